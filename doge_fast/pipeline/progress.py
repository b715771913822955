"""Progress of a command: a bar on a terminal, otherwise a line in the log every few minutes."""

import functools
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
"""Time between two lines of the log."""
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed}, {remaining} left, {rate_fmt}{postfix}"

# The remaining time is known after this many timed steps, or after this many seconds.
TIMED_STEPS = 3
_TIMED_SECONDS = 10.0

# The escape sequence with which tqdm moves up a line.
_UP = "\x1b[A"

_log = logging.getLogger("doge_fast")


@functools.cache
def tell_once(line: str, level: int = logging.INFO) -> None:
    """Log a line the first time only, since the runs of a search differ in their weights alone."""
    _log.log(level, "%s", line)


class StepClock:
    """Times a few steps of a training after the first one, which is slower."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._is_done = False

    def add(self) -> float | None:
        """Count a step; return the median seconds of a step once, when enough are timed, else None.

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
    """A stream for tqdm that logs its text and drops its cursor movements."""

    def write(self, drawn: str) -> None:
        if line := drawn.replace(_UP, "").strip():
            _log.info("%s", line)

    def flush(self) -> None:
        """Do nothing: the log has no buffer."""


def _style(delay: float) -> dict[str, Any]:
    if not ranks.is_first():
        return {"disable": True}
    if sys.stderr.isatty():
        # leave=None: only the outermost bar stays on the terminal.
        return {"leave": None, "dynamic_ncols": True, "delay": delay}
    every = dict.fromkeys(("mininterval", "maxinterval", "delay"), LINE_SECONDS)
    return {"file": _LogLines(), "leave": False, "bar_format": _LINE, **every}


def bar(total: int, what: str, unit: str, *, initial: int = 0) -> Any:
    """A bar that the caller advances with tqdm's `update`, `set_postfix` and `close`.

    Args:
        total: number of units.
        what: label of the bar.
        unit: name of a unit, in the singular.
        initial: units that are done already.
    """
    options = {"total": total, "initial": initial, "desc": visible(what), "unit": unit}
    return tqdm(**options, **_style(delay=0))


def over(documents: Iterable[Any], what: str) -> Iterator[Any]:
    """Yield the documents, with a bar after one second."""
    yield from tqdm(documents, desc=visible(what), unit="document", **_style(delay=1))
