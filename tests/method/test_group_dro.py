"""DoReMi's update equals loops over tokens, and its weights stay on the simplex."""

import math

import pytest
import torch

from doge_fast.weights.group_dro import (
    ExcessWeights,
    Variant,
    example_shares,
    excess_losses,
)

VARIANTS: tuple[Variant, ...] = ("doremi", "doge")
# Sums of a few float64 numbers in another order.
ULPS = 1e-14


def start(alpha: list[float], excess: float = 0.0) -> ExcessWeights:
    alpha_K = torch.tensor(alpha, dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    return ExcessWeights(alpha_K, alpha_K, torch.full_like(alpha_K, excess), zero)


def excess_by_loop(
    losses: list[list[float]],
    reference: list[list[float]],
    ids: list[int],
    last: list[float],
    variant: str,
) -> list[float]:
    found = list(last)
    for k in range(len(last)):
        own, other = [], []
        for b, domain in enumerate(ids):
            if domain == k:
                own += losses[b]
                other += reference[b]
        if not own:
            continue
        if variant == "doremi":
            clipped = [max(0.0, x - y) for x, y in zip(own, other, strict=True)]
            found[k] = math.fsum(clipped) / len(clipped)
        else:
            found[k] = max(0.0, (math.fsum(own) - math.fsum(other)) / len(own))
    return found


def moved_by_loop(
    alpha: list[float], excess: list[float], step_size: float, smoothing: float
) -> list[float]:
    grown = [a * math.exp(step_size * x) for a, x in zip(alpha, excess, strict=True)]
    return [(1 - smoothing) * g / math.fsum(grown) + smoothing / len(alpha) for g in grown]


def loss_by_loop(
    losses: list[list[float]],
    ids: list[int],
    alpha: list[float],
    sampling: list[float],
    variant: str,
) -> float:
    if variant == "doremi":
        ratios = [a / s for a, s in zip(alpha, sampling, strict=True)]
        tokens = [(ratios[k], loss) for k, row in zip(ids, losses, strict=True) for loss in row]
        return math.fsum(w * loss for w, loss in tokens) / math.fsum(w for w, _ in tokens)
    total = 0.0
    for k in sorted(set(ids)):
        own = [loss for b, domain in enumerate(ids) if domain == k for loss in losses[b]]
        total += alpha[k] * math.fsum(own) / len(own)
    return total


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_steps_equal_a_loop(variant: Variant) -> None:
    """Domains of unequal size, one of them missing from some batches and one from all."""
    generator = torch.Generator().manual_seed(7)
    num_domains, num_tokens = 4, 5
    sampling = [0.4, 0.3, 0.2, 0.1]
    weights = start(sampling, excess=2.0)
    alpha, excess, seen = list(sampling), [2.0] * num_domains, []
    for step in range(30):
        ids = [0, 0, 0, 1] if step % 3 == 0 else [0, 1, 1, 2]
        losses_BT = torch.rand(4, num_tokens, generator=generator, dtype=torch.float64) * 6
        reference_BT = torch.rand(4, num_tokens, generator=generator, dtype=torch.float64) * 6
        ids_B = torch.tensor(ids)
        excess_K = excess_losses(losses_BT, reference_BT, ids_B, weights.excess, variant=variant)
        weights = weights.moved(excess_K, step_size=0.3, smoothing=0.02)
        sampling_K = torch.tensor(sampling, dtype=torch.float64)
        shares_B = example_shares(weights.alpha, sampling_K, ids_B, variant=variant)
        loss = losses_BT.mean(1) @ shares_B

        rows, others = losses_BT.tolist(), reference_BT.tolist()
        excess = excess_by_loop(rows, others, ids, excess, variant)
        alpha = moved_by_loop(alpha, excess, 0.3, 0.02)
        seen.append(alpha)
        close = {"rel": (step + 1) * 10 * ULPS, "abs": ULPS}
        assert weights.excess.tolist() == pytest.approx(excess, **close)
        assert weights.alpha.tolist() == pytest.approx(alpha, **close)
        mean = [math.fsum(each) / len(seen) for each in zip(*seen, strict=True)]
        assert weights.alpha_mean.tolist() == pytest.approx(mean, **close)
        expected = loss_by_loop(rows, ids, alpha, sampling, variant)
        assert float(loss) == pytest.approx(expected, **close)
    assert weights.excess[3] == 2.0
    assert weights.num_steps == 30
