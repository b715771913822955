"""Rows filled from gradients on a CPU, through csrc/cpu/accumulate.cpp."""

from collections.abc import Sequence

from torch import Tensor

from doge_fast.kernels.build import CPP, operators


def accumulate(grads: Sequence[Tensor], rows: Sequence[Tensor], add: bool) -> None:
    """rows[i] = grads[i], or rows[i] += grads[i]."""
    operators(CPP).accumulate.default(grads, rows, add)
