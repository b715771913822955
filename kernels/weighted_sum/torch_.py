"""The weighted sum of rows in plain torch: any device, always available, the fallback.

Reads each row with a non-zero coefficient once; writes each output once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# 1 MiB of float32: the running sum stays in cache, and a call has work for every thread.
TILE_COLUMNS = 1 << 18


@torch.no_grad()
def weighted_sum(blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]) -> None:
    """outs[p] = sum_r c_r blocks[p][r], float32 or better inside; c_r = 0 ignores the row."""
    if coefficients_R.device.type == "cpu":
        _sum_used_rows(blocks, coefficients_R, outs)
    else:
        _sum_masked_rows(blocks, coefficients_R, outs)


def _sum_used_rows(
    blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]
) -> None:
    exact_R = coefficients_R.tolist()
    # As the sum has them: beyond float32's range infinite there, not an error.
    rounded_R = coefficients_R.float().tolist()
    for block, out in zip(blocks, outs, strict=True):
        out_N = out.view(-1)
        values_R = exact_R if block.dtype == torch.float64 else rounded_R
        terms = [(row, values_R[row]) for row, c in enumerate(exact_R) if c != 0]
        for first in range(0, block.shape[1], TILE_COLUMNS):
            tile_RT = block[:, first : first + TILE_COLUMNS]
            out_T = out_N[first : first + TILE_COLUMNS]
            wide = _wide(block.dtype)
            # Straight into the output where that is as wide as the sum.
            sum_T = out_T if out.dtype == wide else torch.empty_like(out_T, dtype=wide)
            sum_T.zero_()
            for row, c in terms:
                sum_T.add_(tile_RT[row].to(wide), alpha=c)
            if sum_T is not out_T:
                out_T.copy_(sum_T)


def _sum_masked_rows(
    blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]
) -> None:
    # Which rows count is known on the device only, and asking would make the host wait:
    # rows are read and replaced by zero instead, so that a NaN there is still not seen.
    used_R1 = (coefficients_R != 0)[:, None]
    for block, out in zip(blocks, outs, strict=True):
        out_N, wide = out.view(-1), _wide(block.dtype)
        c_R1 = coefficients_R.to(wide)[:, None]
        for first in range(0, block.shape[1], TILE_COLUMNS):
            tile_RT = block[:, first : first + TILE_COLUMNS].to(wide)
            # A product and a sum, not a matrix product: that might run in tf32.
            sum_T = (c_R1 * torch.where(used_R1, tile_RT, 0)).sum(0)
            out_N[first : first + TILE_COLUMNS].copy_(sum_T)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
