"""Detect a training that has diverged.

A step with non-finite values changes nothing, and the records hold null for such values. Without
this check a diverged run would look like one that learned nothing.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from doge_fast.pipeline.failures import WORLD, UserError

# Steps between checks of the counts; a check makes the host wait for the device.
LOOK_EVERY = 16
WAY_OUT = (
    "Its records are kept, and no result is written. Name another directory, and lower "
    "learning_rate (--learning-rate) or lengthen the warm-up (--warmup-steps)."
)


class Diverged(UserError):
    """Losses or gradients are no longer finite, so the result would mean nothing."""

    code = WORLD


def diverged(run: Path, what: str) -> Diverged:
    """The error for a diverged run; `what` states the evidence."""
    return Diverged(f"{run} has diverged: {what}. {WAY_OUT}")


class LostSteps:
    """Counts lost steps on the device: skipped, or with a loss that is not finite.

    A run survives up to `most` - 1 lost steps in a row.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self.most = most
        self._is_near = device.type == "cpu"
        # Lost steps in a row now, and the longest such row.
        self._row, self._longest = torch.zeros(2, dtype=torch.int64, device=device)

    def add(self, is_lost: Tensor) -> None:
        """Count a step; `is_lost` is a bool scalar on the device. Does not wait for it."""
        self._row = (self._row + 1) * is_lost
        self._longest = torch.maximum(self._longest, self._row)

    def in_a_row(self) -> int:
        """Number of lost steps in a row up to now; waits for the device."""
        return int(self._row)

    def too_many(self, step: int) -> int:
        """The longest row of lost steps if it is too long, else 0; the same on all ranks.

        Checks every step on a CPU, every `LOOK_EVERY` steps elsewhere, and waits for the device.
        """
        if not self._is_near and step % LOOK_EVERY:
            return 0
        longest = int(self._longest)
        return longest if longest >= self.most else 0


def not_finite(values: Mapping[str, float]) -> list[str]:
    """Names whose value is infinite or NaN."""
    return [name for name, value in values.items() if not math.isfinite(value)]
