"""Layer norms and root mean square norms: a gain along the last dimensions, and optionally a bias.

y = n(x) * w + b, hence dw = sum_t dy_t * n(x_t) and db = sum_t dy_t.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from doge_fast.kernels import segment_sum
from doge_fast.stacked.layers.batch import DomainRun
from doge_fast.stacked.layers.linear import autocast_dtype
from doge_fast.stacked.layers.rule import Gradients, LayerRule
from doge_fast.stacked.layers.token_sums import Sum, exact, put, sums_one_by_one

_IS_RMS_WIDENED = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


class LayerNormRule(LayerRule):
    """torch's LayerNorm, by torch's kernels."""

    def covers(self, module: Any) -> bool:
        """False without a gain."""
        return super().covers(module) and module.weight is not None

    def prepare(self, module: Any, x: Tensor) -> Tensor:
        """x, in float32 under autocast on a GPU, as torch's LayerNorm has it."""
        return x.float() if _is_widened(x) else x

    def forward(self, module: Any, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The output; saves mean and reciprocal deviation of each token, and the gain."""
        weight, bias = module.weight, module.bias
        if _is_widened(x):
            weight, bias = weight.float(), None if bias is None else bias.float()
        shape = list(module.normalized_shape)
        output, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, module.eps)
        return output, (mean, rstd, weight)

    def input_gradient(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Tensor:
        """dx, by torch's kernel."""
        return _layer_norm_backward(grad, x, saved, [True, False, False])[0]

    def gradients(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Gradients:
        """The gradients of gain and bias."""
        # Under autocast on a GPU the output, hence its gradient, is float32.
        dtype = module.weight.dtype
        yield module.weight, _Gain(grad, x, dtype, saved)
        yield module.bias, Sum(grad.to(dtype))

    def terms(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Mapping[str, Tensor]:
        """Those of gain and bias."""
        mean, rstd, _ = saved
        return {"weight": grad * ((x - mean) * rstd), "bias": grad}

    def write(
        self, gradients: Sequence[Any], run: DomainRun, outs: Iterable[tuple[Tensor, bool]]
    ) -> None:
        """Gain and bias, which read the same gradient; on a GPU in one launch."""
        if len(gradients) == 2:
            # Two parameters: the second does not move the rows of the first.
            outs = list(outs)
            (gain, bias), ((out, adds), (bias_out, adds_bias)) = gradients, outs
            # Parameters of another dtype than the gradient: the bias has a copy of it.
            have_one_grad = gain.grad is bias.values and not sums_one_by_one(gain.grad)
            if have_one_grad and adds == adds_bias and out.dtype == bias_out.dtype:
                gain.write_at_once(run, out, adds, bias_out)
                return
        super().write(gradients, run, outs)


class _Gain(NamedTuple):
    """sum_t dy_t * n(x_t); on a GPU the terms are never in memory."""

    grad: Tensor
    x: Tensor
    """The input of the norm; n(x) where `norm` is empty."""
    dtype: torch.dtype
    norm: tuple[Tensor, ...] = ()
    """A LayerNorm's mean and reciprocal deviation of each token, and its gain; else empty."""

    def write(self, run: DomainRun, out: Tensor, adds: bool) -> None:
        if not sums_one_by_one(self.grad):
            self.write_at_once(run, out, adds)
        elif not self.norm:
            Sum(self.grad * self.x).write(run, out, adds)
        else:
            for domains, part in run.equal_parts:
                self._write_by_torch(part, out[domains], adds)

    def write_at_once(
        self, run: DomainRun, out: Tensor, adds: bool, bias_out: Tensor | None = None
    ) -> None:
        """As `write`, in one launch; `bias_out` gets the sums of the gradient alone."""
        # The kernel multiplies dy_t by (x_t - mean_t) rstd_t while it sums; `mean_T` None: by x_t.
        grad_TN, x_TN = (run.tokens(values, out[0].numel()) for values in (self.grad, self.x))
        mean_T, rstd_T = [run.tokens(values) for values in self.norm[:2]] or (None, None)
        segment_sum(
            *(grad_TN, out.view(len(out), 1, -1)),
            add=adds,
            borders=None if run.is_equal else run.token_borders(len(grad_TN), out.device),
            factor_TD=x_TN,
            mean_T=mean_T,
            rstd_T=rstd_T,
            bias_GRD=None if bias_out is None else bias_out.view(len(out), 1, -1),
        )

    def _write_by_torch(self, part: DomainRun, out: Tensor, adds: bool) -> None:
        """One domain after another, by torch's kernel, which is fastest on a CPU."""
        mean, rstd, weight = self.norm
        ones = [1] * weight.dim()
        # [G, tokens of a domain, *shape of the gain]; statistics with ones for that shape.
        tensors = [part.by_domain(values, *weight.shape) for values in (self.grad, self.x)]
        tensors += [part.by_domain(values, *ones) for values in (mean, rstd)]
        gains = [
            _layer_norm_backward(grad, x, (mean, rstd, weight), [False, True, False])[1]
            for grad, x, mean, rstd in zip(*tensors, strict=True)
        ]
        put(out, torch.stack(gains), adds)


def _layer_norm_backward(
    grad: Tensor, x: Tensor, norm: Sequence[Tensor], output_mask: list[bool]
) -> Sequence[Tensor]:
    """Gradients of x, gain and bias, those that `output_mask` names."""
    mean, rstd, weight = norm
    gradients: Sequence[Tensor] = torch.ops.aten.native_layer_norm_backward(
        grad, x, list(weight.shape), mean, rstd, weight, None, output_mask
    )
    return gradients


def _is_widened(x: Tensor) -> bool:
    """Whether autocast runs torch's LayerNorm in float32: on a GPU it does, on a CPU not."""
    return autocast_dtype(x) is not None and x.device.type != "cpu"


class _GainRule(LayerRule):
    """y = x w, where `prepare` returns x = n(module's input)."""

    params = ("weight",)

    def forward(self, module: Any, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The output; saves the weight."""
        return x * module.weight, (module.weight,)

    def input_gradient(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Tensor:
        """dx = dy w."""
        return grad * saved[0]

    def gradients(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Gradients:
        """The gradient of the gain."""
        yield module.weight, _Gain(grad, x, torch.promote_types(grad.dtype, x.dtype))

    def terms(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Mapping[str, Tensor]:
        """Those of the gain."""
        return {"weight": grad * x}


class RMSNormRule(_GainRule):
    """torch's RMSNorm, which rounds once, after the weight."""

    def output_dtype(self, x: Tensor) -> torch.dtype | None:
        """The dtype of x; on a GPU under autocast float32, from torch 2.12 on."""
        return None if _is_widened(x) and _IS_RMS_WIDENED else x.dtype

    def prepare(self, module: Any, x: Tensor) -> Tensor:
        """n(x), in float32 at least."""
        return F.rms_norm(exact(x), module.normalized_shape, None, module.eps)


class LlamaRMSNormRule(_GainRule):
    """transformers' RMSNorms, which round n(x) to the dtype of x before they multiply."""

    def prepare(self, module: Any, x: Tensor) -> Tensor:
        """n(x), in the dtype of x."""
        # float32 even for float64 x, as transformers has it.
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        return (wide * scale).to(x.dtype)
