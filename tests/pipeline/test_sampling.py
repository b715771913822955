"""The batch of any step from the seed and the step alone."""

import numpy as np
import pytest

from doge_fast.mixture.counts import MixtureCounts, Phase
from doge_fast.pipeline.domains import BlockSampler, domain_blocks


def counts_of(seed, step, weights, batch_size):
    """[K] rows of each domain in one batch."""
    named = {str(k): weight for k, weight in enumerate(weights)}
    counts = MixtureCounts(seed, [Phase(0, named)], batch_size, list(named))
    return counts.rotated(np.array([step]), np.array([weights]))[0]


def test_every_epoch_shows_every_block_once_in_an_order_of_its_own():
    stream = np.concatenate(
        [domain_blocks(3, step, domain="a", num_blocks=30, size=4) for step in range(15)]
    )
    first, second = stream[:30], stream[30:]
    assert sorted(first) == sorted(second) == list(range(30))
    assert list(first) != list(second) != list(range(30))


def test_batches_larger_than_a_domain_repeat_it_evenly():
    rows = domain_blocks(0, 2, domain="a", num_blocks=3, size=10)
    assert np.bincount(rows, minlength=3).min() >= 3


def test_the_order_depends_on_seed_and_name():
    orders = {
        (seed, name): tuple(domain_blocks(seed, 0, domain=name, num_blocks=99, size=20))
        for seed in (0, 1)
        for name in ("a", "b")
    }
    assert len(set(orders.values())) == 4


def test_the_order_is_that_of_every_version():
    """Records name a seed and a step: what they stand for must not change."""
    assert domain_blocks(7, 4711, domain="arxiv", num_blocks=1000, size=6).tolist() == PINNED_BLOCKS
    assert counts_of(7, 4711, [0.5, 0.3, 0.2], 28).tolist() == PINNED_COUNTS


PINNED_BLOCKS = [797, 908, 728, 674, 492, 708]
PINNED_COUNTS = [14, 8, 6]

WEIGHTS = [
    [1.0],
    [0.25] * 4,
    [1 / 7] * 7,
    [0.0, 0.6, 0.0, 0.4, 0.0],
    [1e-4, 1 - 1e-4],
    [0.123456, 0.333333, 0.543211],
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("batch_size", [1, 2, 28, 1000])
def test_counts_are_within_one_of_their_share(weights, batch_size):
    for step in range(60):
        counts = counts_of(1, step, weights, batch_size)
        assert counts.sum() == batch_size
        share = batch_size * np.array(weights)
        # 1e-9: rounding of the sum of weights; a share of 7 may be 6.9999999.
        assert (counts >= np.floor(share - 1e-9)).all()
        assert (counts <= np.ceil(share + 1e-9)).all()


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_counts_are_exact_in_expectation_over_seeds(weights):
    seeds = 4000
    mean = np.mean([counts_of(seed, 5, weights, 9) for seed in range(seeds)], axis=0)
    # A count differs from its mean by less than one: five standard errors, at most.
    assert np.abs(mean - 9 * np.array(weights)).max() < 5 * 0.5 / np.sqrt(seeds)


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_what_was_drawn_stays_close_to_the_weights(weights):
    num_blocks = {str(k): 100 for k in range(len(weights))}
    named = dict(zip(num_blocks, weights, strict=True))
    mixture = BlockSampler(2, named, 13, num_blocks)
    steps = np.arange(20_000)
    drawn = np.cumsum(mixture.counts(steps), axis=0)
    expected = 13.0 * (steps[:, None] + 1) * np.array(weights)
    # A rotation's discrepancy grows with the logarithm of the steps (Khinchin: at most
    # 3/2 + log t / log golden ratio / sqrt 5, twice for the two ends of an interval).
    bound = 2 * (1.5 + np.log(20_000) / (np.log(1.618) * np.sqrt(5)))
    assert np.abs(drawn - expected).max() < bound


def test_mixtures_go_on_where_they_stopped():
    num_blocks = {"a": 40, "b": 1000, "c": 7}
    weights = {"c": 0.1, "a": 0.2, "b": 0.7}
    streams: dict[str, list[int]] = {name: [] for name in num_blocks}
    for step in range(30):
        batch = BlockSampler(5, weights, 10, num_blocks).blocks(step)
        assert list(batch) == ["a", "b", "c"]
        assert sum(map(len, batch.values())) == 10
        for name, rows in batch.items():
            streams[name].extend(rows)
    for name, stream in streams.items():
        as_proxy = domain_blocks(5, 0, domain=name, num_blocks=num_blocks[name], size=len(stream))
        assert stream == list(as_proxy)


def test_a_long_mixture_is_found_by_arithmetic():
    num_blocks = {"a": 50, "b": 60}
    mixture = BlockSampler(0, {"a": 0.3, "b": 0.7}, 8, num_blocks)
    steps = 3000
    drawn = mixture.counts(np.arange(steps)).sum(axis=0)
    assert (mixture.drawn(steps) == drawn).all()
    # Asked for an earlier one, and for the boundary of a partial sum, it says the same.
    for step in (0, 1, 1023, 1024, 1025, 2048):
        assert (mixture.drawn(step) == mixture.counts(np.arange(step)).sum(axis=0)).all()


def test_a_curriculum_changes_weights_and_keeps_positions():
    num_blocks = {"a": 500, "b": 500}
    phases = [Phase(0, {"a": 1.0, "b": 0.0}), Phase(10, {"a": 0.25, "b": 0.75})]
    seen: dict[str, list[int]] = {"a": [], "b": []}
    for step in range(30):
        batch = BlockSampler(1, phases, 4, num_blocks).blocks(step)
        assert len(batch["a"]) == (4 if step < 10 else 1)
        for name, rows in batch.items():
            seen[name].extend(rows)
    # Sixty blocks each: none came twice before all had come once.
    assert len(set(seen["a"])) == len(seen["a"]) == 60
    assert len(set(seen["b"])) == len(seen["b"]) == 60


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: counts_of(0, 0, [0.5, 0.4], 8), "sum to 1; they are .*, with the sum 0.9"),
        (lambda: counts_of(0, 0, [1.5, -0.5], 8), "must be >= 0"),
        (lambda: counts_of(0, 0, [float("nan"), 1.0], 8), "must be >= 0"),
        (lambda: counts_of(0, 0, [], 8), "must be >= 0"),
        (lambda: counts_of(0, 0, [1.0], 0), "batch_size >= 1"),
        (lambda: BlockSampler(0, {"a": 1.0}, 1, {"a": 1}).blocks(-1), "step >= 0"),
        (lambda: domain_blocks(0, 0, domain="a", num_blocks=0, size=1), "a has no blocks"),
        (
            lambda: BlockSampler(0, {"a": 1.0}, 1, {"b": 1}),
            "must name exactly the domains b; from step 0 on they name a",
        ),
        (
            lambda: BlockSampler(0, [Phase(1, {"a": 1.0})], 1, {"a": 1}),
            "begin at step 0 and go on at increasing steps; they begin at \\[1\\]",
        ),
    ],
)
def test_samplers_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()
