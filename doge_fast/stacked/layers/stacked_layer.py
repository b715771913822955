"""A module with a rule in a stacked pass: one forward for all examples, rows in the backward.

Autograd sees the gradient of the input alone; what the parameters' gradients are made of goes to
the rows through one opaque operator, `torch.ops.doge_fast.fill_rows_`: a compiler sees that it
changes a token and keeps it, and the blocks behind it may be allocated when the first gradient
appears.
"""

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from doge_fast.stacked.layers.batch import ExampleAxis, only_input
from doge_fast.stacked.layers.rule import LayerRule
from doge_fast.stacked.layers.token_sums import TokenSum

Write = Callable[[Tensor, TokenSum], object]
"""`write(param, gradient)` fills the rows of a parameter."""


class StackedLayer:
    """Runs a module by its rule.

    Args:
        module: of a class that has a rule.
        rule: its own.
        examples: of the pass under way.
        write: takes the gradient of each parameter, as a sum over tokens.
    """

    def __init__(
        self, module: nn.Module, rule: LayerRule, examples: ExampleAxis, write: Write
    ) -> None:
        self.module = module
        self.rule = rule
        self._examples = examples
        self._write = write
        self._original = module.forward
        # What a compiled backward pass knows it by: a graph may hold a number, not an object.
        self.number = next(_numbers)
        _layers[self.number] = self
        params = module.parameters(recurse=False)
        self._token = torch.zeros(1, device=next(params).device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output; takes the place of its forward."""
        if not torch.is_grad_enabled():
            return self._original(*args, **kwargs)
        given = only_input(self.module, args, kwargs)
        x = self._examples.in_front(given, self.module)
        num_copies = 1
        if x.shape[0] == 1 and x.is_floating_point():
            x = x.expand(self._examples.num_examples, *x.shape[1:])
        elif x.shape[0] == 1:
            num_copies = self._examples.num_examples
        x = self.rule.prepare(self.module, x)
        params = self.module._parameters.values()
        output = _Layer.apply(self, num_copies, x, self._token, *params)  # type: ignore[no-untyped-call]
        return output.to(given.dtype) if self.rule.keeps_dtype else output

    def fill_rows(self, tensors: list[Tensor]) -> None:
        """Write the rows from the gradient of the output, x and what the forward has saved."""
        for param, gradient in self.rule.gradients(self.module, *tensors):
            if param is not None:
                self._write(param, gradient)


class _Layer(torch.autograd.Function):
    """A rule's forward and input gradient; parameters are inputs, so that the output has a graph.

    The output is repeated `num_copies` times where all examples share one input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: StackedLayer,
        num_copies: int,
        x: Tensor,
        token: Tensor,
        *params: Tensor | None,
    ) -> Tensor:
        made = layer.rule.forward(layer.module, x)
        if isinstance(made, Tensor):
            raise RuntimeError(
                f"forward() of {type(layer.rule).__name__} must return the output and the tensors "
                "that are saved; got a tensor. Return (output, ())."
            )
        output, saved = made
        ctx.save_for_backward(x, *saved)
        ctx.layer, ctx.token, ctx.num_others = layer, token, 1 + len(params)
        return output.expand(num_copies, *output.shape[1:]) if num_copies > 1 else output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer, tensors = ctx.layer, [grad, *ctx.saved_tensors]
        if torch.compiler.is_compiling():
            fill_rows_(tensors, ctx.token, layer.number)
        else:
            layer.fill_rows(tensors)
        grad_x = None
        if ctx.needs_input_grad[2]:
            grad_x = layer.rule.input_gradient(layer.module, *tensors)
        return None, None, grad_x, *[None] * ctx.num_others


_layers: WeakValueDictionary[int, StackedLayer] = WeakValueDictionary()
_numbers = count()


# A graph that was captured would replay the kernels and not what the host keeps of the rows: which
# are written, and whether they add up. Inductor leaves an operator with this tag outside.
@torch.library.custom_op(
    "doge_fast::fill_rows_", mutates_args={"token"}, tags=[torch.Tag.cudagraph_unsafe]
)
def fill_rows_(tensors: list[Tensor], token: Tensor, number: int) -> None:
    """Write rows of the flat buffer from what the backward of a module has at hand.

    Args:
        tensors: gradient of the output first, then x and what the module's rule has saved.
        token: changes, in the eyes of a compiler; nothing is written to it.
        number: of the `StackedLayer`.
    """
    _layers[number].fill_rows(tensors)


@fill_rows_.register_fake
def _(tensors: list[Tensor], token: Tensor, number: int) -> None:
    return None
