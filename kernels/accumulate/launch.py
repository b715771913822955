"""The frozen launch configuration of accumulation, and which calls are worth a launch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doge_fast.kernels.chunks import Span, by_dtype, chunk_tables
from doge_fast.kernels.triton_support import on_device, sum_dtype, triton_dtype

FIELDS = ("source", "target", "length")


@dataclass(frozen=True)
class Launch:
    """Elements of a program, and of one step of it."""

    chunk_columns: int = 8192
    block: int = 1024
    num_warps: int = 4


LAUNCH = Launch()


def constants_of(grad_dtype: torch.dtype, row_dtype: torch.dtype, add: bool) -> dict[str, Any]:
    """Compile-time arguments, but for the alignment."""
    return {
        "CHUNK": LAUNCH.chunk_columns,
        "BLOCK": LAUNCH.block,
        "GRADIENT": triton_dtype(grad_dtype),
        "ROW": triton_dtype(row_dtype),
        "SUM": triton_dtype(sum_dtype(grad_dtype, row_dtype)),
        "ADD": add,
    }


def accumulate(grads: Sequence[Tensor], rows: Sequence[Tensor], add: bool) -> None:
    """rows[i] = grads[i], or rows[i] += grads[i], through Triton.

    A table is uploaded for every new list of addresses; where the allocator hands out the same
    ones step after step it is found again.

    Raises:
        RuntimeError: a CUDA graph is being captured and these addresses were not seen before.
    """
    from doge_fast.kernels.accumulate import triton_kernel

    for (grad_dtype, row_dtype), group in by_dtype(zip(grads, rows, strict=True)):
        spans = [
            Span(grad.data_ptr(), grad.itemsize, 0, grad.numel(), row.data_ptr(), row.itemsize)
            for grad, row in group
        ]
        device = group[0][0].device
        for table in chunk_tables(spans, FIELDS, LAUNCH.chunk_columns, device):
            with on_device(device):
                triton_kernel.accumulate[(table.num_chunks,)](
                    table.table,
                    **constants_of(grad_dtype, row_dtype, add),
                    ALIGNED=table.is_aligned,
                    num_warps=LAUNCH.num_warps,
                    enable_fp_fusion=True,
                )
