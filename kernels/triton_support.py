"""What the Triton kernels share: dtypes, the current device, and whether Triton interprets.

Triton is an optional package, imported when the first of these functions asks it something.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


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
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """float32 sums, whatever narrower the storage; float64 where any of it is float64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which kernels launch on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
