"""The weighted sum of rows through the CUDA extension."""

from collections.abc import Sequence

from torch import Tensor

from doge_fast.kernels.build import cuda_operators
from doge_fast.kernels.chunks import Span, by_dtype, chunk_tables

FIELDS = ("source", "row_stride", "length", "target")
# One block of threads takes a chunk, 16 columns a thread; the kernel checks that it is no more.
CHUNK_COLUMNS = 4096


def weighted_sum(blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]) -> None:
    """outs[p] = sum_r c_r blocks[p][r]: one launch for each pair of dtypes and alignment."""
    run = cuda_operators(coefficients_R.device.type).weighted_sum
    coefficients_R = coefficients_R.contiguous()
    for (dtype, out_dtype), group in by_dtype(zip(blocks, outs, strict=True)):
        spans = [Span.of(*tensors) for tensors in group]
        for table in chunk_tables(spans, FIELDS, CHUNK_COLUMNS, coefficients_R.device):
            run(table.table, CHUNK_COLUMNS, table.is_aligned, dtype, out_dtype, coefficients_R)
