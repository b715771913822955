"""The weighted sum of rows on a GPU, through Triton.

One program per chunk of columns; a chunk is (address in row 0, row stride, length, address in
the output) in a [num_chunks, 4] int64 table. Every output element is the work of one program,
added in row order: nothing to reduce, bitwise reproducible.

The coefficients are read on the device, where the K x K step left them with the clipping and
the unscaling in them: nothing waits for the host. A coefficient of zero leaves its row unread; the
NaN of a skipped step makes every output NaN.

Reads each row with a non-zero coefficient once; writes each output once.
"""

# Triton's own compiler types device code.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from doge_fast.kernels.chunks import chunk_tables, spans_by_dtype
from doge_fast.kernels.schema import check_coefficients, check_weighted_sum
from doge_fast.kernels.triton_support import on_device, sum_dtype, triton_dtype

FIELDS = ("source", "row_stride", "length", "target")


@dataclass(frozen=True)
class Tuning:
    """Columns of a program, 16-byte loads of a thread per row, rows loaded at once.

    Few registers (32 to 40 compiled for sm_80 and sm_90), so that a multiprocessor holds its
    most warps: with one row, 32 KB on their way, with two and more 64 KB.
    """

    group: int
    chunk_columns: int = 4096
    num_warps: int = 4


FEW_ROWS = 8
MANY_ROWS = Tuning(group=4)
# Threads of a warp, of NVIDIA's; and the widest load of a thread.
WARP, LOAD_BYTES = 32, 16


def pick(num_rows: int) -> Tuning:
    """All rows at once while they are few."""
    return Tuning(group=num_rows) if num_rows <= FEW_ROWS else MANY_ROWS


def constants_of(num_rows: int, dtype: torch.dtype, out_dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments, but for the alignment."""
    tuning = pick(num_rows)
    return {
        "R": num_rows,
        "GROUP": tuning.group,
        "CHUNK": tuning.chunk_columns,
        "BLOCK": tuning.num_warps * WARP * LOAD_BYTES // dtype.itemsize,
        "STORAGE": triton_dtype(dtype),
        "OUTPUT": triton_dtype(out_dtype),
        "SUM": triton_dtype(sum_dtype(dtype)),
    }


def weighted_sum(blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]) -> None:
    """outs[p] = sum_r c_r blocks[p][r], through Triton.

    The float64 coefficients carry the global clip, the unscaling and the skip already: NaN
    spoils every output, zero leaves its row unread.
    """
    groups = spans_by_dtype(partial(check_weighted_sum, blocks, coefficients_R, outs), blocks, outs)
    check_coefficients(blocks, coefficients_R)
    device = coefficients_R.device
    coefficients_R = coefficients_R.contiguous()
    for (dtype, out_dtype), spans in groups:
        tuning = pick(len(coefficients_R))
        constants = constants_of(len(coefficients_R), dtype, out_dtype)
        for table in chunk_tables(spans, FIELDS, tuning.chunk_columns, device):
            with on_device(device):
                sum_chunk[(table.num_chunks,)](
                    table.table,
                    coefficients_R,
                    **constants,
                    ALIGNED=table.is_aligned,
                    num_warps=tuning.num_warps,
                    enable_fp_fusion=True,
                )


@triton.jit
def sum_chunk(
    table,
    coefficients_R,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STORAGE: tl.constexpr,
    OUTPUT: tl.constexpr,
    SUM: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """out = sum_r c_r row_r over one chunk of columns, GROUP rows on their way at once."""
    entry = table + tl.program_id(0).to(tl.int64) * 4
    pointer = tl.load(entry).to(tl.pointer_type(STORAGE))
    row_stride = tl.load(entry + 1)
    length = tl.load(entry + 2)
    output = tl.load(entry + 3).to(tl.pointer_type(OUTPUT))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        row_stride = tl.multiple_of(row_stride, 16)
        length = tl.multiple_of(length, 16)
        output = tl.multiple_of(output, 16)
    for start in range(0, CHUNK, BLOCK):
        columns_B = start + tl.arange(0, BLOCK)
        sum_B = tl.zeros([BLOCK], SUM)
        for first in range(0, R, GROUP):
            coefficients = ()
            rows = ()
            for g in tl.static_range(GROUP):
                r = first + g
                c = tl.load(coefficients_R + r, mask=r < R, other=0.0)
                # [BLOCK]; a row whose coefficient is zero is not read, so it may hold anything
                end = tl.where(c != 0, length, 0)
                # row_stride is int64: rows may be further apart than 2**31
                row_B = tl.load(pointer + r * row_stride + columns_B, mask=columns_B < end, other=0)
                coefficients = coefficients + (c,)  # noqa: RUF005
                rows = rows + (row_B,)  # noqa: RUF005
            for g in tl.static_range(GROUP):
                c_B = tl.zeros([BLOCK], SUM) + coefficients[g].to(SUM)
                sum_B = tl.fma(rows[g].to(SUM), c_B, sum_B)
        if OUTPUT == tl.bfloat16:  # noqa: SIM300
            # Not every Triton narrows float64 to bfloat16 in one step.
            sum_B = sum_B.to(tl.float32)
        tl.store(output + columns_B, sum_B.to(OUTPUT), mask=columns_B < length)
