"""Differences between arms are seed by seed, with the interval that a referee would compute."""

import math

import numpy as np
import pytest
from scipy import stats

from doge_fast.pipeline.reporting.statistics import change_text, paired_difference


def test_the_interval_is_students_for_paired_samples():
    draw = np.random.default_rng(0)
    own, other = draw.normal(3.0, 0.4, 5), draw.normal(3.2, 0.4, 5)
    found = paired_difference(dict(enumerate(own)), dict(enumerate(other)))
    expected = stats.ttest_rel(own, other).confidence_interval(0.95)
    assert found.mean == pytest.approx((own - other).mean())
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.pairs == 5


@pytest.mark.parametrize(
    ("own", "other", "told"),
    [
        ([2.0], [2.1], "−9.5\N{NO-BREAK SPACE}%"),
        ([math.nan, 2.0], [2.1, 2.1], "not finite"),
        ([], [], "–"),
    ],
)
def test_one_pair_a_diverged_one_and_none_decide_nothing(own, other, told):
    found = paired_difference(dict(enumerate(own)), dict(enumerate(other)))
    assert not found.is_decided
    assert math.isfinite(found.mean) == (own == [2.0])
    assert change_text(found) == told
