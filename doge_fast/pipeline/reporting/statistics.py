"""Means over seeds, and arms compared seed by seed: the one statistic of every table."""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from doge_fast.pipeline.records.measures import exp_or_inf
from doge_fast.pipeline.records.movement import Floats
from doge_fast.pipeline.reporting.wording import Stat, percent_text

CONFIDENCE = 0.95


def stat_of(values: Iterable[float]) -> Stat:
    """Mean and standard error of one value a seed."""
    array = np.asarray(list(values), dtype=np.float64)
    if len(array) == 1:
        return Stat(float(array[0]))
    if not np.isfinite(array).all():
        return Stat(float(array.mean()), math.nan)
    return Stat(float(array.mean()), float(array.std(ddof=1) / math.sqrt(len(array))))


def nan_mean(values: Floats) -> Floats:
    """Mean over the first axis of what is a number; nan where nothing is."""
    mean: Floats = np.ma.filled(np.ma.masked_invalid(values).mean(0), math.nan)
    return mean


class Difference(NamedTuple):
    """Mean of paired differences with its interval: none for one pair, and no mean for none."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def is_decided(self) -> bool:
        """Whether the interval leaves out zero; with one pair it never does."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def is_known(self) -> bool:
        """Whether there is a pair and every value is finite."""
        return math.isfinite(self.mean)

    @property
    def is_lower(self) -> bool:
        """Whether the interval says that the first is lower."""
        return self.is_decided and self.mean < 0

    @property
    def is_higher(self) -> bool:
        """Whether the interval says that the first is higher."""
        return self.is_decided and self.mean > 0


NO_PAIR = Difference(math.nan, None, None, 0)


def paired_difference(own: Sequence[float], other: Sequence[float]) -> Difference:
    """Mean of own_s - other_s over seeds s, with Student's interval for it.

    d  =  mean_s d_s,     d ± t_{n-1} * sd(d_s) / sqrt(n)

    What seeds share (initialisation, order of the data) cancels in each difference, so the
    interval is that of the arms' difference and not of the seeds' spread.

    Args:
        own: a value for each seed.
        other: of the same seeds, in the same order.
    """
    assert len(own) == len(other)
    if not own:
        return NO_PAIR
    mean = float(np.mean(np.subtract(own, other)))
    if len(own) == 1 or not math.isfinite(mean):
        return Difference(mean, None, None, len(own))
    with warnings.catch_warnings():
        # Seeds that differ by the same to the last digit: their interval has no width.
        warnings.filterwarnings("ignore", "Precision loss occurred", RuntimeWarning)
        interval = stats.ttest_rel(own, other).confidence_interval(CONFIDENCE)
    return Difference(mean, float(interval.low), float(interval.high), len(own))


def change_text(difference: Difference) -> str:
    """A difference of losses as a change of perplexity: -2.1 % [-3.0, -1.2]."""
    if not difference.pairs:
        return "–"
    mean, low, high = change_of(difference)
    text = percent_text(mean)
    if difference.low is None:
        return text
    return f"{text} [{100 * low:+.1f}, {100 * high:+.1f}]".replace("-", "−")


def change_of(difference: Difference) -> tuple[float, float, float]:
    """(mean, low, high) of a difference of losses as relative changes of perplexity."""
    ends = (difference.mean, difference.low, difference.high)
    mean, low, high = (exp_or_inf(difference.mean if end is None else end) - 1 for end in ends)
    return mean, low, high
