"""The Gram matrix: all inner products of the rows, in one pass over them."""

# Triton's own compiler types device code.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from doge_fast.kernels import build
from doge_fast.kernels.chunks import ChunkTable, SpansByDtype, chunk_tables, spans_by_dtype
from doge_fast.kernels.dispatch import (
    Operator,
    by_device,
    choose_without_cuda,
    register,
    requested_backend,
    runs,
)
from doge_fast.kernels.schema import (
    check_blocks,
    check_number,
    check_pairs,
    check_readable,
    sum_dtype,
)
from doge_fast.kernels.triton_support import is_interpreted, kernel, launching_on, tl, triton_dtype

# AdamW's second moments of each block's columns, or None: no metric there.
Moments = Sequence[Tensor | None]
# The metric of a block's columns from `first` up to `last`.
_MetricOf = Callable[[int, int], Tensor]


def gram(
    grads: Tensor | Sequence[Tensor],
    *,
    second_moments: Tensor | Sequence[Tensor | None] | None = None,
    eps: float = 0.0,
    halves: bool = False,
    implementation: str | None = None,
) -> Tensor:
    """All inner products of the rows, in one pass over them; optionally in AdamW's metric.

    G_ij  =  sum_n d_n g_in g_jn     where  d_n = 1     or, with second moments v,
    d_n = 1 / (sqrt(v_n) + eps), and 0 where v_n = 0

    With `halves` of the sums g_j = a_j + b_j, where a_j and b_j are rows 2 j and 2 j + 1, and with
    one row more: G_Kj = sum_n d_n a_jn b_jn. Sums g_j are made as rows are read, in float32.

    Products are exact or float32. Sums are float32 over at most 16384 columns, and float64 across
    these; all is float64 for float64 rows. Bitwise symmetric. The same call gives the same bits for
    any number of multiprocessors or (`cpp`) threads. Implementations differ in the last float32
    bits, and so does `cpp` between instruction sets. Reads each row and v once (GPU: up to 128
    rows); d is never in memory as a whole.

    A column that no gradient has reached has v_n = 0 and counts as 0: 1 / `eps` would outweigh all
    others, for a step that AdamW never takes, since its v has the new gradient in it. A row that is
    not finite gives products that are not finite, whatever the metric.

    Args:
        grads: [K, N], rows of float32, bfloat16, float16 or float64 with any stride(0); or a list
            of such blocks [K, n_p], whose dtypes and devices may differ.
        second_moments: v, AdamW's `exp_avg_sq` as it is: contiguous, n_p elements of any shape, of
            these dtypes, on the device of the block; a tensor if `grads` is one, else a list. None,
            here or in the list: d = 1.
        eps: >= 0; added to the root, as AdamW does.
        halves: whether the blocks are [2 K, n_p], two rows for each gradient.
        implementation: "torch", "cpp", "triton" or "cuda"; None: the dispatcher chooses. With
            second moments "cuda" takes float32 rows and moments, and it takes no halves; the next
            best takes what is left.

    Returns:
        [K, K] float64, on the device of the first block; [K + 1, K] with halves.

    Raises:
        ValueError: a block is not [K, n] of these dtypes with stride(1) == 1, or the numbers of
            rows differ or, with halves, are odd; second moments are missing for a block, not
            contiguous, or of another size or device; `eps` < 0.
        RuntimeError: the forced implementation cannot run.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), eq. (ge-decompose): W = G tau. The metric is
    that of AdamW's step (Loshchilov, Hutter; ICLR 2019), Algorithm 2.
    """
    blocks = [grads] if isinstance(grads, Tensor) else grads
    moments = [second_moments] if isinstance(second_moments, Tensor) else second_moments
    check_options(blocks, moments, eps, halves)
    gram_KK: Tensor = _op(blocks, moments, eps, halves, implementation=implementation)
    return gram_KK


# In plain torch: any device, always available.
#
# A float32 product of two rows of 20 million elements is wrong in the third digit, and all diagonal
# entries are too small. So a product has at most `CHUNK_COLUMNS` columns, and the partial results
# are added in float64. Reads each block once, K times from cache; writes one [K, K] partial
# result per chunk.

# The longest float32 sum. Measured on a CPU: as fast as longer ones; the worst error is 4e-7 of the
# largest entry, for 16-bit rows of one sign (4096 columns: 3e-6).
CHUNK_COLUMNS = 1024
# Elements of a cast tile, and of the partial results of one product. Large, because every product
# is a barrier for all threads.
TILE_ELEMENTS = 1 << 20
PARTIAL_ELEMENTS = 1 << 20
# Short blocks that are concatenated; the copy stays small.
MAX_JOINED = 32


def gram_torch(
    blocks: Sequence[Tensor],
    moments: Moments | None = None,
    eps: float = 0.0,
    halves: bool = False,
) -> Tensor:
    """sum_p B_p D_p B_p^T, [R, R] float64: the reference of the other implementations.

    With halves the products of halves are a last row.
    """
    check_gram(blocks, moments)
    result = _empty_result(blocks, halves).zero_()
    of_blocks = [None] * len(blocks) if moments is None else moments
    plain = [block for block, v in zip(blocks, of_blocks, strict=True) if v is None]
    for block in _joined(plain):
        _add_block(result, block, None, halves)
    for block, v in zip(blocks, of_blocks, strict=True):
        if v is not None:
            metric = partial(_metric, v.view(-1), sum_dtype(block.dtype, v.dtype), eps)
            _add_block(result, block, metric, halves)
    # Matrix products are not exactly symmetric: copy one triangle to the other.
    gram_RR = result[: result.shape[1]]
    gram_RR.copy_(gram_RR.tril() + gram_RR.tril(-1).T)
    return result


def _empty_result(blocks: Sequence[Tensor], halves: bool) -> Tensor:
    num_rows = blocks[0].shape[0] // (2 if halves else 1)
    return blocks[0].new_empty((num_rows + halves, num_rows), dtype=torch.float64)


def _joined(blocks: Sequence[Tensor]) -> Iterator[Tensor]:
    """The blocks; those shorter than a chunk, such as biases, are concatenated."""
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


def _add_block(result: Tensor, block_RN: Tensor, metric: _MetricOf | None, halves: bool) -> None:
    num_rows, num_columns = block_RN.shape
    whole = num_columns - num_columns % CHUNK_COLUMNS
    most_chunks = PARTIAL_ELEMENTS // (num_rows * num_rows)
    if halves or metric is not None or block_RN.dtype != _product_dtype(block_RN):
        most_chunks = min(most_chunks, TILE_ELEMENTS // (num_rows * CHUNK_COLUMNS))
    tile = CHUNK_COLUMNS * max(1, most_chunks)
    for first in range(0, whole, tile):
        last = min(first + tile, whole)
        # [chunks, R, CHUNK_COLUMNS], a view
        chunks_CRB = block_RN[:, first:last].view(num_rows, -1, CHUNK_COLUMNS).transpose(0, 1)
        metric_C1B = None if metric is None else metric(first, last).view(-1, 1, CHUNK_COLUMNS)
        _add_chunks(result, chunks_CRB, metric_C1B, halves)
    if whole < num_columns:
        metric_11B = None if metric is None else metric(whole, num_columns)[None, None]
        _add_chunks(result, block_RN[None, :, whole:], metric_11B, halves)


def _add_chunks(
    result: Tensor, chunks_CRB: Tensor, metric_C1B: Tensor | None, halves: bool
) -> None:
    chunks_CRB = chunks_CRB.to(_product_dtype(chunks_CRB))
    metric = 1.0 if metric_C1B is None else metric_C1B.to(chunks_CRB.dtype)
    if halves:
        first_CRB, second_CRB = chunks_CRB[:, 0::2], chunks_CRB[:, 1::2]
        chunks_CRB = first_CRB + second_CRB
        result[-1] += (first_CRB * metric * second_CRB).sum((0, 2), dtype=torch.float64)
    scaled_CRB = chunks_CRB if metric_C1B is None else chunks_CRB * metric
    partial_CRR = torch.bmm(scaled_CRB, chunks_CRB.mT)
    result[: result.shape[1]] += partial_CRR.sum(0, dtype=torch.float64)


def _metric(moments_N: Tensor, dtype: torch.dtype, eps: float, first: int, last: int) -> Tensor:
    """d_n of the columns [first, last), in `dtype`."""
    moments_B = moments_N[first:last].to(dtype)
    return torch.where(moments_B == 0, 0, (moments_B.sqrt() + eps).reciprocal())


def _product_dtype(rows: Tensor) -> torch.dtype:
    # A global switch of the user's may turn float32 products into tf32 or bfloat16, which costs
    # 7e-4 on the diagonal, and so does autocast. Only on a CPU can we be certain that they do not.
    switch = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    is_plain = switch in ("none", "ieee") and not torch.is_autocast_enabled("cpu")
    exact = rows.device.type == "cpu" and is_plain
    return torch.float32 if exact and rows.dtype != torch.float64 else torch.float64


# Compiled: csrc/cpu/gram.cpp and csrc/cuda/gram.cu.

# Short enough that a model of ten million parameters occupies every multiprocessor.
CUDA_CHUNK_COLUMNS = 4096
# Tiles of more rows do not fit in registers.
MAX_CUDA_ROWS = 64
# The kernel in C++ takes at most this many rows.
MAX_CPP_ROWS = 2048
FIELDS = ("source", "row_stride", "length")
# With a metric; and with the output of a weighted sum.
SCALED_FIELDS = (*FIELDS, "vector")
SUMMED_FIELDS = (*SCALED_FIELDS, "out")


def gram_cpp(
    blocks: Sequence[Tensor],
    moments: Moments | None = None,
    eps: float = 0.0,
    halves: bool = False,
) -> Tensor:
    """On a CPU; plain torch takes more than MAX_CPP_ROWS rows."""
    if len(blocks[0]) > MAX_CPP_ROWS:
        return gram_torch(blocks, moments, eps, halves)
    try:
        gram_RR: Tensor = torch.ops.doge_fast_cpp.gram.default(blocks, moments, eps, halves)
    except RuntimeError:
        # C++ checks its arguments in a tenth of the time; this message names the block.
        check_gram(blocks, moments)
        raise
    return gram_RR


def gram_cuda(
    blocks: Sequence[Tensor],
    moments: Moments | None = None,
    eps: float = 0.0,
    halves: bool = False,
) -> Tensor:
    """Two launches for each dtype and alignment.

    The kernels take neither float64 nor more than MAX_CUDA_ROWS rows, a metric of float32 rows and
    moments alone, and no halves: for the rest another implementation runs.
    """
    vectors = () if moments is None else (moments,)
    groups = spans_by_dtype(partial(check_gram, blocks, *vectors), blocks, *vectors)
    device = blocks[0].device
    is_ours = not halves and len(blocks[0]) <= MAX_CUDA_ROWS
    if not (is_ours and all(_has_cuda_kernel(dtypes) for dtypes, _ in groups)):
        result: Tensor = choose_without_cuda("gram", device)(blocks, moments, eps, halves)
        return result
    gram_RR = _empty_result(blocks, halves)
    run = build.cuda_operators(device.type).gram
    is_first = True
    for (dtype, *scaled), spans in groups:
        fields, of_metric = (SCALED_FIELDS, eps) if scaled else (FIELDS, None)
        for table in chunk_tables(spans, fields, CUDA_CHUNK_COLUMNS, device):
            run(table.table, table.is_aligned, dtype, of_metric, gram_RR, not is_first)
            is_first = False
    return gram_RR.zero_() if is_first else gram_RR


def _has_cuda_kernel(dtypes: tuple[torch.dtype, ...]) -> bool:
    return torch.float64 not in dtypes and (len(dtypes) == 1 or set(dtypes) == {torch.float32})


# Through Triton.
#
# Rows come through a chunk table, [num_chunks, 3] int64: address of the chunk's first element in
# row 0, row stride in elements, number of columns; with a metric, [num_chunks, 4], the address of
# the chunk's first second moment; with a weighted sum, [num_chunks, 5], that of its first element
# of the output. A program takes consecutive chunks, and later
# programs take fewer. Sums are float32 within a chunk and float64 across chunks; a second kernel
# adds the programs' partial results in a fixed order. The chunks of a program depend on the table's
# length and the tuning, not on the device, so results are bitwise reproducible.
#
# Reads each row and the second moments once (K*N and N elements); with more rows than a tile holds,
# once per column of tiles.
# Writes one float64 square per program and reads it once to reduce. `gram_tiles` adds to its square
# after every chunk, in the second-level cache.

# Bytes of a thread's widest load.
LOAD_BYTES = 16


@dataclass(frozen=True)
class Pairs:
    """One multiply-add per pair of rows and column; all pairs in the registers of one warp.

    A single warp waits for no other at the end of a chunk. A GPU runs up to 4224 of them at once,
    so chunks are short, and there are up to 2 ** `program_doublings` programs, about four times as
    many: then all multiprocessors finish at about the same time.
    """

    block: int
    num_warps: int = 1
    chunk_columns: int = 2048
    program_doublings: int = 14


@dataclass(frozen=True)
class Tiles:
    """Tiles of rows through the matrix units, the lower triangle of pairs of tiles.

    Tensor cores truncate sums: every 8 columns a sum loses up to one ulp per addend, towards zero.
    Over 32 columns, the longest `block`, this is on average 5e-7 of a sum of one sign (by
    emulation, after Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021). Later
    additions round to nearest, up to 256 in float32 per chunk, then float64. So the loss does not
    grow with N.
    """

    tile: int
    block: int
    num_warps: int
    num_stages: int
    chunk_columns: int = 8192
    program_doublings: int = 11
    tiles: int = 1
    """With at most so many tiles a program has all pairs of them, with more it has one pair."""


@dataclass(frozen=True)
class Reduction:
    """Entries of one program, and partial results that it loads at a time."""

    block: int
    programs: int
    num_warps: int


# Four float64 entries are 32 bytes, the smallest memory transaction. Many rows have enough entries
# to occupy a GPU with fewer and wider programs.
FEW_ROWS = Reduction(block=4, programs=2048, num_warps=16)
MANY_ROWS = Reduction(block=32, programs=128, num_warps=8)

# {largest number of rows: tuning}. With few rows a thread has several loads of 16 bytes, so that
# the 32 warps of a multiprocessor, its maximum of programs, have 32 KB or more in flight.
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

# Programs of one warp reach the occupancy of `Pairs`; programs of two warps reach half of it.
ONE_WARP = {"num_warps": 1, "chunk_columns": 2048, "program_doublings": 14}
TWO_WARPS = {"num_warps": 2, "chunk_columns": 4096, "program_doublings": 12}
TILES_FLOAT32: dict[float, Tiles] = {
    32: Tiles(tile=16, block=32, num_stages=4, tiles=2, **ONE_WARP),
    # The sums of ten pairs leave registers for 16 columns.
    64: Tiles(tile=16, block=16, num_stages=4, tiles=4, **ONE_WARP),
    128: Tiles(tile=128, block=32, num_warps=8, num_stages=4),
    math.inf: Tiles(tile=64, block=32, num_warps=8, num_stages=4),
}
TILES_HALF: dict[float, Tiles] = {
    16: Tiles(tile=16, block=32, num_stages=6, **ONE_WARP),
    32: Tiles(tile=32, block=32, num_stages=6, **TWO_WARPS),
    64: Tiles(tile=64, block=32, num_warps=4, num_stages=8),
    # Two tiles at a time: eight stages would be more shared memory than an sm_86 or sm_120 has.
    math.inf: Tiles(tile=128, block=32, num_warps=8, num_stages=7),
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
# With a metric. Scaled rows of 16 bits, as sums of them, are float32: rounded to 16 bits again, a
# product would be neither exact nor float32.
SCALED_TUNINGS: dict[torch.dtype, dict[float, Pairs | Tiles]] = {
    **TUNINGS,
    torch.bfloat16: {**TILES_FLOAT32, **PAIRS_HALF},
    torch.float16: {**TILES_FLOAT32, **PAIRS_HALF},
}
# With halves two rows are loaded for each of the matrix: more than two tiles at a time would spill.
TILES_OF_SUMS: dict[float, Tiles] = {
    32: TILES_FLOAT32[32],
    64: Tiles(tile=64, block=32, num_warps=4, num_stages=4),
    math.inf: Tiles(tile=64, block=16, num_warps=8, num_stages=4),
}
HALVES_TUNINGS: dict[torch.dtype, dict[float, Pairs | Tiles]] = {
    torch.float32: {**TILES_OF_SUMS, **PAIRS_FLOAT32},
    torch.bfloat16: {**TILES_OF_SUMS, **PAIRS_HALF},
    torch.float16: {**TILES_OF_SUMS, **PAIRS_HALF},
    torch.float64: TUNINGS[torch.float64],
}
# The weighted sum beside it leaves registers for 16 columns of 32 rows.
SUMMED_TUNINGS: dict[torch.dtype, dict[float, Pairs | Tiles]] = {
    **HALVES_TUNINGS,
    torch.float32: {
        **HALVES_TUNINGS[torch.float32],
        32: Tiles(tile=16, block=16, num_stages=6, tiles=2, **ONE_WARP),
    },
}
# Float64 entries of all partial results: 128 MiB.
MAX_PARTIAL_ENTRIES = 1 << 24


def pick(
    num_rows: int,
    dtype: torch.dtype,
    *,
    is_scaled: bool = False,
    halves: bool = False,
    is_summed: bool = False,
) -> Pairs | Tiles:
    """Pairs while they are memory-bound and fit in registers, else tiles.

    With halves `num_rows` counts the rows that are sums of two. Pairs then take as many registers
    as with one row more.

    The table has the time of the arithmetic over that of the memory traffic, both computed, on H200
    (4.3 TB/s, 60 TFLOP/s of float32, 400 of tf32 and 300 by a single warp, 990 of bfloat16) and on
    A100 (1.75, 19.5, 156, 312). R rows cost R (R + 1) operations per column in pairs. A pair of
    tiles of T rows costs 2 T^2 of bfloat16; of tf32 it costs 4 T^2 on the diagonal and 6 T^2 below
    it (`split_dot`). Only 128 float32 rows are bound by arithmetic.

                              H200           A100
        pairs, float32        0.23 (R=12)    0.29
        pairs, 16 bits        0.39 (R=10)    0.49
        tiles, bfloat16       0.20 (R=22)    0.26
                              0.36 (R=50)    0.46
                              0.56 (R=128)   0.72
        tiles, float32        0.58 (R=22)    0.46
                              0.95 (R=50)    0.75
                              1.38 (R=128)   1.44
        tiles of halves,      0.29 (R=22)    0.22
        float32               0.44 (R=50)    0.45
    """
    of_halves = SUMMED_TUNINGS if is_summed else HALVES_TUNINGS
    tunings = (of_halves if halves else SCALED_TUNINGS if is_scaled else TUNINGS)[dtype]
    fitting = (
        most
        for most, tuning in tunings.items()
        if num_rows + (halves and isinstance(tuning, Pairs)) <= most
    )
    return tunings[min(fitting)]


def reduction(num_rows: int) -> Reduction:
    """The tuning of `gram_reduce`."""
    return FEW_ROWS if num_rows <= 32 else MANY_ROWS


def program_doublings(tuning: Tiles, side: int) -> int:
    """log2 of the number of programs, limited so that their squares fit in MAX_PARTIAL_ENTRIES."""
    most = max(1, MAX_PARTIAL_ENTRIES // (side * side))
    return min(tuning.program_doublings, most.bit_length() - 1)


def square_entries(num_entries: int) -> int:
    """Entries of a program's square of pairs, padded to a power of two."""
    return 1 << (num_entries - 1).bit_length()


def columns_of(tuning: Pairs, dtype: torch.dtype, is_aligned: bool) -> dict[str, int]:
    """BLOCK, the columns of a step, and DOUBLINGS, log2 of the columns of a thread's load."""
    doublings = (LOAD_BYTES // dtype.itemsize).bit_length() - 1
    # The interpreter's time does not depend on the width of a step.
    block = tuning.block << (3 if is_interpreted() else 0)
    if is_aligned:
        return {"BLOCK": block, "DOUBLINGS": doublings}
    # Loads of one element; the number of sums in registers stays the same.
    return {"BLOCK": block >> doublings, "DOUBLINGS": 0}


def product_of(dtype: torch.dtype, *, is_wide: bool = False) -> tuple[torch.dtype, bool]:
    """The dtype of the factors of the tiles' products, and whether `split_dot` multiplies them.

    `is_wide`: the factors are not the rows as they are stored.
    """
    if is_wide:
        dtype = sum_dtype(dtype)
    if is_interpreted() and dtype == torch.bfloat16:
        # Triton's interpreter multiplies the bit patterns of bfloat16 operands.
        return torch.float32, False
    # AMD's matrix units support other precisions; Triton's own product works on all.
    return dtype, dtype == torch.float32 and torch.version.hip is None


def gram_triton(
    blocks: Sequence[Tensor],
    moments: Moments | None = None,
    eps: float = 0.0,
    halves: bool = False,
) -> Tensor:
    """As `gram_torch`, through Triton's kernels."""
    vectors = () if moments is None else (moments,)
    check = partial(check_gram, blocks, *vectors)
    return _launched(blocks, spans_by_dtype(check, blocks, *vectors), eps, halves, None)


def gram_and_sum_by_triton(
    blocks: Sequence[Tensor],
    coefficients_K: Tensor,
    outs: Sequence[Tensor],
    moments: Sequence[Tensor],
    eps: float,
    check: Callable[[], None],
) -> Tensor:
    """With halves; also outs[p] = sum_k c_k g_k of the sums of halves, which are read once.

    Every block has second moments. `can_sum` says for how many sums; `check` is that of the lists.
    """
    groups = spans_by_dtype(check, blocks, moments, outs)
    return _launched(blocks, groups, eps, True, coefficients_K)


def can_sum(num_sums: int) -> bool:
    """Whether a program has all rows of its columns."""
    options = {"is_scaled": True, "halves": True, "is_summed": True}
    sizes = (pick(num_sums, dtype, **options) for dtype in SUMMED_TUNINGS)
    return all(isinstance(each, Pairs) or num_sums <= each.tile * each.tiles for each in sizes)


def _launched(
    blocks: Sequence[Tensor],
    groups: SpansByDtype,
    eps: float,
    halves: bool,
    coefficients_K: Tensor | None,
) -> Tensor:
    result = _empty_result(blocks, halves)
    is_first = True
    for dtypes, spans in groups:
        is_scaled = len(dtypes) > 1
        is_summed = coefficients_K is not None
        options = {"is_scaled": is_scaled, "halves": halves, "is_summed": is_summed}
        tuning = pick(result.shape[1], dtypes[0], **options)
        fields = (FIELDS, SCALED_FIELDS, SUMMED_FIELDS)[len(dtypes) - 1]
        tables = chunk_tables(spans, fields, tuning.chunk_columns, result.device)
        if tables:
            launch: Any = _add_pairs if isinstance(tuning, Pairs) else _add_tiles
            with launching_on(result.device):
                launch(tuning, tables, dtypes, eps, result, is_first, coefficients_K)
            is_first = False
    return result.zero_() if is_first else result


def vector_constants(dtypes: tuple[torch.dtype, ...], eps: float) -> dict[str, Any]:
    """Compile-time arguments of what comes with rows: moments, and an output; eps rarely changes.

    WIDTH is that of the chunk table.
    """
    moment, out = (*dtypes[1:], None, None)[:2]
    return {
        "WIDTH": len(FIELDS) + len(dtypes) - 1,
        "MOMENT": None if moment is None else triton_dtype(moment),
        "METRIC": None if moment is None else triton_dtype(sum_dtype(dtypes[0], moment)),
        "EPS": None if moment is None else eps,
        "OUT": None if out is None else triton_dtype(out),
    }


def _add_pairs(
    tuning: Pairs,
    tables: Sequence[ChunkTable],
    dtypes: tuple[torch.dtype, ...],
    eps: float,
    result: Tensor,
    is_first: bool,
    coefficients_K: Tensor | None,
) -> None:
    (height, num_rows), dtype = result.shape, dtypes[0]
    square = square_entries(result.numel())
    programs = [min(1 << tuning.program_doublings, table.num_chunks) for table in tables]
    partials = result.new_empty((sum(programs), square))
    for table, part in zip(tables, torch.split(partials, programs), strict=True):
        gram_pairs[(len(part),)](
            table.table,
            coefficients_K,
            part,
            table.num_chunks,
            R=num_rows,
            HALVES=height > num_rows,
            PROGRAM_DOUBLINGS=tuning.program_doublings,
            SQUARE=square,
            **columns_of(tuning, dtype, table.is_aligned),
            **vector_constants(dtypes, eps),
            STORAGE=triton_dtype(dtype),
            SUM=triton_dtype(sum_dtype(dtype)),
            ALIGNED=table.is_aligned,
            num_warps=tuning.num_warps,
            enable_fp_fusion=True,
        )
    _reduce(partials, result, side=num_rows, is_first=is_first)


def _add_tiles(
    tuning: Tiles,
    tables: Sequence[ChunkTable],
    dtypes: tuple[torch.dtype, ...],
    eps: float,
    result: Tensor,
    is_first: bool,
    coefficients_K: Tensor | None,
) -> None:
    (height, num_rows), dtype = result.shape, dtypes[0]
    halves = height > num_rows
    num_tiles = -(-num_rows // tuning.tile)
    side = num_tiles * tuning.tile
    doublings = program_doublings(tuning, side)
    programs = [min(1 << doublings, table.num_chunks) for table in tables]
    partials = result.new_empty((sum(programs), (side + halves) * side))
    is_whole = num_tiles <= tuning.tiles
    product_dtype, is_split = product_of(dtype, is_wide=halves or len(dtypes) > 1)
    for table, part in zip(tables, torch.split(partials, programs), strict=True):
        gram_tiles[(len(part), 1 if is_whole else num_tiles * (num_tiles + 1) // 2)](
            table.table,
            coefficients_K,
            part,
            table.num_chunks,
            R=num_rows,
            HALVES=halves,
            PROGRAM_DOUBLINGS=doublings,
            TILES=num_tiles,
            TILE=tuning.tile,
            BLOCK=tuning.block,
            **vector_constants(dtypes, eps),
            STORAGE=triton_dtype(dtype),
            PRODUCT=triton_dtype(product_dtype),
            SUM=triton_dtype(sum_dtype(dtype)),
            IS_WHOLE=is_whole,
            IS_SPLIT=is_split,
            ALIGNED=table.is_aligned,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            enable_fp_fusion=True,
        )
    _reduce(partials, result, side=side, is_first=is_first)


def _reduce(partials: Tensor, result: Tensor, *, side: int, is_first: bool) -> None:
    num_partials, stride = partials.shape
    tuning = reduction(result.shape[1])
    gram_reduce[(-(-result.numel() // tuning.block),)](
        partials,
        result,
        num_partials,
        R=result.shape[1],
        ENTRIES=result.numel(),
        SIDE=side,
        STRIDE=stride,
        PROGRAMS=tuning.programs,
        BLOCK=tuning.block,
        ADD=not is_first,
        num_warps=tuning.num_warps,
        enable_fp_fusion=True,
    )


@kernel
def load_chunk(table, chunk, WIDTH: tl.constexpr, STORAGE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address, row stride and length of one chunk; ALIGNED allows 16-byte loads."""
    entry = table + chunk * WIDTH
    address = tl.load(entry)
    row_stride = tl.load(entry + 1)
    length = tl.load(entry + 2)
    pointer = address.to(tl.pointer_type(STORAGE))
    if ALIGNED:
        # Without these hints loads are 4 bytes wide and the tiles spill registers.
        pointer = tl.multiple_of(pointer, 16)
        row_stride = tl.multiple_of(row_stride, 16)
        length = tl.multiple_of(length, 16)
    return pointer, row_stride, length


@kernel
def load_vector(
    table,
    chunk,
    WIDTH: tl.constexpr,
    PLACE: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The address of a chunk's second moments, in place 3, or of its output, in place 4."""
    pointer = tl.load(table + chunk * WIDTH + PLACE).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@kernel
def divisor_of(moment, METRIC: tl.constexpr, EPS: tl.constexpr):
    """sqrt(v) + eps in the dtype METRIC, or infinity where v is 0: the inverse is the metric."""
    moment = moment.to(METRIC)
    # The fast root of float32 takes subnormal moments for zeros.
    root = tl.sqrt(moment) if METRIC == tl.float64 else tl.sqrt_rn(moment)  # noqa: SIM300
    return tl.where(moment == 0, float("inf"), root + tl.full(moment.shape, EPS, METRIC))


@kernel
def first_chunk(program, num_chunks, DOUBLINGS: tl.constexpr):
    """The first chunk of `program`; there are P = min(C, 2 ** DOUBLINGS) programs for C chunks.

    Every program has one chunk. Of the C - P others, programs p and later share
    (C - P) ((P - p) / P)^3, so each program has fewer chunks than the one before. A GPU starts
    programs in order. If it runs a third of them at a time or fewer, the last ones are small, and
    all multiprocessors finish at about the same time.
    """
    num_programs = tl.num_programs(0)
    programs_left = num_programs - program
    # int64: chunks times programs pass 2**31
    left = (num_chunks - num_programs).to(tl.int64)
    for _ in tl.static_range(3):
        left = left * programs_left >> DOUBLINGS
    return num_chunks - programs_left - left.to(tl.int32)


@kernel
def lanes(row_B, DOUBLINGS: tl.constexpr):
    """The 2 ** DOUBLINGS interleaved parts of a row; a thread keeps the elements it loaded."""
    parts = (row_B,)
    for _ in tl.static_range(DOUBLINGS):
        halves = ()
        for p in tl.static_range(len(parts)):
            even, odd = tl.split(tl.reshape(parts[p], [parts[p].shape[0] // 2, 2]))
            halves = halves + (even, odd)  # noqa: RUF005
        parts = halves
    return parts


@kernel
def gram_pairs(
    table,
    coefficients,
    partials,
    num_chunks,
    R: tl.constexpr,
    HALVES: tl.constexpr,
    PROGRAM_DOUBLINGS: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCK: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    STORAGE: tl.constexpr,
    MOMENT: tl.constexpr,
    METRIC: tl.constexpr,
    EPS: tl.constexpr,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    SUM: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One multiply-add per column and pair of rows: memory-bound while R is small.

    Without a metric MOMENT is None; with one, a row is multiplied by it once for all its pairs.
    With HALVES a row is the sum of two, whose products are entries R * R and on. With a dtype OUT
    the weighted sum of these rows is written, in their order, by the coefficients [R].

    A thread adds the 2 ** DOUBLINGS columns of one load to one sum per pair, in column order: a sum
    per column would need 2 ** DOUBLINGS times the registers.
    """
    program = tl.program_id(0)
    entries_S = tl.arange(0, SQUARE)
    total_S = tl.zeros([SQUARE], tl.float64)
    LANES: tl.constexpr = 1 << DOUBLINGS
    first = first_chunk(program, num_chunks, PROGRAM_DOUBLINGS)
    last = first_chunk(program + 1, num_chunks, PROGRAM_DOUBLINGS)
    for chunk in range(first, last):
        pointer, row_stride, length = load_chunk(table, chunk, WIDTH, STORAGE, ALIGNED)
        if MOMENT is not None:
            moments = load_vector(table, chunk, WIDTH, 3, MOMENT, ALIGNED)
        if OUT is not None:
            out = load_vector(table, chunk, WIDTH, 4, OUT, ALIGNED)
        sums = ()
        for _ in tl.static_range(R * (R + 1) // 2 + (R if HALVES else 0)):
            sums = sums + (tl.zeros([BLOCK // LANES], SUM),)  # noqa: RUF005
        # int64: a row may be longer than 2**31
        for start in range(0, length, BLOCK):
            columns_B = start + tl.arange(0, BLOCK)
            rows = ()
            if OUT is not None:
                total_B = tl.zeros([BLOCK], SUM)
            for i in tl.static_range(2 * R if HALVES else R):
                # [BLOCK]; columns past the chunk add nothing
                row_B = tl.load(
                    pointer + i * row_stride + columns_B, mask=columns_B < length, other=0
                )
                if OUT is not None:
                    if i % 2 == 0:
                        first_B = row_B.to(SUM)
                    else:
                        both_B = first_B + row_B.to(SUM)
                        total_B += tl.load(coefficients + i // 2).to(SUM) * both_B
                # LANES of [BLOCK / LANES]
                rows = rows + lanes(row_B.to(SUM), DOUBLINGS)
            if OUT is not None:
                tl.store(out + columns_B, total_B.to(OUT), mask=columns_B < length)
            if MOMENT is not None:
                moment_B = tl.load(moments + columns_B, mask=columns_B < length, other=0)
                metric_B = 1.0 / divisor_of(moment_B, METRIC, EPS)
                metric = lanes(metric_B.to(SUM), DOUBLINGS)
            products = ()
            if HALVES:
                halves = rows
                rows = ()
                for i in tl.static_range(R):
                    product_L = sums[R * (R + 1) // 2 + i]
                    for v in tl.static_range(LANES):
                        first_L = halves[2 * i * LANES + v]
                        second_L = halves[(2 * i + 1) * LANES + v]
                        rows = rows + (first_L + second_L,)  # noqa: RUF005
                        if MOMENT is not None:
                            first_L *= metric[v]
                        product_L = tl.fma(first_L, second_L, product_L)
                    products = products + (product_L,)  # noqa: RUF005
            longer = ()
            for i in tl.static_range(R):
                scaled = ()
                for v in tl.static_range(LANES):
                    if MOMENT is None:
                        scaled = scaled + (rows[i * LANES + v],)  # noqa: RUF005
                    else:
                        scaled = scaled + (rows[i * LANES + v] * metric[v],)  # noqa: RUF005
                for j in tl.static_range(i + 1):
                    sum_L = sums[i * (i + 1) // 2 + j]
                    for v in tl.static_range(LANES):
                        sum_L = tl.fma(scaled[v], rows[j * LANES + v], sum_L)
                    longer = longer + (sum_L,)  # noqa: RUF005
            sums = longer + products
        for i in tl.static_range(R):
            for j in tl.static_range(i + 1):
                product = tl.sum(sums[i * (i + 1) // 2 + j], axis=0).to(tl.float64)
                # Row-major [R, R], both triangles: bitwise symmetric.
                is_pair_S = (entries_S == i * R + j) | (entries_S == j * R + i)
                total_S += tl.where(is_pair_S, product, 0.0)
        if HALVES:
            for i in tl.static_range(R):
                product = tl.sum(sums[R * (R + 1) // 2 + i], axis=0).to(tl.float64)
                total_S += tl.where(entries_S == R * R + i, product, 0.0)
    tl.store(partials + program.to(tl.int64) * SQUARE + entries_S, total_S)


@kernel
def high_part(x_TB):
    """x rounded to the 11 bits of tf32, which matrix units then do not truncate."""
    bits_TB = x_TB.to(tl.int32, bitcast=True)
    return ((bits_TB + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@kernel
def split_dot(left_TB, right_TB, IS_SQUARE: tl.constexpr):
    """x y^T of float32 in products of tf32: two for a square, three otherwise.

    x = h + l, where h is `high_part` and l the exact rest, and y = k + m. x y^T = h k^T + h m^T +
    l k^T + l m^T, and the last is omitted: at most 2**-24, on average 1e-8, of the norms' product.
    In a square, h m^T is the transpose of l k^T, so this returns S = h h^T + 2 h l^T with
    (S + S^T) / 2 = x x^T. The truncation of l has either sign. A NaN in x is a NaN in l.
    """
    left_high_TB, right_high_TB = high_part(left_TB), high_part(right_TB)
    left_low_TB, right_low_TB = left_TB - left_high_TB, right_TB - right_high_TB
    # The small products first: truncating small sums loses little.
    if IS_SQUARE:
        product_TT = tl.dot(
            left_high_TB, tl.trans(right_low_TB + right_low_TB), input_precision="tf32"
        )
    else:
        product_TT = tl.dot(left_high_TB, tl.trans(right_low_TB), input_precision="tf32")
        product_TT = tl.dot(
            left_low_TB, tl.trans(right_high_TB), acc=product_TT, input_precision="tf32"
        )
    return tl.dot(left_high_TB, tl.trans(right_high_TB), acc=product_TT, input_precision="tf32")


@kernel
def gram_tiles(
    table,
    coefficients,
    partials,
    num_chunks,
    R: tl.constexpr,
    HALVES: tl.constexpr,
    PROGRAM_DOUBLINGS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    STORAGE: tl.constexpr,
    MOMENT: tl.constexpr,
    METRIC: tl.constexpr,
    EPS: tl.constexpr,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    PRODUCT: tl.constexpr,
    SUM: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The lower triangle of pairs of tiles of TILE rows through tl.dot; never plain tf32.

    A program has all pairs with IS_WHOLE, and reads each row once; else it has a single pair.
    Matrix units truncate sums, so they add BLOCK columns only (`Tiles`). The sums of a chunk are
    float32, rounded to nearest, and those across chunks float64. With a metric, rows are multiplied
    by its root. With HALVES a row is the sum of two, whose products are a last row of the square.
    With IS_WHOLE and a dtype OUT their weighted sum is written, by the coefficients [R].
    """
    program = tl.program_id(0)
    tiles = ()
    if IS_WHOLE:
        for tile in tl.static_range(TILES):
            tiles = tiles + (tile,)  # noqa: RUF005
    else:
        # Row-major lower triangle: pair = tile_i (tile_i + 1) / 2 + tile_j.
        pair = tl.program_id(1)
        tile_i = 0
        for above in tl.static_range(1, TILES):
            tile_i += (pair >= above * (above + 1) // 2).to(tl.int32)
        tiles = (pair - tile_i * (tile_i + 1) // 2, tile_i)
    side: tl.constexpr = TILES * TILE
    square = partials + program.to(tl.int64) * (side + (1 if HALVES else 0)) * side
    row_T = tl.arange(0, TILE)
    first = first_chunk(program, num_chunks, PROGRAM_DOUBLINGS)
    last = first_chunk(program + 1, num_chunks, PROGRAM_DOUBLINGS)
    for chunk in range(first, last):
        pointer, row_stride, length = load_chunk(table, chunk, WIDTH, STORAGE, ALIGNED)
        if MOMENT is not None:
            moments = load_vector(table, chunk, WIDTH, 3, MOMENT, ALIGNED)
        if OUT is not None:
            out = load_vector(table, chunk, WIDTH, 4, OUT, ALIGNED)
        sums = ()
        for _ in tl.static_range(len(tiles) * (len(tiles) + 1) // 2):
            sums = sums + (tl.zeros([TILE, TILE], SUM),)  # noqa: RUF005
        products = ()
        if HALVES:
            for _ in tl.static_range(len(tiles)):
                products = products + (tl.zeros([TILE], SUM),)  # noqa: RUF005
        # int64: a row may be longer than 2**31
        for start in range(0, length, BLOCK):
            columns = start + tl.arange(0, BLOCK)[None, :]
            if MOMENT is not None:
                # [1, BLOCK]
                moment_1B = tl.load(moments + columns, mask=columns < length, other=0)
                root_1B = tl.rsqrt(divisor_of(moment_1B, METRIC, EPS)).to(PRODUCT)
            rows = ()
            longer = ()
            if OUT is not None:
                total_B = tl.zeros([BLOCK], SUM)
            for i in tl.static_range(len(tiles)):
                i_T = tiles[i] * TILE + row_T
                # [TILE, BLOCK]; rows past R and columns past the chunk add nothing
                is_inside_TB = (i_T[:, None] < R) & (columns < length)
                first_T = 2 * i_T if HALVES else i_T
                row_TB = tl.load(
                    pointer + first_T[:, None] * row_stride + columns, mask=is_inside_TB, other=0
                ).to(PRODUCT)
                if HALVES:
                    second_TB = tl.load(
                        pointer + (first_T[:, None] + 1) * row_stride + columns,
                        mask=is_inside_TB,
                        other=0,
                    ).to(PRODUCT)
                    product_TB = row_TB * second_TB
                    if MOMENT is not None:
                        product_TB *= root_1B * root_1B
                    longer = longer + (products[i] + tl.sum(product_TB, axis=1),)  # noqa: RUF005
                    row_TB += second_TB
                    if OUT is not None:
                        c_T = tl.load(coefficients + i_T, mask=i_T < R, other=0.0).to(SUM)
                        total_B += tl.sum(c_T[:, None] * row_TB, axis=0)
                if MOMENT is not None:
                    row_TB *= root_1B
                rows = rows + (row_TB,)  # noqa: RUF005
            if OUT is not None:
                columns_B = start + tl.arange(0, BLOCK)
                tl.store(out + columns_B, total_B.to(OUT), mask=columns_B < length)
            products = longer
            longer = ()
            for i in tl.static_range(len(tiles)):
                for j in tl.static_range(i + 1):
                    sums_TT = sums[i * (i + 1) // 2 + j]
                    if IS_WHOLE or i != j:
                        if IS_SPLIT:
                            product_TT = split_dot(rows[i], rows[j], i == j)
                        else:
                            product_TT = tl.dot(
                                rows[i], tl.trans(rows[j]), input_precision="ieee", out_dtype=SUM
                            )
                        # Not `+`, which the compiler would move into the matrix units.
                        sums_TT = tl.fma(product_TT, tl.full(product_TT.shape, 1.0, SUM), sums_TT)
                    longer = longer + (sums_TT,)  # noqa: RUF005
            sums = longer
        for i in tl.static_range(len(tiles)):
            for j in tl.static_range(i + 1):
                if IS_WHOLE or i != j:
                    sums_TT = sums[i * (i + 1) // 2 + j]
                    if IS_SPLIT and i == j:
                        sums_TT = (sums_TT + tl.trans(sums_TT)) * 0.5
                    i_T, j_T = tiles[i] * TILE + row_T, tiles[j] * TILE + row_T
                    square_TT = square + i_T[:, None] * side + j_T[None, :]
                    # Totals stay in memory: in float64 they would need twice the registers.
                    is_later = i_T[:, None] + chunk != i_T[:, None] + first
                    total_TT = tl.load(square_TT, mask=is_later, other=0.0)
                    tl.store(square_TT, total_TT + sums_TT.to(tl.float64))
            if HALVES and (IS_WHOLE or i == 0):
                i_T = tiles[i] * TILE + row_T
                is_own_T = i_T >= 0
                if not IS_WHOLE:
                    # Of all pairs with this tile, its pair with itself writes them.
                    is_own_T = i_T == tiles[len(tiles) - 1] * TILE + row_T
                product_T = square + side * side + i_T
                is_later_T = is_own_T & (i_T + chunk != i_T + first)
                total_T = tl.load(product_T, mask=is_later_T, other=0.0)
                tl.store(product_T, total_T + products[i].to(tl.float64), mask=is_own_T)
        # Other threads may load these totals in the next chunk.
        tl.debug_barrier()


@kernel
def gram_reduce(
    partials,
    gram,
    num_partials,
    R: tl.constexpr,
    ENTRIES: tl.constexpr,
    SIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """gram = or += the sum of the programs' squares, of which it reads the lower triangle.

    Entries behind those of the square are a row behind the programs' squares.
    """
    entries_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    high_B = tl.maximum(entries_B // R, entries_B % R)
    low_B = tl.minimum(entries_B // R, entries_B % R)
    high_B = tl.where(entries_B < R * R, high_B, SIDE)
    is_entry_B = entries_B < ENTRIES
    sums_PB = tl.zeros([PROGRAMS, BLOCK], tl.float64)
    for first in range(0, num_partials, PROGRAMS):
        programs_P = (first + tl.arange(0, PROGRAMS)).to(tl.int64)
        square_P1 = partials + programs_P[:, None] * STRIDE
        is_partial_PB = (programs_P[:, None] < num_partials) & is_entry_B[None, :]
        sums_PB += tl.load(
            square_P1 + (high_B * SIDE + low_B)[None, :], mask=is_partial_PB, other=0.0
        )
    sum_B = tl.sum(sums_PB, axis=0)
    if ADD:
        sum_B += tl.load(gram + entries_B, mask=is_entry_B, other=0.0)
    tl.store(gram + entries_B, sum_B, mask=is_entry_B)


def check_gram(blocks: Sequence[Tensor], moments: Moments | None = None) -> None:
    """Raise ValueError unless `blocks` are [R, n_p] floating rows on one device, moments [n_p]."""
    check_blocks("gram", blocks)
    if moments is not None:
        sizes = [block.shape[1] for block in blocks]
        check_pairs("gram", "blocks", sizes, "second_moments", moments)
        check_readable("gram", "second_moments", moments, blocks[0].device)


def check_options(
    blocks: Sequence[Tensor], moments: Moments | None, eps: float, halves: bool
) -> None:
    """Raise ValueError unless `eps` >= 0 and, with halves, the number of rows is even."""
    if moments is not None and not eps >= 0:
        raise ValueError(f"gram() adds eps >= 0 to the roots of second moments; got {eps}.")
    if halves and len(blocks[0]) % 2:
        raise ValueError(f"gram(halves=True) adds rows in pairs; got {len(blocks[0])} rows.")


def _run(
    blocks: Sequence[Tensor],
    moments: Moments | None = None,
    eps: float = 0.0,
    halves: bool = False,
    *,
    implementation: str | None = None,
) -> Tensor:
    # Faster than .device, which makes an object for each tensor.
    if len(set(map(Tensor.get_device, blocks))) > 1:
        grams = [
            _run(*each, eps, halves, implementation=implementation)
            for each in _by_device(blocks, moments)
        ]
        return torch.stack([gram_RR.to(grams[0].device) for gram_RR in grams]).sum(0)
    run = runs["gram", blocks[0].device, implementation, requested_backend()]
    is_plain = moments is None and not halves
    gram_RR: Tensor = run(blocks) if is_plain else run(blocks, moments, eps, halves)
    return gram_RR


def _fake(
    blocks: Sequence[Tensor],
    moments: Moments | None = None,
    eps: float = 0.0,
    halves: bool = False,
    *,
    implementation: str | None = None,
) -> Tensor:
    for each in _by_device(blocks, moments):
        check_gram(*each)
    return _empty_result(blocks, halves)


def _by_device(
    blocks: Sequence[Tensor], moments: Moments | None
) -> Iterator[tuple[list[Tensor], list[Tensor | None] | None]]:
    if moments is not None:
        check_number("gram", "blocks", blocks, "second_moments", moments)
    for group in by_device(blocks):
        of_group = None if moments is None else [moments[i] for i in group]
        yield [blocks[i] for i in group], of_group


_op = register(
    Operator(
        "gram",
        {"cpp": gram_cpp, "cuda": gram_cuda, "triton": gram_triton, "torch": gram_torch},
    ),
    "(Tensor[] blocks, Tensor?[]? second_moments=None, float eps=0., bool halves=False, *, "
    "str? implementation=None) -> Tensor",
    run=_run,
    fake=_fake,
)
