"""The weighted sum of rows on a CPU, through csrc/cpu/weighted_sum.cpp."""

from collections.abc import Sequence

from torch import Tensor

from doge_fast.kernels.build import CPP, operators


def weighted_sum(blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]) -> None:
    """outs[p] = sum_r c_r blocks[p][r]."""
    operators(CPP).weighted_sum.default(blocks, coefficients_R, outs)
