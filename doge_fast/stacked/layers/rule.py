"""How a module class computes its output and the gradients of its parameters."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from doge_fast.stacked.layers.token_sums import TokenSum


class LayerRule(ABC):
    """The rule of a module class whose forward takes one tensor and treats examples one by one.

    A stacked pass (`doge_fast.stacked.stacked`) runs `forward` and `input_gradient` once for all
    examples. What `gradients` returns gives the row of every domain, and the norm of every
    example's gradient.

    A rule has `forward`, `gradients`, `params` where they are not weight and bias, and
    `input_gradient` unless the input is indices. x is [B, ..., features], or [B * T, features]
    where a model flattens its batch, or indices of an integer dtype, [B, ...]. Only `prepare` is
    differentiated by autograd. `torch.compile` traces `prepare`, `forward` and `input_gradient`.
    Autocast may be on in the first two; a gradient has the dtype of its output.
    """

    params: ClassVar[tuple[str, ...]] = ("weight", "bias")
    """Names of the parameters that the rule has gradients for. A module with others has no rule."""

    keeps_dtype: ClassVar[bool] = False
    """Whether the output is rounded to the dtype of the module's input, whatever that of x."""

    def covers(self, module: Any) -> bool:
        """Whether the rule is right for this module of its class.

        False where a parameter is computed from others, by pruning say, or where there are more.
        """
        own = {name for name, param in module._parameters.items() if param is not None}
        others = [name for name in self.params if name not in own]
        is_computed = any(getattr(module, name, None) is not None for name in others)
        return own <= set(self.params) and not is_computed

    def prepare(self, module: Any, x: Tensor) -> Tensor:
        """What the methods below call x, from the input, by operations that autograd knows."""
        return x

    @abstractmethod
    def forward(self, module: Any, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The output, and the tensors that the methods below get as `saved`."""

    def input_gradient(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Tensor:
        """The gradient of the loss with respect to x.

        Args:
            module: of the class.
            grad: of the output, and of its shape.
            x: as `prepare` returned it.
            saved: as `forward` returned them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no input_gradient().")

    @abstractmethod
    def gradients(
        self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor
    ) -> Iterator[tuple[nn.Parameter | None, TokenSum]]:
        """Each parameter, or None where the module has none, and its `Outer`, `Lookup` or `Sum`.

        Args:
            module: of the class.
            grad: of the output, and of its shape.
            x: as `prepare` returned it.
            saved: as `forward` returned them; empty for norms per example, which do not run it.
        """
