"""Sums of segments on a GPU, through Triton.

One program per segment, block of columns and share of the segment. Where segments are long and few
each is cut into shares, whose sums a second launch of the same kernel adds up; the shares depend on
the sizes alone, so that every GPU gives the same bits.

Reads values and factor once, writes each sum once (and reads it before, when adding). With
`borders` it reads two of them for each segment, with `order` one position for each token.
"""

# Triton's own compiler types device code.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from doge_fast.kernels.triton_support import on_device, sum_dtype, triton_dtype

# Tokens of a program where segments are long.
SHARE = 128
# Bytes of the sums that a program keeps, and its columns: of long segments, which several programs
# share, and of short ones, of which a program takes whole rows and many must be under way.
LONG_TILE, LONG_COLUMNS = 16384, 128
# Half as many columns of float64, whose sums would spill.
SHORT_TILE, SHORT_COLUMNS = 8192, 1024
NUM_WARPS = 4


class Sizes(NamedTuple):
    """How the work is cut."""

    num_shares: int
    """Programs of a segment, for each block of columns."""
    block_tokens: int
    block_columns: int


def pick(num_tokens: int, num_segments: int, width: int, sums: torch.dtype) -> Sizes:
    """Sizes for segments of `num_tokens / num_segments` tokens, and sums of a dtype."""
    num_shares = max(1, num_tokens // (SHARE * num_segments))
    is_long = num_tokens >= SHARE // 2 * num_segments
    tile, most = (LONG_TILE, LONG_COLUMNS) if is_long else (SHORT_TILE, SHORT_COLUMNS)
    if not is_long and sums == torch.float64:
        most //= 2
    columns = min(most, max(16, triton.next_power_of_2(width)))
    return Sizes(num_shares, max(1, min(32, tile // (sums.itemsize * columns))), columns)


def segment_sum(
    values_TD: Tensor,
    out_GRD: Tensor,
    add: bool,
    borders: Tensor | None,
    order: Tensor | None,
    factor_TD: Tensor | None,
    mean_T: Tensor | None,
    rstd_T: Tensor | None,
) -> None:
    """out_s = the sum of the terms of segment s, or out_s += it."""
    num_groups, num_rows, width = out_GRD.shape
    num_segments = num_groups * num_rows
    if not num_segments or not width:
        return
    dtype = sum_dtype(values_TD.dtype, out_GRD.dtype)
    sizes = pick(len(values_TD), num_segments, width, dtype)
    terms = (borders, order, factor_TD, mean_T, rstd_T)
    if sizes.num_shares == 1:
        _launch(values_TD, out_GRD, add, terms, sizes)
        return
    # A share is a group, and every share of a segment a row of it.
    shares_SPD = values_TD.new_empty(num_segments, sizes.num_shares, width, dtype=dtype)
    _launch(values_TD, shares_SPD, False, terms, sizes)
    shares_TD = shares_SPD.view(-1, width)
    once = pick(len(shares_TD), num_segments, width, dtype)._replace(num_shares=1)
    _launch(shares_TD, out_GRD, add, (None,) * 5, once)


def _launch(
    values_TD: Tensor,
    out: Tensor,
    add: bool,
    terms: tuple[Tensor | None, ...],
    sizes: Sizes,
) -> None:
    """One launch; `out` is [S, shares, D], or [G, R, D] where a segment is one share."""
    borders, order, factor_TD, mean_T, rstd_T = terms
    num_groups, num_rows, width = out.shape
    num_segments = num_groups * num_rows // sizes.num_shares
    constants = constants_of(
        *(values_TD.dtype, out.dtype, width, sizes),
        has_borders=borders is not None,
        has_order=order is not None,
        has_factor=factor_TD is not None,
        has_statistics=mean_T is not None,
        add=add,
    )
    grid = (num_segments, triton.cdiv(width, sizes.block_columns), sizes.num_shares)
    with on_device(out.device):
        sum_segments[grid](
            values_TD,
            values_TD if factor_TD is None else factor_TD,
            values_TD if mean_T is None else mean_T,
            values_TD if rstd_T is None else rstd_T,
            values_TD if order is None else order,
            values_TD if borders is None else borders,
            out,
            # Without borders all segments are as long.
            len(values_TD) // num_segments,
            num_rows,
            out.stride(0),
            **constants,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


def constants_of(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    width: int,
    sizes: Sizes,
    *,
    has_borders: bool = False,
    has_order: bool = False,
    has_factor: bool = False,
    has_statistics: bool = False,
    add: bool = False,
) -> dict[str, Any]:
    """Compile-time arguments."""
    return {
        "WIDTH": width,
        "SHARES": sizes.num_shares,
        "TOKENS": sizes.block_tokens,
        "COLUMNS": sizes.block_columns,
        "SUM": triton_dtype(sum_dtype(dtype, out_dtype)),
        "HAS_BORDERS": has_borders,
        "HAS_ORDER": has_order,
        "HAS_FACTOR": has_factor,
        "HAS_STATISTICS": has_statistics,
        "ADD": add,
    }


@triton.jit
def sum_segments(
    values,
    factor,
    mean,
    rstd,
    order,
    borders,
    out,
    length,
    num_rows,
    out_stride,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
    HAS_BORDERS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
    ADD: tl.constexpr,
):
    """out[segment, share] = the sum of its terms, or += it."""
    # int64: tokens times columns pass 2**31 in large batches.
    segment, share = tl.program_id(0).to(tl.int64), tl.program_id(2)
    columns_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_C = columns_C < WIDTH
    if HAS_BORDERS:
        first, last = tl.load(borders + segment), tl.load(borders + segment + 1)
    else:
        first = segment * length
        last = first + length
    per_share = tl.cdiv(last - first, SHARES)
    first += share * per_share
    last = tl.minimum(last, first + per_share)
    # A word that a domain does not have: nothing is added.
    if ADD and first >= last:
        return
    # A row of the tile adds up every TOKENS-th token: rounding grows with the number of steps.
    sum_TC = tl.zeros([TOKENS, COLUMNS], SUM)
    for start in range(first, last, TOKENS):
        token_T = start + tl.arange(0, TOKENS).to(tl.int64)
        is_token_T = token_T < last
        if HAS_ORDER:
            token_T = tl.load(order + token_T, mask=is_token_T, other=0)
        is_inside_TC = is_token_T[:, None] & is_column_C[None, :]
        offset_TC = token_T[:, None] * WIDTH + columns_C[None, :]
        # [TOKENS, COLUMNS]
        term_TC = tl.load(values + offset_TC, mask=is_inside_TC, other=0).to(SUM)
        if HAS_FACTOR:
            factor_TC = tl.load(factor + offset_TC, mask=is_inside_TC, other=0).to(SUM)
            if HAS_STATISTICS:
                mean_T = tl.load(mean + token_T, mask=is_token_T, other=0).to(SUM)
                rstd_T = tl.load(rstd + token_T, mask=is_token_T, other=0).to(SUM)
                factor_TC = (factor_TC - mean_T[:, None]) * rstd_T[:, None]
            term_TC *= factor_TC
        sum_TC += term_TC
    sum_C = tl.sum(sum_TC, 0)
    if SHARES == 1:
        # In 32 bits, which hold the number of segments: a division in 64 is a subroutine.
        group = tl.program_id(0) // num_rows
        row_of_group = tl.program_id(0) - group * num_rows
        row = group.to(tl.int64) * out_stride + row_of_group.to(tl.int64) * WIDTH
    else:
        row = (segment * SHARES + share) * WIDTH
    if ADD:
        sum_C += tl.load(out + row + columns_C, mask=is_column_C, other=0).to(SUM)
    if out.dtype.element_ty == tl.bfloat16:
        # Not every Triton narrows float64 to bfloat16 in one step.
        sum_C = sum_C.to(tl.float32)
    tl.store(out + row + columns_C, sum_C.to(out.dtype.element_ty), mask=is_column_C)
