"""Checks of arguments that operators share.

The dispatcher runs an operator's check before plain torch, Triton and CUDA. Implementations that
keep tables of their blocks run it once for each new list of blocks. C++ checks its arguments
faster itself; if it raises, the dispatcher runs the check to raise the common message.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STORAGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def as_blocks(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """One tensor as a list of one."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def is_one_device(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are on one device; True for an empty list."""
    if torch.compiler.is_compiling():
        return all(tensor.device == tensors[0].device for tensor in tensors)
    # Half the time of .device, which makes an object for each tensor; -1 is the CPU.
    return len(set(map(Tensor.get_device, tensors))) <= 1


def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the tensors of each device, in order of first appearance."""
    groups: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(index)
    return list(groups.values())


def check_blocks(operator: str, blocks: Sequence[Tensor]) -> None:
    """Raise ValueError unless `blocks` are [R, n_p] floating rows on one device."""
    if not blocks:
        raise ValueError(
            f"{operator}() needs at least one block to know the number of rows; got an empty "
            "list. Pass [K, n] tensors, or one [K, N] tensor."
        )
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


def check_pairs(
    operator: str, left: str, sizes: Sequence[int], right: str, tensors: Sequence[Tensor]
) -> None:
    """Raise ValueError unless tensors[i] has sizes[i] elements for every i."""
    if len(sizes) != len(tensors):
        raise ValueError(
            f"{operator}() pairs {left} with {right}; got {len(sizes)} {left} and "
            f"{len(tensors)} {right}. Pass one of {right} for each of {left}."
        )
    for index, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        if tensor.numel() != size:
            raise ValueError(
                f"{operator}() needs {right}[i] as long as a row of {left}[i]; "
                f"{left}[{index}] has {size} elements, {right}[{index}] has {tensor.numel()}. "
                "Check that both lists are in the same order."
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
