"""How far a verb has come: a bar on a terminal, and a line of the log now and then elsewhere."""

import itertools
import logging
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from doge_fast.pipeline import ranks
from doge_fast.pipeline.named import visible

LINE_SECONDS = 180.0
"""Between two lines of a log."""
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed}, {remaining} left, {rate_fmt}{postfix}"

# Steps that are timed before it is said how long a training takes, or as many as take so long.
TIMED_STEPS = 3
_TIMED_SECONDS = 10.0

# How tqdm goes back to a bar above.
_UP = "\x1b[A"

_log = logging.getLogger("doge_fast")


class StepClock:
    """Times a few first steps of a training, but for the very first one, which is slower."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._is_done = False

    def add(self) -> float | None:
        """Count a step. The median seconds of one, once, as soon as enough are timed.

        Waits for the device until then.
        """
        if self._is_done:
            return None
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        times = self._times
        times.append(time.monotonic())
        self._is_done = len(times) > TIMED_STEPS or times[-1] - times[0] > _TIMED_SECONDS
        pairs = itertools.pairwise(times)
        return statistics.median(b - a for a, b in pairs) if self._is_done else None


class _LogLines:
    """A stream for tqdm: what it draws is a line of the log, and where it moves to is nothing."""

    def write(self, drawn: str) -> None:
        if line := drawn.replace(_UP, "").strip():
            _log.info("%s", line)

    def flush(self) -> None:
        """Nothing waits."""


def _style(delay: float) -> dict[str, Any]:
    if not ranks.is_first():
        return {"disable": True}
    if sys.stderr.isatty():
        # None is left of a bar below another.
        return {"leave": None, "dynamic_ncols": True, "delay": delay}
    every = dict.fromkeys(("mininterval", "maxinterval", "delay"), LINE_SECONDS)
    return {"file": _LogLines(), "leave": False, "bar_format": _LINE, **every}


def bar(total: int, what: str, unit: str, *, initial: int = 0) -> Any:
    """A bar that is moved by hand; its `update`, `set_postfix` and `close` are tqdm's.

    Args:
        total: of units.
        what: stands before it.
        unit: in the singular.
        initial: units that are done already.
    """
    options = {"total": total, "initial": initial, "desc": visible(what), "unit": unit}
    return tqdm(**options, **_style(delay=0))


def over(documents: Iterable[Any], what: str) -> Iterator[Any]:
    """`documents`, with a bar once they have taken a second."""
    yield from tqdm(documents, desc=visible(what), unit="document", **_style(delay=1))
