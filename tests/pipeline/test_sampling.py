"""The batch of any step from the seed and the step alone."""

import numpy as np
import pytest

from doge_fast.mixture.counts import Phase
from doge_fast.pipeline.domains import BlockSampler, domain_blocks


def test_batches_larger_than_a_domain_repeat_it_evenly():
    rows = domain_blocks(0, 2, domain="a", num_blocks=3, size=10)
    assert np.bincount(rows, minlength=3).min() >= 3


def test_the_order_is_that_of_every_version():
    """Records name a seed and a step: what they stand for must not change."""
    rows = domain_blocks(7, 4711, domain="arxiv", num_blocks=1000, size=6)
    assert rows.tolist() == [797, 908, 728, 674, 492, 708]


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


def test_a_domain_without_blocks_is_refused():
    with pytest.raises(ValueError, match="a has no blocks"):
        domain_blocks(0, 0, domain="a", num_blocks=0, size=1)
