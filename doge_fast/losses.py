"""Losses of a batch that holds several domains: one mean per domain, as the method wants them."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100


def domain_losses(
    logits_BLV: Tensor,
    labels_BL: Tensor,
    sizes: Mapping[str, int],
    *,
    num_targets: Mapping[str, int] | None = None,
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
        _wide(logits_BLV[:, :-1]).flatten(0, 1),
        targets_BL.flatten(),
        ignore_index=ignore_index,
        reduction="none",
    )
    examples = [sizes[name] for name in names]
    parts = torch.split(token_losses.view_as(targets_BL), examples)
    sums_D = torch.stack([part.sum() for part in parts])
    return sums_D / _counts(targets_BL, names, examples, num_targets, ignore_index)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _counts(
    targets_BL: Tensor,
    names: Collection[str],
    examples: list[int],
    num_targets: Mapping[str, int] | None,
    ignore_index: int,
) -> Tensor:
    """[D] targets of each domain, at least 1."""
    if num_targets is not None:
        counted = [num_targets[name] for name in names]
        return torch.tensor(counted, device=targets_BL.device).clamp(min=1)
    parts = torch.split(targets_BL != ignore_index, examples)
    return torch.stack([part.sum() for part in parts]).clamp(min=1)


def _check(logits_BLV: Tensor, labels_BL: Tensor, sizes: Mapping[str, int]) -> None:
    if logits_BLV.dim() != 3 or labels_BL.shape != logits_BLV.shape[:2]:
        raise ValueError(
            "domain_losses() takes logits [B, L, V] and labels [B, L]; got "
            f"{list(logits_BLV.shape)} and {list(labels_BL.shape)}."
        )
    if sum(sizes.values()) != len(labels_BL) or any(size < 0 for size in sizes.values()):
        raise ValueError(
            f"sizes must add up to the {len(labels_BL)} examples of the batch; got {dict(sizes)}."
        )
