"""The Gram matrix through the CUDA extension."""

from collections.abc import Sequence

from torch import Tensor

from doge_fast.kernels.build import cuda_operators
from doge_fast.kernels.chunks import Span, by_dtype, chunk_tables
from doge_fast.kernels.schema import gram_shape

FIELDS = ("source", "row_stride", "length")
# Short enough that a model of ten million parameters has work for every multiprocessor.
CHUNK_COLUMNS = 4096


def gram(blocks: Sequence[Tensor]) -> Tensor:
    """sum_p B_p B_p^T, [R, R] float64: two launches for each dtype and alignment."""
    gram_RR: Tensor = gram_shape(blocks)
    run = cuda_operators(gram_RR.device.type).gram
    is_first = True
    for (dtype,), group in by_dtype([block] for block in blocks):
        spans = [Span.of(*tensors) for tensors in group]
        for table in chunk_tables(spans, FIELDS, CHUNK_COLUMNS, gram_RR.device):
            run(table.table, table.is_aligned, dtype, gram_RR, not is_first)
            is_first = False
    return gram_RR.zero_() if is_first else gram_RR
