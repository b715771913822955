"""How Triton's Gram kernels are tuned: frozen block sizes, and the rule that picks among them.

How many programs there are depends on the rows and the chunks only, never on the device, so that a
result is the same on every GPU of one architecture.
"""

import math
from dataclasses import dataclass

import torch

from doge_fast.kernels.triton_support import is_interpreted

# The widest load of a thread.
LOAD_BYTES = 16
# Two tf32 products for the float32 product of a tile with itself; not a name of Triton's.
FOLDED = "folded"


@dataclass(frozen=True)
class Pairs:
    """One multiply-add per pair of rows and column; all pairs in the registers of one warp.

    One warp has nobody to wait for at the end of a chunk, but a GPU runs up to 4224 of them at
    once: short chunks, and four times as many programs, 2 ** `program_doublings` at most, let its
    multiprocessors end together.
    """

    block: int
    num_warps: int = 1
    chunk_columns: int = 2048
    program_doublings: int = 14


@dataclass(frozen=True)
class Tiles:
    """Tiles of rows through the matrix units.

    Tensor cores cut off what they add: every 8 columns the sum loses up to one unit in its last
    place for each addend, always towards zero. Added up over `block` = 32 columns that is 5e-7
    of a sum of one sign on average (by emulation, after Fasi et al., "Numerical behavior of
    NVIDIA tensor cores", 2021). What follows is rounded to nearest: up to 256 float32 additions
    per chunk, then float64. The loss is the same at any N.
    """

    tile: int
    block: int
    num_warps: int
    num_stages: int
    chunk_columns: int = 8192
    program_doublings: int = 11


@dataclass(frozen=True)
class Reduction:
    """Entries that one program adds up, and partial results that it loads at a time."""

    block: int
    programs: int
    num_warps: int


# Four neighbours are 32 bytes, what memory hands out at least; many rows have entries enough to
# occupy a GPU with fewer, wider programs.
FEW_ROWS = Reduction(block=4, programs=2048, num_warps=16)
MANY_ROWS = Reduction(block=32, programs=128, num_warps=8)

# Keyed by the largest number of rows. Few rows load several times 16 bytes at once, so that
# 32 warps, the most programs a multiprocessor holds, keep 32 KB or more on the way.
PAIRS_FLOAT32: dict[float, Pairs] = {
    1: Pairs(block=1024),
    3: Pairs(block=512),
    4: Pairs(block=256),
    8: Pairs(block=128),
    # 91 sums and 13 rows would not fit in registers.
    12: Pairs(block=128, program_doublings=13),
}
PAIRS_HALF: dict[float, Pairs] = {
    1: Pairs(block=2048),
    3: Pairs(block=1024),
    10: Pairs(block=256),
}
# A float64 takes two registers.
PAIRS_FLOAT64: dict[float, Pairs] = {
    1: Pairs(block=512),
    3: Pairs(block=256),
    10: Pairs(block=64),
}

# Programs of one warp are as many at once as those of pairs, of two warps half as many.
ONE_WARP = {"num_warps": 1, "chunk_columns": 2048, "program_doublings": 14}
TWO_WARPS = {"num_warps": 2, "chunk_columns": 4096, "program_doublings": 12}
TILES_FLOAT32: dict[float, Tiles] = {
    16: Tiles(tile=16, block=32, num_stages=4, **ONE_WARP),
    32: Tiles(tile=32, block=32, num_stages=4, **TWO_WARPS),
    64: Tiles(tile=64, block=32, num_warps=4, num_stages=4),
    128: Tiles(tile=128, block=32, num_warps=8, num_stages=4),
    math.inf: Tiles(tile=64, block=32, num_warps=8, num_stages=4),
}
TILES_HALF: dict[float, Tiles] = {
    16: Tiles(tile=16, block=32, num_stages=6, **ONE_WARP),
    32: Tiles(tile=32, block=32, num_stages=6, **TWO_WARPS),
    64: Tiles(tile=64, block=32, num_warps=4, num_stages=8),
    math.inf: Tiles(tile=128, block=32, num_warps=8, num_stages=8),
}
TILES_FLOAT64: dict[float, Tiles] = {
    16: Tiles(tile=16, block=16, num_stages=3, **ONE_WARP),
    32: Tiles(tile=32, block=16, num_stages=3, **TWO_WARPS),
    math.inf: Tiles(tile=64, block=16, num_warps=8, num_stages=3),
}
TUNINGS: dict[torch.dtype, dict[float, Pairs | Tiles]] = {
    torch.float32: {**TILES_FLOAT32, **PAIRS_FLOAT32},
    torch.bfloat16: {**TILES_HALF, **PAIRS_HALF},
    torch.float16: {**TILES_HALF, **PAIRS_HALF},
    torch.float64: {**TILES_FLOAT64, **PAIRS_FLOAT64},
}
# Float64 entries of all partial results together: 128 MiB.
MAX_PARTIAL_ENTRIES = 1 << 24


def pick(num_rows: int, dtype: torch.dtype) -> Pairs | Tiles:
    """Pairs while they are memory-bound and fit in registers, tiles above.

    By arithmetic, with 4.3 TB/s, 60 TFLOP/s of float32, 400 of tf32 and 990 of bfloat16 (H200)
    and 1.75, 19.5, 156 and 312 (A100), as parts of the time that a column's bytes take. R rows
    cost R (R + 1) operations in pairs: of float32 rows 0.23 and 0.29 at R = 12, of 16-bit rows
    0.39 and 0.49 at 10. Tiles of T rows cost 2 T^2 operations of bfloat16 or twice 2 T^2 of tf32
    (`folded_dot`): of bfloat16 rows 0.20 and 0.26 at 22, 0.36 and 0.46 at 50, 0.56 and 0.72 at
    128; of float32 rows 0.50 and 0.52 at 22, 0.88 and 0.92 at 50, 1.38 and 1.44 at 128, the one
    that arithmetic binds.
    """
    return TUNINGS[dtype][min(most for most in TUNINGS[dtype] if num_rows <= most)]


def reduction(num_rows: int) -> Reduction:
    """Which of the two fits."""
    return FEW_ROWS if num_rows <= 32 else MANY_ROWS


def program_doublings(tuning: Tiles, side: int) -> int:
    """The logarithm of the most programs, whose squares of `side` fit in what there is for them."""
    most = max(1, MAX_PARTIAL_ENTRIES // (side * side))
    return min(tuning.program_doublings, most.bit_length() - 1)


def square_entries(num_rows: int) -> int:
    """Entries of a program's square of pairs, padded to a power of two."""
    return 1 << (num_rows * num_rows - 1).bit_length()


def columns_of(tuning: Pairs, dtype: torch.dtype, is_aligned: bool) -> dict[str, int]:
    """Columns of a step, and doublings up to those that one 16-byte load brings."""
    doublings = (LOAD_BYTES // dtype.itemsize).bit_length() - 1
    # The interpreter takes as long for a wide step as for a narrow one.
    block = tuning.block << (3 if is_interpreted() else 0)
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
