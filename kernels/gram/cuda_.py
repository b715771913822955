"""The Gram matrix through the CUDA extension."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from doge_fast.kernels.build import cuda_operators
from doge_fast.kernels.chunks import chunk_tables, spans_by_dtype
from doge_fast.kernels.schema import check_gram, gram_shape

FIELDS = ("source", "row_stride", "length")
# Short enough that a model of ten million parameters has work for every multiprocessor.
CHUNK_COLUMNS = 4096


def gram(blocks: Sequence[Tensor]) -> Tensor:
    """sum_p B_p B_p^T, [R, R] float64: two launches for each dtype and alignment."""
    groups = spans_by_dtype(partial(check_gram, blocks), blocks)
    gram_RR: Tensor = gram_shape(blocks)
    run = cuda_operators(gram_RR.device.type).gram
    is_first = True
    for (dtype,), spans in groups:
        for table in chunk_tables(spans, FIELDS, CHUNK_COLUMNS, gram_RR.device):
            run(table.table, table.is_aligned, dtype, gram_RR, not is_first)
            is_first = False
    return gram_RR.zero_() if is_first else gram_RR
