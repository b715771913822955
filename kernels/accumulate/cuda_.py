"""Rows filled from gradients through the CUDA extension."""

from collections.abc import Sequence

from torch import Tensor

from doge_fast.kernels.build import cuda_operators


def accumulate(grads: Sequence[Tensor], rows: Sequence[Tensor], add: bool) -> None:
    """rows[i] = grads[i], or rows[i] += grads[i]: one launch for every 144 pairs of dtypes."""
    if grads:
        cuda_operators(grads[0].device.type).accumulate(grads, rows, add)
