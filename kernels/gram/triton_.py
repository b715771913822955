"""The Gram matrix on a GPU, through Triton.

Rows come through a chunk table, [num_chunks, 3] int64: address of the chunk's first element in
row 0, distance between rows in elements, number of columns. A program takes chunks that follow
each other, a later program fewer than an earlier one; sums are float32 within a chunk and
float64 across chunks; a second kernel adds the programs' partial results in a fixed order.
Which chunks a program takes depends on nothing but the table's length and the tuning, so results
are bitwise reproducible.

Reads each row once (K*N elements); with more rows than a tile holds, once per tile column.
Writes one float64 square per program, reads it once more to reduce; `gram_tiles` adds to its
square after every chunk, which the second-level cache holds.
"""

# Triton's own compiler types device code.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from doge_fast.kernels.chunks import ChunkTable, chunk_tables, spans_by_dtype
from doge_fast.kernels.gram.tuning import (
    FOLDED,
    Pairs,
    Tiles,
    columns_of,
    pick,
    product_of,
    program_doublings,
    reduction,
    square_entries,
)
from doge_fast.kernels.schema import check_gram, gram_shape
from doge_fast.kernels.triton_support import on_device, sum_dtype, triton_dtype

FIELDS = ("source", "row_stride", "length")


def gram(blocks: Sequence[Tensor]) -> Tensor:
    """sum_p B_p B_p^T, [R, R] float64, through Triton."""
    groups = spans_by_dtype(partial(check_gram, blocks), blocks)
    gram_RR: Tensor = gram_shape(blocks)
    is_first = True
    for (dtype,), spans in groups:
        tuning = pick(len(gram_RR), dtype)
        tables = chunk_tables(spans, FIELDS, tuning.chunk_columns, gram_RR.device)
        if tables:
            with on_device(gram_RR.device):
                if isinstance(tuning, Pairs):
                    _add_pairs(tuning, tables, dtype, gram_RR, is_first)
                else:
                    _add_tiles(tuning, tables, dtype, gram_RR, is_first)
            is_first = False
    return gram_RR.zero_() if is_first else gram_RR


def _add_pairs(
    tuning: Pairs,
    tables: Sequence[ChunkTable],
    dtype: torch.dtype,
    gram_RR: Tensor,
    is_first: bool,
) -> None:
    num_rows = len(gram_RR)
    square = square_entries(num_rows)
    programs = [min(1 << tuning.program_doublings, table.num_chunks) for table in tables]
    partials = gram_RR.new_empty((sum(programs), square))
    for table, part in zip(tables, torch.split(partials, programs), strict=True):
        gram_pairs[(len(part),)](
            table.table,
            part,
            table.num_chunks,
            R=num_rows,
            PROGRAM_DOUBLINGS=tuning.program_doublings,
            SQUARE=square,
            **columns_of(tuning, dtype, table.is_aligned),
            STORAGE=triton_dtype(dtype),
            SUM=triton_dtype(sum_dtype(dtype)),
            ALIGNED=table.is_aligned,
            num_warps=tuning.num_warps,
            enable_fp_fusion=True,
        )
    _reduce(partials, gram_RR, side=num_rows, is_folded=False, is_first=is_first)


def _add_tiles(
    tuning: Tiles,
    tables: Sequence[ChunkTable],
    dtype: torch.dtype,
    gram_RR: Tensor,
    is_first: bool,
) -> None:
    num_rows = len(gram_RR)
    num_tiles = -(-num_rows // tuning.tile)
    side = num_tiles * tuning.tile
    doublings = program_doublings(tuning, side)
    programs = [min(1 << doublings, table.num_chunks) for table in tables]
    partials = gram_RR.new_empty((sum(programs), side * side))
    product_dtype, precision = product_of(dtype, num_tiles)
    for table, part in zip(tables, torch.split(partials, programs), strict=True):
        gram_tiles[(len(part), num_tiles * (num_tiles + 1) // 2)](
            table.table,
            part,
            table.num_chunks,
            R=num_rows,
            PROGRAM_DOUBLINGS=doublings,
            TILES=num_tiles,
            TILE=tuning.tile,
            BLOCK=tuning.block,
            STORAGE=triton_dtype(dtype),
            PRODUCT=triton_dtype(product_dtype),
            SUM=triton_dtype(sum_dtype(dtype)),
            PRECISION=precision,
            ALIGNED=table.is_aligned,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            enable_fp_fusion=True,
        )
    _reduce(partials, gram_RR, side=side, is_folded=precision == FOLDED, is_first=is_first)


def _reduce(
    partials: Tensor, gram_RR: Tensor, *, side: int, is_folded: bool, is_first: bool
) -> None:
    num_partials, stride = partials.shape
    tuning = reduction(len(gram_RR))
    gram_reduce[(-(-gram_RR.numel() // tuning.block),)](
        partials,
        gram_RR,
        num_partials,
        R=len(gram_RR),
        SIDE=side,
        STRIDE=stride,
        PROGRAMS=tuning.programs,
        BLOCK=tuning.block,
        FOLDED=is_folded,
        ADD=not is_first,
        num_warps=tuning.num_warps,
        enable_fp_fusion=True,
    )


@triton.jit
def load_chunk(table, chunk, STORAGE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address, row stride and length of one chunk; 16-byte loads where all allow them."""
    entry = table + chunk * 3
    address = tl.load(entry)
    row_stride = tl.load(entry + 1)
    length = tl.load(entry + 2)
    pointer = address.to(tl.pointer_type(STORAGE))
    if ALIGNED:
        # Unhinted, every load is 4 bytes wide and the tiles spill.
        pointer = tl.multiple_of(pointer, 16)
        row_stride = tl.multiple_of(row_stride, 16)
        length = tl.multiple_of(length, 16)
    return pointer, row_stride, length


@triton.jit
def first_chunk(program, num_chunks, DOUBLINGS: tl.constexpr):
    """Where the chunks of `program` begin; there are P = 2 ** DOUBLINGS programs, or one a chunk.

    Every program has one chunk; of the C - P others, (C - P) ((P - p) / P)^3 are left from program
    p on, so that each gets fewer than the one before it. Programs start in this order: a GPU that
    runs a third of them at a time or fewer has small ones left when the last begin, and its
    multiprocessors end together.
    """
    num_programs = tl.num_programs(0)
    programs_left = num_programs - program
    # int64: chunks times programs pass 2**31
    left = (num_chunks - num_programs).to(tl.int64)
    for _ in tl.static_range(3):
        left = left * programs_left >> DOUBLINGS
    return num_chunks - programs_left - left.to(tl.int32)


@triton.jit
def lanes(row_B, DOUBLINGS: tl.constexpr):
    """Its 2 ** DOUBLINGS interleaved parts: what one thread loaded, apart, nothing is moved."""
    parts = (row_B,)
    for _ in tl.static_range(DOUBLINGS):
        halves = ()
        for p in tl.static_range(len(parts)):
            even, odd = tl.split(tl.reshape(parts[p], [parts[p].shape[0] // 2, 2]))
            halves = halves + (even, odd)  # noqa: RUF005
        parts = halves
    return parts


@triton.jit
def gram_pairs(
    table,
    partials,
    num_chunks,
    R: tl.constexpr,
    PROGRAM_DOUBLINGS: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCK: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    STORAGE: tl.constexpr,
    SUM: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One multiply-add per column and pair of rows: memory-bound while R is small.

    The 2 ** DOUBLINGS columns that one load brings to a thread go into one sum per pair, in
    column order: a sum per column would take as many times the registers.
    """
    program = tl.program_id(0)
    entries_S = tl.arange(0, SQUARE)
    total_S = tl.zeros([SQUARE], tl.float64)
    LANES: tl.constexpr = 1 << DOUBLINGS
    first = first_chunk(program, num_chunks, PROGRAM_DOUBLINGS)
    last = first_chunk(program + 1, num_chunks, PROGRAM_DOUBLINGS)
    for chunk in range(first, last):
        pointer, row_stride, length = load_chunk(table, chunk, STORAGE, ALIGNED)
        sums = ()
        for _ in tl.static_range(R * (R + 1) // 2):
            sums = sums + (tl.zeros([BLOCK // LANES], SUM),)  # noqa: RUF005
        # int64: a row may be longer than 2**31
        for start in range(0, length, BLOCK):
            columns_B = start + tl.arange(0, BLOCK)
            rows = ()
            for i in tl.static_range(R):
                # [BLOCK]; columns past the chunk add nothing
                row_B = tl.load(
                    pointer + i * row_stride + columns_B, mask=columns_B < length, other=0
                )
                # LANES of [BLOCK / LANES]
                rows = rows + lanes(row_B.to(SUM), DOUBLINGS)
            longer = ()
            for i in tl.static_range(R):
                for j in tl.static_range(i + 1):
                    sum_L = sums[i * (i + 1) // 2 + j]
                    for v in tl.static_range(LANES):
                        sum_L = tl.fma(rows[i * LANES + v], rows[j * LANES + v], sum_L)
                    longer = longer + (sum_L,)  # noqa: RUF005
            sums = longer
        for i in tl.static_range(R):
            for j in tl.static_range(i + 1):
                product = tl.sum(sums[i * (i + 1) // 2 + j], axis=0).to(tl.float64)
                # Row-major [R, R], both triangles: bitwise symmetric.
                is_here_S = (entries_S == i * R + j) | (entries_S == j * R + i)
                total_S += tl.where(is_here_S, product, 0.0)
    tl.store(partials + program.to(tl.int64) * SQUARE + entries_S, total_S)


@triton.jit
def folded_dot(x_TB):
    """S with (S + S^T) / 2 = x x^T, in two products of matrix units instead of three or four.

    x = h + l, h rounded to the 11 bits that tf32 keeps, so that nothing is cut off h, and l the
    exact rest: x x^T = h h^T + h l^T + (h l^T)^T + l l^T, and S = h h^T + 2 h l^T leaves out
    l l^T alone: at most 2**-24, on average 1e-8, of the diagonal. What matrix units cut off l is
    of either sign. A NaN stays one in l.
    """
    bits_TB = x_TB.to(tl.int32, bitcast=True)
    high_TB = ((bits_TB + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    low_TB = x_TB - high_TB
    # The small product first: sums of small numbers lose little.
    product_TT = tl.dot(high_TB, tl.trans(low_TB + low_TB), input_precision="tf32")
    return tl.dot(high_TB, tl.trans(high_TB), acc=product_TT, input_precision="tf32")


@triton.jit
def gram_tiles(
    table,
    partials,
    num_chunks,
    R: tl.constexpr,
    PROGRAM_DOUBLINGS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    STORAGE: tl.constexpr,
    PRODUCT: tl.constexpr,
    SUM: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Tiles of TILE rows through tl.dot, the lower triangle of tiles; never plain tf32.

    Matrix units cut off what they add, so they add BLOCK columns only; the rest of a chunk is
    added in float32, rounded to nearest, and chunks in float64.
    """
    program = tl.program_id(0)
    pair = tl.program_id(1)
    # Row-major lower triangle: pair = tile_i (tile_i + 1) / 2 + tile_j.
    tile_i = 0
    for above in tl.static_range(1, TILES):
        tile_i += (pair >= above * (above + 1) // 2).to(tl.int32)
    tile_j = pair - tile_i * (tile_i + 1) // 2
    i_T = tile_i * TILE + tl.arange(0, TILE)
    j_T = tile_j * TILE + tl.arange(0, TILE)
    side: tl.constexpr = TILES * TILE
    square_TT = partials + program.to(tl.int64) * side * side + i_T[:, None] * side + j_T[None, :]
    first = first_chunk(program, num_chunks, PROGRAM_DOUBLINGS)
    last = first_chunk(program + 1, num_chunks, PROGRAM_DOUBLINGS)
    for chunk in range(first, last):
        pointer, row_stride, length = load_chunk(table, chunk, STORAGE, ALIGNED)
        sums_TT = tl.zeros([TILE, TILE], SUM)
        # int64: a row may be longer than 2**31
        for start in range(0, length, BLOCK):
            columns = start + tl.arange(0, BLOCK)[None, :]
            # [TILE, BLOCK]; rows past R and columns past the chunk add nothing
            left_TB = tl.load(
                pointer + i_T[:, None] * row_stride + columns,
                mask=(i_T[:, None] < R) & (columns < length),
                other=0,
            ).to(PRODUCT)
            if PRECISION == "folded":
                product_TT = folded_dot(left_TB)
            elif TILES == 1:
                product_TT = tl.dot(
                    left_TB, tl.trans(left_TB), input_precision=PRECISION, out_dtype=SUM
                )
            else:
                right_TB = tl.load(
                    pointer + j_T[:, None] * row_stride + columns,
                    mask=(j_T[:, None] < R) & (columns < length),
                    other=0,
                ).to(PRODUCT)
                product_TT = tl.dot(
                    left_TB, tl.trans(right_TB), input_precision=PRECISION, out_dtype=SUM
                )
            # A plain addition the compiler would hand to the matrix units.
            sums_TT = tl.fma(product_TT, tl.full(product_TT.shape, 1.0, SUM), sums_TT)
        # In memory: float64 totals would take the registers of a second tile.
        is_later = i_T[:, None] + chunk != i_T[:, None] + first
        total_TT = tl.load(square_TT, mask=is_later, other=0.0) + sums_TT.to(tl.float64)
        tl.store(square_TT, total_TT)
        # Loads of the next chunk may fall to other threads.
        tl.debug_barrier()


@triton.jit
def gram_reduce(
    partials,
    gram,
    num_partials,
    R: tl.constexpr,
    SIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    FOLDED: tl.constexpr,
    ADD: tl.constexpr,
):
    """gram = or += the sum of the programs' squares, (S + S^T) / 2 of folded ones.

    Others come from their lower triangles: three-pass products are not symmetric to the bit.
    """
    entries_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    high_B = tl.maximum(entries_B // R, entries_B % R)
    low_B = tl.minimum(entries_B // R, entries_B % R)
    is_entry_B = entries_B < R * R
    sums_PB = tl.zeros([PROGRAMS, BLOCK], tl.float64)
    for first in range(0, num_partials, PROGRAMS):
        programs_P = (first + tl.arange(0, PROGRAMS)).to(tl.int64)
        square_P1 = partials + programs_P[:, None] * STRIDE
        is_there_PB = (programs_P[:, None] < num_partials) & is_entry_B[None, :]
        sums_PB += tl.load(
            square_P1 + (high_B * SIDE + low_B)[None, :], mask=is_there_PB, other=0.0
        )
        if FOLDED:
            sums_PB += tl.load(
                square_P1 + (low_B * SIDE + high_B)[None, :], mask=is_there_PB, other=0.0
            )
    sum_B = tl.sum(sums_PB, axis=0)
    if FOLDED:
        sum_B = sum_B * 0.5
    if ADD:
        sum_B += tl.load(gram + entries_B, mask=is_entry_B, other=0.0)
    tl.store(gram + entries_B, sum_B, mask=is_entry_B)
