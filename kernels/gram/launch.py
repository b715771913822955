"""Frozen launch configurations of the Gram kernels, and the rule that picks one.

The number of programs depends on the number of rows only, never on the device, so that a
result is the same on every GPU of one architecture.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from doge_fast.kernels.chunks import ChunkTable, Span, by_dtype, chunk_tables
from doge_fast.kernels.schema import gram_shape
from doge_fast.kernels.triton_support import (
    is_interpreted,
    on_device,
    sum_dtype,
    triton_dtype,
)

FIELDS = ("source", "row_stride", "length")


@dataclass(frozen=True)
class PairsLaunch:
    """One multiply-add per pair of rows and column; all pairs in the registers of a program."""

    block: int
    num_warps: int
    chunk_columns: int = 8192
    num_programs: int = 2048


@dataclass(frozen=True)
class TilesLaunch:
    """Tiles of rows through the matrix units.

    Tensor cores truncate what they add, so chunks are shorter: at most
    chunk_columns / (16 ways) additions before the float64 sum, 2e-6 of the diagonal at worst.
    """

    tile: int
    ways: int
    block: int
    num_warps: int
    num_stages: int
    chunk_columns: int = 2048
    num_programs: int = 512


@dataclass(frozen=True)
class ReduceLaunch:
    """Entries that one program adds up, and partial results that it loads at a time."""

    block: int
    programs: int


# Few rows leave many partial results of few entries; many rows the reverse.
REDUCE_FEW_ROWS = ReduceLaunch(block=16, programs=64)
REDUCE_MANY_ROWS = ReduceLaunch(block=256, programs=8)

# Keyed by the largest number of rows. Nothing here spills when compiled for sm_80 or sm_90;
# a program of pairs at 7 rows holds 112 sums per thread and loads 16 bytes at a time.
PAIRS_FLOAT32: dict[float, PairsLaunch] = {
    4: PairsLaunch(block=512, num_warps=4),
    8: PairsLaunch(block=512, num_warps=4),
    10: PairsLaunch(block=256, num_warps=4),
}
# 16-bit products cost a matrix unit next to nothing; pairs would load 8 bytes at a time.
PAIRS_HALF: dict[float, PairsLaunch] = {4: PairsLaunch(block=1024, num_warps=4)}
# A float64 takes two registers.
PAIRS_FLOAT64: dict[float, PairsLaunch] = {4: PairsLaunch(block=256, num_warps=4)}

TILES_FLOAT32: dict[float, TilesLaunch] = {
    16: TilesLaunch(tile=16, ways=4, block=64, num_warps=4, num_stages=3),
    32: TilesLaunch(tile=32, ways=4, block=32, num_warps=8, num_stages=3),
    math.inf: TilesLaunch(tile=64, ways=1, block=32, num_warps=8, num_stages=3, chunk_columns=512),
}
TILES_HALF: dict[float, TilesLaunch] = {
    16: TilesLaunch(tile=16, ways=4, block=128, num_warps=4, num_stages=3),
    32: TilesLaunch(tile=32, ways=4, block=32, num_warps=4, num_stages=3),
    math.inf: TilesLaunch(tile=64, ways=2, block=64, num_warps=8, num_stages=3),
}
TILES_FLOAT64: dict[float, TilesLaunch] = {
    16: TilesLaunch(tile=16, ways=4, block=32, num_warps=4, num_stages=2),
    math.inf: TilesLaunch(tile=32, ways=4, block=32, num_warps=8, num_stages=2),
}
LAUNCHES: dict[torch.dtype, dict[float, PairsLaunch | TilesLaunch]] = {
    torch.float32: {**TILES_FLOAT32, **PAIRS_FLOAT32},
    torch.bfloat16: {**TILES_HALF, **PAIRS_HALF},
    torch.float16: {**TILES_HALF, **PAIRS_HALF},
    torch.float64: {**TILES_FLOAT64, **PAIRS_FLOAT64},
}
# Float64 entries of all partial results together: 64 MiB.
MAX_PARTIAL_ENTRIES = 1 << 23


def pick(num_rows: int, dtype: torch.dtype) -> PairsLaunch | TilesLaunch:
    """Pairs while they are memory-bound, tiles above.

    A column of R rows costs R (R + 1) / 2 multiply-adds in pairs: at 10 rows of float32, 1.4
    a byte, which a GPU with matrix units still does at full bandwidth.
    """
    return LAUNCHES[dtype][min(most for most in LAUNCHES[dtype] if num_rows <= most)]


def gram(blocks: Sequence[Tensor]) -> Tensor:
    """sum_p B_p B_p^T, [R, R] float64, through Triton."""
    gram_RR: Tensor = gram_shape(blocks)
    is_first = True
    for (dtype,), group in by_dtype([block] for block in blocks):
        spans = [
            Span(block.data_ptr(), block.itemsize, block.stride(0), block.shape[1])
            for (block,) in group
        ]
        launch = pick(len(gram_RR), dtype)
        tables = chunk_tables(spans, FIELDS, launch.chunk_columns, gram_RR.device)
        if tables:
            with on_device(gram_RR.device):
                if isinstance(launch, PairsLaunch):
                    _add_pairs(launch, tables, dtype, gram_RR, is_first)
                else:
                    _add_tiles(launch, tables, dtype, gram_RR, is_first)
            is_first = False
    return gram_RR.zero_() if is_first else gram_RR


def _add_pairs(
    launch: PairsLaunch,
    tables: Sequence[ChunkTable],
    dtype: torch.dtype,
    gram_RR: Tensor,
    is_first: bool,
) -> None:
    from doge_fast.kernels.gram import triton_kernel

    num_rows = len(gram_RR)
    square = 1 << (num_rows * num_rows - 1).bit_length()
    programs = [min(launch.num_programs, table.num_chunks) for table in tables]
    partials = gram_RR.new_empty((sum(programs), square))
    for table, part in zip(tables, torch.split(partials, programs), strict=True):
        triton_kernel.gram_pairs[(len(part),)](
            table.table,
            part,
            table.num_chunks,
            R=num_rows,
            SQUARE=square,
            BLOCK=launch.block,
            STORAGE=triton_dtype(dtype),
            SUM=triton_dtype(sum_dtype(dtype)),
            ALIGNED=table.is_aligned,
            num_warps=launch.num_warps,
        )
    _reduce(partials, gram_RR, side=num_rows, is_first=is_first)


def _add_tiles(
    launch: TilesLaunch,
    tables: Sequence[ChunkTable],
    dtype: torch.dtype,
    gram_RR: Tensor,
    is_first: bool,
) -> None:
    from doge_fast.kernels.gram import triton_kernel

    num_rows = len(gram_RR)
    num_tiles = -(-num_rows // launch.tile)
    side = num_tiles * launch.tile
    most_programs = max(1, min(launch.num_programs, MAX_PARTIAL_ENTRIES // (side * side)))
    programs = [min(most_programs, table.num_chunks) for table in tables]
    partials = gram_RR.new_empty((sum(programs), side * side))
    product_dtype, precision = _product(dtype)
    for table, part in zip(tables, torch.split(partials, programs), strict=True):
        triton_kernel.gram_tiles[(len(part), num_tiles * (num_tiles + 1) // 2)](
            table.table,
            part,
            table.num_chunks,
            R=num_rows,
            TILES=num_tiles,
            TILE=launch.tile,
            WAYS=launch.ways,
            BLOCK=launch.block,
            STORAGE=triton_dtype(dtype),
            PRODUCT=triton_dtype(product_dtype),
            SUM=triton_dtype(sum_dtype(dtype)),
            PRECISION=precision,
            ALIGNED=table.is_aligned,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
    _reduce(partials, gram_RR, side=side, is_first=is_first)


def _reduce(partials: Tensor, gram_RR: Tensor, *, side: int, is_first: bool) -> None:
    from doge_fast.kernels.gram import triton_kernel

    num_partials, stride = partials.shape
    launch = REDUCE_FEW_ROWS if len(gram_RR) <= 16 else REDUCE_MANY_ROWS
    triton_kernel.gram_reduce[(-(-gram_RR.numel() // launch.block),)](
        partials,
        gram_RR,
        num_partials,
        R=len(gram_RR),
        SIDE=side,
        STRIDE=stride,
        PROGRAMS=launch.programs,
        BLOCK=launch.block,
        ADD=not is_first,
    )


def _product(dtype: torch.dtype) -> tuple[torch.dtype, str]:
    if is_interpreted() and dtype == torch.bfloat16:
        # Triton's interpreter multiplies the bit patterns of bfloat16 operands.
        return torch.float32, "ieee"
    has_tf32x3 = dtype == torch.float32 and not is_interpreted() and torch.version.hip is None
    return dtype, "tf32x3" if has_tf32x3 else "ieee"
