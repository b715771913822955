"""How a module class computes its output and the gradients of its parameters."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from doge_fast.stacked.layers.batch import DomainRun
from doge_fast.stacked.layers.token_sums import TokenSum

Gradients = Iterator[tuple[nn.Parameter | None, TokenSum]]
"""(parameter, its `Outer`, `Lookup` or `Sum`); the parameter is None if the module lacks it."""


class LayerRule(ABC):
    """The rule of a module class whose forward takes one tensor and treats examples one by one.

    A stacked pass runs `forward` and `input_gradient` once for all examples. The row of a domain is
    the sum of its terms in `gradients`.

    A rule defines `forward`, `gradients`, `input_gradient` unless the input is indices, and
    `params` unless these are weight and bias. x is [B, ..., features], [B * T, features] if the
    model flattens its batch, or integer indices [B, ...]. Autograd differentiates `prepare` alone.
    `torch.compile` traces `prepare`, `forward`, `input_gradient` and `terms`. Autocast may be on in
    `prepare` and `forward`; the gradient of the output has the output's shape and dtype.
    """

    params: ClassVar[tuple[str, ...]] = ("weight", "bias")
    """The parameters that `gradients` yields. The rule does not apply to a module with others."""

    def output_dtype(self, x: Tensor) -> torch.dtype | None:
        """The dtype that the output is cast to, from the module's input x; None: it is not cast."""
        return None

    def covers(self, module: Any) -> bool:
        """Whether the rule applies to this module of its class.

        False if a parameter is computed from others (as by pruning), if one parameter has two
        names, or if the module has others than `params`.
        """
        params = {name: param for name, param in module._parameters.items() if param is not None}
        missing = [name for name in self.params if name not in params]
        is_computed = any(getattr(module, name, None) is not None for name in missing)
        is_shared = len(set(map(id, params.values()))) < len(params)
        return params.keys() <= set(self.params) and not is_computed and not is_shared

    def prepare(self, module: Any, x: Tensor) -> Tensor:
        """The x of the other methods, from the module's input; autograd differentiates this."""
        return x

    @abstractmethod
    def forward(self, module: Any, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The output, and the tensors that the methods below receive as `saved`."""

    def input_gradient(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Tensor:
        """The gradient of the loss with respect to x; `grad` is that of the output."""
        raise NotImplementedError(f"{type(self).__name__} has no input_gradient().")

    @abstractmethod
    def gradients(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Gradients:
        """The gradients of the parameters as sums over tokens."""

    def terms(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Mapping[str, Tensor]:
        """{name of a parameter: its terms, [B, ..., *shape]}, which a compiled graph sums.

        Of parameters whose `gradients` are sums of cheap terms. torch.compile traces this method,
        and sums the terms of each example where it makes them, so that the operator that writes the
        rows does not read them again. The default leaves all parameters to `gradients`.
        """
        return {}

    def write(
        self, gradients: Sequence[TokenSum], run: DomainRun, outs: Iterable[tuple[Tensor, bool]]
    ) -> None:
        """Write the `gradients` of trained parameters; `outs` yields (out, adds) for each.

        Finish one before taking the next of `outs`: a second gradient of one parameter may move the
        memory of its rows.
        """
        for gradient, (out, adds) in zip(gradients, outs, strict=True):
            gradient.write(run, out, adds)
