"""Sums of segments of tokens: gradients of gains, biases and embeddings, a row for each domain."""

# Triton's own compiler types device code.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from doge_fast.kernels.dispatch import Operator, register, requested_backend, runs
from doge_fast.kernels.schema import STORAGE_DTYPES, sum_dtype
from doge_fast.kernels.triton_support import kernel, launching_on, tl, triton_dtype


def segment_sum(
    values_TD: Tensor,
    out_GRD: Tensor,
    *,
    add: bool = False,
    borders: Tensor | None = None,
    segment_T: Tensor | None = None,
    order: Tensor | None = None,
    factor_TD: Tensor | None = None,
    mean_T: Tensor | None = None,
    rstd_T: Tensor | None = None,
    bias_GRD: Tensor | None = None,
    implementation: str | None = None,
) -> None:
    """Sums of segments of tokens: gradients of gains, biases and embeddings of many domains.

    out_s  =  sum_{i = b_s}^{b_{s+1} - 1}  v_t     with t = order_i; added to out_s with `add`

    v_t is row t of `values_TD`. With `factor_TD` it is multiplied by factor_t, with `mean_T` and
    `rstd_T` by (factor_t - mean_t) rstd_t, the normalised input of a LayerNorm. `bias_GRD` then
    gets the sums of the values alone, the gradient of a bias beside that gain. Segment s = g R + r
    is `out_GRD[g, r]`; an empty segment is zero. Where most segments are empty, as words that a
    domain does not have, `segment_T` in the place of borders costs by the tokens alone. Sums are
    float64 if values or output are, else float32; their order depends on the sizes and borders
    alone. The host reads nothing.

    Args:
        values_TD: [T, D] contiguous, of float32, bfloat16, float16 or float64.
        out_GRD: [G, R, D] of any of these dtypes; `out_GRD[g]` is contiguous, stride(0) arbitrary.
        add: whether to add to `out_GRD` or to overwrite it.
        borders: [G R + 1] int64, nondecreasing from 0 to T. None: T / (G R) tokens per segment.
        segment_T: [T] int64, nondecreasing from 0 to G R - 1: the segment of each token. Without
            borders, factor and bias.
        order: [T] int64, indices into `values_TD`; needs `segment_T`. None: 0 to T - 1.
        factor_TD: [T, D] contiguous, as `values_TD`.
        mean_T: [T] contiguous and floating; needs `factor_TD` and `rstd_T`.
        rstd_T: [T] contiguous and floating; needs `factor_TD` and `mean_T`.
        bias_GRD: as `out_GRD`, with a stride(0) of its own; needs `factor_TD`.
        implementation: "torch" or "triton"; None leaves it to the dispatcher.

    Raises:
        ValueError: a tensor has another shape, dtype, layout or device; or there are no borders
            and G R does not divide T.
        RuntimeError: the forced implementation cannot run.
    """
    _op(
        *(values_TD, out_GRD, add, borders, segment_T, order),
        *(factor_TD, mean_T, rstd_T, bias_GRD),
        implementation=implementation,
    )


# In plain torch: any device, always available.
#
# The number of operators does not grow with the segments; results are bitwise reproducible. Unequal
# segments are summed in float64, because `segment_reduce` adds one token after another.


@torch.no_grad()
def segment_sum_torch(
    values_TD: Tensor,
    out_GRD: Tensor,
    add: bool,
    borders: Tensor | None,
    segment_T: Tensor | None,
    order: Tensor | None,
    factor_TD: Tensor | None,
    mean_T: Tensor | None,
    rstd_T: Tensor | None,
    bias_GRD: Tensor | None,
) -> None:
    """out_s = the sum of the terms of segment s, or out_s += it."""
    if bias_GRD is not None:
        segment_sum_torch(values_TD, bias_GRD, add, borders, *(None,) * 6)
    if segment_T is not None:
        places = torch.arange(out_GRD.shape[0] * out_GRD.shape[1] + 1, device=out_GRD.device)
        borders = torch.searchsorted(segment_T, places)
    terms_TD = values_TD.to(sum_dtype(values_TD.dtype, out_GRD.dtype))
    if factor_TD is not None:
        factor_TD = factor_TD.to(terms_TD.dtype)
        if mean_T is not None and rstd_T is not None:
            factor_TD = (factor_TD - mean_T[:, None]) * rstd_T[:, None]
        terms_TD = terms_TD * factor_TD
    if order is not None:
        terms_TD = terms_TD[order]
    num_groups, num_rows, width = out_GRD.shape
    if not out_GRD.numel():
        return
    if borders is None:
        sums = terms_TD.view(num_groups * num_rows, -1, width).sum(1)
        (out_GRD.add_ if add else out_GRD.copy_)(sums.view(out_GRD.shape))
        return
    terms_TD = terms_TD.double()
    # One group at a time, to have temporary sums of one group only.
    step = num_rows if num_rows > 1 else num_groups
    for out_SD, first in zip(
        out_GRD.unbind() if num_rows > 1 else [out_GRD[:, 0]],
        range(0, num_groups * num_rows, step),
        strict=True,
    ):
        sums = torch.segment_reduce(
            *(terms_TD, "sum"),
            offsets=borders[first : first + step + 1],
            unsafe=True,
            initial=0,
        )
        (out_SD.add_ if add else out_SD.copy_)(sums)


# Through Triton. There is no C++ or CUDA version: on a CPU torch's own kernels sum segments.
#
# One program per segment, block of columns and share of the segment. Long and few segments are
# split into shares, whose sums a second launch of the same kernel adds up. The shares depend on the
# sizes alone, so all GPUs give the same bits.
#
# Reads values and factor once and writes each sum once; with `add` it reads each sum, with
# `borders` two borders per segment, with `segment_T` and `order` a number per token each.
#
# With `segment_T` one program begins at each token, and ends where the token before is of the same
# segment: the first token of a run sums the whole run. An embedding of 50 domains has 2.5 million
# segments, and 65,536 tokens.

# Tokens of a program in long segments.
SHARE = 128
# Bytes of a program's sums, and its columns. Several programs share a long segment. In short ones
# a program takes whole rows, with smaller sums so that many programs run at once.
LONG_TILE, LONG_COLUMNS = 16384, 128
# Half as many columns of float64: its sums would spill registers.
SHORT_TILE, SHORT_COLUMNS = 8192, 1024
NUM_WARPS = 4


class Sizes(NamedTuple):
    """The sizes of a launch."""

    num_shares: int
    """Programs of a segment, for each block of columns."""
    block_tokens: int
    block_columns: int


def pick(num_tokens: int, num_segments: int, width: int, sums: torch.dtype) -> Sizes:
    """Sizes for segments of `num_tokens / num_segments` tokens and sums of dtype `sums`."""
    num_shares = max(1, num_tokens // (SHARE * num_segments))
    is_long = num_tokens >= SHARE // 2 * num_segments
    tile, most = (LONG_TILE, LONG_COLUMNS) if is_long else (SHORT_TILE, SHORT_COLUMNS)
    if not is_long and sums == torch.float64:
        most //= 2
    columns = min(most, max(16, 1 << (width - 1).bit_length()))
    return Sizes(num_shares, max(1, min(32, tile // (sums.itemsize * columns))), columns)


def segment_sum_triton(
    values_TD: Tensor,
    out_GRD: Tensor,
    add: bool,
    borders: Tensor | None,
    segment_T: Tensor | None,
    order: Tensor | None,
    factor_TD: Tensor | None,
    mean_T: Tensor | None,
    rstd_T: Tensor | None,
    bias_GRD: Tensor | None,
) -> None:
    """out_s = the sum of the terms of segment s, or out_s += it."""
    num_groups, num_rows, width = out_GRD.shape
    num_segments = num_groups * num_rows
    if not num_segments or not width:
        return
    if segment_T is not None:
        _sum_runs(values_TD, out_GRD, add, segment_T, order)
        return
    dtype = sum_dtype(values_TD.dtype, out_GRD.dtype)
    sizes = pick(len(values_TD), num_segments, width, dtype)
    outs = [out_GRD] if bias_GRD is None else [out_GRD, bias_GRD]
    terms = {"factor": factor_TD, "mean": mean_T, "rstd": rstd_T, "bias_values": None}
    terms |= {"borders": borders}
    if sizes.num_shares == 1:
        _launch(values_TD, outs, add, terms, sizes)
        return
    # [S, shares, D]: a segment is a group, and its shares are the rows.
    shape = (num_segments, sizes.num_shares, width)
    shares = [values_TD.new_empty(shape, dtype=dtype) for _ in outs]
    _launch(values_TD, shares, False, terms, sizes)
    shares_TD, *bias_TD = (each.view(-1, width) for each in shares)
    once = pick(len(shares_TD), num_segments, width, dtype)._replace(num_shares=1)
    of_shares = dict.fromkeys(terms) | {"bias_values": bias_TD[0] if bias_TD else None}
    _launch(shares_TD, outs, add, of_shares, once)


def _sum_runs(
    values_TD: Tensor, out_GRD: Tensor, add: bool, segment_T: Tensor, order: Tensor | None
) -> None:
    if not add:
        out_GRD.zero_()
    num_tokens, width = values_TD.shape
    if not num_tokens:
        return
    sizes = run_sizes(width, sum_dtype(values_TD.dtype, out_GRD.dtype))
    with launching_on(out_GRD.device):
        sum_run[(num_tokens, -(-width // sizes.block_columns))](
            values=values_TD,
            segments=segment_T,
            order=order,
            out=out_GRD,
            num_tokens=num_tokens,
            num_rows=out_GRD.shape[1],
            out_stride=out_GRD.stride(0),
            **constants_of(values_TD.dtype, out_GRD.dtype, width, sizes, add=add),
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


def run_sizes(width: int, sums: torch.dtype) -> Sizes:
    """Sizes for runs of few tokens and sums of dtype `sums`."""
    return pick(1, 1, width, sums)


def _launch(
    values_TD: Tensor, outs: list[Tensor], add: bool, terms: dict[str, Tensor | None], sizes: Sizes
) -> None:
    """One launch; outputs are [S, shares, D], or [G, R, D] where a segment is one share.

    `terms` are the kernel's optional arguments. None is a constant for Triton's compiler.
    """
    out, bias = outs[0], outs[1] if len(outs) == 2 else None
    num_groups, num_rows, width = out.shape
    num_segments = num_groups * num_rows // sizes.num_shares
    grid = (num_segments, -(-width // sizes.block_columns), sizes.num_shares)
    with launching_on(out.device):
        sum_segments[grid](
            values=values_TD,
            **terms,
            out=out,
            bias=bias,
            # The length of every segment without borders.
            length=len(values_TD) // num_segments,
            num_rows=num_rows,
            out_stride=out.stride(0),
            bias_stride=0 if bias is None else bias.stride(0),
            **constants_of(values_TD.dtype, out.dtype, width, sizes, add=add),
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


def constants_of(
    dtype: torch.dtype, out_dtype: torch.dtype, width: int, sizes: Sizes, *, add: bool = False
) -> dict[str, Any]:
    """Compile-time arguments."""
    return {
        "WIDTH": width,
        "SHARES": sizes.num_shares,
        "TOKENS": sizes.block_tokens,
        "COLUMNS": sizes.block_columns,
        "SUM": triton_dtype(sum_dtype(dtype, out_dtype)),
        "ADD": add,
    }


@kernel
def sum_segments(
    values,
    bias_values,
    factor,
    mean,
    rstd,
    borders,
    out,
    bias,
    length,
    num_rows,
    out_stride,
    bias_stride,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
    ADD: tl.constexpr,
):
    """out[segment, share] = the sum of its terms, or += it.

    Likewise `bias`, unless it is None, of `bias_values`, or without them of the values alone.
    """
    # int64: tokens times columns pass 2**31 in large batches.
    segment, share = tl.program_id(0).to(tl.int64), tl.program_id(2)
    columns_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_C = columns_C < WIDTH
    if borders is not None:
        first, last = tl.load(borders + segment), tl.load(borders + segment + 1)
    else:
        first = segment * length
        last = first + length
    per_share = tl.cdiv(last - first, SHARES)
    first += share * per_share
    last = tl.minimum(last, first + per_share)
    # An empty segment, such as a word that a domain does not have: nothing to add.
    if ADD and first >= last:
        return
    # Row i of the tile sums tokens i, i + TOKENS, ...: shorter sums, less rounding.
    sum_TC = tl.zeros([TOKENS, COLUMNS], SUM)
    bias_TC = tl.zeros([TOKENS, COLUMNS], SUM)
    for start in range(first, last, TOKENS):
        token_T = start + tl.arange(0, TOKENS).to(tl.int64)
        is_token_T = token_T < last
        is_inside_TC = is_token_T[:, None] & is_column_C[None, :]
        offset_TC = token_T[:, None] * WIDTH + columns_C[None, :]
        # [TOKENS, COLUMNS]
        term_TC = tl.load(values + offset_TC, mask=is_inside_TC, other=0).to(SUM)
        if bias_values is not None:
            bias_TC += tl.load(bias_values + offset_TC, mask=is_inside_TC, other=0)
        elif bias is not None:
            bias_TC += term_TC
        if factor is not None:
            factor_TC = tl.load(factor + offset_TC, mask=is_inside_TC, other=0).to(SUM)
            if mean is not None:
                mean_T = tl.load(mean + token_T, mask=is_token_T, other=0).to(SUM)
                rstd_T = tl.load(rstd + token_T, mask=is_token_T, other=0).to(SUM)
                factor_TC = (factor_TC - mean_T[:, None]) * rstd_T[:, None]
            term_TC *= factor_TC
        sum_TC += term_TC
    if SHARES == 1:
        # In 32 bits, enough for the number of segments: a 64-bit division is a subroutine.
        group = tl.program_id(0) // num_rows
        row = tl.program_id(0) - group * num_rows
    else:
        group, row = tl.program_id(0), share
    group, row = group.to(tl.int64), row.to(tl.int64) * WIDTH
    _store(out + group * out_stride + row, sum_TC, columns_C, is_column_C, ADD)
    if bias is not None:
        _store(bias + group * bias_stride + row, bias_TC, columns_C, is_column_C, ADD)


@kernel
def sum_run(
    values,
    segments,
    order,
    out,
    num_tokens,
    num_rows,
    out_stride,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
    ADD: tl.constexpr,
):
    """out[segment] = the sum of a run of tokens that begins here, or += it."""
    # int64: tokens times columns pass 2**31 in large batches.
    first = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_C = columns_C < WIDTH
    segment = tl.load(segments + first)
    if tl.load(segments + first - 1, mask=first > 0, other=-1) == segment:
        return
    # Row i of the tile sums tokens i, i + TOKENS, ...: shorter sums, less rounding.
    sum_TC = tl.zeros([TOKENS, COLUMNS], SUM)
    num_found = TOKENS
    while num_found == TOKENS:
        token_T = first + tl.arange(0, TOKENS).to(tl.int64)
        found_T = tl.load(segments + token_T, mask=token_T < num_tokens, other=-1) == segment
        if order is not None:
            token_T = tl.load(order + token_T, mask=found_T, other=0)
        is_inside_TC = found_T[:, None] & is_column_C[None, :]
        offset_TC = token_T[:, None] * WIDTH + columns_C[None, :]
        # [TOKENS, COLUMNS]
        sum_TC += tl.load(values + offset_TC, mask=is_inside_TC, other=0).to(SUM)
        # Fewer than there is room for: the run ends.
        num_found = tl.sum(found_T.to(tl.int32), 0)
        first += TOKENS
    group = segment // num_rows
    row = (segment - group * num_rows) * WIDTH
    _store(out + group * out_stride + row, sum_TC, columns_C, is_column_C, ADD)


@kernel
def _store(row, sum_TC, columns_C, is_column_C, ADD: tl.constexpr):
    """Write the sum over the tile's tokens, or add it."""
    sum_C = tl.sum(sum_TC, 0)
    if ADD:
        sum_C += tl.load(row + columns_C, mask=is_column_C, other=0).to(sum_C.dtype)
    if row.dtype.element_ty == tl.bfloat16:
        # Not every Triton narrows float64 to bfloat16 in one step.
        sum_C = sum_C.to(tl.float32)
    tl.store(row + columns_C, sum_C.to(row.dtype.element_ty), mask=is_column_C)


def check_segment_sum(
    values_TD: Tensor,
    out_GRD: Tensor,
    add: bool,
    borders: Tensor | None,
    segment_T: Tensor | None,
    order: Tensor | None,
    factor_TD: Tensor | None,
    mean_T: Tensor | None,
    rstd_T: Tensor | None,
    bias_GRD: Tensor | None,
) -> None:
    """Raise ValueError unless all are of T tokens, D columns and G R segments, on one device."""
    if values_TD.dim() != 2 or out_GRD.dim() != 3 or values_TD.shape[1] != out_GRD.shape[2]:
        raise ValueError(
            "segment_sum() sums rows of values_TD [T, D] into out_GRD [G, R, D]; got shapes "
            f"{list(values_TD.shape)} and {list(out_GRD.shape)}."
        )
    num_segments, num_tokens = out_GRD.shape[0] * out_GRD.shape[1], len(values_TD)
    has_borders = borders is not None or segment_T is not None
    if not has_borders and num_tokens % max(1, num_segments):
        raise ValueError(
            f"segment_sum() without borders needs segments of equal length; {num_tokens} tokens "
            f"are no multiple of {num_segments} segments. Pass borders."
        )
    others = (borders, factor_TD, bias_GRD) if segment_T is not None else (order,)
    if any(each is not None for each in others):
        raise ValueError(
            "segment_sum() takes segment_T in the place of borders, without factor_TD and "
            "bias_GRD, and order with segment_T alone. Pass borders for the former."
        )
    if len({mean_T is None, rstd_T is None, mean_T is None or factor_TD is None}) > 1:
        raise ValueError(
            "segment_sum() takes mean_T and rstd_T together, and with factor_TD. Pass all three, "
            "or factor_TD alone."
        )
    if bias_GRD is not None and (factor_TD is None or bias_GRD.shape != out_GRD.shape):
        raise ValueError(
            "segment_sum() takes bias_GRD beside factor_TD, of the shape of out_GRD; they have "
            f"shapes {list(bias_GRD.shape)} and {list(out_GRD.shape)}."
        )
    expected = {
        "values_TD": (values_TD, values_TD.shape, STORAGE_DTYPES),
        "out_GRD[0]": (out_GRD[0] if len(out_GRD) else out_GRD, out_GRD.shape[-2:], STORAGE_DTYPES),
        "bias_GRD[0]": (
            bias_GRD[0] if bias_GRD is not None and len(bias_GRD) else None,
            *(out_GRD.shape[-2:], (out_GRD.dtype,)),
        ),
        "borders": (borders, (num_segments + 1,), (torch.int64,)),
        "segment_T": (segment_T, (num_tokens,), (torch.int64,)),
        "order": (order, (num_tokens,), (torch.int64,)),
        "factor_TD": (factor_TD, values_TD.shape, STORAGE_DTYPES),
        "mean_T": (mean_T, (num_tokens,), STORAGE_DTYPES),
        "rstd_T": (rstd_T, (num_tokens,), STORAGE_DTYPES),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        is_right = tensor.shape == shape and tensor.dtype in dtypes and tensor.is_contiguous()
        if not is_right or tensor.device != out_GRD.device:
            raise ValueError(
                f"segment_sum() needs {name} contiguous, of shape {list(shape)} and "
                f"{' or '.join(map(str, dtypes))} on {out_GRD.device}; it has shape "
                f"{list(tensor.shape)}, strides {list(tensor.stride())} and {tensor.dtype} on "
                f"{tensor.device}."
            )


def _run(values_TD: Tensor, out_GRD: Tensor, *rest: Any, implementation: str | None = None) -> None:
    check_segment_sum(values_TD, out_GRD, *rest)
    run = runs["segment_sum", out_GRD.device, implementation, requested_backend()]
    run(values_TD, out_GRD, *rest)
    increment_version([out for out in (out_GRD, rest[-1]) if out is not None])


def _fake(
    values_TD: Tensor, out_GRD: Tensor, *rest: Any, implementation: str | None = None
) -> None:
    check_segment_sum(values_TD, out_GRD, *rest)


_op = register(
    Operator(
        "segment_sum",
        {"triton": segment_sum_triton, "torch": segment_sum_torch},
    ),
    "(Tensor values_TD, Tensor(a!) out_GRD, bool add, Tensor? borders, Tensor? segment_T, "
    "Tensor? order, Tensor? factor_TD, Tensor? mean_T, Tensor? rstd_T, Tensor(b!)? bias_GRD, "
    "*, str? implementation=None) -> ()",
    run=_run,
    fake=_fake,
)
