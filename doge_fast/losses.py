"""Losses of a batch that holds several domains: one mean per domain."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from doge_fast.stacked.layers.batch import DomainRun, on_device
from doge_fast.stacked.layers.linear import Outer, autocast_dtype, without_autocast
from doge_fast.stacked.layers.token_sums import Sum, TokenSum, exact, wide_dtype
from doge_fast.stacked.stacked import StackedModel, pass_of

IGNORED = -100
"""The label where nothing is predicted."""


def domain_losses(
    logits_BLV: Tensor,
    labels_BL: Tensor,
    sizes: Mapping[str, int],
    *,
    num_targets: Mapping[str, int | Tensor] | None = None,
) -> Tensor:
    """Mean next-token loss of each domain in a batch that is sorted by domain.

    l_i  =  1 / n_i  sum over the targets t of domain i of  - log p(t)

    Position p predicts label p + 1, as in causal language models of transformers. Run backward on
    the sum of the result inside `DoGEOptimizer.stacked`: domain i's tokens get the gradient of l_i.

    Args:
        logits_BLV: [B, L, V] floating.
        labels_BL: [B, L] int64; tokens, or `IGNORED` where nothing is predicted.
        sizes: number of examples of each domain, in the order of the batch.
        num_targets: {domain: n_i}, the targets in the whole optimizer step, if it has several
            micro-batches. None: the targets of this batch.

    Returns:
        [D] float32 (float64 for float64 logits), for the domains with examples in the order of
        `sizes`; 0 for a domain whose targets are all ignored.

    Raises:
        ValueError: the shapes do not match, or `sizes` do not add up to the batch.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), section 2: l_j, the mean loss of a domain.
    """
    _check(logits_BLV, labels_BL, sizes)
    targets_BL = labels_BL[:, 1:]
    token_losses = F.cross_entropy(
        rearrange(exact(logits_BLV[:, :-1]), "b l v -> (b l) v"),
        rearrange(targets_BL, "b l -> (b l)"),
        ignore_index=IGNORED,
        reduction="none",
    )
    examples = [size for size in sizes.values() if size]
    sums_D = _sums(token_losses.view_as(targets_BL), examples)
    return sums_D / _counts(targets_BL, sizes, num_targets)


def linear_domain_losses(
    hidden_BLH: Tensor,
    weight_VH: Tensor,
    labels_BL: Tensor,
    sizes: Mapping[str, int],
    *,
    bias_V: Tensor | None = None,
    num_targets: Mapping[str, int | Tensor] | None = None,
) -> Tensor:
    """`domain_losses` of a linear head, with the logits of one domain at a time.

    l_i  =  1 / n_i  sum over the targets t of domain i of  - log softmax(W h + b)_t

    Equals `domain_losses(F.linear(hidden_BLH, weight_VH, bias_V), labels_BL, sizes)` to rounding.
    That call keeps B L V logits several times over; this one has the logits of one domain at a time
    and computes them again in the backward pass, which costs one more product of the head's size.
    Inside `DoGEOptimizer.stacked` each domain's gradient of the head goes straight into its row::

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

    Returns:
        As `domain_losses`.

    Raises:
        ValueError: the shapes do not match, `sizes` do not add up to the batch, or they differ
            from those of the stacked batch.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), section 2: l_j, the mean loss of a domain.
    """
    _check(hidden_BLH, labels_BL, sizes)
    examples = [size for size in sizes.values() if size]
    targets_BL = labels_BL[:, 1:]
    ends = [last * targets_BL.shape[1] for last in itertools.accumulate(examples)]
    sums_D: Tensor = _LinearLosses.apply(  # type: ignore[no-untyped-call]
        rearrange(hidden_BLH[:, :-1], "b l h -> (b l) h"),
        weight_VH,
        bias_V,
        rearrange(targets_BL, "b l -> (b l)"),
        [slice(first, end) for first, end in itertools.pairwise([0, *ends])],
        [None if each is None else _pass_of(each, examples) for each in (weight_VH, bias_V)],
    )
    return sums_D / _counts(targets_BL, sizes, num_targets)


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

    # spans: the tokens of each domain. passes: of weight and bias, the stacked pass that trains
    # them; None where autograd gets the gradient.

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        spans: list[slice],
        passes: list[StackedModel | None],
    ) -> Tensor:
        dtype = autocast_dtype(hidden_TH) or hidden_TH.dtype
        hidden, weight = hidden_TH.to(dtype), weight_VH.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        with without_autocast(hidden):
            sums = [
                F.cross_entropy(
                    exact(F.linear(hidden[span], weight, bias)),
                    targets_T[span],
                    ignore_index=IGNORED,
                    reduction="sum",
                )
                for span in spans
            ]
        ctx.save_for_backward(hidden, weight_VH, bias_V, weight, bias, targets_T)
        ctx.spans, ctx.passes = spans, passes
        return torch.stack(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_D: Tensor) -> Any:
        with without_autocast(grad_D):
            return *_head_gradients(ctx, grad_D), None, None, None


def _head_gradients(ctx: Any, grad_D: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of hidden states, weight and bias; None if a stacked pass writes it to the rows."""
    hidden_TH, weight_param, bias_param, weight_VH, bias_V, targets_T = ctx.saved_tensors
    counted_T = targets_T != IGNORED
    # Ignored positions get a valid index; their share is zero.
    targets_T = torch.where(counted_T, targets_T, 0)
    parts = zip(grad_D.unbind(), ctx.spans, strict=True)
    # d(result) / d(loss of the token).
    share_T = counted_T * torch.cat([grad.expand(span.stop - span.start) for grad, span in parts])
    # 16 bits are enough for one product; sums of several are float32.
    wide = wide_dtype(hidden_TH.dtype)
    grad_TH = torch.empty_like(hidden_TH) if ctx.needs_input_grad[0] else None
    params = [weight_param, bias_param]
    needed = ctx.needs_input_grad[1:3]
    wholes = [
        torch.zeros_like(param, dtype=wide) if is_needed and stacked is None else None
        for param, is_needed, stacked in zip(params, needed, ctx.passes, strict=True)
    ]
    for domain, span in enumerate(ctx.spans):
        hidden = hidden_TH[span]
        logits = exact(F.linear(hidden, weight_VH, bias_V))
        # share_t (softmax(logits) - one-hot(target)).
        slope = torch.softmax(logits, 1).mul_(share_T[span, None])
        del logits
        slope.scatter_add_(1, targets_T[span, None], -share_T[span, None])
        slope = slope.to(hidden.dtype)
        if grad_TH is not None:
            torch.mm(slope, weight_VH, out=grad_TH[span])
        if needed[0]:
            _write(Outer(slope, hidden), domain, weight_param, ctx.passes[0], wholes[0])
        if needed[1]:
            gradient = Sum(slope.sum(0, keepdim=True, dtype=wide))
            _write(gradient, domain, bias_param, ctx.passes[1], wholes[1])
    return grad_TH, *wholes


def _write(
    gradient: TokenSum,
    domain: int,
    param: Tensor,
    stacked: StackedModel | None,
    whole: Tensor | None,
) -> None:
    """Write a domain's gradient of `param` into its row in a stacked pass, or add it to `whole`."""
    if stacked is None:
        assert whole is not None
        gradient.write(_all_tokens(0), whole[None], True)
    else:
        run = _all_tokens(stacked.segments[domain].row)
        gradient.write(run, *stacked.slots(param, run.rows, gradient.dtype))


def _all_tokens(row: int) -> DomainRun:
    """A run of one domain, which has all tokens."""
    return DomainRun(row, (0, 1), 1)


def _counts(
    targets_BL: Tensor, sizes: Mapping[str, int], num_targets: Mapping[str, int | Tensor] | None
) -> Tensor:
    """[D] targets of each domain, at least 1."""
    names = [name for name, size in sizes.items() if size]
    if num_targets is None:
        examples = [sizes[name] for name in names]
        return _sums(targets_BL != IGNORED, examples).clamp(min=1)
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
