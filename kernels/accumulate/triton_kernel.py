"""Rows filled from gradients on a GPU: device code only, one launch for a whole list.

One program per chunk of elements; a chunk is (address in the gradient, address in the row,
length) in a [num_chunks, 3] int64 table.

Reads each gradient once, and each row once when adding; writes each row once.
"""

# Triton's own compiler types device code.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def accumulate(
    table,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GRADIENT: tl.constexpr,
    ROW: tl.constexpr,
    SUM: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """row = gradient, or row += gradient, over one chunk of elements."""
    entry = table + tl.program_id(0).to(tl.int64) * 3
    gradient = tl.load(entry).to(tl.pointer_type(GRADIENT))
    row = tl.load(entry + 1).to(tl.pointer_type(ROW))
    length = tl.load(entry + 2)
    if ALIGNED:
        gradient = tl.multiple_of(gradient, 16)
        row = tl.multiple_of(row, 16)
        length = tl.multiple_of(length, 16)
    for start in range(0, CHUNK, BLOCK):
        columns_B = start + tl.arange(0, BLOCK)
        is_inside_B = columns_B < length
        # [BLOCK]
        value_B = tl.load(gradient + columns_B, mask=is_inside_B, other=0).to(SUM)
        if ADD:
            value_B += tl.load(row + columns_B, mask=is_inside_B, other=0).to(SUM)
        if ROW == tl.bfloat16:  # noqa: SIM300
            # Not every Triton narrows float64 to bfloat16 in one step.
            value_B = value_B.to(tl.float32)
        tl.store(row + columns_B, value_B.to(ROW), mask=is_inside_B)
