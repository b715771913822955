"""Sums of segments in plain torch: any device, always available, the fallback.

A few operators, whatever the number of segments, and the same bits for the same call. Segments of
unequal length are summed in float64, since that sum is a chain of additions.
"""

import torch
from torch import Tensor

from doge_fast.kernels.triton_support import sum_dtype


@torch.no_grad()
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
    terms_TD = values_TD.to(sum_dtype(values_TD.dtype, out_GRD.dtype))
    if factor_TD is not None:
        factor_TD = factor_TD.to(terms_TD.dtype)
        if mean_T is not None and rstd_T is not None:
            factor_TD = (factor_TD - mean_T[:, None]) * rstd_T[:, None]
        terms_TD = terms_TD * factor_TD
    if order is not None:
        terms_TD = terms_TD[order]
    num_groups, num_rows, width = out_GRD.shape
    if borders is None:
        sums = terms_TD.view(num_groups * num_rows, -1, width).sum(1)
        _put(out_GRD, sums.view(out_GRD.shape), add)
        return
    terms_TD = terms_TD.double()
    # One group at a time: its sums, and not those of all, are in memory twice.
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
        _put(out_SD, sums, add)


def _put(out: Tensor, sums: Tensor, add: bool) -> None:
    if add:
        out.add_(sums)
    else:
        out.copy_(sums)
