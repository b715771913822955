"""Shared by the Triton kernels: decoration at the first launch, dtypes, the current device.

Triton is an optional package and a large import. An operator's file takes `tl` and `kernel` from
here, under `from __future__ import annotations`, so that importing the file does not import Triton.
At the first launch of one of its kernels, `decorate` replaces the file's `tl` by `triton.language`
and its kernels by the results of `triton.jit`.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Replaced by triton.language in a file's globals; see `decorate`.
tl: Any = None


class kernel:
    """`triton.jit` for a kernel or a function called by kernels, delayed to the first launch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Any:
        """The kernel's launch over a grid."""
        # Called once per file: `decorate` replaces all its kernels.
        names = self.function.__globals__
        decorate(names)
        return names[self.function.__name__][grid]


def decorate(names: dict[str, Any]) -> None:
    """Decorate all kernels among the globals of a file."""
    import triton
    import triton.language

    names["tl"] = triton.language
    for name, value in list(names.items()):
        if isinstance(value, kernel):
            names[name] = triton.jit(value.function)


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


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 if any storage is float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which kernels launch on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
