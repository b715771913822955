"""Whether a training still computes numbers.

What is not finite moves nothing and stands in the records as null, so a run that has lost its
numbers looks like one that learned nothing.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from doge_fast.pipeline.failures import WORLD, UserError

# Steps between looks at the counts, which make a host wait for its device.
LOOK_EVERY = 16
WAY_OUT = (
    "Its records are kept, and no result is written. Name another directory, and lower "
    "learning_rate (--learning-rate) or lengthen the warm-up (--warmup-steps)."
)


class Diverged(UserError):
    """The training computes no numbers any more, and its result would mean nothing."""

    code = WORLD


def diverged(run: Path, what: str) -> Diverged:
    """The error of a run that has lost its numbers, and what shows it."""
    return Diverged(f"{run} has diverged: {what}. {WAY_OUT}")


class LostSteps:
    """Counts the steps that moved nothing, or whose loss was not finite; on the device.

    A run survives up to `most` - 1 of them in a row.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self.most = most
        self._is_near = device.type == "cpu"
        # In a row now, and the most there have been.
        self._row, self._longest = torch.zeros(2, dtype=torch.int64, device=device)

    def add(self, is_lost: Tensor) -> None:
        """Count a step by a bool scalar; waits for nothing."""
        self._row = (self._row + 1) * is_lost
        self._longest = torch.maximum(self._longest, self._row)

    def in_a_row(self) -> int:
        """Those up to now. Waits for the device."""
        return int(self._row)

    def too_many(self, step: int) -> int:
        """How many there were in a row, if they are too many; the same on all ranks.

        Waits for the device in every step on a CPU, and in a sixteenth of them elsewhere.
        """
        if not self._is_near and step % LOOK_EVERY:
            return 0
        longest = int(self._longest)
        return longest if longest >= self.most else 0


def not_finite(values: Mapping[str, float]) -> list[str]:
    """Names of what is infinite or no number."""
    return [name for name, value in values.items() if not math.isfinite(value)]
