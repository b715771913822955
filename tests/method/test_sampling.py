"""Counters: the keyed permutation, and counts that stay close to weights that move."""

import numpy as np
import pytest

from doge_fast.mixture.counts import MixtureCounts, Phase
from doge_fast.mixture.permutation import permute, round_keys


@pytest.mark.parametrize("size", [*range(1, 70), 127, 128, 129, 1000, 4096, 4097])
def test_the_permutation_is_one(size):
    keys = round_keys("test", size)
    images = permute(np.arange(size), size, keys)
    assert sorted(images) == list(range(size))


def test_the_permutation_mixes():
    size, trials = 50, 2000
    seen = np.zeros((size, size))
    for seed in range(trials):
        keys = round_keys("test", seed)
        seen[np.arange(size), permute(np.arange(size), size, keys)] += 1
    # Pearson's statistic of a doubly stochastic table: mean (n-1)^2, variance 2 (n-1)^2.
    statistic = ((seen - trials / size) ** 2 / (trials / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def moving(kind: str, num_steps: int, num_domains: int) -> np.ndarray:
    """[T, K] weights of every step."""
    rng = np.random.default_rng(11)
    if kind == "constant":
        return np.tile(rng.dirichlet(np.ones(num_domains)), (num_steps, 1))
    if kind == "ramp":
        first, last = rng.dirichlet(np.ones(num_domains), size=2)
        share = np.linspace(0, 1, num_steps)[:, None]
        return (1 - share) * first + share * last
    if kind == "in step":
        # The border between two domains moves as the offsets do.
        border = 0.25 + 0.5 * (np.arange(num_steps) * 0.6180339887498949 / 8 % 1)
        rest = np.full((num_steps, num_domains - 2), 0.1 / max(1, num_domains - 2))
        weights = np.column_stack([0.9 * border, 0.9 * (1 - border), rest])
        return weights / weights.sum(axis=1, keepdims=True)
    weights = rng.dirichlet(np.full(num_domains, 20 if kind == "noise" else 0.1), size=num_steps)
    if kind == "domains that come and go":
        weights = np.where(rng.random(weights.shape) < 0.4, weights, 0)
        weights[:, 0] += 0.01
    return weights / weights.sum(axis=1, keepdims=True)


def counts_at(weights_TK: np.ndarray, batch_size: int, seed: int = 0) -> MixtureCounts:
    names = [str(k) for k in range(weights_TK.shape[1])]
    start = Phase(0, dict(zip(names, weights_TK[0], strict=True)))
    counts = MixtureCounts(seed, [start], batch_size, names)
    counts.first_steps = list(range(len(weights_TK)))
    counts.weights_QK = list(weights_TK)
    return counts


KINDS = ["constant", "ramp", "noise", "wild", "domains that come and go", "in step"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_domains", "batch_size"), [(2, 8), (7, 512), (40, 32)])
def test_what_was_drawn_stays_close_to_the_weights(kind, num_domains, batch_size):
    weights_TK = moving(kind, 6000, num_domains)
    counts = counts_at(weights_TK, batch_size)
    drawn = np.diff([counts.drawn(step) for step in range(0, 6001, 40)], axis=0)
    asked = (batch_size * weights_TK).reshape(-1, 40, num_domains).sum(axis=1)
    assert (drawn.sum(axis=1) == 40 * batch_size).all()
    # Roundings that move with the weights add up as independent ones do.
    most = 5 if kind == "constant" else 2 * np.sqrt(6000)
    assert np.abs(np.cumsum(drawn - asked, axis=0)).max() < most


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_within_one_of_their_share(kind):
    weights_TK = moving(kind, 1500, 7)
    counts = counts_at(weights_TK, 30)
    counts_TK = counts.counts(np.arange(1500))
    # At the borders of partial sums, and for a step before those that were asked for.
    for step in (1500, 0, 1, 1023, 1024, 1025):
        assert (counts.drawn(step) == counts_TK[:step].sum(axis=0)).all()
    assert (counts_TK.sum(axis=1) == 30).all()
    # 1e-9: rounding of the sum of weights; a share of 7 may be 6.9999999.
    assert (counts_TK >= np.floor(30 * weights_TK - 1e-9)).all()
    assert (counts_TK <= np.ceil(30 * weights_TK + 1e-9)).all()
    assert not counts_TK[weights_TK == 0].any()


def test_a_change_leaves_earlier_steps_as_they_were():
    counts = counts_at(np.tile([0.5, 0.5], (1, 1)), 4)
    steps = [*range(0, 2990, 130), *range(2990, 3001)]
    before = {step: counts.drawn(step).tolist() for step in steps}
    counts.set_weights(3000, np.array([1.0, 0.0]))
    assert {step: counts.drawn(step).tolist() for step in steps} == before
    assert (counts.drawn(3010) - before[3000]).tolist() == [40, 0]
    # A change before a planned one holds until that.
    counts.set_weights(2990, np.array([0.0, 1.0]))
    assert (counts.drawn(3000) - before[2990]).tolist() == [0, 40]
    assert (counts.drawn(3001) - counts.drawn(3000)).tolist() == [4, 0]
    counts.set_weights(3000, np.array([0.25, 0.75]))
    assert counts.first_steps == [0, 2990, 3000]
    assert (counts.drawn(3004) - counts.drawn(3000)).tolist() == [4, 12]
