"""Losses of a batch that holds several domains: one mean per domain, as the method wants them."""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from doge_fast.stacked.layers.batch import on_device
from doge_fast.stacked.layers.linear import autocast_dtype, without_autocast
from doge_fast.stacked.layers.token_sums import products, put
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

    Token by token the loss of position p is that of label p + 1, as in causal language models of
    transformers. The sum of the result is what `DoGEOptimizer.stacked` differentiates: its
    gradient with respect to domain i's tokens is that of l_i.

    Args:
        logits_BLV: [B, L, V] floating.
        labels_BL: [B, L] int64; tokens, or `ignore_index` where nothing is to be predicted.
        sizes: number of examples of each domain, in the order of the batch.
        num_targets: n_i where a domain's targets are spread over several micro-batches: those of
            the whole optimizer step. None: those of this batch.
        ignore_index: the label that is not predicted.

    Returns:
        [D] float32 (float64 for float64 logits), one for each domain of `sizes` that has
        examples, in their order; 0 for a domain whose targets are all ignored.

    Raises:
        ValueError: the shapes do not belong together, or `sizes` do not add up to the batch.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), section 2: l_j, the mean loss of a domain.
    """
    _check(logits_BLV, labels_BL, sizes)
    names = [name for name, size in sizes.items() if size]
    targets_BL = labels_BL[:, 1:]
    token_losses = F.cross_entropy(
        rearrange(_wide(logits_BLV[:, :-1]), "b l v -> (b l) v"),
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
    Logits are B L V numbers there, several times over; here those of the largest domain (or of
    `chunk_tokens` tokens), which are computed a second time in the backward pass: one product of
    the head's size more. Inside `DoGEOptimizer.stacked` each domain's gradient of the head goes
    straight into its row::

        with optimizer.stacked(model, sizes):
            hidden = model.base_model(input_ids).last_hidden_state
            head = model.get_output_embeddings()
            linear_domain_losses(hidden, head.weight, labels, sizes).sum().backward()

    For heads that are a product and nothing else: no scale and no cap of the logits. Runs outside
    what `torch.compile` compiles. Under autocast the products are of its dtype.

    Args:
        hidden_BLH: [B, L, H] floating, what the head reads.
        weight_VH: [V, H], of the head.
        labels_BL: as for `domain_losses`.
        sizes: as for `domain_losses`; inside `stacked`, the very sizes of the batch.
        bias_V: [V], of the head.
        num_targets: as for `domain_losses`.
        ignore_index: as for `domain_losses`.
        chunk_tokens: tokens whose logits exist at a time; None: a whole domain's.

    Returns:
        As `domain_losses`.

    Raises:
        ValueError: the shapes do not belong together, or `sizes` do not add up to the batch or
            are not those of the stacked batch.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), section 2: l_j, the mean loss of a domain.
    """
    _check_head(hidden_BLH, weight_VH, bias_V, chunk_tokens)
    _check(hidden_BLH, labels_BL, sizes)
    names = [name for name, size in sizes.items() if size]
    examples = [sizes[name] for name in names]
    targets_BL = labels_BL[:, 1:]
    passes = [None if each is None else _pass_of(each, examples) for each in (weight_VH, bias_V)]
    spans = tuple(_spans(examples, targets_BL.shape[1]))
    head = _Head(spans, ignore_index, chunk_tokens, *passes)
    hidden_TH = rearrange(hidden_BLH[:, :-1], "b l h -> (b l) h")
    targets_T = rearrange(targets_BL, "b l -> (b l)")
    sums_D: Tensor = _LinearLosses.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_VH, bias_V, targets_T, head
    )
    return sums_D / _counts(targets_BL, names, examples, num_targets, ignore_index)


class _Head(NamedTuple):
    """What the autograd function is given beside tensors."""

    spans: tuple[slice, ...]
    """Tokens of each domain."""
    ignore_index: int
    chunk_tokens: int | None
    weight_pass: StackedModel | None
    """The stacked pass that takes the weight's gradient domain by domain."""
    bias_pass: StackedModel | None
    """Likewise the bias's."""

    def chunks(self, span: slice) -> Iterator[slice]:
        """The tokens of a domain in one chunk or several; the logits of one exist at a time."""
        step = self.chunk_tokens or max(1, span.stop - span.start)
        for first in range(span.start, max(span.stop, span.start + 1), step):
            yield slice(first, min(span.stop, first + step))


def _spans(examples: list[int], length: int) -> Iterator[slice]:
    first = 0
    for number in examples:
        yield slice(first * length, (first + number) * length)
        first += number


def _pass_of(param: Tensor, examples: list[int]) -> StackedModel | None:
    """The stacked pass under way that trains `param`, whose batch must be ours."""
    stacked = pass_of(param)
    if stacked is not None:
        expected = [segment.last - segment.first for segment in stacked.batch.segments]
        if expected != examples:
            raise ValueError(
                f"inside stacked() the sizes must be those of its batch, {expected}; got "
                f"{examples}."
            )
    return stacked


def _operands(hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> list[Tensor | None]:
    """All three in the dtype of the head's products."""
    operands = [hidden_TH, weight_VH, bias_V]
    dtype = autocast_dtype(hidden_TH)
    if dtype is None:
        return operands
    return [None if operand is None else operand.to(dtype) for operand in operands]


class _LinearLosses(torch.autograd.Function):
    """[D] sums of token losses of the domains; logits are computed in both passes and not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        head: _Head,
    ) -> Tensor:
        hidden, weight, bias = _operands(hidden_TH, weight_VH, bias_V)
        assert hidden is not None
        with without_autocast(hidden):
            sums = []
            for span in head.spans:
                losses = [
                    F.cross_entropy(
                        _wide(F.linear(hidden[chunk], weight, bias)),  # type: ignore[arg-type]
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
            walk = _BackwardWalk(ctx, grad_D)
            walk.run()
        return walk.hidden_TH, walk.weight_VH, walk.bias_V, None, None


class _Saved(NamedTuple):
    """What the forward kept of a head, in the dtype of its products."""

    hidden_TH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    share_T: Tensor
    """What the loss of each token counts; 0 where there is no target."""
    minus_share_T: Tensor
    tokens_T: Tensor
    """The targets; 0 where the token does not count."""


class _BackwardWalk:
    """The gradients of a head, domain by domain; those that a stacked pass takes stay None."""

    def __init__(self, ctx: Any, grad_D: Tensor) -> None:
        hidden_TH, weight_VH, bias_V, weight, bias, targets_T = ctx.saved_tensors
        self._params = weight_VH, bias_V
        self._head: _Head = ctx.head
        counted_T = targets_T != self._head.ignore_index
        # An index that exists, for positions that count nothing.
        tokens_T = torch.where(counted_T, targets_T, 0)
        pairs = zip(grad_D.unbind(), self._head.spans, strict=True)
        grad_T = torch.cat([grad.expand(span.stop - span.start) for grad, span in pairs])
        share_T = counted_T * grad_T
        self._saved = _Saved(hidden_TH, weight, bias, share_T, -share_T, tokens_T)
        # 16 bits hold one product; several add up in float32.
        dtype = self._saved.hidden_TH.dtype
        self._sum_dtype = torch.float32 if dtype.itemsize < 4 else dtype
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        self.hidden_TH = torch.empty_like(self._saved.hidden_TH) if needs_hidden else None
        self.weight_VH = self.bias_V = None
        if needs_weight and self._head.weight_pass is None:
            self.weight_VH = torch.zeros_like(self._saved.weight_VH, dtype=self._sum_dtype)
        if needs_bias and self._head.bias_pass is None:
            self.bias_V = torch.zeros_like(bias, dtype=self._sum_dtype)
        self._needs_bias = needs_bias
        self._bias_sum: Tensor | None = None

    def run(self) -> None:
        """Visit every domain once."""
        for domain, span in enumerate(self._head.spans):
            self._visit_weight(domain, span)
            if self._bias_sum is not None:
                self._take_bias(domain, self._bias_sum)

    def _visit_weight(self, domain: int, span: slice) -> None:
        """Compute all of a domain; its gradient of the weight goes where it belongs."""
        stacked = self._head.weight_pass
        if stacked is not None:
            is_one = span.stop - span.start <= (self._head.chunk_tokens or span.stop)
            dtype = self._saved.hidden_TH.dtype if is_one else self._sum_dtype
            fill = partial(self._fill_row, domain, dtype)
            stacked.fill(self._params[0], self._row_of(stacked, domain), dtype, fill)
        elif self.weight_VH is not None:
            self._fill(domain, self.weight_VH, True)
        else:
            for _ in self._slopes(domain):
                pass

    def _row_of(self, stacked: StackedModel, domain: int) -> range:
        row = stacked.batch.segments[domain].row
        return range(row, row + 1)

    def _take_bias(self, domain: int, grad_V: Tensor) -> None:
        stacked = self._head.bias_pass
        if stacked is not None:
            rows = self._row_of(stacked, domain)
            stacked.fill(self._params[1], rows, self._sum_dtype, put(grad_V))
        elif self.bias_V is not None:
            self.bias_V += grad_V

    def _fill_row(self, domain: int, dtype: torch.dtype, out_1VH: Tensor, adds: bool) -> None:
        if out_1VH.dtype.itemsize >= dtype.itemsize:
            self._fill(domain, out_1VH[0], adds)
            return
        # Rows narrower than the sum of several products round it once.
        sum_VH = torch.empty_like(out_1VH[0], dtype=dtype)
        self._fill(domain, sum_VH, False)
        put(sum_VH)(out_1VH, adds)

    def _fill(self, domain: int, out_VH: Tensor, adds: bool) -> None:
        """out = or += the weight's gradient of one domain."""
        for hidden_CH, slope_CV in self._slopes(domain):
            products(slope_CV.t()[None], hidden_CH[None])(out_VH[None], adds)
            adds = True

    def _slopes(self, domain: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(hidden, gradient of the logits) by chunks; fills `hidden_TH` and the bias's sum."""
        saved, self._bias_sum = self._saved, None
        if self._needs_bias:
            self._bias_sum = saved.share_T.new_zeros(len(saved.weight_VH), dtype=self._sum_dtype)
        for chunk in self._head.chunks(self._head.spans[domain]):
            hidden_CH = saved.hidden_TH[chunk]
            logits_CV = _wide(F.linear(hidden_CH, saved.weight_VH, saved.bias_V))
            # (softmax(logits) - one-hot(target)) times what the loss of a token counts.
            slope_CV = torch.softmax(logits_CV, 1).mul_(saved.share_T[chunk, None])
            del logits_CV
            minus_share_C1 = saved.minus_share_T[chunk, None]
            slope_CV.scatter_add_(1, saved.tokens_T[chunk, None], minus_share_C1)
            slope_CV = slope_CV.to(hidden_CH.dtype)
            if self.hidden_TH is not None:
                torch.mm(slope_CV, saved.weight_VH, out=self.hidden_TH[chunk])
            if self._bias_sum is not None:
                self._bias_sum += slope_CV.sum(0, dtype=self._sum_dtype)
            yield hidden_CH, slope_CV


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _wide(logits: Tensor) -> Tensor:
    return logits.to(_wide_dtype(logits.dtype))


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
    # All numbers of the host in one copy, which it does not wait for.
    of_host = [
        index
        for index, count in enumerate(counts)
        if not isinstance(count, Tensor) or count.device != device
    ]
    copied = on_device([int(counts[index]) for index in of_host], device)
    if len(of_host) == len(counts):
        return copied.clamp(min=1)
    for index, count in zip(of_host, copied.unbind(), strict=True):
        counts[index] = count
    return torch.stack(counts).clamp(min=1)  # type: ignore[arg-type]


def _sums(values_BP: Tensor, examples: list[int]) -> Tensor:
    """[D] sums over the tokens of each domain, in a few operators for any number of domains."""
    if len(set(examples)) == 1:
        return values_BP.reshape(len(examples), -1).sum(1)
    device = values_BP.device
    domain_of = [domain for domain, number in enumerate(examples) for _ in range(number)]
    is_its_DB = torch.arange(len(examples), device=device)[:, None] == on_device(domain_of, device)
    return torch.where(is_its_DB, values_BP.sum(1), 0).sum(1)


def _check_head(
    hidden_BLH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, chunk_tokens: int | None
) -> None:
    if weight_VH.dim() != 2 or hidden_BLH.shape[-1:] != weight_VH.shape[1:]:
        raise ValueError(
            "linear_domain_losses() takes hidden states [B, L, H] and a weight [V, H]; got "
            f"{list(hidden_BLH.shape)} and {list(weight_VH.shape)}."
        )
    if bias_V is not None and bias_V.shape != weight_VH.shape[:1]:
        raise ValueError(
            f"bias_V must hold one number for each of {len(weight_VH)} tokens; got "
            f"{list(bias_V.shape)}."
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
