"""From the rows of a step to its weighted gradient: Gram matrix, K x K step, weighted sum.

Reads the K x N rows twice and writes N, all on the device; nothing waits for it.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from doge_fast.distributed.exchange import Columns, Exchange
from doge_fast.flat_buffer import Block
from doge_fast.kernels.reweight.packing import LastStep
from doge_fast.tracing import phase
from doge_fast.weights import scores as generalization
from doge_fast.weights import simplex
from doge_fast.weights.state import DomainWeights
from doge_fast.weights.subset import Subset


@torch.no_grad()
def combine(
    blocks: list[Block],
    weights: DomainWeights,
    subset: Subset,
    exchange: Exchange,
    *,
    present: Collection[str],
    selected: Collection[int] | None,
    lr: float | Tensor,
    grad_scale: float | Tensor,
    decided: Callable[[Tensor], None],
) -> LastStep:
    """Move the domain weights and write sum_j alpha'_j g_j into `p.grad`.

    A gradient that is not finite moves nothing and makes `p.grad` NaN.

    Args:
        blocks: rows of every parameter that a domain gave a gradient, complete.
        weights: that move.
        subset: the domains of this step.
        exchange: between the ranks; what they have told each other of this step.
        present: names of the rows that have a gradient.
        selected: ids of the parameters whose columns enter W; None: all.
        lr: eta of this step.
        grad_scale: > 0, the factor that the rows carry; `p.grad` keeps it.
        decided: called with the flag of a skipped step when all that it needs is queued.

    Raises:
        RuntimeError: no selected parameter is among the blocks.
        ValueError: `lr` < 0 or NaN.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), Algorithms 1 and 2, eq. (update_dw).
    """
    columns = exchange.complete(blocks, selected or ())
    with phase("gram"):
        products = subset.spread(*_grams(columns, exchange, selected, weights))
    before = None if products.full_RR is not None else weights.snapshot()
    with phase("reweight"):
        new = subset.gathered(
            weights.move(
                products.gram_RR,
                full_RR=products.full_RR,
                own_R=products.own_R,
                seen=present,
                lr=lr,
                grad_scale=grad_scale,
                share=subset.share,
            )
        )
    if before is None:
        decided(new.skipped)
    with phase("weighted_sum"):
        gradients = exchange.deliver(columns, new.coefficients, weights.shared_state)
    if before is not None:
        new = _cut_afterwards(columns, gradients, exchange, new, weights, before, grad_scale)
        decided(new.skipped)
    exchange.give(columns, gradients)
    return new._replace(lr=lr)


def _grams(
    columns: Columns,
    exchange: Exchange,
    selected: Collection[int] | None,
    weights: DomainWeights,
) -> tuple[Tensor, Tensor | None]:
    """Gram matrices of the selected columns and of all; the latter None where not needed.

    The Gram matrix is additive over columns. Columns outside the selection are read only for
    per-domain clipping; the combined gradient's own norm is cheaper to take from it.
    """
    if selected is None:
        gram_RR = exchange.summed(columns.rows)
        return gram_RR, gram_RR
    inside, outside = columns.split(selected)
    if not inside:
        raise RuntimeError(
            "no selected parameter received a gradient in this step; `selection` must name "
            "parameters that the domains touch."
        )
    gram_RR = exchange.summed(inside)
    if not outside:
        return gram_RR, gram_RR
    if not weights.rule.cuts_rows:
        return gram_RR, None
    return gram_RR, gram_RR + exchange.summed(outside)


def _cut_afterwards(
    columns: Columns,
    gradients: list[Tensor],
    exchange: Exchange,
    new: LastStep,
    weights: DomainWeights,
    before: Tensor,
    grad_scale: float | Tensor,
) -> LastStep:
    """The global clip and the overflow that only the combined gradient shows.

    Its norm takes one pass over N.
    """
    combined_norm = exchange.squared_norm(columns, gradients).sqrt() / grad_scale
    overflow = ~combined_norm.isfinite()
    weights.retract(before, overflow)
    if weights.rule.max_grad_norm is not None:
        factor = generalization.clip_factors(combined_norm, weights.rule.max_grad_norm)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
    skipped = new.skipped | overflow
    return new._replace(
        alpha=weights.read("alpha"),
        combined_norm=combined_norm,
        skipped=skipped,
        found_inf=skipped.to(torch.float32),
    )


def scale_of(
    grad_scale: float | Tensor | None, scaler: GradScaler | None, device: torch.device
) -> float | Tensor:
    """The factor of the losses: the one that is named, if it is one, else that of the scaler.

    A tensor is not looked at.

    Raises:
        ValueError: the loop's number is not positive and finite.
    """
    if grad_scale is None:
        return factor_of(scaler, device)
    if not isinstance(grad_scale, Tensor) and not (
        simplex.is_number(grad_scale) and 0 < grad_scale < float("inf")
    ):
        raise ValueError(
            f"grad_scale must be positive and finite; got {grad_scale!r}. Pass the factor that the "
            "losses were multiplied by, scaler.get_scale()."
        )
    return grad_scale


def factor_of(scaler: GradScaler | None, device: torch.device) -> float | Tensor:
    """What the losses of this step were multiplied by; one without a scaler."""
    if scaler is None:
        return 1.0
    # On the device: get_scale() would make the host wait for it.
    return scaler.scale(torch.ones((), device=device))


def checked_scaler(scaler: object) -> GradScaler | None:
    """The scaler that was given.

    Raises:
        TypeError: it is none.
    """
    if scaler is None or isinstance(scaler, GradScaler):
        return scaler
    raise TypeError(f"scaler must be a torch.amp.GradScaler or None; got {scaler!r}.")
