"""What profilers see of a step, its phases by name; and functions that compilers must not trace."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

_NOTHING = nullcontext()

P = ParamSpec("P")
R = TypeVar("R")


def phase(name: str) -> AbstractContextManager[object]:
    """A range `doge_fast.NAME` in a profile; costs nothing while no profiler runs."""
    if _profiler_enabled():
        return record_function(f"doge_fast.{name}")
    return _NOTHING


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
