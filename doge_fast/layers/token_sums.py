"""Gradients of parameters as sums over tokens: a row per domain, or a norm per example.

    Outer   sum_t l_t r_t^T     a matrix: l the gradient of the output, r the input (Linear)
    Sum     sum_t v_t           gains and biases

The row of a domain is the sum over the tokens of its examples. The gradient G_b of an example b is
the sum over its own tokens, and for a matrix

    ||G_b||^2  =  sum_ts <l_bt, l_bs> <r_bt, r_bs>

so products between tokens give its norm, or G_b itself for one example at a time, whichever is
less work. A matrix that is used more than once, as embedding and output matrix say, has the cross
terms between its uses too.
"""

from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple, Protocol

import torch
from einops import rearrange, reduce
from torch import Tensor

from doge_fast.layers.batch import Run

# Elements of the largest array that the products between tokens make at once.
MOST_ELEMENTS = 1 << 25

# Elements of a weight up to which the products of all domains are one call, where that is not
# always faster: on a CPU a large product keeps all cores busy by itself.
MOST_BATCHED = {"cpu": 1 << 20}

Fill = Callable[[Tensor, bool], object]
"""`fill(out, adds)` writes [G, *shape] of the parameter, or adds to what is there."""


class TokenSum(Protocol):
    """A parameter's gradient as a rule returns it: its rows, and each example's gradient."""

    @property
    def dtype(self) -> torch.dtype:
        """In which the gradient is computed."""

    def rows(self, run: Run) -> Fill:
        """The gradients of the domains of a run."""

    def per_example(self, shape: torch.Size) -> "Outer | Tensor":
        """The gradient of every example, [B, *shape] or its factors; `shape` is the parameter's."""


class Outer(NamedTuple):
    """sum_t left_t right_t^T, the gradient of a matrix [rows, columns].

    Every dimension between the examples and the last one is one of tokens.
    """

    left: Tensor
    """[B, ..., rows]; or of an integer dtype [B, ...]: the row that right_t belongs to. Integers
    that all examples share may come as [1, ...]."""
    right: Tensor
    """[B, ..., columns], of the dtype that the gradient is to have."""

    @property
    def dtype(self) -> torch.dtype:
        """In which the gradient is computed."""
        return self.right.dtype

    def rows(self, run: Run) -> Fill:
        """The gradients of the domains of a run."""
        right_GTC = run.cut(self.right, self.right.shape[-1])
        if self.left.is_floating_point():
            return _matmul_into(run.cut(self.left, self.left.shape[-1]).mT, right_GTC)
        if self.left.shape[0] == self.right.shape[0]:
            return _scatter_into(run.cut(self.left), right_GTC)
        # The same rows for all examples: add up their gradients first.
        index_T = self.left.flatten()
        right_GTC = reduce(right_GTC, "g (n t) c -> g t c", "sum", t=len(index_T))
        return _scatter_into(index_T.expand(run.num_rows, -1), right_GTC)

    def per_example(self, shape: torch.Size) -> "Outer":
        """The same with one dimension of tokens, [B, T, rows] or [B, T], and [B, T, columns]."""
        is_index = not self.left.is_floating_point()
        left = self.left.expand(len(self.right), *self.left.shape[1:])
        return Outer(
            rearrange(left, "b ... -> b (...)" if is_index else "b ... r -> b (...) r"),
            rearrange(self.right, "b ... c -> b (...) c"),
        )


class Sum(NamedTuple):
    """sum_t values_t, the gradient of a gain or a bias; without tokens, of an example each."""

    values: Tensor
    """[B, ..., *shape] of the parameter's shape, and of the dtype that the gradient is to have."""

    @property
    def dtype(self) -> torch.dtype:
        """In which the gradient is computed."""
        return self.values.dtype

    def rows(self, run: Run) -> Fill:
        """The gradients of the domains of a run."""

        def fill(out: Tensor, adds: bool) -> None:
            values_GTN = run.cut(self.values, out[0].numel())
            if adds:
                out.add_(values_GTN.sum(1).view(out.shape))
            else:
                torch.sum(values_GTN, 1, out=out.flatten(1))

        return fill

    def per_example(self, shape: torch.Size) -> Tensor:
        """[B, *shape], in float32 at least."""
        return exact(self.values).reshape(len(self.values), -1, *shape).sum(1)


def put(gradient: Tensor) -> Fill:
    """A gradient that is there already."""

    def fill(out: Tensor, adds: bool) -> None:
        value = gradient.view(out.shape)
        if adds:
            out.add_(value)
        else:
            out.copy_(value)

    return fill


def _matmul_into(left_GRT: Tensor, right_GTC: Tensor) -> Fill:
    def fill(out: Tensor, adds: bool) -> None:
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

    return fill


def _scatter_into(index_GT: Tensor, right_GTC: Tensor) -> Fill:
    def fill(out: Tensor, adds: bool) -> None:
        if not adds:
            out.zero_()
        for row_RC, index_T, right_TC in zip(out, index_GT, right_GTC, strict=True):
            row_RC.index_add_(0, index_T, right_TC)

    return fill


def squared_norms(uses: Sequence[Outer | Tensor], shape: torch.Size) -> Tensor:
    """[B] squared norms of every example's gradient, the sum over `uses`.

    Args:
        uses: of one parameter, at least one; as `per_example` gives them.
        shape: the parameter's.
    """
    outers = [use for use in uses if isinstance(use, Outer)]
    if len(outers) == len(uses) and _is_less_between_tokens(outers, shape):
        return _between_tokens(outers)
    if not outers:
        grads_BN = torch.stack([exact(use) for use in uses]).sum(0).flatten(1)  # type: ignore[arg-type]
        return grads_BN.square().sum(1)
    num_examples = len(outers[0].right)
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
    parts = []
    for first in range(0, num_examples, step):
        part = slice(first, first + step)
        cut = [Outer(exact(use.left[part]), exact(use.right[part])) for use in uses]
        pairs = combinations_with_replacement(range(len(cut)), 2)
        squares = [(1 if i == j else 2) * _inner(cut[i], cut[j]) for i, j in pairs]
        parts.append(torch.stack(squares).sum(0))
    # A sum of both signs: rounding may leave it below zero.
    return torch.cat(parts).clamp(min=0)


def _inner(one: Outer, other: Outer) -> Tensor:
    """[B] inner products of two gradients of each example."""
    right_BTS = one.right @ other.right.mT
    return (_lefts(one.left, other.left).to(right_BTS.dtype) * right_BTS).sum((1, 2))


def _lefts(one: Tensor, other: Tensor) -> Tensor:
    """[B, T, S] inner products of the left vectors; an index stands for a unit vector."""
    if one.dim() == 2 and other.dim() == 2:
        return one[:, :, None] == other[:, None, :]
    if one.dim() == 2:
        # [B, S, rows] at the rows named by one: [B, S, T].
        index = one[:, None, :].expand(-1, other.shape[1], -1)
        return other.gather(2, index).mT
    if other.dim() == 2:
        return _lefts(other, one).mT
    return one @ other.mT


def _gradient(use: Outer | Tensor, example: int, shape: torch.Size) -> Tensor:
    """[*shape] the gradient of one example."""
    if isinstance(use, Tensor):
        return exact(use[example])
    left, right = exact(use.left[example]), exact(use.right[example])
    if left.dim() == 1:
        return right.new_zeros(shape).index_add_(0, left, right)
    return left.mT @ right


def exact(values: Tensor) -> Tensor:
    """In float32 at least; indices as they are."""
    is_narrow = values.dtype in (torch.float16, torch.bfloat16)
    return values.float() if is_narrow else values
