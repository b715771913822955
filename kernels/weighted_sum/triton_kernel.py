"""The weighted sum of rows on a GPU: device code only.

One program per chunk of columns; a chunk is (address in row 0, row stride, length, address in
the output) in a [num_chunks, 4] int64 table. Every output element is the work of one program,
added in row order: nothing to reduce, bitwise reproducible.

Reads each row with a non-zero coefficient once, the coefficients from the device (no
synchronisation with the host); writes each output once.
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
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STORAGE: tl.constexpr,
    OUTPUT: tl.constexpr,
    SUM: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """out = sum_r c_r row_r over one chunk of columns."""
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
        for r in range(R):
            c = tl.load(coefficients_R + r)
            # [BLOCK]; a row whose coefficient is zero is not read, so it may hold anything
            end = tl.where(c != 0, length, 0)
            row_B = tl.load(pointer + r * row_stride + columns_B, mask=columns_B < end, other=0)
            sum_B = tl.fma(row_B.to(SUM), tl.zeros([BLOCK], SUM) + c.to(SUM), sum_B)
        if OUTPUT == tl.bfloat16:  # noqa: SIM300
            # Not every Triton narrows float64 to bfloat16 in one step.
            sum_B = sum_B.to(tl.float32)
        tl.store(output + columns_B, sum_B.to(OUTPUT), mask=columns_B < length)
