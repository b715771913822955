"""What profilers, `torch.compile` and warnings see of a step.

Named phases, functions that are not traced, and the line of the loop that a warning is of.
"""

import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

_NOTHING = nullcontext()
# Modules whose frames lie between the loop and a warning.
_IS_BETWEEN = re.compile(r"(doge_fast|torch|contextlib)\b").match

P = ParamSpec("P")
R = TypeVar("R")
Ranges = Callable[[str], AbstractContextManager[object]]
"""From a phase's name to a context manager around the phase."""

# One for the process: backward passes run on threads of torch, which do not see the caller's
# context variables.
_observer: Ranges | None = None


def phase(name: str) -> AbstractContextManager[object]:
    """A named part of a step: for the observer, or as `doge_fast.NAME` for torch's profiler.

    Without either it costs two comparisons.
    """
    if _observer is not None:
        return _observer(name)
    if _profiler_enabled():
        return record_function(f"doge_fast.{name}")
    return _NOTHING


@contextmanager
def observed(ranges: Ranges) -> Iterator[None]:
    """Enter `ranges(name)` around every phase inside the block, on all threads."""
    global _observer
    before, _observer = _observer, ranges
    try:
        yield
    finally:
        _observer = before


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Keep `torch.compile` out of a function: it runs on the host or calls opaque operators."""
    # torch.compiler.disable imports for a second, so it waits for the function's first call;
    # building any torch optimizer has imported the same by then.
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return called


def warn(message: str) -> None:
    """Warn, with the line of the user's loop as its place."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _IS_BETWEEN(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
