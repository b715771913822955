"""Rows filled from gradients, in plain torch: any device, always available, the fallback.

Reads each gradient once, and each row once when adding; writes each row once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# 512 KiB of float64: a cast tile that stays in the second-level cache.
TILE_COLUMNS = 65_536


@torch.no_grad()
def accumulate(grads: Sequence[Tensor], rows: Sequence[Tensor], add: bool) -> None:
    """rows[i] = grads[i], or rows[i] += grads[i], in the wider of the two dtypes.

    Elsewhere than on a CPU they have one shape: views would cost the host more than all else.
    """
    if rows and not rows[0].is_cpu:
        _in_few_launches(list(grads), list(rows), add)
        return
    for grad, row in zip(grads, rows, strict=True):
        flat_grad, flat_row = grad.view(-1), row.view(-1)
        if not add:
            flat_row.copy_(flat_grad)
        elif grad.dtype == row.dtype:
            flat_row.add_(flat_grad)
        else:
            _add_in_tiles(flat_grad, flat_row)


def _in_few_launches(grads: list[Tensor], rows: list[Tensor], add: bool) -> None:
    # Addresses travel as arguments of the kernels: nothing is uploaded, and a graph can hold it.
    if add:
        torch._foreach_add_(rows, grads)
    else:
        torch._foreach_copy_(rows, grads)


def _add_in_tiles(grad_N: Tensor, row_N: Tensor) -> None:
    # Tiles: torch would make whole-row copies in the common dtype on a CPU. float16 with
    # bfloat16 promotes to float32, so no pair loses more than the store does.
    common = torch.promote_types(grad_N.dtype, row_N.dtype)
    for first in range(0, len(row_N), TILE_COLUMNS):
        row_T = row_N[first : first + TILE_COLUMNS]
        grad_T = grad_N[first : first + TILE_COLUMNS]
        row_T.copy_(row_T.to(common) + grad_T.to(common))
