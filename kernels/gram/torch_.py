"""The Gram matrix in plain torch: any device, always available, the fallback.

One flat float32 product of two rows of 20 million elements is wrong in the third digit, and
every diagonal entry comes out low. Here a product sees at most `CHUNK_COLUMNS` columns; the
partial results are added in float64.

Reads each block once, K times from cache; writes one [K, K] partial result per chunk.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from doge_fast.kernels.schema import gram_shape

# The longest float32 sum. Measured on a CPU: as fast as any longer one, and 4e-7 of the largest
# entry off at worst, where 16-bit rows of one sign are cast first (4096: 3e-6).
CHUNK_COLUMNS = 1024
# Elements of a tile that is cast, and of the partial results that wait for their float64 sum.
# Large, since every product is a barrier for all threads.
TILE_ELEMENTS = 1 << 20
PARTIAL_ELEMENTS = 1 << 20
# Short blocks that are copied together; the copy stays small.
MAX_JOINED = 32


def gram(blocks: Sequence[Tensor]) -> Tensor:
    """sum_p B_p B_p^T, [R, R] float64."""
    gram_RR: Tensor = gram_shape(blocks).zero_()
    for block in _joined(blocks):
        _add_block(gram_RR, block)
    # Matrix products promise no symmetry; one triangle speaks for both.
    return gram_RR.tril() + gram_RR.tril(-1).T


def _joined(blocks: Sequence[Tensor]) -> Iterator[Tensor]:
    """The blocks, those shorter than a chunk side by side: a model has many biases."""
    short: dict[torch.dtype, list[Tensor]] = {}
    for block in blocks:
        if block.shape[1] >= CHUNK_COLUMNS:
            yield block
            continue
        waiting = short.setdefault(block.dtype, [])
        waiting.append(block)
        if len(waiting) == MAX_JOINED:
            yield torch.cat(short.pop(block.dtype), dim=1)
    for waiting in short.values():
        yield torch.cat(waiting, dim=1)


def _add_block(gram_RR: Tensor, block_RN: Tensor) -> None:
    num_rows, num_columns = block_RN.shape
    whole = num_columns - num_columns % CHUNK_COLUMNS
    most_chunks = PARTIAL_ELEMENTS // (num_rows * num_rows)
    if block_RN.dtype != _product_dtype(block_RN):
        most_chunks = min(most_chunks, TILE_ELEMENTS // (num_rows * CHUNK_COLUMNS))
    tile = CHUNK_COLUMNS * max(1, most_chunks)
    for first in range(0, whole, tile):
        tile_RT = block_RN[:, first : min(first + tile, whole)]
        # [chunks, R, CHUNK_COLUMNS], a view
        chunks_CRB = tile_RT.view(num_rows, -1, CHUNK_COLUMNS).transpose(0, 1)
        _add_chunks(gram_RR, chunks_CRB)
    if whole < num_columns:
        _add_chunks(gram_RR, block_RN[None, :, whole:])


def _add_chunks(gram_RR: Tensor, chunks_CRB: Tensor) -> None:
    chunks_CRB = chunks_CRB.to(_product_dtype(chunks_CRB))
    partial_CRR = torch.bmm(chunks_CRB, chunks_CRB.mT)
    gram_RR.add_(partial_CRR.sum(0, dtype=torch.float64))


def _product_dtype(rows: Tensor) -> torch.dtype:
    # float32 products may run in tf32 or bfloat16 by a switch that is the user's to set, and
    # then lose 7e-4 on the diagonal. Only a CPU says for certain that they will not.
    switch = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    exact = rows.device.type == "cpu" and switch in ("none", "ieee")
    return torch.float32 if exact and rows.dtype != torch.float64 else torch.float64
