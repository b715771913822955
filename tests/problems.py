"""Gradient matrices with known properties, by name, and the dtypes that they are stored in."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STORAGE_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@dataclass(frozen=True)
class GradientProblem:
    """A matrix of domain gradients, [K, N]: standard normal numbers, then `change`."""

    name: str
    num_rows: int
    num_columns: int
    change: Callable[[Tensor], Tensor] = lambda grads_KN: grads_KN

    def sample(self, device: torch.device | str = "cpu") -> Tensor:
        """The matrix on `device`, the same numbers at every call."""
        generator = torch.Generator().manual_seed(len(self.name))
        grads_KN = torch.randn(self.num_rows, self.num_columns, generator=generator)
        return self.change(grads_KN.to(device))

    def __str__(self) -> str:
        return self.name


def _zero_row(grads_KN: Tensor) -> Tensor:
    grads_KN[2] = 0
    return grads_KN


def _equal_rows(grads_KN: Tensor) -> Tensor:
    grads_KN[2] = grads_KN[0]
    return grads_KN


def _opposite_rows(grads_KN: Tensor) -> Tensor:
    grads_KN[2] = -grads_KN[0]
    return grads_KN


def _far_scales(grads_KN: Tensor) -> Tensor:
    grads_KN[0] *= 1e-10
    grads_KN[2] *= 1e10
    return grads_KN


GRADIENT_PROBLEMS = [
    GradientProblem("one domain", 1, 1000),
    GradientProblem("one column", 5, 1),
    GradientProblem("odd number of columns", 7, 4099),
    GradientProblem("eleven domains", 11, 2048),
    GradientProblem("more domains than a tile", 67, 131),
    GradientProblem("more columns than a chunk", 2, 20_011),
    GradientProblem("zero row", 4, 777, _zero_row),
    GradientProblem("equal rows", 4, 777, _equal_rows),
    GradientProblem("opposite rows", 4, 777, _opposite_rows),
    GradientProblem("scales 1e-10 and 1e10", 4, 777, _far_scales),
    GradientProblem("strided view", 14, 1000, lambda grads: grads[::2, 3:-5]),
    GradientProblem("overlapping rows", 1, 1000, lambda grads: grads.expand(3, -1)),
    GradientProblem("bfloat16", 7, 1111, lambda grads: grads.bfloat16()),
    GradientProblem("bfloat16, many domains", 18, 1111, lambda grads: grads.bfloat16()),
    GradientProblem("float16", 5, 1111, lambda grads: grads.half()),
    GradientProblem("float64", 7, 1111, lambda grads: grads.double()),
    GradientProblem("float64, two domains", 2, 1111, lambda grads: grads.double()),
    GradientProblem("one sign", 4, 9001, lambda grads: grads.abs() + 1),
]
