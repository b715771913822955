"""Arms compared seed by seed: the mean difference and how far chance may have moved it."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import numpy as np
from scipy import stats

from doge_fast.pipeline.reporting.wording import percent_text

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """Mean of paired differences with its confidence interval; no interval for one pair."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def is_decided(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def paired_difference(
    own: Sequence[float], other: Sequence[float], *, confidence: float = CONFIDENCE
) -> Difference:
    """Mean of own_s - other_s over seeds s, with Student's interval for it.

    d  =  mean_s d_s,     d ± t_{n-1} * sd(d_s) / sqrt(n)

    What seeds share (initialisation, order of the data) cancels in each difference, so the
    interval is that of the arms' difference and not of the seeds' spread.

    Args:
        own: a value for each seed.
        other: of the same seeds, in the same order.
        confidence: of the interval, in (0, 1).

    Raises:
        ValueError: there is no pair, or the numbers of values differ.
    """
    if len(own) != len(other) or not own:
        raise ValueError(
            f"Paired differences need two values for each seed; got {len(own)} and {len(other)}."
        )
    differences = np.asarray(own, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    mean, pairs = float(differences.mean()), len(differences)
    if pairs == 1 or not np.isfinite(differences).all():
        return Difference(mean, None, None, pairs)
    error = float(differences.std(ddof=1)) / math.sqrt(pairs)
    reach = float(stats.t.ppf((1 + confidence) / 2, pairs - 1)) * error
    return Difference(mean, mean - reach, mean + reach, pairs)


def is_known(found: Difference | None) -> TypeGuard[Difference]:
    """Whether there is a difference and it is finite."""
    return found is not None and math.isfinite(found.mean)


def change_text(difference: Difference) -> str:
    """A difference of losses as a change of perplexity: -2.1 % [-3.0, -1.2]."""
    text = percent_text(_change(difference.mean))
    if difference.low is None or difference.high is None:
        return text
    low, high = (
        f"{100 * _change(value):+.1f}".replace("-", "−")
        for value in (difference.low, difference.high)
    )
    return f"{text} [{low}, {high}]"


def change_of(difference: Difference) -> tuple[float, float, float]:
    """(mean, low, high) of a difference of losses as relative changes of perplexity."""
    low = difference.mean if difference.low is None else difference.low
    high = difference.mean if difference.high is None else difference.high
    return _change(difference.mean), _change(low), _change(high)


def _change(difference: float) -> float:
    return math.expm1(difference) if difference < 700 else math.inf
