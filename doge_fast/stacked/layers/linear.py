"""Linear layers, with the weight as torch has it or as transformers' Conv1D has it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doge_fast.stacked.layers.rule import LayerRule
from doge_fast.stacked.layers.token_sums import Outer, Sum, TokenSum


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_autocast(kind: str) -> bool:
    # torch 2.11 cannot trace it.
    return torch.amp.is_autocast_available(kind)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of products on the device of `x`; None where autocast is off, or not known."""
    kind = x.device.type
    # "meta" has none, and torch raises when asked whether it is on.
    is_on = _has_autocast(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which operators on the device of `x` leave dtypes alone."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


class LinearRule(LayerRule):
    """y = x W^T + b, hence dW = sum_t dy_t x_t^T and db = sum_t dy_t.

    Args:
        is_transposed: whether the weight is [inputs, outputs].
    """

    def __init__(self, *, is_transposed: bool = False) -> None:
        self.is_transposed = is_transposed

    def covers(self, module: Any) -> bool:
        """Not where the weight is flattened, as when it is sharded."""
        return super().covers(module) and module.weight.dim() == 2

    def prepare(self, module: Any, x: Tensor) -> Tensor:
        """In the dtype of the product."""
        dtype = autocast_dtype(x)
        return x if dtype is None else x.to(dtype)

    def forward(self, module: Any, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The output, and the weight as it is now."""
        weight = module.weight
        return F.linear(x, weight.t() if self.is_transposed else weight, module.bias), (weight,)

    def input_gradient(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Tensor:
        """dx = dy W."""
        weight = saved[0].to(grad.dtype)
        return grad @ (weight.t() if self.is_transposed else weight)

    def gradients(
        self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor
    ) -> Iterator[tuple[nn.Parameter | None, TokenSum]]:
        """Of weight and bias."""
        # Under autocast the product is one of narrow numbers.
        x = x.to(grad.dtype)
        yield module.weight, Outer(x, grad) if self.is_transposed else Outer(grad, x)
        yield module.bias, Sum(grad)
