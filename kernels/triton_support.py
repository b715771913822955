"""What the Triton kernels share: decoration at the first launch, dtypes, the current device.

Triton is an optional package and a large import. An operator's file holds its kernels all the same:
it takes `tl` and `kernel` from here, under `from __future__ import annotations`, so that reading
the file needs no Triton. The first launch of one of its kernels puts `triton.language` in the place
of `tl`, and what `triton.jit` makes of each of its kernels in the kernel's place.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Stands for triton.language until the file's kernels are decorated.
tl: Any = None


class kernel:
    """In the place of `triton.jit`: a kernel, or what kernels call, that is not decorated yet."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Any:
        """The launch over a grid, the first one of a kernel of its file."""
        names = self.function.__globals__
        decorate(names)
        return names[self.function.__name__][grid]


def decorate(names: dict[str, Any]) -> None:
    """Let Triton have the kernels among the names of a file."""
    import triton
    import triton.language

    names["tl"] = triton.language
    for name, value in list(names.items()):
        if isinstance(value, kernel):
            names[name] = triton.jit(value.function)


def is_installed() -> bool:
    """Whether Triton can be imported; it is a large import, made when it is first needed."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the memory of the CPU."""
    import triton

    # The environment counts when kernels are decorated, and only then.
    return bool(triton.knobs.runtime.interpret)


@functools.cache
def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name for a dtype."""
    import triton.language

    return getattr(triton.language, str(dtype).removeprefix("torch."))


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """float32 sums, whatever narrower the storage; float64 where any of it is float64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which kernels launch on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
