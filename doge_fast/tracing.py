"""What observers see of a step, its phases by name; and functions that compilers must not trace."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

_NOTHING = nullcontext()

P = ParamSpec("P")
R = TypeVar("R")


Ranges = Callable[[str], AbstractContextManager[object]]
"""A phase's name -> what is entered when the phase begins and left when it ends."""

# The observer, where there is one. Of the whole process: backward passes run on threads of torch,
# which know nothing of the caller's context variables.
_observer: Ranges | None = None


def phase(name: str) -> AbstractContextManager[object]:
    """A named part of a step, for the observer or else, as `doge_fast.NAME`, for torch's profiler.

    Costs nothing while nobody observes and no profiler runs.
    """
    if _observer is not None:
        return _observer(name)
    if _profiler_enabled():
        return record_function(f"doge_fast.{name}")
    return _NOTHING


@contextmanager
def observed(ranges: Ranges) -> Iterator[None]:
    """Tell `ranges` of every phase that runs inside the block, on whatever thread."""
    global _observer
    before, _observer = _observer, ranges
    try:
        yield
    finally:
        _observer = before


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Keep `torch.compile` out of a function: it runs on the host or calls opaque operators.

    As `torch.compiler.disable`, which takes a second to import what it needs; here it does so when
    the function is first called, and by then building any optimizer has.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return called
