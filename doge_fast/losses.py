"""Losses of a batch that holds several domains: one mean per domain."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

Out = tuple[Tensor | None, bool]
"""Memory of a gradient, None if there is none to compute; and whether it is to be added to."""


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
    `chunk_tokens` tokens) at a time. Inside `DoGEOptimizer.stacked` each domain's gradient of the
    head goes straight into its row, while its logits are there: see `_LinearLosses`. Elsewhere the
    backward pass computes the logits again, which costs one more product of the head's size::

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
    weight_pass, bias_pass = (
        None if each is None else _pass_of(each, examples) for each in (weight_VH, bias_V)
    )
    is_trained = torch.is_grad_enabled()
    spans = tuple(itertools.starmap(slice, itertools.pairwise([0, *ends])))
    losses_D: Tensor = _LinearLosses.apply(  # type: ignore[no-untyped-call]
        rearrange(hidden_BLH[:, :-1], "b l h -> (b l) h"),
        weight_VH,
        bias_V,
        rearrange(targets_BL, "b l -> (b l)"),
        _counts(targets_BL, names, examples, num_targets, ignore_index),
        _Head(spans, ignore_index, chunk_tokens, weight_pass, bias_pass, is_trained),
    )
    return losses_D


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
    is_trained: bool
    """Whether a backward pass may follow."""

    def dtype_of(self, domain: int, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a domain's gradient of the weight, for products of `dtype`."""
        # 16 bits are enough for one product; sums of several are float32.
        return dtype if len(self.chunks(self.spans[domain])) == 1 else wide_dtype(dtype)

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
    """[D] mean losses. Gradients are computed with the losses where they have a place to wait in.

    A domain's loss reaches the parameters through one number, the gradient of that loss, which the
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
        bias_V: Tensor | None,
        targets_T: Tensor,
        counts_D: Tensor,
        head: _Head,
    ) -> Tensor:
        dtype = autocast_dtype(hidden_TH) or hidden_TH.dtype
        bias = None if bias_V is None else bias_V.to(dtype)
        tensors = hidden_TH.to(dtype), weight_VH.to(dtype), bias, targets_T
        needs_hidden, *needs = ctx.needs_input_grad[:3]
        places = ctx.places = _reserved(head, (weight_VH, bias_V), needs, dtype)
        share_D = None if places is None else counts_D.to(wide_dtype(dtype)).reciprocal()
        with without_autocast(hidden_TH):
            sums_D, ctx.grad_TH = _over_domains(
                head,
                *tensors,
                share_D=share_D,
                needs_hidden=needs_hidden,
                memory_of=lambda domain: nullcontext(_outs(places, domain)),
            )
        ctx.head = head
        ctx.save_for_backward(weight_VH, bias_V, counts_D, *tensors)
        return sums_D / counts_D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_D: Tensor) -> Any:
        weight, bias, counts_D, *tensors = ctx.saved_tensors
        head: _Head = ctx.head
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if _are_kept(ctx.places):
            grad_TH = ctx.grad_TH
            _multiply(grad_D, head.spans, grad_TH, ctx.places)
            ctx.grad_TH = ctx.places = None
            return grad_TH, *[None] * 5
        wide = wide_dtype(tensors[0].dtype)
        grad_VH = grad_V = None
        if needs_weight and head.weight_pass is None:
            grad_VH = torch.zeros_like(tensors[1], dtype=wide)
        if needs_bias and head.bias_pass is None:
            grad_V = torch.zeros_like(tensors[2], dtype=wide)

        @contextmanager
        def memory_of(domain: int) -> Iterator[tuple[Out, Out]]:
            dtype = head.dtype_of(domain, tensors[0].dtype)
            with (
                _memory_for(grad_VH, weight, head.weight_pass, domain, dtype) as for_weight,
                _memory_for(grad_V, bias, head.bias_pass, domain, wide) as for_bias,
            ):
                yield for_weight, for_bias

        with without_autocast(grad_D):
            _, grad_TH = _over_domains(
                head,
                *tensors,
                share_D=grad_D / counts_D,
                needs_hidden=needs_hidden,
                memory_of=memory_of,
            )
        return grad_TH, grad_VH, grad_V, None, None, None


class _Place(NamedTuple):
    """Memory of a row for the gradient of a parameter, before the backward pass."""

    stacked: StackedModel
    param: Tensor
    row: int
    memory: Tensor


Places = list[tuple[_Place | None, _Place | None]]
"""For every domain those of weight and bias; None without a gradient."""


def _reserved(
    head: _Head, params: Sequence[Tensor | None], needs: Sequence[bool], dtype: torch.dtype
) -> Places | None:
    """Places for all gradients of weight and bias; None if one of them has none."""
    if not head.is_trained or dtype == torch.float16:
        return None
    places: Places = []
    for domain in range(len(head.spans)):
        kinds = head.dtype_of(domain, dtype), wide_dtype(dtype)
        own: list[_Place | None] = []
        passes = head.weight_pass, head.bias_pass
        for param, is_needed, stacked, kind in zip(params, needs, passes, kinds, strict=True):
            if param is None or not is_needed:
                own.append(None)
                continue
            row = -1 if stacked is None else stacked.segments[domain].row
            memory = None if stacked is None else stacked.reserve(param, row, kind)
            if stacked is None or memory is None:
                return None
            own.append(_Place(stacked, param, row, memory))
        places.append((own[0], own[1]))
    return places


def _outs(places: Places | None, domain: int) -> tuple[Out, Out]:
    weight, bias = (None, None) if places is None else places[domain]
    return (weight and weight.memory, False), (bias and bias.memory, False)


def _are_kept(places: Places | None) -> bool:
    """Whether there are places, and nothing else has used their memory since."""
    return places is not None and all(
        each is None or each.stacked.is_reserved(each.param, each.row, each.memory)
        for pair in places
        for each in pair
    )


def _multiply(
    grad_D: Tensor, spans: Sequence[slice], grad_TH: Tensor | None, places: Places
) -> None:
    """Make gradients of the means those of the loss; the places become rows."""
    # The host knows the numbers of a CPU.
    is_one = grad_D.is_cpu and bool((grad_D == 1).all())
    for grad, span, pair in zip(grad_D, spans, places, strict=True):
        values = [] if grad_TH is None else [grad_TH[span]]
        for place in filter(None, pair):
            rows = range(place.row, place.row + 1)
            values.append(place.stacked.slots(place.param, rows, place.memory.dtype)[0])
        for value in () if is_one else values:
            value.mul_(grad)


def _over_domains(
    head: _Head,
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    *,
    share_D: Tensor | None,
    needs_hidden: bool,
    memory_of: Callable[[int], AbstractContextManager[tuple[Out, Out]]],
) -> tuple[Tensor, Tensor | None]:
    """[D] sums of the token losses, and the gradient of the hidden states.

    Args:
        head: the domains and chunks.
        hidden_TH: [T, H] of all domains; with weight [V, H] and bias [V] of its dtype.
        weight_VH: as above.
        bias_V: as above, or None.
        targets_T: [T] int64.
        share_D: d(result) / d(loss of a token) by domain; None: losses alone.
        needs_hidden: whether the hidden states have a gradient.
        memory_of: a domain's memory for its gradients of weight and bias, which are written.
    """
    counted_T = targets_T != head.ignore_index
    # Ignored positions get a valid index; their share is zero.
    targets_T1 = torch.where(counted_T, targets_T, 0)[:, None]
    wide = wide_dtype(hidden_TH.dtype)
    grad_TH = torch.empty_like(hidden_TH) if needs_hidden and share_D is not None else None
    sums = []
    for domain, span in enumerate(head.spans):
        losses = []
        with memory_of(domain) as ((out_VH, adds_w), (out_V, adds_b)):
            for index, chunk in enumerate(head.chunks(span)):
                hidden_CH, targets_C1 = hidden_TH[chunk], targets_T1[chunk]
                # Everything of the logits' size happens in the same memory.
                values_CV = exact(F.linear(hidden_CH, weight_VH, bias_V))
                values_CV.sub_(values_CV.amax(1, keepdim=True))
                picked_C1 = values_CV.gather(1, targets_C1)
                totals_C1 = values_CV.exp_().sum(1, keepdim=True)
                losses_C = (totals_C1.log() - picked_C1)[:, 0]
                losses.append(torch.where(counted_T[chunk], losses_C, 0).sum())
                if share_D is None:
                    continue
                # share_t (softmax(logits) - one-hot(target)).
                share_C1 = counted_T[chunk, None] * share_D[domain]
                slope_CV = values_CV.mul_(share_C1 / totals_C1)
                slope_CV.scatter_add_(1, targets_C1, -share_C1)
                slope_CV = slope_CV.to(hidden_CH.dtype)
                if grad_TH is not None:
                    torch.mm(slope_CV, weight_VH, out=grad_TH[chunk])
                if out_VH is not None:
                    left_1VC, right_1CH = slope_CV.t()[None], hidden_CH[None]
                    multiply(out_VH[None], left_1VC, right_1CH, adds_w or index > 0)
                if out_V is not None:
                    put(out_V, slope_CV.sum(0, dtype=wide), adds_b or index > 0)
        sums.append(losses[0] if len(losses) == 1 else torch.stack(losses).sum())
    return torch.stack(sums), grad_TH


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
