"""Differences between arms are seed by seed, with the interval that a referee would compute."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from scipy import stats

from doge_fast.pipeline.reporting.statistics import change_of, change_text, paired_difference


def by_seed(values: Iterable[float]) -> dict[int, float]:
    return dict(enumerate(values))


def test_the_interval_is_students_for_paired_samples() -> None:
    draw = np.random.default_rng(0)
    own, other = draw.normal(3.0, 0.4, 5), draw.normal(3.2, 0.4, 5)
    found = paired_difference(by_seed(own), by_seed(other))
    expected = stats.ttest_rel(own, other).confidence_interval(0.95)
    assert found.mean == pytest.approx((own - other).mean())
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.pairs == 5


def test_what_seeds_share_cancels() -> None:
    """Seeds that differ by far more than the arms do still decide between the arms."""
    seeds = [2.0, 5.0, 9.0]
    own = [seed - 0.02 + 0.001 * i for i, seed in enumerate(seeds)]
    found = paired_difference(by_seed(own), by_seed(seeds))
    assert found.is_decided
    assert found.mean == pytest.approx(-0.019)
    # The same values in another order are other pairs.
    assert not paired_difference(by_seed(own[::-1]), by_seed(seeds)).is_decided


def test_changes_are_of_perplexity() -> None:
    found = paired_difference(by_seed([3.0, 3.02, 2.99]), by_seed([3.1, 3.11, 3.08]))
    mean, low, high = change_of(found)
    assert mean == pytest.approx(math.exp(found.mean) - 1)
    assert low < mean < high < 0
    text = change_text(found)
    assert text.startswith("−9.") or text.startswith("−8.")
    assert text.endswith("]")


@pytest.mark.parametrize(
    ("own", "other", "told"),
    [
        ([2.0], [2.1], "−9.5\N{NO-BREAK SPACE}%"),
        ([math.nan, 2.0], [2.1, 2.1], "not finite"),
        ([], [], "–"),
    ],
)
def test_one_pair_a_diverged_one_and_none_decide_nothing(
    own: list[float], other: list[float], told: str
) -> None:
    found = paired_difference(by_seed(own), by_seed(other))
    assert not found.is_decided
    assert math.isfinite(found.mean) == (own == [2.0])
    assert change_text(found) == told
