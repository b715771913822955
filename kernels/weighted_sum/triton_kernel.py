"""The weighted sum of rows on a GPU: device code only.

One program per chunk of columns; a chunk is (address in row 0, row stride, length, address in
the output) in a [num_chunks, 4] int64 table. Every output element is the work of one program,
added in row order: nothing to reduce, bitwise reproducible.

The coefficients are read on the device, where the K x K step left them with the clipping and
the unscaling in them: nobody waits for the host. A coefficient of zero leaves its row unread; the
NaN of a skipped step makes every output NaN.

Reads each row with a non-zero coefficient once; writes each output once.
"""

# Triton's own compiler types device code.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def weighted_sum(
    table,
    coefficients_R,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STORAGE: tl.constexpr,
    OUTPUT: tl.constexpr,
    SUM: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """out = sum_r c_r row_r over one chunk of columns, GROUP rows on their way at once."""
    entry = table + tl.program_id(0).to(tl.int64) * 4
    pointer = tl.load(entry).to(tl.pointer_type(STORAGE))
    row_stride = tl.load(entry + 1)
    length = tl.load(entry + 2)
    output = tl.load(entry + 3).to(tl.pointer_type(OUTPUT))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        row_stride = tl.multiple_of(row_stride, 16)
        length = tl.multiple_of(length, 16)
        output = tl.multiple_of(output, 16)
    for start in range(0, CHUNK, BLOCK):
        columns_B = start + tl.arange(0, BLOCK)
        sum_B = tl.zeros([BLOCK], SUM)
        for first in range(0, R, GROUP):
            coefficients = ()
            rows = ()
            for g in tl.static_range(GROUP):
                r = first + g
                c = tl.load(coefficients_R + r, mask=r < R, other=0.0)
                # [BLOCK]; a row whose coefficient is zero is not read, so it may hold anything
                end = tl.where(c != 0, length, 0)
                # row_stride is int64: rows may be further apart than 2**31
                row_B = tl.load(pointer + r * row_stride + columns_B, mask=columns_B < end, other=0)
                coefficients = coefficients + (c,)  # noqa: RUF005
                rows = rows + (row_B,)  # noqa: RUF005
            for g in tl.static_range(GROUP):
                c_B = tl.zeros([BLOCK], SUM) + coefficients[g].to(SUM)
                sum_B = tl.fma(rows[g].to(SUM), c_B, sum_B)
        if OUTPUT == tl.bfloat16:  # noqa: SIM300
            # Not every Triton narrows float64 to bfloat16 in one step.
            sum_B = sum_B.to(tl.float32)
        tl.store(output + columns_B, sum_B.to(OUTPUT), mask=columns_B < length)
