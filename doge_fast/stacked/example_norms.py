"""Norm of every example's gradient, from one ordinary backward pass.

The gradient of an example is a sum over its tokens. The rules of `doge_fast.stacked.layers` compute
its terms from a module's input and the gradient of its output. Hooks read both and change nothing
in the pass. The gradients of a few examples exist at a time; their norms are kept.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from doge_fast.stacked.layers.batch import DomainRun, ExampleAxis, only_input
from doge_fast.stacked.layers.registry import rule_of
from doge_fast.stacked.layers.rule import LayerRule
from doge_fast.stacked.layers.token_sums import TokenSum, wide_dtype

# Elements of one parameter's gradients that exist at the same time.
MOST_ELEMENTS = 1 << 25


class ExampleNorms:
    """Squared norms of every example's gradient of every parameter in `params`, by name.

    Needs memory for a few gradients of the largest parameter. The first pass also needs a copy of
    all gradients.

    Raises:
        ValueError: a module that owns some of `params` has no rule (see `without_rule`).
    """

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor]) -> None:
        unknown = without_rule(model, params)
        if unknown:
            raise ValueError(
                "Gradient norms per example can be computed for modules with a rule: Linear, "
                "Conv1D, Embedding, LayerNorm, RMSNorm and those given to "
                "doge_fast.stacked.layers.register; not for "
                f"{', '.join(unknown[:3])}{', ...' * (len(unknown) > 3)}. Run one example after "
                "another."
            )
        self._params = dict(params)
        self._names = {id(param): name for name, param in params.items()}
        self._owners = [(module, rule) for _, module, rule in _owners(model, params) if rule]
        self._examples = ExampleAxis()
        self._uses: dict[str, list[TokenSum]] = {}
        self._num_uses: dict[str, int] = {}
        self._sums: dict[str, _Sum] | None = {}
        self.squared: dict[str, Tensor] = {}
        """{name: [B]} of the last pass."""

    @contextmanager
    def recording(self, num_examples: int) -> Iterator[None]:
        """Record one forward and one backward pass on B examples; then `squared` is {name: [B]}.

        The first pass compares the sum over the examples with the change of `p.grad`. They differ
        if a parameter is also used outside the module that owns it.

        Raises:
            RuntimeError: the first dimension of a module's input is not B, a parameter is used
                outside its module, or there was more than one pass.
        """
        self._examples.begin(num_examples)
        self._uses = {name: [] for name in self._params}
        self._num_uses = dict.fromkeys(self._params, 0)
        self.squared = {}
        if self._sums is not None:
            self._sums = {name: _Sum(param) for name, param in self._params.items()}
        handles = [
            module.register_forward_hook(partial(self._after_forward, rule), with_kwargs=True)
            for module, rule in self._owners
        ]
        try:
            yield
            with torch.autocast(next(iter(self._params.values())).device.type, enabled=False):
                self._finish()
        finally:
            for handle in handles:
                handle.remove()
            self._uses = {}

    def _after_forward(
        self, rule: LayerRule, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Tensor | None:
        if not torch.is_grad_enabled() or not output.requires_grad:
            return None
        given = only_input(module, args, kwargs)
        x = self._examples.in_front(given, module)
        if x is not given:
            # All examples share this input. The expanded output has a gradient for each example.
            rest = output.shape[1:] if given.dim() == x.dim() else output.shape
            output = output.expand(len(x), *rest)
        for param in module.parameters(recurse=False):
            if id(param) in self._names:
                self._num_uses[self._names[id(param)]] += 1
        output.register_hook(partial(self._after_backward, rule, module, x.detach()))
        return output  # type: ignore[no-any-return]

    def _after_backward(self, rule: LayerRule, module: nn.Module, x: Tensor, grad: Tensor) -> None:
        # backward() may have been called under autocast.
        with torch.autocast(grad.device.type, enabled=False):
            prepared = rule.prepare(module, x)
            for param, gradient in rule.gradients(module, grad.detach(), prepared):
                if param is not None and id(param) in self._names:
                    name = self._names[id(param)]
                    if self._sums is not None:
                        self._sums[name].note_terms(grad, prepared)
                    self._add(name, gradient)

    def _add(self, name: str, gradient: TokenSum) -> None:
        if name in self.squared:
            raise RuntimeError(
                f"Gradient norms per example need a single backward pass; {name} received another "
                "gradient after it. Run one example after another."
            )
        self._uses[name].append(gradient)
        if len(self._uses[name]) == self._num_uses[name]:
            self._take_norms(name)

    def _take_norms(self, name: str) -> None:
        param, size = self._params[name], self._examples.num_examples
        uses, dtype = self._uses.pop(name), wide_dtype(param.dtype)
        if not uses:
            self.squared[name] = torch.zeros(size, dtype=dtype, device=param.device)
            return
        step = max(1, MOST_ELEMENTS // max(1, param.numel()))
        squared = []
        for first in range(0, size, step):
            last = min(size, first + step)
            # Each example is a row.
            run = DomainRun(0, range(first, last + 1), size)
            grads = torch.empty(last - first, *param.shape, dtype=dtype, device=param.device)
            for index, use in enumerate(uses):
                use.write(run, grads, index > 0)
            # Row by row first: a float32 norm of millions of elements is imprecise.
            rows = grads.reshape(last - first, -1, *param.shape[-1:])
            norms = torch.linalg.vector_norm(rows, dim=-1).reshape(last - first, -1)
            squared.append(norms.square().sum(1))
            if self._sums is not None:
                self._sums[name].add(grads)
        self.squared[name] = torch.cat(squared)

    def _finish(self) -> None:
        for name in self._params:
            if name not in self.squared:
                self._take_norms(name)
        outside = [name for name, each in (self._sums or {}).items() if not each.agrees()]
        if outside:
            raise RuntimeError(
                f"The gradient of {', '.join(outside[:3])}{', ...' * (len(outside) > 3)} is not "
                "the sum over the examples: it is used outside the module that owns it, or the "
                "model mixes examples. Run one example after another."
            )
        self._sums = None


class _Sum:
    """The sum over the examples, compared with the change of `p.grad`."""

    def __init__(self, param: Tensor) -> None:
        self._param = param
        self._before = None if param.grad is None else param.grad.clone()
        self._sum = torch.zeros_like(param, dtype=wide_dtype(param.dtype), requires_grad=False)
        self._tolerance = 256 * torch.finfo(self._sum.dtype).eps
        self._terms = torch.zeros((), dtype=torch.float64, device=param.device)

    def note_terms(self, grad: Tensor, x: Tensor) -> None:
        """Bound the rounding error by the size and the dtype of the terms."""
        # Not by the size of the sum: that of an attention's key bias is zero but for rounding.
        largest = x.norm(dim=-1).max() if x.is_floating_point() else 0
        self._terms = self._terms + grad.norm(dim=-1).sum(dtype=torch.float64) * (1 + largest)
        # Half an ulp for each of our 16-bit products, and half an ulp for autograd's.
        self._tolerance = max(self._tolerance, 4 * torch.finfo(grad.dtype).eps)

    def add(self, grads: Tensor) -> None:
        """Add the gradients of some examples."""
        self._sum += grads.sum(0)

    def agrees(self) -> bool:
        """Whether `p.grad` changed by the sum."""
        after = self._param.grad
        gained = torch.zeros_like(self._sum) if after is None else after.to(self._sum.dtype)
        if self._before is not None:
            gained = gained - self._before
        return bool((gained - self._sum).norm() <= self._tolerance * self._terms)


def without_rule(model: nn.Module, params: Mapping[str, Tensor]) -> list[str]:
    """Modules that own some of `params` and have no rule, as "name (class)"."""
    return [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module, rule in _owners(model, params)
        if rule is None
    ]


def _owners(
    model: nn.Module, params: Mapping[str, Tensor]
) -> Iterator[tuple[str, nn.Module, LayerRule | None]]:
    """Modules that own some of `params`, by name, and their rules."""
    counted = {id(param) for param in params.values()}
    for name, module in model.named_modules():
        if any(id(param) in counted for param in module.parameters(recurse=False)):
            yield name, module, rule_of(module)
