"""Losses of a batch that holds several domains: one mean per domain."""

import itertools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from doge_fast.stacked.layers.batch import on_device
from doge_fast.stacked.layers.linear import autocast_dtype, multiply, without_autocast
from doge_fast.stacked.layers.token_sums import exact, put, wide_dtype
from doge_fast.stacked.stacked import StackedModel, pass_of

IGNORED = -100


def domain_losses(
    logits_BLV: Tensor,
    labels_BL: Tensor,
    sizes: Mapping[str, int],
    *,
    num_targets: Mapping[str, int | Tensor] | None = None,
    ignore_index: int = IGNORED,
) -> Tensor:
    """Mean next-token loss of each domain in a batch that is sorted by domain.

    l_i  =  1 / n_i  sum over the targets t of domain i of  - log p(t)

    Position p predicts label p + 1, as in causal language models of transformers. Run backward on
    the sum of the result inside `DoGEOptimizer.stacked`: domain i's tokens get the gradient of l_i.

    Args:
        logits_BLV: [B, L, V] floating.
        labels_BL: [B, L] int64; tokens, or `ignore_index` where nothing is predicted.
        sizes: number of examples of each domain, in the order of the batch.
        num_targets: {domain: n_i}, the targets in the whole optimizer step, if it has several
            micro-batches. None: the targets of this batch.
        ignore_index: the label that is not predicted.

    Returns:
        [D] float32 (float64 for float64 logits), for the domains with examples in the order of
        `sizes`; 0 for a domain whose targets are all ignored.

    Raises:
        ValueError: the shapes do not match, or `sizes` do not add up to the batch.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), section 2: l_j, the mean loss of a domain.
    """
    _check(logits_BLV, labels_BL, sizes)
    names = [name for name, size in sizes.items() if size]
    targets_BL = labels_BL[:, 1:]
    token_losses = F.cross_entropy(
        rearrange(exact(logits_BLV[:, :-1]), "b l v -> (b l) v"),
        rearrange(targets_BL, "b l -> (b l)"),
        ignore_index=ignore_index,
        reduction="none",
    )
    examples = [sizes[name] for name in names]
    sums_D = _sums(token_losses.view_as(targets_BL), examples)
    return sums_D / _counts(targets_BL, names, examples, num_targets, ignore_index)


def linear_domain_losses(
    hidden_BLH: Tensor,
    weight_VH: Tensor,
    labels_BL: Tensor,
    sizes: Mapping[str, int],
    *,
    bias_V: Tensor | None = None,
    num_targets: Mapping[str, int | Tensor] | None = None,
    ignore_index: int = IGNORED,
    chunk_tokens: int | None = None,
) -> Tensor:
    """`domain_losses` of a linear head, with the logits of one domain at a time.

    l_i  =  1 / n_i  sum over the targets t of domain i of  - log softmax(W h + b)_t

    Equals `domain_losses(F.linear(hidden_BLH, weight_VH, bias_V), labels_BL, sizes)` to rounding.
    That call keeps B L V logits several times over; this one has the logits of one domain (or of
    `chunk_tokens` tokens) at a time and computes them again in the backward pass, which costs one
    more product of the head's size. Inside `DoGEOptimizer.stacked` each domain's gradient of the
    head goes straight into its row::

        with optimizer.stacked(model, sizes):
            hidden = model.base_model(input_ids).last_hidden_state
            head = model.get_output_embeddings()
            linear_domain_losses(hidden, head.weight, labels, sizes).sum().backward()

    For heads that do not scale or cap the logits. Call it outside compiled code. Under autocast the
    products have its dtype.

    Args:
        hidden_BLH: [B, L, H] floating, the input of the head.
        weight_VH: [V, H], the head's weight.
        labels_BL: as for `domain_losses`.
        sizes: as for `domain_losses`; inside `stacked`, the sizes that it was given.
        bias_V: [V], the head's bias.
        num_targets: as for `domain_losses`.
        ignore_index: as for `domain_losses`.
        chunk_tokens: >= 1; tokens whose logits exist at a time. None: a whole domain.

    Returns:
        As `domain_losses`.

    Raises:
        ValueError: the shapes do not match, `sizes` do not add up to the batch, or they differ
            from those of the stacked batch.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), section 2: l_j, the mean loss of a domain.
    """
    _check_head(hidden_BLH, weight_VH, bias_V, chunk_tokens)
    _check(hidden_BLH, labels_BL, sizes)
    names = [name for name, size in sizes.items() if size]
    examples = [sizes[name] for name in names]
    targets_BL = labels_BL[:, 1:]
    ends = [last * targets_BL.shape[1] for last in itertools.accumulate(examples)]
    passes = [None if each is None else _pass_of(each, examples) for each in (weight_VH, bias_V)]
    spans = tuple(itertools.starmap(slice, itertools.pairwise([0, *ends])))
    sums_D: Tensor = _LinearLosses.apply(  # type: ignore[no-untyped-call]
        rearrange(hidden_BLH[:, :-1], "b l h -> (b l) h"),
        weight_VH,
        bias_V,
        rearrange(targets_BL, "b l -> (b l)"),
        _Head(spans, ignore_index, chunk_tokens, *passes),
    )
    return sums_D / _counts(targets_BL, names, examples, num_targets, ignore_index)


class _Head(NamedTuple):
    """The arguments of `_LinearLosses` that are no tensors."""

    spans: tuple[slice, ...]
    """Tokens of each domain."""
    ignore_index: int
    chunk_tokens: int | None
    weight_pass: StackedModel | None
    """The stacked pass that trains the weight; None: autograd gets its gradient."""
    bias_pass: StackedModel | None
    """The same for the bias."""

    def chunks(self, span: slice) -> list[slice]:
        """The chunks of a domain's tokens; at least one, even without tokens."""
        step = self.chunk_tokens or max(1, span.stop - span.start)
        firsts = range(span.start, max(span.stop, span.start + 1), step)
        return [slice(first, min(span.stop, first + step)) for first in firsts]


def _pass_of(param: Tensor, examples: list[int]) -> StackedModel | None:
    """The stacked pass under way that trains `param`; ValueError if its batch is another one."""
    stacked = pass_of(param)
    if stacked is not None:
        expected = [segment.last - segment.first for segment in stacked.segments]
        if expected != examples:
            raise ValueError(
                f"inside stacked() the sizes must be those of its batch, {expected}; got "
                f"{examples}."
            )
    return stacked


class _LinearLosses(torch.autograd.Function):
    """[D] sums of token losses. The backward pass computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        head: _Head,
    ) -> Tensor:
        dtype = autocast_dtype(hidden_TH) or hidden_TH.dtype
        hidden, weight = hidden_TH.to(dtype), weight_VH.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        with without_autocast(hidden):
            sums = []
            for span in head.spans:
                losses = [
                    F.cross_entropy(
                        exact(F.linear(hidden[chunk], weight, bias)),
                        targets_T[chunk],
                        ignore_index=head.ignore_index,
                        reduction="sum",
                    )
                    for chunk in head.chunks(span)
                ]
                sums.append(losses[0] if len(losses) == 1 else torch.stack(losses).sum())
        ctx.save_for_backward(hidden, weight_VH, bias_V, weight, bias, targets_T)
        ctx.head = head
        return torch.stack(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_D: Tensor) -> Any:
        with without_autocast(grad_D):
            return *_head_gradients(ctx, grad_D), None, None


def _head_gradients(ctx: Any, grad_D: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of hidden states, weight and bias; None if a stacked pass writes it to the rows."""
    hidden_TH, weight_param, bias_param, weight_VH, bias_V, targets_T = ctx.saved_tensors
    head: _Head = ctx.head
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    counted_T = targets_T != head.ignore_index
    # Ignored positions get a valid index; their share is zero.
    targets_T = torch.where(counted_T, targets_T, 0)
    parts = zip(grad_D.unbind(), head.spans, strict=True)
    # d(result) / d(loss of the token).
    share_T = counted_T * torch.cat([grad.expand(span.stop - span.start) for grad, span in parts])
    minus_share_T = -share_T
    # 16 bits are enough for one product; sums of several are float32.
    wide = wide_dtype(hidden_TH.dtype)
    grad_TH = torch.empty_like(hidden_TH) if needs_hidden else None
    grad_VH = grad_V = None
    if needs_weight and head.weight_pass is None:
        grad_VH = torch.zeros_like(weight_VH, dtype=wide)
    if needs_bias and head.bias_pass is None:
        grad_V = torch.zeros_like(bias_V, dtype=wide)
    for domain, span in enumerate(head.spans):
        chunks = head.chunks(span)
        dtype = hidden_TH.dtype if len(chunks) == 1 else wide
        with (
            _memory_for(grad_VH, weight_param, head.weight_pass, domain, dtype) as (out_VH, adds_w),
            _memory_for(grad_V, bias_param, head.bias_pass, domain, wide) as (out_V, adds_b),
        ):
            for index, chunk in enumerate(chunks):
                hidden_CH = hidden_TH[chunk]
                logits_CV = exact(F.linear(hidden_CH, weight_VH, bias_V))
                # share_t (softmax(logits) - one-hot(target)).
                slope_CV = torch.softmax(logits_CV, 1).mul_(share_T[chunk, None])
                del logits_CV
                slope_CV.scatter_add_(1, targets_T[chunk, None], minus_share_T[chunk, None])
                slope_CV = slope_CV.to(hidden_CH.dtype)
                if grad_TH is not None:
                    torch.mm(slope_CV, weight_VH, out=grad_TH[chunk])
                if out_VH is not None:
                    left_1VC, right_1CH = slope_CV.t()[None], hidden_CH[None]
                    multiply(out_VH[None], left_1VC, right_1CH, adds_w or index > 0)
                if out_V is not None:
                    put(out_V, slope_CV.sum(0, dtype=wide), adds_b or index > 0)
    return grad_TH, grad_VH, grad_V


@contextmanager
def _memory_for(
    whole: Tensor | None,
    param: Tensor,
    stacked: StackedModel | None,
    domain: int,
    dtype: torch.dtype,
) -> Iterator[tuple[Tensor | None, bool]]:
    """`whole`, or the row of domain number `domain` in `stacked`; True if it must be added to."""
    if stacked is None:
        yield whole, True
        return
    row = stacked.segments[domain].row
    out, adds = stacked.slots(param, range(row, row + 1), dtype)
    if out.dtype.itemsize >= dtype.itemsize:
        yield out[0], adds
        return
    # A 16-bit row: sum the products in float32 and round once.
    value = torch.zeros_like(out, dtype=dtype)
    yield value[0], True
    put(out, value, adds)


def _counts(
    targets_BL: Tensor,
    names: Collection[str],
    examples: list[int],
    num_targets: Mapping[str, int | Tensor] | None,
    ignore_index: int,
) -> Tensor:
    """[D] targets of each domain, at least 1."""
    if num_targets is None:
        return _sums(targets_BL != ignore_index, examples).clamp(min=1)
    device = targets_BL.device
    counts = [num_targets[name] for name in names]
    if any(isinstance(count, Tensor) and count.device == device for count in counts):
        return torch.stack([torch.as_tensor(count).to(device) for count in counts]).clamp(min=1)
    # One copy for all counts.
    return on_device([int(count) for count in counts], device).clamp(min=1)


def _sums(values_BP: Tensor, examples: list[int]) -> Tensor:
    """[D] sums over the tokens of each domain; the number of operators does not grow with D."""
    if len(set(examples)) == 1:
        return values_BP.reshape(len(examples), -1).sum(1)
    device = values_BP.device
    domain_of = [domain for domain, number in enumerate(examples) for _ in range(number)]
    is_in_DB = torch.arange(len(examples), device=device)[:, None] == on_device(domain_of, device)
    # torch.where, not a product with the mask: NaN * 0 would reach every domain.
    return torch.where(is_in_DB, values_BP.sum(1), 0).sum(1)


def _check_head(
    hidden_BLH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, chunk_tokens: int | None
) -> None:
    is_bias = bias_V is None or bias_V.shape == weight_VH.shape[:1]
    if weight_VH.dim() != 2 or hidden_BLH.shape[-1:] != weight_VH.shape[1:] or not is_bias:
        raise ValueError(
            "linear_domain_losses() takes hidden states [B, L, H], a weight [V, H] and a bias_V "
            f"[V] or None; got {list(hidden_BLH.shape)}, {list(weight_VH.shape)} and "
            f"{None if bias_V is None else list(bias_V.shape)}."
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1; got {chunk_tokens}.")


def _check(logits_BLV: Tensor, labels_BL: Tensor, sizes: Mapping[str, int]) -> None:
    if logits_BLV.dim() != 3 or labels_BL.shape != logits_BLV.shape[:2]:
        raise ValueError(
            "domain losses take logits [B, L, V] or hidden states [B, L, H] and labels [B, L]; got "
            f"{list(logits_BLV.shape)} and {list(labels_BL.shape)}."
        )
    if sum(sizes.values()) != len(labels_BL) or any(size < 0 for size in sizes.values()):
        raise ValueError(
            f"sizes must add up to the {len(labels_BL)} examples of the batch; got {dict(sizes)}."
        )
