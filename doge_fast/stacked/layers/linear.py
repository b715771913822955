"""Linear layers: torch's Linear and transformers' Conv1D, whose weight is transposed."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from doge_fast.stacked.layers.batch import DomainRun
from doge_fast.stacked.layers.rule import Gradients, LayerRule
from doge_fast.stacked.layers.token_sums import Sum, put

# A weight with at most so many elements gets the products of all domains from one call. On a CPU a
# larger product keeps all cores busy by itself; on other devices one call is always faster.
MOST_BATCHED = {"cpu": 1 << 20}
# Bytes of temporary products, where rows have another dtype than the product.
MOST_TEMPORARY_BYTES = 1 << 26
# Devices on which 16-bit matrices have a float32 product.
WIDE_PRODUCTS = () if torch.version.hip else ("cuda",)


class LinearRule(LayerRule):
    """y = x W^T + b, hence dW = sum_t dy_t x_t^T and db = sum_t dy_t.

    With `is_transposed` the weight is [inputs, outputs].
    """

    def __init__(self, *, is_transposed: bool = False) -> None:
        self.is_transposed = is_transposed

    def covers(self, module: Any) -> bool:
        """False for a flattened weight, as in a sharded model."""
        return super().covers(module) and module.weight.dim() == 2

    def prepare(self, module: Any, x: Tensor) -> Tensor:
        """x in the dtype of the product."""
        dtype = autocast_dtype(x)
        return x if dtype is None else x.to(dtype)

    def forward(self, module: Any, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The output; saves the weight."""
        weight = module.weight
        output = F.linear(x, weight.t() if self.is_transposed else weight, module.bias)
        # With a bias it is a view, which nothing after it could change in place.
        return torch.ops.aten._unsafe_view(output, output.shape), (weight,)

    def input_gradient(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Tensor:
        """dx = dy W."""
        weight = saved[0].to(grad.dtype)
        return grad @ (weight.t() if self.is_transposed else weight)

    def gradients(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Gradients:
        """The gradients of weight and bias."""
        yield module.weight, Outer(x, grad) if self.is_transposed else Outer(grad, x)
        yield module.bias, Sum(grad)


class Outer(NamedTuple):
    """sum_t left_t right_t^T, the gradient of a matrix [rows, columns].

    Dimensions between the first and the last count tokens. Both have the gradient's dtype.
    """

    left: Tensor
    """[B, ..., rows]"""
    right: Tensor
    """[B, ..., columns]"""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the gradient is computed in."""
        return self.right.dtype

    def write(self, run: DomainRun, out: Tensor, adds: bool) -> None:
        """As `TokenSum.write`."""
        for domains, part in run.equal_parts:
            left_GTR = part.by_domain(self.left, self.left.shape[-1])
            right_GTC = part.by_domain(self.right, self.right.shape[-1])
            multiply(out[domains], left_GTR.mT, right_GTC, adds)


def multiply(out: Tensor, left_GRT: Tensor, right_GTC: Tensor, adds: bool) -> None:
    """out[g] = or += left[g] @ right[g]; `out` [G, R, C] may have another dtype."""
    if out.dtype == left_GRT.dtype:
        _multiply(out, left_GRT, right_GTC, adds)
        return
    is_16_bits = left_GRT.dtype in (torch.bfloat16, torch.float16)
    if is_16_bits and out.dtype == torch.float32 and out.device.type in WIDE_PRODUCTS:
        multiply_wide(out, left_GRT, right_GTC, adds)
        return
    step = max(1, MOST_TEMPORARY_BYTES // max(1, out[0].numel() * left_GRT.itemsize))
    for first in range(0, len(out), step):
        part = slice(first, first + step)
        value = torch.empty(out[part].shape, dtype=left_GRT.dtype, device=out.device)
        _multiply(value, left_GRT[part], right_GTC[part], False)
        put(out[part], value, adds)


def _multiply(out: Tensor, left_GRT: Tensor, right_GTC: Tensor, adds: bool) -> None:
    size = out[0].numel()
    if len(out) > 1 and size <= MOST_BATCHED.get(out.device.type, size):
        if adds:
            out.baddbmm_(left_GRT, right_GTC)
        else:
            torch.bmm(left_GRT, right_GTC, out=out)
        return
    for row_RC, left_RT, right_TC in zip(out, left_GRT, right_GTC, strict=True):
        if adds:
            row_RC.addmm_(left_RT, right_TC)
        else:
            torch.mm(left_RT, right_TC, out=row_RC)


def multiply_wide(out: Tensor, left_GRT: Tensor, right_GTC: Tensor, adds: bool) -> None:
    """out = or += the float32 products of 16-bit matrices, without a temporary."""
    # By overload: on some devices torch.baddbmm takes the dtype for a factor.
    if adds:
        torch.ops.aten.baddbmm.dtype_out(out, left_GRT, right_GTC, torch.float32, out=out)
    else:
        torch.ops.aten.bmm.dtype_out(left_GRT, right_GTC, torch.float32, out=out)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_autocast(kind: str) -> bool:
    # torch 2.11 cannot trace this call.
    return torch.amp.is_autocast_available(kind)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of products under autocast, on the device of `x`; None where autocast is off.

    Autocast leaves float64 as it is.
    """
    kind = x.device.type
    # "meta" has no autocast, and is_autocast_enabled raises there.
    is_on = _has_autocast(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on and x.dtype != torch.float64 else None


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context without autocast, on the device of `x`."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()
