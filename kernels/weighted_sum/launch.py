"""The frozen launch configurations of the weighted sum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doge_fast.kernels.chunks import Span, by_dtype, chunk_tables
from doge_fast.kernels.triton_support import on_device, sum_dtype, triton_dtype

FIELDS = ("source", "row_stride", "length", "target")


@dataclass(frozen=True)
class Launch:
    """Columns of a program, 16-byte loads of a thread per row, rows loaded at once.

    Few registers (32 to 40 compiled for sm_80 and sm_90), so that a multiprocessor holds its
    most warps: with one row, 32 KB on their way, with two and more 64 KB.
    """

    group: int
    chunk_columns: int = 4096
    num_warps: int = 4


FEW_ROWS = 8
MANY_ROWS = Launch(group=4)
# Threads of a warp, of NVIDIA's; and the widest load of a thread.
WARP, LOAD_BYTES = 32, 16


def pick(num_rows: int) -> Launch:
    """All rows at once while they are few."""
    return Launch(group=num_rows) if num_rows <= FEW_ROWS else MANY_ROWS


def constants_of(num_rows: int, dtype: torch.dtype, out_dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments, but for the alignment."""
    launch = pick(num_rows)
    return {
        "R": num_rows,
        "GROUP": launch.group,
        "CHUNK": launch.chunk_columns,
        "BLOCK": launch.num_warps * WARP * LOAD_BYTES // dtype.itemsize,
        "STORAGE": triton_dtype(dtype),
        "OUTPUT": triton_dtype(out_dtype),
        "SUM": triton_dtype(sum_dtype(dtype)),
    }


def weighted_sum(blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]) -> None:
    """outs[p] = sum_r c_r blocks[p][r], through Triton.

    The float64 coefficients carry the global clip, the unscaling and the skip already: NaN
    spoils every output, zero leaves its row unread.
    """
    from doge_fast.kernels.weighted_sum import triton_kernel

    device = coefficients_R.device
    coefficients_R = coefficients_R.contiguous()
    for (dtype, out_dtype), group in by_dtype(zip(blocks, outs, strict=True)):
        spans = [Span.of(*tensors) for tensors in group]
        launch = pick(len(coefficients_R))
        constants = constants_of(len(coefficients_R), dtype, out_dtype)
        for table in chunk_tables(spans, FIELDS, launch.chunk_columns, device):
            with on_device(device):
                triton_kernel.weighted_sum[(table.num_chunks,)](
                    table.table,
                    coefficients_R,
                    **constants,
                    ALIGNED=table.is_aligned,
                    num_warps=launch.num_warps,
                    enable_fp_fusion=True,
                )
