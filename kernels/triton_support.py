"""Shared by the Triton kernels: decoration at the first launch, dtypes, the current device.

Triton is an optional package and a large import, so importing an operator's file must not import
it. The file takes `tl` and `kernel` from here, under `from __future__ import annotations`. At the
first launch of one of its kernels, `decorate` replaces the file's `tl` by `triton.language` and its
kernels by the results of `triton.jit`.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

# Replaced by triton.language in a file's globals; see `decorate`.
tl: Any = None


class kernel:
    """`triton.jit` for a kernel or a function called by kernels, delayed to the first launch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Any:
        """The kernel's launch over a grid."""
        # Runs once per file, because `decorate` replaces all its kernels.
        file_globals = self.function.__globals__
        decorate(file_globals)
        return file_globals[self.function.__name__][grid]

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """A call by another kernel, in code that Triton compiles; never in Python."""


def decorate(file_globals: dict[str, Any]) -> None:
    """Decorate all kernels among the globals of a file."""
    import triton
    import triton.language

    file_globals["tl"] = triton.language
    for name, value in list(file_globals.items()):
        if isinstance(value, kernel):
            file_globals[name] = triton.jit(value.function)


def is_installed() -> bool:
    """Whether Triton can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the memory of the CPU."""
    import triton

    # Cached: Triton reads the environment only when kernels are decorated.
    return bool(triton.knobs.runtime.interpret)


@functools.cache
def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name for a dtype."""
    import triton.language

    return getattr(triton.language, str(dtype).removeprefix("torch."))


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which kernels launch on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
