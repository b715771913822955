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
# The widest load of a thread.
LOAD_BYTES = 16
# Two tf32 products for the float32 product of a tile with itself; not a name of Triton's.
FOLDED = "folded"


@dataclass(frozen=True)
class PairsLaunch:
    """One multiply-add per pair of rows and column; all pairs in registers.

    One warp where they fit: nothing to wait for at the end of a chunk.
    """

    block: int
    num_warps: int = 1
    chunk_columns: int = 8192
    num_programs: int = 4096


@dataclass(frozen=True)
class TilesLaunch:
    """Tiles of rows through the matrix units.

    Tensor cores cut off what they add: every 8 columns the sum loses up to one unit in its last
    place for each addend, always towards zero. Added up over `block` = 32 columns that is 5e-7
    of a sum of one sign on average (tests/operators/test_triton_accuracy.py emulates it; Fasi
    et al., "Numerical behavior of NVIDIA tensor cores", 2021). What follows is rounded to
    nearest: 256 float32 additions per chunk, then float64. The loss is the same at any N.
    """

    tile: int
    block: int
    num_warps: int
    num_stages: int
    chunk_columns: int = 8192
    num_programs: int = 2048


@dataclass(frozen=True)
class ReduceLaunch:
    """Entries that one program adds up, and partial results that it loads at a time."""

    block: int
    programs: int
    num_warps: int


# Four neighbours are 32 bytes, what memory hands out at least; many rows have entries enough to
# occupy a GPU with fewer, wider programs.
REDUCE_FEW_ROWS = ReduceLaunch(block=4, programs=512, num_warps=8)
REDUCE_MANY_ROWS = ReduceLaunch(block=32, programs=128, num_warps=8)

# Keyed by the largest number of rows. Few rows load several times 16 bytes at once, so that
# 32 warps, the most programs a multiprocessor holds, keep 32 KB or more on the way.
PAIRS_FLOAT32: dict[float, PairsLaunch] = {
    1: PairsLaunch(block=1024),
    3: PairsLaunch(block=512),
    4: PairsLaunch(block=256),
    12: PairsLaunch(block=128),
    # 105 sums and 14 rows of one warp would not fit in registers, 136 and 16 not of two.
    14: PairsLaunch(block=256, num_warps=2),
}
PAIRS_HALF: dict[float, PairsLaunch] = {
    1: PairsLaunch(block=2048),
    3: PairsLaunch(block=1024),
    10: PairsLaunch(block=256),
}
# A float64 takes two registers.
PAIRS_FLOAT64: dict[float, PairsLaunch] = {
    1: PairsLaunch(block=512),
    3: PairsLaunch(block=256),
    10: PairsLaunch(block=64),
}

TILES_FLOAT32: dict[float, TilesLaunch] = {
    16: TilesLaunch(tile=16, block=32, num_warps=1, num_stages=4),
    32: TilesLaunch(tile=32, block=32, num_warps=2, num_stages=4),
    64: TilesLaunch(tile=64, block=32, num_warps=4, num_stages=4),
    128: TilesLaunch(tile=128, block=32, num_warps=8, num_stages=4),
    math.inf: TilesLaunch(tile=64, block=32, num_warps=8, num_stages=4),
}
TILES_HALF: dict[float, TilesLaunch] = {
    16: TilesLaunch(tile=16, block=32, num_warps=1, num_stages=6),
    32: TilesLaunch(tile=32, block=32, num_warps=2, num_stages=6),
    64: TilesLaunch(tile=64, block=32, num_warps=4, num_stages=6),
    math.inf: TilesLaunch(tile=128, block=32, num_warps=8, num_stages=4),
}
TILES_FLOAT64: dict[float, TilesLaunch] = {
    16: TilesLaunch(tile=16, block=16, num_warps=1, num_stages=3),
    32: TilesLaunch(tile=32, block=16, num_warps=2, num_stages=3),
    math.inf: TilesLaunch(tile=64, block=16, num_warps=8, num_stages=3),
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
    """Pairs while they are memory-bound and fit in registers, tiles above.

    By arithmetic, with 4.3 TB/s, 60 TFLOP/s of float32, 400 of tf32 and 990 of bfloat16 (H200)
    and 1.75, 19.5, 156 and 312 (A100), as parts of the time that a column's bytes take. R rows
    cost R (R + 1) operations in pairs: of float32 rows 0.27 and 0.34 at R = 14, of 16-bit rows
    0.39 and 0.49 at 10. Tiles of T rows cost 2 T^2 operations of bfloat16 or twice 2 T^2 of tf32
    (`folded_dot`): of bfloat16 rows 0.20 and 0.26 at 22, 0.36 and 0.46 at 50, 0.56 and 0.72 at
    128; of float32 rows 0.50 and 0.52 at 22, 0.88 and 0.92 at 50, 1.38 and 1.44 at 128, the one
    that arithmetic binds.
    """
    return LAUNCHES[dtype][min(most for most in LAUNCHES[dtype] if num_rows <= most)]


def gram(blocks: Sequence[Tensor]) -> Tensor:
    """sum_p B_p B_p^T, [R, R] float64, through Triton."""
    gram_RR: Tensor = gram_shape(blocks)
    is_first = True
    for (dtype,), group in by_dtype([block] for block in blocks):
        spans = [Span.of(*tensors) for tensors in group]
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
    square = square_entries(num_rows)
    programs = [min(launch.num_programs, table.num_chunks) for table in tables]
    partials = gram_RR.new_empty((sum(programs), square))
    for table, part in zip(tables, torch.split(partials, programs), strict=True):
        triton_kernel.gram_pairs[(len(part),)](
            table.table,
            part,
            table.num_chunks,
            R=num_rows,
            SQUARE=square,
            **columns_of(launch, dtype, table.is_aligned),
            STORAGE=triton_dtype(dtype),
            SUM=triton_dtype(sum_dtype(dtype)),
            ALIGNED=table.is_aligned,
            num_warps=launch.num_warps,
            enable_fp_fusion=True,
        )
    _reduce(partials, gram_RR, side=num_rows, is_folded=False, is_first=is_first)


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
    product_dtype, precision = product_of(dtype, num_tiles)
    for table, part in zip(tables, torch.split(partials, programs), strict=True):
        triton_kernel.gram_tiles[(len(part), num_tiles * (num_tiles + 1) // 2)](
            table.table,
            part,
            table.num_chunks,
            R=num_rows,
            TILES=num_tiles,
            TILE=launch.tile,
            BLOCK=launch.block,
            STORAGE=triton_dtype(dtype),
            PRODUCT=triton_dtype(product_dtype),
            SUM=triton_dtype(sum_dtype(dtype)),
            PRECISION=precision,
            ALIGNED=table.is_aligned,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            enable_fp_fusion=True,
        )
    _reduce(partials, gram_RR, side=side, is_folded=precision == FOLDED, is_first=is_first)


def _reduce(
    partials: Tensor, gram_RR: Tensor, *, side: int, is_folded: bool, is_first: bool
) -> None:
    from doge_fast.kernels.gram import triton_kernel

    num_partials, stride = partials.shape
    launch = reduce_launch(len(gram_RR))
    triton_kernel.gram_reduce[(-(-gram_RR.numel() // launch.block),)](
        partials,
        gram_RR,
        num_partials,
        R=len(gram_RR),
        SIDE=side,
        STRIDE=stride,
        PROGRAMS=launch.programs,
        BLOCK=launch.block,
        FOLDED=is_folded,
        ADD=not is_first,
        num_warps=launch.num_warps,
        enable_fp_fusion=True,
    )


def reduce_launch(num_rows: int) -> ReduceLaunch:
    """Which of the two fits."""
    return REDUCE_FEW_ROWS if num_rows <= 32 else REDUCE_MANY_ROWS


def square_entries(num_rows: int) -> int:
    """Entries of a program's square of pairs, padded to a power of two."""
    return 1 << (num_rows * num_rows - 1).bit_length()


def columns_of(launch: PairsLaunch, dtype: torch.dtype, is_aligned: bool) -> dict[str, int]:
    """Columns of a step, and doublings up to those that one 16-byte load brings."""
    doublings = (LOAD_BYTES // dtype.itemsize).bit_length() - 1
    # The interpreter takes as long for a wide step as for a narrow one.
    block = launch.block << (3 if is_interpreted() else 0)
    if is_aligned:
        return {"BLOCK": block, "DOUBLINGS": doublings}
    # Loads of one element; as many sums in the registers.
    return {"BLOCK": block >> doublings, "DOUBLINGS": 0}


def product_of(dtype: torch.dtype, num_tiles: int) -> tuple[torch.dtype, str]:
    """The dtype that tiles multiply in, and how."""
    if is_interpreted() and dtype == torch.bfloat16:
        # Triton's interpreter multiplies the bit patterns of bfloat16 operands.
        return torch.float32, "ieee"
    # Matrix units of AMD differ in what they take; multiply-adds they all do.
    if dtype != torch.float32 or torch.version.hip is not None:
        return dtype, "ieee"
    return dtype, FOLDED if num_tiles == 1 else "tf32x3"
