"""The weighted sum of rows through the CUDA extension."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from doge_fast.kernels.build import cuda_operators
from doge_fast.kernels.chunks import chunk_tables, spans_by_dtype
from doge_fast.kernels.schema import check_coefficients, check_weighted_sum

FIELDS = ("source", "row_stride", "length", "target")
# One block of threads takes a chunk, 16 columns a thread; the kernel checks that it is no more.
CHUNK_COLUMNS = 4096


def weighted_sum(blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]) -> None:
    """outs[p] = sum_r c_r blocks[p][r]: one launch for each pair of dtypes and alignment."""
    groups = spans_by_dtype(partial(check_weighted_sum, blocks, coefficients_R, outs), blocks, outs)
    check_coefficients(blocks, coefficients_R)
    run = cuda_operators(coefficients_R.device.type).weighted_sum
    coefficients_R = coefficients_R.contiguous()
    for (dtype, out_dtype), spans in groups:
        for table in chunk_tables(spans, FIELDS, CHUNK_COLUMNS, coefficients_R.device):
            run(table.table, CHUNK_COLUMNS, table.is_aligned, dtype, out_dtype, coefficients_R)
