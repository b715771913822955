"""What profilers, `torch.compile` and warnings see of a step.

Named phases, functions that are not traced, and the line of the loop that a warning is of.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ParamSpec, TypeVar

from torch._C._profiler import _RecordFunctionFast
from torch._compile import _disable_dynamo

# Modules whose frames lie between the loop and a warning.
_IS_BETWEEN = re.compile(r"(doge_fast|torch|contextlib)\b").match

P = ParamSpec("P")
R = TypeVar("R")

phase: Callable[[str], AbstractContextManager[object]] = _RecordFunctionFast
"""A context manager around a named part of a step, `tracing.phase("doge_fast.gram")`.

A range of torch's profiler, or what `observed` has put in its place. Look it up at each use.
"""


@contextmanager
def observed(ranges: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter `ranges(name)` around every phase inside the block, on all threads."""
    # One for the process: backward passes run on threads of torch, which do not see the caller's
    # context variables.
    global phase
    before, phase = phase, ranges
    try:
        yield
    finally:
        phase = before


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Keep `torch.compile` out of a function: it runs on the host or calls opaque operators."""
    # torch.compiler.disable would import dynamo here, which takes a second; this waits for the
    # first call.
    disabled: Callable[P, R] = _disable_dynamo(function)
    return disabled


def between_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Keep `torch.compile` out of a function, but not out of the functions that it calls."""
    skipped: Callable[P, R] = _disable_dynamo(function, recursive=False)
    return skipped


def warn(message: str) -> None:
    """Warn, with the line of the user's loop as its place."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _IS_BETWEEN(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
