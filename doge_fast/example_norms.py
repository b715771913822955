"""Norm of every example's gradient, from one ordinary backward pass and without those gradients.

What an example b adds to the gradient of a matrix is a sum of outer products over its tokens,

    G_b        =  sum_t  l_bt r_bt^T          (Linear: l the output's gradient, r the input)
    ||G_b||^2  =  sum_ts <l_bt, l_bs> <r_bt, r_bs>

so products between tokens give its norm, or G_b itself for one example at a time, whichever is
less work. A matrix that is used more than once, as embedding and output matrix say, has the cross
terms between its uses too. Gains and biases are vectors, of which each example has its own.

The pass itself is not touched: hooks look at what each module gets and at the gradient of what it
gives, and `p.grad` is what it always is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Elements of the largest array that the products between tokens make at once.
MOST_ELEMENTS = 1 << 25


class Outer(NamedTuple):
    """Each example's gradient of a matrix, sum_t left_bt right_bt^T."""

    left: Tensor
    """[B, T, rows], or [B, T] int64: the row whose entry is one."""
    right: Tensor
    """[B, T, columns]."""


# An `Outer`, or [B, *shape]: the gradient itself.
Use = Outer | Tensor
# (module, input, gradient of the output) -> what each of its parameters has from them.
Rule = Callable[[Any, Tensor, Tensor], Iterator[tuple[Tensor | None, Use]]]


class ExampleNorms:
    """Squared norms of every example's gradient of every parameter.

    Args:
        model: whose modules are listened to.
        params: the parameters that count, by name.

    Raises:
        ValueError: parameters stand in modules that there is no rule for (see `without_rule`).
    """

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor]) -> None:
        unknown = without_rule(model, params)
        if unknown:
            raise ValueError(
                "Norms per example are known for Linear, Conv1D, Embedding, LayerNorm and RMSNorm; "
                f"not for {', '.join(unknown[:3])}{', ...' * (len(unknown) > 3)}. Run one example "
                "after another."
            )
        self._params = dict(params)
        self._names = {id(param): name for name, param in params.items()}
        self._owners = [(module, rule) for _, module, rule in _owners(model, params) if rule]
        self._num_examples = 0
        self._lengths: set[int] = set()
        self._uses: dict[str, list[Use]] = {}
        self._num_uses: dict[str, int] = {}
        self._probes: dict[str, _Probe] | None = {}
        self.squared: dict[str, Tensor] = {}

    @contextmanager
    def listening(self, num_examples: int) -> Iterator[None]:
        """Listen to one forward and one backward pass; then `squared` is {name: [B]}.

        The first time what was heard is compared with what `p.grad` became, so that a parameter
        that something else than its own module uses does not go unnoticed.

        Args:
            num_examples: B; what the modules get has them in front.

        Raises:
            RuntimeError: a module got something else, a parameter is used outside its module, or
                there was more than one pass.
        """
        self._num_examples, self._lengths = num_examples, set()
        self._uses = {name: [] for name in self._params}
        self._num_uses = dict.fromkeys(self._params, 0)
        self.squared = {}
        if self._probes is not None:
            self._probes = {name: _Probe(param) for name, param in self._params.items()}
        handles = [
            module.register_forward_hook(partial(self._heard, rule), with_kwargs=True)
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

    def _heard(
        self, rule: Rule, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any
    ) -> Tensor | None:
        if not torch.is_grad_enabled() or not output.requires_grad:
            return None
        x = args[0] if args else next(iter(kwargs.values()))
        x, heard = self._examples_first(module, x, output)
        for param in module.parameters(recurse=False):
            if id(param) in self._names:
                self._num_uses[self._names[id(param)]] += 1
        received = partial(self._received, rule, module, x.detach())
        heard.register_hook(received)  # type: ignore[no-untyped-call]
        return heard

    def _examples_first(
        self, module: nn.Module, x: Tensor, output: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Input and output with B in front; what is the same for all examples is repeated."""
        size, shape = self._num_examples, list(x.shape)
        if isinstance(module, nn.Embedding):
            if x.dim() == 1 and len(x) != size:
                # Positions without a batch.
                x, output = x[None], output[None]
            if x.dim() > 1 and len(x) == 1:
                x, output = x.expand(size, *x.shape[1:]), output.expand(size, *output.shape[1:])
        if len(x) == size and (x.dim() > 1 or not isinstance(module, nn.Embedding)):
            if output.dim() > 2:
                self._lengths.add(x.shape[1])
            return x, output
        if x.dim() == 2 and len(x) % size == 0 and len(x) // size in self._lengths:
            # One token below the other, and so comes the gradient.
            return x, output
        raise RuntimeError(
            f"Norms per example need the {size} examples of the batch in the first dimension; a "
            f"{type(module).__name__} got shape {shape}. Run one example after another."
        )

    def _received(self, rule: Rule, module: nn.Module, x: Tensor, grad: Tensor) -> None:
        size = self._num_examples
        if len(x) != size:
            x, grad = (each.reshape(size, -1, each.shape[-1]) for each in (x, grad))
        # Where backward was called under autocast.
        with torch.autocast(grad.device.type, enabled=False):
            for param, use in rule(module, x, grad.detach()):
                if param is not None and id(param) in self._names:
                    self._add(self._names[id(param)], use, grad.dtype)

    def _add(self, name: str, use: Use, dtype: torch.dtype) -> None:
        if name in self.squared or not self._num_uses:
            raise RuntimeError(
                f"Norms per example are those of one backward pass; {name} got a gradient after "
                "its own was complete. Run one example after another."
            )
        if self._probes is not None:
            self._probes[name].add(use, dtype)
        uses = self._uses[name]
        uses.append(use)
        if len(uses) == self._num_uses[name]:
            self.squared[name] = squared_norms(uses, self._params[name].shape)
            uses.clear()

    def _settle(self) -> None:
        """What got fewer gradients than it has uses, or none."""
        for name, param in self._params.items():
            if name not in self.squared:
                uses = self._uses[name]
                self.squared[name] = (
                    squared_norms(uses, param.shape)
                    if uses
                    else torch.zeros(self._num_examples, dtype=param.dtype, device=param.device)
                )
        outside = [name for name, probe in (self._probes or {}).items() if not probe.agrees()]
        if outside:
            raise RuntimeError(
                f"{', '.join(outside[:3])}{', ...' * (len(outside) > 3)} got another gradient than "
                "that of the module that owns it: something else uses it too, or couples the "
                "examples' paths to it. Run one example after another."
            )
        self._probes = None


def squared_norms(uses: Sequence[Use], shape: torch.Size) -> Tensor:
    """[B] squared norms of every example's gradient, the sum over `uses`.

    Args:
        uses: of one parameter, at least one.
        shape: the parameter's.
    """
    if all(isinstance(use, Outer) for use in uses):
        outers = [use for use in uses if isinstance(use, Outer)]
        if _is_less_between_tokens(outers, shape):
            return _between_tokens(outers)
    if all(isinstance(use, Tensor) for use in uses):
        whole_B = torch.stack([_exact(use) for use in uses if isinstance(use, Tensor)]).sum(0)
        return whole_B.flatten(1).square().sum(1)
    num_examples = len(uses[0].left if isinstance(uses[0], Outer) else uses[0])
    squared = []
    for example in range(num_examples):
        gradient = _gradient(uses[0], example, shape)
        for use in uses[1:]:
            gradient = gradient + _gradient(use, example, shape)
        squared.append(gradient.square().sum())
    return torch.stack(squared)


def _is_less_between_tokens(uses: Sequence[Outer], shape: torch.Size) -> bool:
    """Whether products between tokens are fewer than those of the gradient itself."""
    num_rows, num_columns = shape

    def width(*lefts: Tensor) -> int:
        return 0 if any(left.dim() == 2 for left in lefts) else num_rows

    between = sum(
        one.right.shape[1] * other.right.shape[1] * (num_columns + width(one.left, other.left))
        for one, other in combinations_with_replacement(uses, 2)
    )
    return between <= sum(use.right.shape[1] * num_columns * width(use.left) for use in uses) + (
        num_rows * num_columns
    )


def _between_tokens(uses: Sequence[Outer]) -> Tensor:
    num_examples, num_tokens = len(uses[0].right), max(use.right.shape[1] for use in uses)
    widest = max(num_tokens, *(max(use.left.shape[-1], use.right.shape[-1]) for use in uses))
    step = max(1, MOST_ELEMENTS // (num_tokens * widest))
    found = []
    for first in range(0, num_examples, step):
        cut = [
            Outer(_exact(use.left[first : first + step]), _exact(use.right[first : first + step]))
            for use in uses
        ]
        pairs = combinations_with_replacement(range(len(cut)), 2)
        squares = [(1 if i == j else 2) * _inner(cut[i], cut[j]) for i, j in pairs]
        found.append(torch.stack(squares).sum(0))
    # A sum of both signs, so that rounding may leave less than nothing of it.
    return torch.cat(found).clamp(min=0)


def _inner(one: Outer, other: Outer) -> Tensor:
    """[B] inner products of two gradients of each example."""
    right_BTS = one.right @ other.right.mT
    return (_lefts(one.left, other.left).to(right_BTS.dtype) * right_BTS).sum((1, 2))


def _lefts(one: Tensor, other: Tensor) -> Tensor:
    """[B, T, S] inner products of the left vectors, rows that hold a one among them."""
    if one.dim() == 2 and other.dim() == 2:
        return one[:, :, None] == other[:, None, :]
    if one.dim() == 2:
        # [B, S, rows] at the rows named by one: [B, S, T].
        index = one[:, None, :].expand(-1, other.shape[1], -1)
        return other.gather(2, index).mT
    if other.dim() == 2:
        return _lefts(other, one).mT
    return one @ other.mT


def _gradient(use: Use, example: int, shape: torch.Size) -> Tensor:
    """[*shape] the gradient of one example."""
    if isinstance(use, Tensor):
        return _exact(use[example])
    left, right = _exact(use.left[example]), _exact(use.right[example])
    if left.dim() == 1:
        return right.new_zeros(shape).index_add_(0, left, right)
    return left.mT @ right


def _exact(values: Tensor) -> Tensor:
    """In float32 at least; indices as they are."""
    is_narrow = values.dtype in (torch.float16, torch.bfloat16)
    return values.float() if is_narrow else values


class _Probe:
    """Compares u^T G v of what was heard with that of what `p.grad` became; u, v random signs."""

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
        self._heard = self._size = torch.zeros((), dtype=torch.float64, device=param.device)
        self._tolerance = 256 * torch.finfo(wide).eps

    def add(self, use: Use, dtype: torch.dtype) -> None:
        """One more part of the gradient, that autograd has computed in `dtype`."""
        if isinstance(use, Outer):
            is_index = use.left.dim() == 2
            left_BT = self._left[use.left] if is_index else _exact(use.left) @ self._left
            terms = left_BT * (_exact(use.right) @ self._right)
        else:
            terms = self._product(_exact(use).flatten(1))
        self._heard = self._heard + terms.sum(dtype=torch.float64)
        self._size = self._size + terms.abs().sum(dtype=torch.float64)
        # Each product of a narrow type is off by half an ulp, and so is what autograd made of them.
        self._tolerance = max(self._tolerance, 4 * torch.finfo(dtype).eps)

    def agrees(self) -> bool:
        """Whether nothing else has gone into `p.grad`."""
        after = self._seen_by_autograd()
        size = self._size + self._before.abs() + after.abs()
        return bool((after - self._before - self._heard).abs() <= self._tolerance * size)

    def _seen_by_autograd(self) -> Tensor:
        grad = self._param.grad
        if grad is None:
            return torch.zeros((), dtype=torch.float64, device=self._param.device)
        return self._product(_exact(grad).flatten()).double()

    def _product(self, values: Tensor) -> Tensor:
        rows = values.reshape(*values.shape[:-1], len(self._left), -1)
        return rows @ self._right @ self._left


# Rules. Inputs and gradients have the examples in front.


def _tokens(values: Tensor, num_last: int = 1) -> Tensor:
    """[B, T, features]: all between the examples and the last `num_last` dimensions as one."""
    flat = values.flatten(-num_last) if num_last else values
    return flat.flatten(1, -2) if flat.dim() > 2 else flat[:, None]


def _linear(module: Any, x: Tensor, grad: Tensor) -> Iterator[tuple[Tensor | None, Use]]:
    grad_BTO = _tokens(grad)
    # Under autocast the product is one of narrow numbers.
    x_BTI = _tokens(x).to(grad_BTO.dtype)
    is_transposed = not isinstance(module, nn.Linear)
    yield module.weight, Outer(x_BTI, grad_BTO) if is_transposed else Outer(grad_BTO, x_BTI)
    yield module.bias, _exact(grad_BTO).sum(1)


def _embedding(module: Any, ids: Tensor, grad: Tensor) -> Iterator[tuple[Tensor | None, Use]]:
    grad_BTD, ids_BT = _tokens(grad), ids.reshape(len(ids), -1)
    if module.padding_idx is not None:
        grad_BTD = grad_BTD.masked_fill((ids_BT == module.padding_idx)[..., None], 0)
    yield module.weight, Outer(ids_BT, grad_BTD)


def _layer_norm(module: Any, x: Tensor, grad: Tensor) -> Iterator[tuple[Tensor | None, Use]]:
    normal = F.layer_norm(_exact(x), module.normalized_shape, None, None, module.eps)
    yield module.weight, _summed(normal * grad, module.weight)
    yield module.bias, _summed(_exact(grad), module.weight)


def _rms_norm(module: Any, x: Tensor, grad: Tensor) -> Iterator[tuple[Tensor | None, Use]]:
    normal = F.rms_norm(_exact(x), module.normalized_shape, None, module.eps)
    yield module.weight, _summed(normal * grad, module.weight)


def _rms_norm_of_llama(module: Any, x: Tensor, grad: Tensor) -> Iterator[tuple[Tensor | None, Use]]:
    """As in transformers: in float32, and back before the weight."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    yield module.weight, _summed(normal.to(x.dtype) * grad, module.weight)


def _summed(values: Tensor, weight: Tensor) -> Tensor:
    """[B, *shape of the weight]: the sum over tokens."""
    return _exact(_tokens(values, weight.dim())).sum(1).view(-1, *weight.shape)


# By the class itself: a subclass may do something else.
_RULES: dict[str, Rule] = {
    "torch.nn.modules.linear.Linear": _linear,
    "transformers.pytorch_utils.Conv1D": _linear,
    "torch.nn.modules.sparse.Embedding": _embedding,
    "torch.nn.modules.normalization.LayerNorm": _layer_norm,
    "torch.nn.modules.normalization.RMSNorm": _rms_norm,
    "transformers.models.llama.modeling_llama.LlamaRMSNorm": _rms_norm_of_llama,
    "transformers.models.mistral.modeling_mistral.MistralRMSNorm": _rms_norm_of_llama,
    "transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm": _rms_norm_of_llama,
}


def without_rule(model: nn.Module, params: Mapping[str, Tensor]) -> list[str]:
    """Modules that own some of `params` and have no rule, as "name (class)"."""
    return [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module, rule in _owners(model, params)
        if rule is None
    ]


def _owners(
    model: nn.Module, params: Mapping[str, Tensor]
) -> Iterator[tuple[str, nn.Module, Rule | None]]:
    """Modules that own some of `params`."""
    counted = {id(param) for param in params.values()}
    for name, module in model.named_modules():
        if any(id(param) in counted for param in module.parameters(recurse=False)):
            yield name, module, _rule_of(module)


def _rule_of(module: nn.Module) -> Rule | None:
    if "forward" in module.__dict__ or module._parameters.get("weight") is None:
        # Somebody has replaced it; or its weight is computed from others, by pruning say.
        return None
    kind = type(module)
    rule = _RULES.get(f"{kind.__module__}.{kind.__qualname__}")
    is_odd = isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    )
    return None if is_odd else rule
