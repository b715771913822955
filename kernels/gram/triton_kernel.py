"""The Gram matrix on a GPU: device code only.

Rows come through a chunk table, [num_chunks, 3] int64: address of the chunk's first element in
row 0, distance between rows in elements, number of columns. Program p takes chunks
p, p + P, p + 2P, ...; sums are float32 within a chunk and float64 across chunks; a second
kernel adds the programs' partial results in a fixed order. P depends on nothing but the
table's length and the launch configuration, so results are bitwise reproducible.

Reads each row once (K*N elements); `gram_tiles` reads it once per tile column when K is
larger than a tile. Writes one float64 square per program, reads it once more to reduce.
"""

# Triton's own compiler types device code.
# mypy: ignore-errors

import triton
import triton.language as tl


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
def gram_pairs(
    table,
    partials,
    num_chunks,
    R: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCK: tl.constexpr,
    STORAGE: tl.constexpr,
    SUM: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One multiply-add per column and pair of rows: memory-bound while R is small."""
    program = tl.program_id(0)
    entries_S = tl.arange(0, SQUARE)
    total_S = tl.zeros([SQUARE], tl.float64)
    for chunk in range(program, num_chunks, tl.num_programs(0)):
        pointer, row_stride, length = load_chunk(table, chunk, STORAGE, ALIGNED)
        sums = ()
        for _ in tl.static_range(R * (R + 1) // 2):
            sums = sums + (tl.zeros([BLOCK], SUM),)  # noqa: RUF005
        # int64: a row may be longer than 2**31
        for start in range(0, length, BLOCK):
            columns_B = start + tl.arange(0, BLOCK)
            rows = ()
            for i in tl.static_range(R):
                # [BLOCK]; columns past the chunk add nothing
                row_B = tl.load(
                    pointer + i * row_stride + columns_B, mask=columns_B < length, other=0
                )
                rows = rows + (row_B.to(SUM),)  # noqa: RUF005
            longer = ()
            for i in tl.static_range(R):
                for j in tl.static_range(i + 1):
                    longer += (tl.fma(rows[i], rows[j], sums[i * (i + 1) // 2 + j]),)
            sums = longer
        for i in tl.static_range(R):
            for j in tl.static_range(i + 1):
                product = tl.sum(sums[i * (i + 1) // 2 + j], axis=0).to(tl.float64)
                # Row-major [R, R], both triangles: bitwise symmetric.
                is_here_S = (entries_S == i * R + j) | (entries_S == j * R + i)
                total_S += tl.where(is_here_S, product, 0.0)
    tl.store(partials + program.to(tl.int64) * SQUARE + entries_S, total_S)


@triton.jit
def gram_tiles(
    table,
    partials,
    num_chunks,
    R: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
    STORAGE: tl.constexpr,
    PRODUCT: tl.constexpr,
    SUM: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Tiles of TILE rows through tl.dot, the lower triangle of tiles; never plain tf32.

    The columns of a step are split WAYS ways and their products added at the end of a chunk:
    a product of 16 rows alone could not be shared among warps, and shorter sums are better
    sums (tensor cores truncate).
    """
    program = tl.program_id(0)
    pair = tl.program_id(1)
    # Row-major lower triangle: pair = tile_i (tile_i + 1) / 2 + tile_j.
    tile_i = 0
    for above in tl.static_range(1, TILES):
        tile_i += (pair >= above * (above + 1) // 2).to(tl.int32)
    tile_j = pair - tile_i * (tile_i + 1) // 2
    local_T = tl.arange(0, TILE)
    rows_i = tile_i * TILE + local_T
    rows_j = tile_j * TILE + local_T
    ways_W = tl.arange(0, WAYS) * BLOCK
    total_TT = tl.zeros([TILE, TILE], tl.float64)
    for chunk in range(program, num_chunks, tl.num_programs(0)):
        pointer, row_stride, length = load_chunk(table, chunk, STORAGE, ALIGNED)
        sums_WTT = tl.zeros([WAYS, TILE, TILE], SUM)
        for start in range(0, length, WAYS * BLOCK):
            # [WAYS, 1, BLOCK]
            columns = start + ways_W[:, None, None] + tl.arange(0, BLOCK)[None, None, :]
            # [WAYS, TILE, BLOCK]; rows past R and columns past the chunk add nothing
            left = tl.load(
                pointer + rows_i[None, :, None] * row_stride + columns,
                mask=(rows_i[None, :, None] < R) & (columns < length),
                other=0,
            ).to(PRODUCT)
            if TILES == 1:
                right = left
            else:
                right = tl.load(
                    pointer + rows_j[None, :, None] * row_stride + columns,
                    mask=(rows_j[None, :, None] < R) & (columns < length),
                    other=0,
                ).to(PRODUCT)
            sums_WTT = tl.dot(
                left,
                tl.trans(right, 0, 2, 1),
                acc=sums_WTT,
                input_precision=PRECISION,
                out_dtype=SUM,
            )
        total_TT += tl.sum(sums_WTT, axis=0).to(tl.float64)
    side: tl.constexpr = TILES * TILE
    square = partials + program.to(tl.int64) * side * side
    tl.store(square + rows_i[:, None] * side + rows_j[None, :], total_TT)


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
    ADD: tl.constexpr,
):
    """gram = or += the sum of the programs' squares, from their lower triangles."""
    entries_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i_B = entries_B // R
    j_B = entries_B % R
    # Both triangles from one: three-pass products are not symmetric to the last bit.
    source_B = tl.maximum(i_B, j_B) * SIDE + tl.minimum(i_B, j_B)
    is_entry_B = entries_B < R * R
    sums_PB = tl.zeros([PROGRAMS, BLOCK], tl.float64)
    for first in range(0, num_partials, PROGRAMS):
        programs_P = (first + tl.arange(0, PROGRAMS)).to(tl.int64)
        sums_PB += tl.load(
            partials + programs_P[:, None] * STRIDE + source_B[None, :],
            mask=(programs_P[:, None] < num_partials) & is_entry_B[None, :],
            other=0.0,
        )
    sum_B = tl.sum(sums_PB, axis=0)
    if ADD:
        sum_B += tl.load(gram + entries_B, mask=is_entry_B, other=0.0)
    tl.store(gram + entries_B, sum_B, mask=is_entry_B)
