"""Losses of a batch that holds several domains: one mean per domain."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from doge_fast.flat_buffer import on_device
from doge_fast.stacked.layers.batch import ExampleAxis
from doge_fast.stacked.layers.linear import autocast_dtype, multiply, without_autocast
from doge_fast.stacked.layers.token_sums import exact, wide_dtype
from doge_fast.stacked.stacked import StackedModel, is_asked, pass_of, sizes_of

IGNORED = -100


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
        labels_BL: [B, L] int64; tokens, or -100 where nothing is predicted.
        sizes: number of examples of each domain, in the order of the batch.
        num_targets: {domain: n_i}, the targets in the whole optimizer step, if it has several
            micro-batches. None: the targets of this batch.

    Returns:
        [D] float32 (float64 for float64 logits), for the domains with examples in the order of
        `sizes`; 0 for a domain whose targets are all ignored.

    Raises:
        ValueError: the shapes do not match, or `sizes` do not add up to the batch.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), section 2.
    """
    sizes = _checked_sizes(logits_BLV, labels_BL, sizes)
    sums_D = _sums(token_losses(logits_BLV, labels_BL), sizes)
    return sums_D / _counts(labels_BL[:, 1:], sizes, num_targets)


def token_losses(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """[B, L - 1] cross-entropy of every predicted token, in nats; the dtype is as above.

    Position p predicts label p + 1; the loss of an ignored one is 0.
    """
    targets_BL = labels_BL[:, 1:]
    losses: Tensor = F.cross_entropy(
        rearrange(exact(logits_BLV[:, :-1]), "b l v -> (b l) v"),
        rearrange(targets_BL, "b l -> (b l)"),
        ignore_index=IGNORED,
        reduction="none",
    )
    return losses.view_as(targets_BL)


def linear_domain_losses(
    hidden_BLH: Tensor,
    weight_VH: Tensor,
    labels_BL: Tensor,
    sizes: Mapping[str, int],
    *,
    num_targets: Mapping[str, int | Tensor] | None = None,
) -> Tensor:
    """`domain_losses` of a linear head without bias, with the logits of one domain at a time.

    l_i  =  1 / n_i  sum over the targets t of domain i of  - log softmax(W h)_t

    Equals `domain_losses(F.linear(hidden_BLH, weight_VH), labels_BL, sizes)` to rounding, which
    keeps B L V logits several times over. Inside `DoGEOptimizer.stacked` each domain's gradient of
    the head goes straight into its row (`_LinearLosses`). Elsewhere the backward pass computes the
    logits again, which costs one more product of the head's size::

        with optimizer.stacked(model, sizes):
            hidden = model.base_model(input_ids).last_hidden_state
            head = model.get_output_embeddings()
            linear_domain_losses(hidden, head.weight, labels, sizes).sum().backward()

    For heads that do not scale or cap the logits, outside compiled code. Under autocast the
    products have its dtype.

    Args:
        hidden_BLH: [B, L, H] floating, the input of the head.
        weight_VH: [V, H], the head's weight.
        labels_BL: this and the rest, and the result, as for `domain_losses`.
        sizes: as above; inside `stacked` those that it was given.
        num_targets: as above.

    Raises:
        ValueError: the shapes do not match, `sizes` do not add up to the batch, or they differ
            from those of the stacked batch.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), section 2: l_j, the mean loss of a domain.
    """
    sizes = _checked_sizes(hidden_BLH, labels_BL, sizes)
    if weight_VH.dim() != 2 or hidden_BLH.shape[-1:] != weight_VH.shape[1:]:
        raise ValueError(
            "linear_domain_losses() takes hidden states [B, L, H] and a weight [V, H]; got "
            f"{list(hidden_BLH.shape)} and {list(weight_VH.shape)}."
        )
    targets_BL = labels_BL[:, 1:]
    ends = [last * targets_BL.shape[1] for last in itertools.accumulate(sizes.values())]
    spans = tuple(itertools.starmap(slice, itertools.pairwise([0, *ends])))
    stacked = pass_of(weight_VH)
    if stacked is not None:
        expected = [segment.last - segment.first for segment in stacked.segments]
        if expected != (given := [*sizes.values()]):
            raise ValueError(
                f"inside stacked() the sizes must be those of its batch, {expected}; got {given}."
            )
    losses_D: Tensor = _LinearLosses.apply(  # type: ignore[no-untyped-call]
        rearrange(hidden_BLH[:, :-1], "b l h -> (b l) h"),
        weight_VH,
        rearrange(targets_BL, "b l -> (b l)"),
        _counts(targets_BL, sizes, num_targets),
        _Head(spans, stacked, torch.is_grad_enabled(), stacked.examples if stacked else None),
    )
    return losses_D


class _Head(NamedTuple):
    """The arguments of `_LinearLosses` that are no tensors."""

    spans: tuple[slice, ...]
    """Tokens of each domain."""
    stacked: StackedModel | None
    """The stacked pass that trains the weight; None: autograd gets its gradient."""
    is_trained: bool
    """Whether a backward pass may follow."""
    examples: ExampleAxis | None
    """Those of the stacked pass."""


class _LinearLosses(torch.autograd.Function):
    """[D] mean losses; where rows have memory for it, forward computes the gradients too.

    A domain's loss reaches the weight through one number, the gradient of that loss, which the
    backward pass brings: mostly 1, or the scale of a GradScaler. So in a stacked pass the gradients
    of the means are computed while the logits are there, those of the head into memory of the
    domain's row (`FlatBuffer.reserve`), and the backward pass only multiplies by that number.
    It computes the logits again where a row holds gradients of an earlier micro-batch, where
    autograd gets the gradient of the head, and in float16, which is too narrow before a scale.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        counts_D: Tensor,
        head: _Head,
    ) -> Tensor:
        dtype = autocast_dtype(hidden_TH) or hidden_TH.dtype
        tensors = hidden_TH.to(dtype), weight_VH.to(dtype), targets_T
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        rows = ctx.rows = _reserved(head, weight_VH if needs_weight else None, dtype)
        share_D = None if rows is None else counts_D.to(wide_dtype(dtype)).reciprocal()
        with without_autocast(hidden_TH):
            sums_D, ctx.grad_TH = _over_domains(
                head,
                *tensors,
                share_D=share_D,
                needs_hidden=needs_hidden,
                out_of=(lambda domain: (rows[domain], False)) if rows else None,
            )
        # Hooks on saved tensors return others, and rows are found by the parameter itself.
        ctx.head, ctx.weight = head, weight_VH
        ctx.save_for_backward(counts_D, *tensors)
        return sums_D / counts_D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_D: Tensor) -> Any:
        counts_D, *tensors = ctx.saved_tensors
        head, weight = ctx.head, ctx.weight
        if head.stacked is not None:
            head.stacked.check_pass(head.examples)
        needs_hidden, has_weight = ctx.needs_input_grad[:2]
        needs_weight = has_weight and (head.stacked is None or is_asked(ctx, 1))
        if needs_weight == has_weight and _are_kept(head, weight, ctx.rows):
            grad_TH = ctx.grad_TH
            _multiply(grad_D, head, weight, grad_TH, ctx.rows)
            ctx.grad_TH = ctx.rows = None
            return grad_TH, *[None] * 4
        dtype = tensors[0].dtype
        grad_VH = None
        if needs_weight and head.stacked is None:
            grad_VH = torch.zeros_like(tensors[1], dtype=wide_dtype(dtype))

        def out_of(domain: int) -> tuple[Tensor, bool]:
            # One row after another: `claim` may replace those that were given before.
            return _row(head, weight, domain, dtype) if grad_VH is None else (grad_VH, True)

        with without_autocast(grad_D):
            _, grad_TH = _over_domains(
                head,
                *tensors,
                share_D=grad_D / counts_D,
                needs_hidden=needs_hidden,
                out_of=out_of if needs_weight else None,
            )
        return grad_TH, grad_VH, None, None, None


def _reserved(head: _Head, weight: Tensor | None, dtype: torch.dtype) -> list[Tensor] | None:
    """Memory for the gradient of each domain, in its row; None where some row has none to spare.

    Empty if the weight needs no gradient.
    """
    if not head.is_trained or dtype == torch.float16:
        return None
    if weight is None:
        return []
    if head.stacked is None:
        return None
    rows = []
    for segment in head.stacked.segments:
        row = head.stacked.buffer.reserve(segment.row, weight, dtype)
        if row is None:
            return None
        rows.append(row)
    return rows


def _are_kept(head: _Head, weight: Tensor, rows: list[Tensor] | None) -> bool:
    """Whether there are reserved rows, and nothing else has used their memory since."""
    if head.stacked is None or not rows:
        return rows is not None
    buffer, segments = head.stacked.buffer, head.stacked.segments
    pairs = zip(segments, rows, strict=True)
    return all(buffer.is_reserved(segment.row, weight, row) for segment, row in pairs)


def _row(head: _Head, weight: Tensor, domain: int, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """The weight's row of domain number `domain`, and whether it must be added to."""
    assert head.stacked is not None
    row = head.stacked.segments[domain].row
    (row_VH,), adds = head.stacked.claim(weight, range(row, row + 1), dtype)
    return row_VH, adds


def _multiply(
    grad_D: Tensor, head: _Head, weight: Tensor, grad_TH: Tensor | None, rows: Sequence[Tensor]
) -> None:
    """Turn gradients of the means into those of the loss, and reserved memory into rows."""
    # On a CPU the host reads numbers without waiting.
    is_one = grad_D.is_cpu and bool((grad_D == 1).all())
    for domain, span in enumerate(head.spans):
        values = [] if grad_TH is None else [grad_TH[span]]
        if rows:
            values.append(_row(head, weight, domain, rows[domain].dtype)[0])
        for value in () if is_one else values:
            value.mul_(grad_D[domain])


def _over_domains(
    head: _Head,
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    share_D: Tensor | None,
    needs_hidden: bool,
    out_of: Callable[[int], tuple[Tensor, bool]] | None,
) -> tuple[Tensor, Tensor | None]:
    """[D] sums of the token losses, and the gradient of the hidden states.

    `share_D` is d(result) / d(loss of a token) by domain; None: losses alone. `out_of` returns a
    domain's memory for the gradient of the weight, and whether it must be added to.
    """
    counted_T = targets_T != IGNORED
    # Ignored positions get a valid index; their share is zero.
    targets_T1 = torch.where(counted_T, targets_T, 0)[:, None]
    grad_TH = torch.empty_like(hidden_TH) if needs_hidden and share_D is not None else None
    sums = []
    for domain, span in enumerate(head.spans):
        hidden_SH, targets_S1 = hidden_TH[span], targets_T1[span]
        # Everything of the logits' size happens in the same memory.
        values_SV = exact(F.linear(hidden_SH, weight_VH))
        values_SV.sub_(values_SV.amax(1, keepdim=True))
        picked_S1 = values_SV.gather(1, targets_S1)
        totals_S1 = values_SV.exp_().sum(1, keepdim=True)
        losses_S = (totals_S1.log() - picked_S1)[:, 0]
        sums.append(torch.where(counted_T[span], losses_S, 0).sum())
        if share_D is None:
            continue
        # share_t (softmax(logits) - one-hot(target)).
        share_S1 = counted_T[span, None] * share_D[domain]
        slope_SV = values_SV.mul_(share_S1 / totals_S1)
        slope_SV.scatter_add_(1, targets_S1, -share_S1)
        slope_SV = slope_SV.to(hidden_SH.dtype)
        if grad_TH is not None:
            torch.mm(slope_SV, weight_VH, out=grad_TH[span])
        if out_of is not None:
            out_VH, adds = out_of(domain)
            multiply(out_VH[None], slope_SV.t()[None], hidden_SH[None], adds)
    return torch.stack(sums), grad_TH


def _counts(
    targets_BL: Tensor, sizes: Mapping[str, int], num_targets: Mapping[str, int | Tensor] | None
) -> Tensor:
    """[D] targets of each domain, at least 1."""
    if num_targets is None:
        return _sums(targets_BL != IGNORED, sizes).clamp(min=1)
    if lacking := [name for name in sizes if name not in num_targets]:
        raise ValueError(f"num_targets must have every domain of the batch; it lacks {lacking}.")
    device = targets_BL.device
    counts = [num_targets[name] for name in sizes]
    if any(isinstance(count, Tensor) and count.device == device for count in counts):
        return torch.stack([torch.as_tensor(count).to(device) for count in counts]).clamp(min=1)
    # One copy for all counts.
    return on_device([int(count) for count in counts], device).clamp(min=1)


def _sums(values_BL: Tensor, sizes: Mapping[str, int]) -> Tensor:
    """[D] sums over the tokens of each domain; the number of operators does not grow with D."""
    if len(set(sizes.values())) == 1:
        return values_BL.reshape(len(sizes), -1).sum(1)
    device = values_BL.device
    domain_of = [domain for domain, size in enumerate(sizes.values()) for _ in range(size)]
    is_in_DB = torch.arange(len(sizes), device=device)[:, None] == on_device(domain_of, device)
    # torch.where, not a product with the mask: NaN * 0 would reach every domain.
    return torch.where(is_in_DB, values_BL.sum(1), 0).sum(1)


def _checked_sizes(
    logits_BLV: Tensor, labels_BL: Tensor, sizes: Mapping[str, int]
) -> dict[str, int]:
    """The sizes that are not zero; ValueError if these are not those of the batch."""
    if logits_BLV.dim() != 3 or labels_BL.shape != logits_BLV.shape[:2]:
        raise ValueError(
            "domain losses take logits [B, L, V] or hidden states [B, L, H] and labels [B, L]; got "
            f"{list(logits_BLV.shape)} and {list(labels_BL.shape)}."
        )
    if sum(sizes_of(sizes).values()) != len(labels_BL):
        raise ValueError(
            f"sizes must add up to the {len(labels_BL)} examples of the batch; got {dict(sizes)}."
        )
    return sizes_of(sizes)
