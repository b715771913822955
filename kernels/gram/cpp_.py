"""The Gram matrix on a CPU, through csrc/cpu/gram.cpp."""

from collections.abc import Sequence

from torch import Tensor

from doge_fast.kernels.build import CPP, operators


def gram(blocks: Sequence[Tensor]) -> Tensor:
    """sum_p B_p B_p^T, [R, R] float64."""
    gram_RR: Tensor = operators(CPP).gram.default(blocks)
    return gram_RR
