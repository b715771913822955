"""From the rows of a step to its weighted gradient: Gram matrix, K x K step, weighted sum.

Reads the K x N rows twice and writes N, all on the device; nothing waits for it.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from doge_fast.distributed.exchange import Columns, Exchange
from doge_fast.flat_buffer import Block
from doge_fast.tracing import phase
from doge_fast.weights import simplex
from doge_fast.weights.reweight import LastStep
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
        gram_BB, full_BB = _grams(columns, exchange, selected)
    with phase("reweight"):
        new = weights.move(
            gram_BB,
            full_BB,
            rows_B=subset.rows,
            present=present,
            lr=lr,
            grad_scale=grad_scale,
        )
    decided(new.skipped)
    with phase("weighted_sum"):
        gradients = exchange.deliver(columns, new.coefficients, weights.shared_state)
    exchange.give(columns, gradients)
    return new


def _grams(
    columns: Columns, exchange: Exchange, selected: Collection[int] | None
) -> tuple[Tensor, Tensor]:
    """[B, B] Gram matrices of the selected columns and of all; one tensor where they are the same.

    The Gram matrix is additive over columns. Clipping and the check for overflow need the columns
    outside the selection too.
    """
    if selected is None:
        gram_BB = exchange.summed(columns.rows)
        return gram_BB, gram_BB
    inside, outside = columns.split(selected)
    if not inside:
        raise RuntimeError(
            "no selected parameter received a gradient in this step; `selection` must name "
            "parameters that the domains touch."
        )
    gram_BB = exchange.summed(inside)
    return gram_BB, gram_BB + exchange.summed(outside) if outside else gram_BB


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
