"""Norm of every example's gradient, from one ordinary backward pass and without those gradients.

What an example adds to the gradient of a parameter is a sum over its tokens, and the rules of
`doge_fast.stacked.layers` know its terms from the input of a module and the gradient of its output;
the norms follow from them (`doge_fast.stacked.layers.token_sums`). Hooks take both, and leave the
pass as it is: `p.grad` is what it always is.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from doge_fast.stacked.layers.batch import ExampleAxis, only_input
from doge_fast.stacked.layers.registry import rule_of
from doge_fast.stacked.layers.rule import LayerRule
from doge_fast.stacked.layers.token_sums import Outer, exact, squared_norms


class ExampleNorms:
    """Squared norms of every example's gradient of every parameter.

    Args:
        model: whose modules get hooks during a pass.
        params: the parameters that count, by name.

    Raises:
        ValueError: parameters stand in modules that there is no rule for (see `without_rule`).
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
        self._examples = ExampleAxis("Norms per example need", "Run one example after another.")
        self._uses: dict[str, list[Outer | Tensor]] = {}
        self._num_uses: dict[str, int] = {}
        self._probes: dict[str, _Probe] | None = {}
        self.squared: dict[str, Tensor] = {}
        """{name: [B]} of the last pass."""

    @contextmanager
    def recording(self, num_examples: int) -> Iterator[None]:
        """Record one forward and one backward pass; then `squared` is {name: [B]}.

        The first time what was recorded is compared with what `p.grad` became, so that a parameter
        that something else than its own module uses does not go unnoticed.

        Args:
            num_examples: B; what the modules get has them in front.

        Raises:
            RuntimeError: a module got something else, a parameter is used outside its module, or
                there was more than one pass.
        """
        self._examples.begin(num_examples)
        self._uses = {name: [] for name in self._params}
        self._num_uses = dict.fromkeys(self._params, 0)
        self.squared = {}
        if self._probes is not None:
            self._probes = {name: _Probe(param) for name, param in self._params.items()}
        handles = [
            module.register_forward_hook(partial(self._after_forward, rule), with_kwargs=True)
            for module, rule in self._owners
        ]
        try:
            yield
            with torch.autocast(next(iter(self._params.values())).device.type, enabled=False):
                self._settle()
        finally:
            for handle in handles:
                handle.remove()
            self._uses = {}

    def _after_forward(
        self, rule: LayerRule, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Tensor | None:
        """Count the module's parameters as used, and wait for the gradient of the output."""
        if not torch.is_grad_enabled() or not output.requires_grad:
            return None
        given = only_input(module, args, kwargs)
        x = self._examples.in_front(given, module)
        if x.dim() > given.dim():
            # Positions without a batch.
            output = output[None]
        if len(output) == 1:
            output = output.expand(self._examples.num_examples, *output.shape[1:])
        for param in module.parameters(recurse=False):
            if id(param) in self._names:
                self._num_uses[self._names[id(param)]] += 1
        output.register_hook(partial(self._after_backward, rule, module, x.detach()))
        return output  # type: ignore[no-any-return]

    def _after_backward(self, rule: LayerRule, module: nn.Module, x: Tensor, grad: Tensor) -> None:
        size = self._examples.num_examples
        if len(grad) != size:
            x, grad = (rearrange(part, "(b t) f -> b t f", b=size) for part in (x, grad))
        elif x.is_floating_point():
            x = x.expand(size, *x.shape[1:])
        # Where backward was called under autocast.
        with torch.autocast(grad.device.type, enabled=False):
            terms = rule.gradients(module, grad.detach(), rule.prepare(module, x))
            for param, gradient in terms:
                if param is not None and id(param) in self._names:
                    use = gradient.per_example(param.shape)
                    self._add(self._names[id(param)], use, grad.dtype)

    def _add(self, name: str, use: Outer | Tensor, dtype: torch.dtype) -> None:
        if name in self.squared or not self._num_uses:
            raise RuntimeError(
                f"Gradient norms per example need a single backward pass; {name} received another "
                "gradient after it. Run one example after another."
            )
        if self._probes is not None:
            self._probes[name].add(use, dtype)
        uses = self._uses[name]
        uses.append(use)
        if len(uses) == self._num_uses[name]:
            self.squared[name] = squared_norms(uses, self._params[name].shape)
            uses.clear()

    def _settle(self) -> None:
        """Complete parameters with fewer gradients than uses, and compare all with `p.grad`."""
        for name, param in self._params.items():
            if name not in self.squared:
                uses, size = self._uses[name], self._examples.num_examples
                self.squared[name] = (
                    squared_norms(uses, param.shape)
                    if uses
                    else torch.zeros(size, dtype=param.dtype, device=param.device)
                )
        outside = [name for name, probe in (self._probes or {}).items() if not probe.agrees()]
        if outside:
            raise RuntimeError(
                f"{', '.join(outside[:3])}{', ...' * (len(outside) > 3)} got another gradient than "
                "that of the module that owns it: something else uses it too, or couples the "
                "examples' paths to it. Run one example after another."
            )
        self._probes = None


class _Probe:
    """Compares u^T G v of what was recorded and of what `p.grad` became; u, v random signs."""

    def __init__(self, param: Tensor) -> None:
        self._param = param
        rows = param.shape[0] if param.dim() else 1
        generator = torch.Generator().manual_seed(rows)
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        signs = [
            torch.randint(0, 2, (size,), generator=generator).mul(2).sub(1).to(param.device, wide)
            for size in (rows, param.numel() // max(rows, 1))
        ]
        self._left, self._right = signs
        self._before = self._seen_by_autograd()
        self._recorded = self._size = torch.zeros((), dtype=torch.float64, device=param.device)
        self._tolerance = 256 * torch.finfo(wide).eps

    def add(self, use: Outer | Tensor, dtype: torch.dtype) -> None:
        """One more part of the gradient, that autograd has computed in `dtype`."""
        if isinstance(use, Outer):
            is_index = use.left.dim() == 2
            left_BT = self._left[use.left] if is_index else exact(use.left) @ self._left
            terms = left_BT * (exact(use.right) @ self._right)
        else:
            terms = self._product(exact(use).flatten(1))
        self._recorded = self._recorded + terms.sum(dtype=torch.float64)
        self._size = self._size + terms.abs().sum(dtype=torch.float64)
        # Each product of a narrow type is off by half an ulp, and so is what autograd made of them.
        self._tolerance = max(self._tolerance, 4 * torch.finfo(dtype).eps)

    def agrees(self) -> bool:
        """Whether nothing else has gone into `p.grad`."""
        after = self._seen_by_autograd()
        size = self._size + self._before.abs() + after.abs()
        return bool((after - self._before - self._recorded).abs() <= self._tolerance * size)

    def _seen_by_autograd(self) -> Tensor:
        grad = self._param.grad
        if grad is None:
            return torch.zeros((), dtype=torch.float64, device=self._param.device)
        return self._product(exact(grad).flatten()).double()

    def _product(self, values: Tensor) -> Tensor:
        rows = values.reshape(*values.shape[:-1], len(self._left), -1)
        return rows @ self._right @ self._left


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
