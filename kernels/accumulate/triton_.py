"""Rows filled from gradients on a GPU, through Triton: one launch for a whole list.

One program per chunk of elements; a chunk is (address in the gradient, address in the row,
length) in a [num_chunks, 3] int64 table.

Reads each gradient once, and each row once when adding; writes each row once.
"""

# Triton's own compiler types device code.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from doge_fast.kernels.chunks import Span, by_dtype, chunk_tables
from doge_fast.kernels.triton_support import on_device, sum_dtype, triton_dtype

FIELDS = ("source", "target", "length")
# Elements of a program, and of one step of it.
CHUNK_COLUMNS = 8192
BLOCK = 1024
NUM_WARPS = 4


def accumulate(grads: Sequence[Tensor], rows: Sequence[Tensor], add: bool) -> None:
    """rows[i] = grads[i], or rows[i] += grads[i].

    A table is uploaded for every new list of addresses. Where the allocator hands out the same
    ones step after step, the table of the first step serves again.

    Raises:
        RuntimeError: a CUDA graph is being captured and these addresses were not seen before.
    """
    for (grad_dtype, row_dtype), group in by_dtype(zip(grads, rows, strict=True)):
        spans = [
            Span(grad.data_ptr(), grad.itemsize, 0, grad.numel(), row.data_ptr(), row.itemsize)
            for grad, row in group
        ]
        device = group[0][0].device
        constants = constants_of(grad_dtype, row_dtype, add)
        for table in chunk_tables(spans, FIELDS, CHUNK_COLUMNS, device):
            with on_device(device):
                accumulate_chunk[(table.num_chunks,)](
                    table.table,
                    **constants,
                    ALIGNED=table.is_aligned,
                    num_warps=NUM_WARPS,
                    enable_fp_fusion=True,
                )


def constants_of(grad_dtype: torch.dtype, row_dtype: torch.dtype, add: bool) -> dict[str, Any]:
    """Compile-time arguments, but for the alignment."""
    return {
        "CHUNK": CHUNK_COLUMNS,
        "BLOCK": BLOCK,
        "GRADIENT": triton_dtype(grad_dtype),
        "ROW": triton_dtype(row_dtype),
        "SUM": triton_dtype(sum_dtype(grad_dtype, row_dtype)),
        "ADD": add,
    }


@triton.jit
def accumulate_chunk(
    table,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GRADIENT: tl.constexpr,
    ROW: tl.constexpr,
    SUM: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """row = gradient, or row += gradient, over one chunk of elements."""
    entry = table + tl.program_id(0).to(tl.int64) * 3
    gradient = tl.load(entry).to(tl.pointer_type(GRADIENT))
    row = tl.load(entry + 1).to(tl.pointer_type(ROW))
    length = tl.load(entry + 2)
    if ALIGNED:
        gradient = tl.multiple_of(gradient, 16)
        row = tl.multiple_of(row, 16)
        length = tl.multiple_of(length, 16)
    for start in range(0, CHUNK, BLOCK):
        columns_B = start + tl.arange(0, BLOCK)
        is_inside_B = columns_B < length
        # [BLOCK]
        value_B = tl.load(gradient + columns_B, mask=is_inside_B, other=0).to(SUM)
        if ADD:
            value_B += tl.load(row + columns_B, mask=is_inside_B, other=0).to(SUM)
        if ROW == tl.bfloat16:  # noqa: SIM300
            # Not every Triton narrows float64 to bfloat16 in one step.
            value_B = value_B.to(tl.float32)
        tl.store(row + columns_B, value_B.to(ROW), mask=is_inside_B)
