"""The frozen launch configuration of the weighted sum."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from doge_fast.kernels.chunks import Span, by_dtype, chunk_tables
from doge_fast.kernels.triton_support import on_device, sum_dtype, triton_dtype

FIELDS = ("source", "row_stride", "length", "target")


@dataclass(frozen=True)
class Launch:
    """Columns of a program, and of one step of it."""

    chunk_columns: int = 4096
    block: int = 1024
    num_warps: int = 4


LAUNCH = Launch()


def weighted_sum(blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]) -> None:
    """outs[p] = sum_r c_r blocks[p][r], through Triton."""
    from doge_fast.kernels.weighted_sum import triton_kernel

    device = coefficients_R.device
    for (dtype, out_dtype), group in by_dtype(zip(blocks, outs, strict=True)):
        spans = [
            Span(
                block.data_ptr(),
                block.itemsize,
                block.stride(0),
                block.shape[1],
                out.data_ptr(),
                out.itemsize,
            )
            for block, out in group
        ]
        for table in chunk_tables(spans, FIELDS, LAUNCH.chunk_columns, device):
            with on_device(device):
                triton_kernel.weighted_sum[(table.num_chunks,)](
                    table.table,
                    coefficients_R,
                    R=len(coefficients_R),
                    CHUNK=LAUNCH.chunk_columns,
                    BLOCK=LAUNCH.block,
                    STORAGE=triton_dtype(dtype),
                    OUTPUT=triton_dtype(out_dtype),
                    SUM=triton_dtype(sum_dtype(dtype)),
                    ALIGNED=table.is_aligned,
                    num_warps=LAUNCH.num_warps,
                )
