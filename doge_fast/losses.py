"""Losses of a batch that holds several domains: one mean per domain."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from doge_fast.flat_buffer import on_device
from doge_fast.kernels import cross_entropy, scale_rows
from doge_fast.kernels.cross_entropy import IGNORED as IGNORED
from doge_fast.kernels.schema import sum_dtype
from doge_fast.stacked.layers.batch import SortedBatch
from doge_fast.stacked.layers.linear import autocast_dtype, multiply, without_autocast
from doge_fast.stacked.layers.token_sums import exact
from doge_fast.stacked.stacked import (
    StackedModel,
    batches_with_halves,
    recording_model,
    sizes_of,
    will_receive_grad,
)

# Logits of several small domains are computed together, up to so many bytes; those of one domain
# are never split. On a CPU they stay in the cache. Elsewhere fewer products read the weight of the
# head, 77 MB for 50,304 words.
CHUNK_BYTES = {"cpu": 1 << 20}
CHUNK_BYTES_ELSEWHERE = 1 << 30


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
        ValueError: the batches of logits and labels differ, or `sizes` do not add up to them.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), section 2.
    """
    sizes = _checked_sizes(logits_BLV, labels_BL, sizes)
    sums_D = _sums(token_losses(logits_BLV, labels_BL), sizes)
    counts_D = _counts(labels_BL[:, 1:], sizes, num_targets)
    if sums_D.requires_grad:
        _weigh_halves(labels_BL[:, 1:], sizes, counts_D)
    return sums_D / counts_D


def token_losses(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """[B, L - 1] cross-entropy of every predicted token, in nats; float32, or float64.

    Position p predicts label p + 1; the loss of an ignored label is 0.
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
    """`domain_losses` of a linear head without bias, with few of the logits at a time.

    The logits of one domain, or of several small ones, exist at a time.

    l_i  =  1 / n_i  sum over the targets t of domain i of  - log softmax(W h)_t

    Equals `domain_losses(F.linear(hidden_BLH, weight_VH), labels_BL, sizes)` to rounding, which
    holds several copies of all B L V logits. The logits turn into their gradients in the same
    memory (`doge_fast.kernels.cross_entropy`). Inside `DoGEOptimizer.stacked` the head's gradient
    of each domain goes straight into its row (`_LinearLosses`). Elsewhere the backward pass
    computes the logits again, which costs one more product of the head's size::

        with optimizer.stacked(model, sizes):
            hidden = model.base_model(input_ids).last_hidden_state
            head = model.get_output_embeddings()
            linear_domain_losses(hidden, head.weight, labels, sizes).sum().backward()

    For heads that do not scale or cap the logits, outside compiled code. Under autocast the
    products have its dtype.

    Args:
        hidden_BLH: [B, L, H] floating, the input of the head.
        weight_VH: [V, H], the head's weight.
        labels_BL: as for `domain_losses`.
        sizes: as for `domain_losses`; inside `stacked` the sizes of its batch.
        num_targets: as for `domain_losses`.

    Returns:
        As `domain_losses`.

    Raises:
        ValueError: the batches differ, `sizes` do not add up to the batch, or they differ from
            those of the stacked batch.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), section 2: l_j, the mean loss of a domain.
    """
    sizes = _checked_sizes(hidden_BLH, labels_BL, sizes)
    targets_BL = labels_BL[:, 1:]
    rows = _HeadRows.of(weight_VH)
    if rows is not None:
        rows.check(sizes)
    parts = [[size] for size in sizes.values()] if rows is None else rows.batch.parts
    ends = [end * targets_BL.shape[1] for end in itertools.accumulate(itertools.chain(*parts))]
    spans = tuple(itertools.starmap(slice, itertools.pairwise([0, *ends])))
    counts_S = counts_D = _counts(targets_BL, sizes, num_targets)
    numbers = [len(part) for part in parts]
    is_split = len(spans) > len(sizes)
    if is_split:
        # The mean of a domain's loss is over the targets of all its segments.
        counts_S = _repeated(counts_D, numbers)
    losses_S: Tensor = _LinearLosses.apply(  # type: ignore[no-untyped-call]
        rearrange(hidden_BLH[:, :-1], "b l h -> (b l) h"),
        weight_VH,
        rearrange(targets_BL, "b l -> (b l)"),
        counts_S,
        _Head(spans, rows, torch.is_grad_enabled()),
    )
    if losses_S.requires_grad:
        _weigh_halves(targets_BL, sizes, counts_D)
    if not is_split:
        return losses_S
    return torch.stack([part_S.sum() for part_S in torch.split(losses_S, numbers)])


class _HeadRows(NamedTuple):
    """The head's rows of the buffer in a stacked pass, one for each of the batch's segments."""

    stacked: StackedModel
    batch: SortedBatch
    weight: Tensor

    @staticmethod
    def of(weight: Tensor) -> "_HeadRows | None":
        """None outside a stacked pass that trains the weight."""
        stacked = recording_model(weight)
        if stacked is None or stacked.batch is None:
            return None
        stacked.batch.num_uses[id(weight)] += 1
        return _HeadRows(stacked, stacked.batch, weight)

    def check(self, sizes: Mapping[str, int]) -> None:
        """ValueError if the sizes are not those of the batch."""
        if (expected := [*map(sum, self.batch.parts)]) != [*sizes.values()]:
            raise ValueError(
                f"inside stacked() the sizes must be those of its batch, {expected}; got "
                f"{[*sizes.values()]}."
            )

    def reserve(self, dtype: torch.dtype) -> list[Tensor] | None:
        """The rows' memory, D views [V, H]; None if a row holds a gradient or is too narrow."""
        views_DVH = []
        for segment in self.batch.segments:
            view_VH = self.stacked.buffer.reserve(segment.row, self.weight, dtype)
            if view_VH is None:
                return None
            views_DVH.append(view_VH)
        return views_DVH

    def are_reserved(self, views_DVH: Sequence[Tensor]) -> bool:
        """Whether nothing else has used the memory since `reserve`."""
        # There are no views if the weight needed no gradient.
        return all(
            self.stacked.buffer.is_reserved(segment.row, self.weight, view_VH)
            for segment, view_VH in zip(self.batch.segments, views_DVH, strict=False)
        )

    def claim(self, domain: int, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """A domain's row [V, H], which counts as written then, and whether it must be added to."""
        row = self.batch.segments[domain].row
        (row_VH,), adds = self.stacked.claim(self.weight, range(row, row + 1), dtype)
        return row_VH, adds

    def claim_all(self, dtype: torch.dtype) -> list[Tensor]:
        """All rows as `claim` gives them, [G, V, H] for each run of neighbouring rows."""
        runs = self.batch.runs
        return [self.stacked.claim(self.weight, run.row_range, dtype)[0] for run in runs]


class _Head(NamedTuple):
    """The arguments of `_LinearLosses` that are no tensors."""

    spans: tuple[slice, ...]
    """Tokens of each domain."""
    rows: _HeadRows | None
    """None outside a stacked pass: autograd gets the gradient of the weight."""
    has_backward: bool
    """Whether a backward pass may follow."""


class _LinearLosses(torch.autograd.Function):
    """[D] mean losses; in a stacked pass forward computes the gradients too, if rows are free.

    A domain's loss reaches the weight through one number, the gradient of that loss, which the
    backward pass brings: mostly 1, or the scale of a GradScaler. So in a stacked pass the gradients
    of the means are computed while the logits are there, those of the head in the memory of the
    domain's row (`FlatBuffer.reserve`), and the backward pass only multiplies by that number.

    The backward pass computes the logits again where a row holds gradients of an earlier
    micro-batch, where autograd gets the gradient of the head, and in float16, which is too narrow
    for gradients that are not scaled yet.
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
        # D views [V, H]; none if the weight needs no gradient. None: the backward pass computes all
        # gradients.
        views_DVH: list[Tensor] | None = None
        if head.has_backward and dtype != torch.float16:
            if not needs_weight:
                views_DVH = []
            elif head.rows is not None:
                views_DVH = head.rows.reserve(dtype)
        share_D = None if views_DVH is None else counts_D.to(sum_dtype(dtype)).reciprocal()
        with without_autocast(hidden_TH):
            sums_D, ctx.grad_TH = _losses_and_gradients(
                head.spans,
                *tensors,
                share_D=share_D,
                needs_hidden=needs_hidden,
                out_of=(lambda domain: (views_DVH[domain], False)) if views_DVH else None,
            )
        ctx.head, ctx.views_DVH = head, views_DVH
        ctx.save_for_backward(counts_D, *tensors)
        return sums_D / counts_D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_D: Tensor) -> Any:
        counts_D, *tensors = ctx.saved_tensors
        head: _Head = ctx.head
        spans, rows = head.spans, head.rows
        needs_hidden, was_trained = ctx.needs_input_grad[:2]
        needs_weight = was_trained
        is_computed = ctx.views_DVH is not None
        if rows is not None:
            rows.stacked.require_open(rows.batch)
            # autograd.grad(loss, hidden) leaves the rows alone.
            needs_weight = was_trained and will_receive_grad(ctx, 1)
            is_computed = is_computed and rows.are_reserved(ctx.views_DVH)
        if is_computed and needs_weight == was_trained:
            grad_TH, views_DVH, claimed = ctx.grad_TH, ctx.views_DVH, []
            ctx.grad_TH = ctx.views_DVH = None
            if rows is not None and needs_weight:
                # The rows in the memory of the views count as written now.
                claimed = rows.claim_all(views_DVH[0].dtype)
            _scale_gradients(grad_D, spans, grad_TH, claimed)
            return grad_TH, *[None] * 4
        dtype = tensors[0].dtype
        grad_VH = None
        if needs_weight and rows is None:
            grad_VH = torch.zeros_like(tensors[1], dtype=sum_dtype(dtype))

        def out_of(domain: int) -> tuple[Tensor, bool]:
            if rows is None:
                assert grad_VH is not None
                return grad_VH, True
            # Claimed one after another: a claim may move rows that were claimed before.
            return rows.claim(domain, dtype)

        with without_autocast(grad_D):
            _, grad_TH = _losses_and_gradients(
                spans,
                *tensors,
                share_D=grad_D / counts_D,
                needs_hidden=needs_hidden,
                out_of=out_of if needs_weight else None,
            )
        return grad_TH, grad_VH, None, None, None


def _scale_gradients(
    grad_D: Tensor, spans: Sequence[slice], grad_TH: Tensor | None, rows: Sequence[Tensor]
) -> None:
    """Multiply gradients of the mean losses by those of the loss with respect to these.

    `rows` are [G, V, H] each, of neighbouring domains.
    """
    if grad_TH is not None:
        scale_rows(grad_TH, _per_token(grad_D, spans))
    if rows:
        sizes = [len(rows_GVH) for rows_GVH in rows]
        for rows_GVH, grad_G in zip(rows, torch.split(grad_D, sizes), strict=True):
            scale_rows(rows_GVH.flatten(1), grad_G)


def _losses_and_gradients(
    spans: Sequence[slice],
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
    grad_TH = torch.empty_like(hidden_TH) if needs_hidden and share_D is not None else None
    share_T = None if share_D is None else _per_token(share_D, spans)
    parts = []
    for domains in _chunks(spans, weight_VH):
        chunk = slice(spans[domains.start].start, spans[domains.stop - 1].stop)
        hidden_SH = hidden_TH[chunk]
        # From logits to their gradients, [S, V] in the same memory.
        values_SV = _logits(hidden_SH, weight_VH)
        share_S = None if share_T is None else share_T[chunk]
        parts.append(cross_entropy(values_SV, targets_T[chunk], share_S))
        if share_D is None:
            continue
        if grad_TH is not None:
            torch.mm(values_SV, weight_VH, out=grad_TH[chunk])
        if out_of is None:
            continue
        sizes = _sizes(spans[domains])
        pairs = zip(torch.split(values_SV, sizes), torch.split(hidden_SH, sizes), strict=True)
        for domain, (slope_PV, part_PH) in enumerate(pairs, domains.start):
            out_VH, adds = out_of(domain)
            multiply(out_VH[None], slope_PV.t()[None], part_PH[None], adds)
    losses_T, sizes = torch.cat(parts), _sizes(spans)
    if len(set(sizes)) == 1:
        return losses_T.view(len(spans), -1).sum(1), grad_TH
    return torch.stack([losses_P.sum() for losses_P in torch.split(losses_T, sizes)]), grad_TH


def _sizes(spans: Sequence[slice]) -> list[int]:
    return [span.stop - span.start for span in spans]


def _chunks(spans: Sequence[slice], weight_VH: Tensor) -> Iterator[slice]:
    """Slices of neighbouring domains whose logits are computed together."""
    per_token = len(weight_VH) * weight_VH.itemsize
    most = CHUNK_BYTES.get(weight_VH.device.type, CHUNK_BYTES_ELSEWHERE) // max(1, per_token)
    first = 0
    for domain, span in enumerate(spans):
        if domain > first and span.stop - spans[first].start > most:
            yield slice(first, domain)
            first = domain
    yield slice(first, len(spans))


def _logits(hidden_SH: Tensor, weight_VH: Tensor) -> Tensor:
    """[S, V], in rows that start at multiples of 16 elements: of 50,257 all loads are wide."""
    stride = -(-len(weight_VH) // 16) * 16
    values_SV = hidden_SH.new_empty(len(hidden_SH), stride)[:, : len(weight_VH)]
    return torch.mm(hidden_SH, weight_VH.t(), out=values_SV)


def _per_token(values_D: Tensor, spans: Sequence[slice]) -> Tensor:
    """[T] each domain's value for all of its tokens."""
    return _repeated(values_D, _sizes(spans))


def _repeated(values_D: Tensor, numbers: Sequence[int]) -> Tensor:
    """Each value so many times."""
    if len(set(numbers)) == 1:
        return values_D.repeat_interleave(numbers[0])
    return torch.cat([value.expand(size) for value, size in zip(values_D, numbers, strict=True)])


def _weigh_halves(targets_BL: Tensor, sizes: Mapping[str, int], counts_D: Tensor) -> None:
    """Give stacked passes the weight of each half in its domain's loss: its targets / n_i."""
    for batch in batches_with_halves():
        parts = batch.parts
        if [*map(sum, parts)] != [*sizes.values()]:
            # The loss of something else than the batch.
            continue
        # Not `_sums`, which copies from the host where sizes differ: a captured CUDA graph has no
        # such copy.
        until_B = (targets_BL != IGNORED).sum(1).cumsum(0)
        until_S = torch.stack([until_B[segment.last - 1] for segment in batch.segments])
        targets_S = torch.diff(until_S, prepend=until_S.new_zeros(1))
        batch.add_weights(targets_S.double() / _repeated(counts_D, [*map(len, parts)]))


def _counts(
    targets_BL: Tensor, sizes: Mapping[str, int], num_targets: Mapping[str, int | Tensor] | None
) -> Tensor:
    """[D] targets of each domain, at least 1."""
    if num_targets is None:
        return _sums(targets_BL != IGNORED, sizes).clamp(min=1)
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
    is_one_batch = labels_BL.shape == logits_BLV.shape[:2]
    if not is_one_batch or sum(sizes.values()) != len(labels_BL):
        raise ValueError(
            "domain losses take logits [B, L, V] or hidden states [B, L, H], labels [B, L], and "
            f"sizes that add up to B; got {list(logits_BLV.shape)}, {list(labels_BL.shape)} and "
            f"{dict(sizes)}."
        )
    return sizes_of(sizes)
