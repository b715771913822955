"""Linear layers: torch's Linear and transformers' Conv1D, whose weight is transposed."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from doge_fast.stacked.layers.batch import DomainRun
from doge_fast.stacked.layers.rule import Gradients, LayerRule
from doge_fast.stacked.layers.token_sums import Sum, put

# One call computes the products of all domains for a weight of at most so many elements. On a CPU a
# larger product keeps all cores busy by itself; on other devices one call is always faster.
MOST_BATCHED = {"cpu": 1 << 20}
# Bytes of temporary products where the buffer's rows have another dtype than the product.
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
        # With a bias the output is a view, which an in-place ReLU, for example, could not change.
        return torch.ops.aten._unsafe_view(output, output.shape), (weight,)

    def input_gradient(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Tensor:
        """dx = dy W."""
        weight = saved[0].to(grad.dtype)
        return grad @ (weight.t() if self.is_transposed else weight)

    def gradients(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Gradients:
        """The gradients of weight and bias."""
        yield module.weight, Outer(x, grad) if self.is_transposed else Outer(grad, x)
        yield module.bias, Sum(grad)

    def terms(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Mapping[str, Tensor]:
        """Those of the bias."""
        return {"bias": grad}


class Outer(NamedTuple):
    """sum_t left_t right_t^T, the gradient of a matrix [P, Q].

    Dimensions between the first and the last count tokens. Both have the gradient's dtype.
    """

    left: Tensor
    """[B, ..., P]"""
    right: Tensor
    """[B, ..., Q]"""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the gradient is computed in."""
        return self.right.dtype

    def write(self, run: DomainRun, out: Tensor, adds: bool) -> None:
        """As `TokenSum.write`."""
        for domains, part in run.equal_parts:
            left_GTP = part.by_domain(self.left, self.left.shape[-1])
            right_GTQ = part.by_domain(self.right, self.right.shape[-1])
            multiply(out[domains], left_GTP.mT, right_GTQ, adds)


def multiply(out: Tensor, left_GPT: Tensor, right_GTQ: Tensor, adds: bool) -> None:
    """out[g] = or += left[g] @ right[g]; `out` [G, P, Q] may have another dtype."""
    if out.dtype == left_GPT.dtype:
        _multiply(out, left_GPT, right_GTQ, adds)
        return
    is_16_bits = left_GPT.dtype in (torch.bfloat16, torch.float16)
    if is_16_bits and out.dtype == torch.float32 and out.device.type in WIDE_PRODUCTS:
        multiply_wide(out, left_GPT, right_GTQ, adds)
        return
    # A few domains at a time, since their products are as large as their rows.
    step = max(1, MOST_TEMPORARY_BYTES // max(1, out[0].numel() * left_GPT.itemsize))
    for first in range(0, len(out), step):
        part = slice(first, first + step)
        value = torch.empty(out[part].shape, dtype=left_GPT.dtype, device=out.device)
        _multiply(value, left_GPT[part], right_GTQ[part], False)
        put(out[part], value, adds)


def _multiply(out: Tensor, left_GPT: Tensor, right_GTQ: Tensor, adds: bool) -> None:
    size = out[0].numel()
    if len(out) > 1 and size <= MOST_BATCHED.get(out.device.type, size):
        if adds:
            out.baddbmm_(left_GPT, right_GTQ)
        else:
            torch.bmm(left_GPT, right_GTQ, out=out)
        return
    for out_PQ, left_PT, right_TQ in zip(out, left_GPT, right_GTQ, strict=True):
        if adds:
            out_PQ.addmm_(left_PT, right_TQ)
        else:
            torch.mm(left_PT, right_TQ, out=out_PQ)


def multiply_wide(out: Tensor, left_GPT: Tensor, right_GTQ: Tensor, adds: bool) -> None:
    """out = or += the float32 products of 16-bit matrices, without a temporary."""
    # By overload: on some devices torch.baddbmm takes the dtype for a factor.
    if adds:
        torch.ops.aten.baddbmm.dtype_out(out, left_GPT, right_GTQ, torch.float32, out=out)
    else:
        torch.ops.aten.bmm.dtype_out(left_GPT, right_GTQ, torch.float32, out=out)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_autocast(device_type: str) -> bool:
    # torch 2.11 cannot trace this call.
    return torch.amp.is_autocast_available(device_type)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of products under autocast, on the device of `x`; None where autocast is off.

    Autocast leaves float64 as it is.
    """
    device_type = x.device.type
    # "meta" has no autocast, and is_autocast_enabled raises there.
    is_on = _has_autocast(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on and x.dtype != torch.float64 else None


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context without autocast, on the device of `x`."""
    device_type = x.device.type
    if not _has_autocast(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
