"""What operators accept: storage dtypes, the dtype of sums, and checks of arguments.

Kernels take addresses, so an argument that passes these checks must not make them read or write
beyond a tensor. Plain torch runs an operator's check at every call; Triton and CUDA run it once for
each new list of blocks. C++ checks its arguments itself, faster. If it refuses them, the operator's
file runs the check here, so that the message is the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STORAGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 if any storage is float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def check_blocks(operator: str, blocks: Sequence[Tensor]) -> None:
    """Raise ValueError unless `blocks` are [R, n_p] floating rows on one device."""
    first = blocks[0]
    for index, block in enumerate(blocks):
        if block.dim() != 2 or block.shape[0] == 0:
            raise ValueError(
                f"{operator}() needs blocks of shape [K, n] with K >= 1; blocks[{index}] has "
                f"shape {list(block.shape)}. View it as [K, numel]."
            )
        if block.dtype not in STORAGE_DTYPES:
            raise ValueError(
                f"{operator}() reads {dtype_names()}; blocks[{index}] is {block.dtype}. "
                "Convert it with .to(torch.float32)."
            )
        if block.shape[0] != first.shape[0]:
            raise ValueError(
                f"{operator}() needs the same number of rows in every block; blocks[0] has "
                f"{first.shape[0]}, blocks[{index}] has {block.shape[0]}. "
                "A domain that did not touch a parameter is a row of zeros."
            )
        if block.device != first.device:
            raise ValueError(
                f"the operator {operator} works on one device at a time; blocks[0] is on "
                f"{first.device}, blocks[{index}] on {block.device}. "
                f"doge_fast.kernels.{operator} groups blocks by device."
            )
        if block.shape[1] > 1 and block.stride(1) != 1:
            raise ValueError(
                f"{operator}() needs rows whose elements are neighbours, stride(1) == 1; "
                f"blocks[{index}] has strides {list(block.stride())}. Call .contiguous() on it."
            )


def check_number(
    operator: str, left: str, lefts: Sequence[object], right: str, rights: Sequence[object]
) -> None:
    """Raise ValueError unless there are as many `rights` as `lefts`."""
    if len(lefts) != len(rights):
        raise ValueError(
            f"{operator}() pairs {left} with {right}; got {len(lefts)} {left} and "
            f"{len(rights)} {right}. Pass one of {right} for each of {left}."
        )


def check_pairs(
    operator: str,
    left: str,
    sizes: Sequence[int],
    right: str,
    tensors: Sequence[Tensor | None],
) -> None:
    """Raise ValueError unless tensors[i] is None or has sizes[i] elements for every i."""
    check_number(operator, left, sizes, right, tensors)
    for index, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        if tensor is not None and tensor.numel() != size:
            raise ValueError(
                f"{operator}() needs {right}[i] as long as a row of {left}[i]; "
                f"{left}[{index}] has {size} elements, {right}[{index}] has {tensor.numel()}. "
                "Check that both lists are in the same order."
            )


def check_readable(
    operator: str, name: str, tensors: Sequence[Tensor | None], device: torch.device
) -> None:
    """Raise ValueError unless each tensor is None or contiguous, floating and on `device`."""
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if tensor.dtype not in STORAGE_DTYPES or tensor.device != device:
            raise ValueError(
                f"{operator}() reads {name} of {dtype_names()} on {device}, as their blocks; "
                f"{name}[{index}] is {tensor.dtype} on {tensor.device}. Convert it with .to()."
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{operator}() reads contiguous {name}; {name}[{index}] has shape "
                f"{list(tensor.shape)} and strides {list(tensor.stride())}. "
                "Call .contiguous() on it."
            )


def check_writable(
    operator: str, name: str, tensors: Sequence[Tensor], device: torch.device
) -> None:
    """Raise ValueError unless all tensors are contiguous, floating and on `device`."""
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in STORAGE_DTYPES or tensor.device != device:
            raise ValueError(
                f"{operator}() writes {dtype_names()} on {device}, the device of its inputs; "
                f"{name}[{index}] is {tensor.dtype} on {tensor.device}. Allocate it there."
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{operator}() writes contiguous memory; {name}[{index}] has shape "
                f"{list(tensor.shape)} and strides {list(tensor.stride())}. Pass a contiguous "
                "tensor and copy from it."
            )


def dtype_names() -> str:
    """`STORAGE_DTYPES` as text."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in STORAGE_DTYPES)
