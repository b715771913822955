"""Layer norms and root mean square norms: a gain along the last dimensions, perhaps a bias.

y = n(x) * w + b, hence dw = sum_t dy_t * n(x_t) and db = sum_t dy_t.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doge_fast.kernels import segment_sum
from doge_fast.stacked.layers.batch import Run
from doge_fast.stacked.layers.linear import autocast_dtype
from doge_fast.stacked.layers.rule import LayerRule
from doge_fast.stacked.layers.token_sums import (
    Fill,
    Sum,
    TokenSum,
    exact,
    in_parts,
    put,
    sums_one_by_one,
)


class LayerNormRule(LayerRule):
    """torch's LayerNorm, by the kernels that torch has for it."""

    def prepare(self, module: Any, x: Tensor) -> Tensor:
        """Autocast widens it on a GPU, and leaves it alone on a CPU."""
        return x.float() if _is_widened(x) else x

    def forward(self, module: Any, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The output; mean and reciprocal deviation of each token."""
        weight, bias = module.weight, module.bias
        if _is_widened(x):
            weight, bias = weight.float(), None if bias is None else bias.float()
        shape = list(module.normalized_shape)
        output, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, module.eps)
        return output, (mean, rstd, weight)

    def input_gradient(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Tensor:
        """torch's."""
        mean, rstd, weight = saved
        shape = list(module.normalized_shape)
        gradient: Tensor = torch.ops.aten.native_layer_norm_backward(
            grad, x, shape, mean, rstd, weight, None, [True, False, False]
        )[0]
        return gradient

    def gradients(
        self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor
    ) -> Iterator[tuple[nn.Parameter | None, TokenSum]]:
        """Of gain and bias."""
        yield module.weight, _Gain(module, grad, x, saved[:2])
        yield module.bias, Sum(grad.to(module.weight.dtype))


class _Gain(NamedTuple):
    """The gradient of a LayerNorm's gain, sum_t dy_t * n(x_t), without the n of all tokens."""

    module: Any
    grad: Tensor
    x: Tensor
    statistics: Sequence[Tensor]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.module.weight.dtype
        return dtype

    def rows(self, run: Run) -> Fill:
        if sums_one_by_one(self.grad):
            return in_parts(run, self._one_by_one)
        return _scaled(run, self.grad, self.x, *self.statistics)

    def _one_by_one(self, run: Run) -> Fill:
        """By torch's kernel, which is the fastest way on a CPU."""
        shape = list(self.module.normalized_shape)
        parts = [run.cut(values, *shape) for values in (self.grad, self.x)]
        parts += [run.cut(values, *[1] * len(shape)) for values in self.statistics]
        gains = [
            torch.ops.aten.native_layer_norm_backward(
                grad, x, shape, mean, rstd, self.module.weight, None, [False, True, False]
            )[1]
            for grad, x, mean, rstd in zip(*parts, strict=True)
        ]
        return put(torch.stack(gains))

    def per_example(self, shape: torch.Size) -> Tensor:
        normal = F.layer_norm(exact(self.x), shape, None, None, self.module.eps)
        return Sum(normal * self.grad).per_example(shape)


class _Scaled(NamedTuple):
    """sum_t dy_t * x_t."""

    grad: Tensor
    x: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.grad.dtype, self.x.dtype)

    def rows(self, run: Run) -> Fill:
        if sums_one_by_one(self.grad):
            return Sum(self.grad * self.x).rows(run)
        return _scaled(run, self.grad, self.x)

    def per_example(self, shape: torch.Size) -> Tensor:
        return Sum(self.grad * self.x).per_example(shape)


def _scaled(run: Run, grad: Tensor, x: Tensor, *statistics: Tensor) -> Fill:
    """sum_t dy_t * x_t of all domains, or of the normal of x_t with mean and deviation of it."""

    def fill(out: Tensor, adds: bool) -> None:
        grad_TN, x_TN = (run.tokens(values, out[0].numel()) for values in (grad, x))
        mean_T, rstd_T = [run.tokens(values) for values in statistics] or (None, None)
        segment_sum(
            *(grad_TN, out.view(len(out), 1, -1)),
            add=adds,
            borders=None if run.is_equal else run.token_borders(len(grad_TN), out.device),
            factor_TD=x_TN,
            mean_T=mean_T,
            rstd_T=rstd_T,
        )

    return fill


def _is_widened(x: Tensor) -> bool:
    return autocast_dtype(x) is not None and x.device.type != "cpu"


class _GainRule(LayerRule):
    """y = x w, where `prepare` has made x of the module's input."""

    params = ("weight",)

    def forward(self, module: Any, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The output, and the weight as it is now."""
        return x * module.weight, (module.weight,)

    def input_gradient(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Tensor:
        """dx = dy w."""
        return grad * saved[0]

    def gradients(
        self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor
    ) -> Iterator[tuple[nn.Parameter | None, TokenSum]]:
        """Of the gain."""
        yield module.weight, _Scaled(grad, x)


class RMSNormRule(_GainRule):
    """torch's RMSNorm, which rounds once, behind the weight."""

    keeps_dtype = True

    def prepare(self, module: Any, x: Tensor) -> Tensor:
        """n(x), in float32 at least."""
        return F.rms_norm(exact(x), module.normalized_shape, None, module.eps)


class LlamaRMSNormRule(_GainRule):
    """transformers' RMSNorms: in float32, and rounded before the weight."""

    def prepare(self, module: Any, x: Tensor) -> Tensor:
        """n(x), in the dtype of x."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        return (wide * scale).to(x.dtype)
