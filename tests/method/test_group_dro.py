"""DoReMi's update, domain by domain; its weights stay on the simplex."""

import pytest
import torch
from torch import Tensor

from doge_fast.weights.group_dro import (
    UNSEEN,
    ExcessWeights,
    Variant,
    example_shares,
    excess_losses,
)

VARIANTS: tuple[Variant, ...] = ("doremi", "doge")
SAMPLING_K = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
STEP_SIZE, SMOOTHING = 0.3, 0.02


def excess_by_domain(
    difference_BT: Tensor, ids_B: Tensor, last_K: Tensor, variant: Variant
) -> Tensor:
    found_K = last_K.clone()
    for k in ids_B.unique():
        own_T = difference_BT[ids_B == k].flatten()
        found_K[k] = own_T.clamp(min=0).mean() if variant == "doremi" else own_T.mean().clamp(min=0)
    return found_K


def loss_by_domain(losses_BT: Tensor, ids_B: Tensor, alpha_K: Tensor, variant: Variant) -> Tensor:
    if variant == "doge":
        return sum(alpha_K[k] * losses_BT[ids_B == k].mean() for k in ids_B.unique())
    weights_BT = (alpha_K / SAMPLING_K)[ids_B][:, None].expand_as(losses_BT)
    return (weights_BT * losses_BT).sum() / weights_BT.sum()


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_steps_are_the_definitions(variant):
    """Domains of unequal size, one of them missing from some batches and one from all."""
    excess_K = torch.full_like(SAMPLING_K, UNSEEN)
    weights = ExcessWeights(SAMPLING_K, SAMPLING_K, excess_K, torch.zeros((), dtype=torch.float64))
    alpha_K, seen = SAMPLING_K, []
    for step in range(30):
        ids_B = torch.tensor([0, 0, 0, 1] if step % 3 == 0 else [0, 1, 1, 2])
        losses_BT, reference_BT = 6 * torch.rand(2, 4, 5, dtype=torch.float64)
        found_K = excess_losses(losses_BT, reference_BT, ids_B, weights.excess, variant=variant)
        weights = weights.moved(found_K, step_size=STEP_SIZE, smoothing=SMOOTHING)
        shares_B = example_shares(weights.alpha, SAMPLING_K, ids_B, variant=variant)

        excess_K = excess_by_domain(losses_BT - reference_BT, ids_B, excess_K, variant)
        seen_K = excess_K != UNSEEN
        grown_K = alpha_K * (STEP_SIZE * excess_K.where(seen_K, excess_K[seen_K].mean())).exp()
        alpha_K = (1 - SMOOTHING) * grown_K / grown_K.sum() + SMOOTHING / 4
        seen.append(alpha_K)
        # Sums of a few float64 numbers in another order.
        close = {"rtol": (step + 1) * 1e-13, "atol": 1e-14}
        torch.testing.assert_close(weights.excess, excess_K, **close)
        torch.testing.assert_close(weights.alpha, alpha_K, **close)
        torch.testing.assert_close(weights.alpha_mean, torch.stack(seen).mean(0), **close)
        loss = loss_by_domain(losses_BT, ids_B, alpha_K, variant)
        torch.testing.assert_close(losses_BT.mean(1) @ shares_B, loss, **close)
    assert weights.excess[3] == UNSEEN
    assert weights.num_steps == 30
