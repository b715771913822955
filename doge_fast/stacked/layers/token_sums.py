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

from doge_fast.kernels import segment_sum
from doge_fast.stacked.layers.batch import Run

# Elements of the largest array that the products between tokens make at once.
MOST_ELEMENTS = 1 << 25

# Elements of a weight up to which the products of all domains are one call, where that is not
# always faster: on a CPU a large product keeps all cores busy by itself.
MOST_BATCHED = {"cpu": 1 << 20}

# Bytes of products that are made in 16 bits before they go to float32 rows.
MOST_TEMPORARY_BYTES = 1 << 26
# Devices whose products of 16 bits can have a float32 result.
WIDE_PRODUCTS = () if torch.version.hip else ("cuda",)

# Devices whose sums over tokens run once for each domain: on a CPU torch's own kernels are faster
# so. Elsewhere every launch counts, and what adds atomically has no order.
ONE_BY_ONE = ("cpu",)

Fill = Callable[[Tensor, bool], object]
"""`fill(out, adds)` writes [G, *shape] of the parameter, or adds to what is there.

The matrices of `out` lie at any distance; its dtype may be another than that of the gradient.
"""


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
        if not self.left.is_floating_point():
            return _lookups(run, self.left, self.right)
        return in_parts(run, self._products)

    def _products(self, run: Run) -> Fill:
        left_GTR = run.cut(self.left, self.left.shape[-1])
        return products(left_GTR.mT, run.cut(self.right, self.right.shape[-1]))

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

        if run.is_equal or sums_one_by_one(self.values):
            return in_parts(run, self._sums)

        def fill(out: Tensor, adds: bool) -> None:
            values_TN = run.tokens(self.values, out[0].numel())
            borders = run.token_borders(len(values_TN), out.device)
            segment_sum(values_TN, out.view(len(out), 1, -1), add=adds, borders=borders)

        return fill

    def _sums(self, run: Run) -> Fill:
        def fill(out: Tensor, adds: bool) -> None:
            values_GTN = run.cut(self.values, out[0].numel())
            if adds or out.dtype != self.values.dtype:
                put(values_GTN.sum(1))(out, adds)
            else:
                torch.sum(values_GTN, 1, out=out.flatten(1))

        return fill

    def per_example(self, shape: torch.Size) -> Tensor:
        """[B, *shape], in float32 at least."""
        return exact(self.values).reshape(len(self.values), -1, *shape).sum(1)


def sums_one_by_one(values: Tensor) -> bool:
    """Whether sums over the tokens of each domain are a call each."""
    return values.device.type in ONE_BY_ONE


def in_parts(run: Run, fill_of: Callable[[Run], Fill]) -> Fill:
    """The gradients of a run, by what is written for domains of equal size.

    Args:
        run: of domains of any sizes.
        fill_of: takes a run of equal ones.
    """
    if run.is_equal:
        return fill_of(run)
    parts = [(domains, fill_of(part)) for domains, part in run.equal_parts]

    def fill(out: Tensor, adds: bool) -> None:
        for domains, fill_part in parts:
            fill_part(out[domains], adds)

    return fill


def put(gradient: Tensor) -> Fill:
    """A gradient that is there already."""

    def fill(out: Tensor, adds: bool) -> None:
        value = gradient.view(out.shape)
        if adds:
            out.add_(value)
        else:
            out.copy_(value)

    return fill


def products(left_GRT: Tensor, right_GTC: Tensor) -> Fill:
    """The product of each domain, of two matrices of one dtype."""

    def fill(out: Tensor, adds: bool) -> None:
        if out.dtype == left_GRT.dtype:
            _multiply(out, left_GRT, right_GTC, adds)
        elif _is_wide_product(out, left_GRT):
            multiply_wide(out, left_GRT, right_GTC, adds)
        else:
            _multiply_apart(out, left_GRT, right_GTC, adds)

    return fill


def _multiply(out: Tensor, left_GRT: Tensor, right_GTC: Tensor, adds: bool) -> None:
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


def _is_wide_product(out: Tensor, left: Tensor) -> bool:
    is_16_bits = left.dtype in (torch.bfloat16, torch.float16)
    return is_16_bits and out.dtype == torch.float32 and out.device.type in WIDE_PRODUCTS


def multiply_wide(out: Tensor, left_GRT: Tensor, right_GTC: Tensor, adds: bool) -> None:
    """out = or += the float32 products of 16-bit matrices, with nothing in between."""
    # The overloads by name: torch.baddbmm takes the dtype for a factor on some devices.
    if adds:
        torch.ops.aten.baddbmm.dtype_out(out, left_GRT, right_GTC, torch.float32, out=out)
    else:
        torch.ops.aten.bmm.dtype_out(left_GRT, right_GTC, torch.float32, out=out)


def _multiply_apart(out: Tensor, left_GRT: Tensor, right_GTC: Tensor, adds: bool) -> None:
    """out = or += products in their own dtype, a few domains at a time."""
    step = max(1, MOST_TEMPORARY_BYTES // max(1, out[0].numel() * left_GRT.itemsize))
    for first in range(0, len(out), step):
        part = slice(first, first + step)
        value = torch.empty(out[part].shape, dtype=left_GRT.dtype, device=out.device)
        _multiply(value, left_GRT[part], right_GTC[part], False)
        put(value)(out[part], adds)


def _lookups(run: Run, index: Tensor, right: Tensor) -> Fill:
    """Sums over the tokens that looked up a row: `index` is [B, ...], or [1, ...] for all."""
    if not sums_one_by_one(right):
        return lambda out, adds: _sum_lookups(run, index, right, out, adds)

    def of_part(part: Run) -> Fill:
        right_GTC = part.cut(right, right.shape[-1])
        if index.shape[0] == right.shape[0]:
            return _scatter(part.cut(index), right_GTC)
        # The same rows for all examples: add up their gradients first.
        index_T = index.flatten()
        right_GTC = reduce(right_GTC, "g (n t) c -> g t c", "sum", t=len(index_T))
        return _scatter(index_T.expand(len(part.rows), -1), right_GTC)

    return in_parts(run, of_part)


def _scatter(index_GT: Tensor, right_GTC: Tensor) -> Fill:
    """In the order of the tokens."""

    def fill(out: Tensor, adds: bool) -> None:
        is_same = out.dtype == right_GTC.dtype
        if is_same and not adds:
            out.zero_()
        for row_RC, index_T, right_TC in zip(out, index_GT, right_GTC, strict=True):
            if is_same:
                row_RC.index_add_(0, index_T, right_TC)
            else:
                value_RC = torch.zeros_like(row_RC, dtype=right_TC.dtype)
                put(value_RC.index_add_(0, index_T, right_TC))(row_RC, adds)

    return fill


def _sum_lookups(run: Run, index: Tensor, right: Tensor, out: Tensor, adds: bool) -> None:
    """Sorted by domain and row, so that each sum has one order: what adds atomically has none."""
    num_domains, num_rows, width = out.shape
    right_TC = run.tokens(right, width)
    if index.shape[0] == right.shape[0]:
        index_T = run.tokens(index)
    else:
        index_T = index.flatten().expand(len(right_TC) // index.numel(), -1).flatten()
    device = out.device
    if run.is_equal:
        domain_G1 = torch.arange(num_domains, device=device)[:, None]
        key_T = (index_T.view(num_domains, -1) + domain_G1 * num_rows).flatten()
    else:
        token_T = torch.arange(len(index_T), device=device)
        ends_G = run.token_borders(len(index_T), device)[1:]
        key_T = index_T + torch.bucketize(token_T, ends_G, right=True) * num_rows
    key_T, order = key_T.sort(stable=True)
    borders = torch.searchsorted(key_T, torch.arange(num_domains * num_rows + 1, device=device))
    segment_sum(right_TC, out, add=adds, borders=borders, order=order)


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
