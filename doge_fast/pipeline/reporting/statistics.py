"""Means over seeds, and the paired difference of two arms, which every table uses."""

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

from doge_fast.pipeline.records.runs import exp_or_inf

CONFIDENCE = 0.95

BySeed = Mapping[int, float]
Losses = Mapping[int, Mapping[str, float]]
"""{seed: {domain: held-out loss}} of models that differ in nothing but their seed."""


class Stat(NamedTuple):
    """A mean over seeds and its standard error; None for one seed."""

    mean: float
    error: float | None = None


def stat_of(values: Iterable[float]) -> Stat:
    """Mean and standard error of one value per seed."""
    array = np.asarray(list(values), dtype=np.float64)
    if len(array) == 1:
        return Stat(float(array[0]))
    error = stats.sem(array) if np.isfinite(array).all() else math.nan
    return Stat(float(array.mean()), float(error))


class PairedDifference(NamedTuple):
    """Mean of paired differences (nan without a pair) and its interval (nan with one pair)."""

    mean: float
    low: float = math.nan
    high: float = math.nan
    pairs: int = 1

    @property
    def is_decided(self) -> bool:
        """Whether the interval excludes zero; never with one pair."""
        return self.is_lower or self.is_higher

    @property
    def is_lower(self) -> bool:
        """Whether the interval lies below zero: the first arm is lower."""
        return self.high < 0

    @property
    def is_higher(self) -> bool:
        """Whether the interval lies above zero: the first arm is higher."""
        return self.low > 0


def paired_difference(own: BySeed, other: BySeed) -> PairedDifference:
    """Mean of own_s - other_s over the seeds s that both have, with Student's interval for it.

    d  =  mean_s d_s,     d ± t_{n-1} * sd(d_s) / sqrt(n)

    What runs of one seed share (initialisation, order of the data) cancels in their difference, so
    the interval is that of the arms' difference and not of the spread over seeds.
    """
    seeds = [seed for seed in own if seed in other]
    if not seeds:
        return PairedDifference(math.nan, pairs=0)
    ours, theirs = [own[seed] for seed in seeds], [other[seed] for seed in seeds]
    mean = float(np.mean(np.subtract(ours, theirs)))
    if len(seeds) == 1 or not math.isfinite(mean):
        return PairedDifference(mean, pairs=len(seeds))
    with warnings.catch_warnings():
        # If all differences are equal to the last digit, the interval has no width.
        warnings.filterwarnings("ignore", "Precision loss occurred", RuntimeWarning)
        interval = stats.ttest_rel(ours, theirs).confidence_interval(CONFIDENCE)
    return PairedDifference(mean, float(interval.low), float(interval.high), len(seeds))


def change_of(difference: PairedDifference) -> tuple[float, float, float]:
    """(mean, low, high) of a difference of losses as relative changes of perplexity."""
    mean, low, high = (exp_or_inf(each) - 1 for each in difference[:3])
    return mean, low, high


def change_text(difference: PairedDifference) -> str:
    """A difference of losses as a change of perplexity: −2.1 % [−3.0, −1.2]."""
    if not difference.pairs:
        return "–"
    mean, low, high = change_of(difference)
    if not math.isfinite(mean):
        return "not finite"
    ends = "" if math.isnan(difference.low) else f" [{100 * low:+.1f}, {100 * high:+.1f}]"
    return f"{100 * mean:+.1f}\N{NO-BREAK SPACE}%{ends}".replace("-", "−")


@dataclass(frozen=True)
class Line:
    """A row of a table: the arms' losses on some domains."""

    label: str
    losses: Mapping[str, Losses]
    """{arm: its losses}; empty for an arm that has not been measured."""
    aim: Mapping[str, float]
    """{domain: its weight in the mean loss}."""
    is_total: bool = False

    def mean_losses(self, arm: str) -> dict[int, float]:
        """{seed: mean loss, weighted by `aim`}."""
        weights = list(self.aim.values())
        return {
            seed: float(np.average([losses[name] for name in self.aim], weights=weights))
            for seed, losses in self.losses[arm].items()
        }

    def perplexity(self, arm: str) -> Stat:
        """exp of the mean loss: a domain's perplexity or, for several, the paper's average."""
        return stat_of(map(exp_or_inf, self.mean_losses(arm).values()))

    def difference(self, own: str, other: str) -> PairedDifference:
        """Paired difference of the mean losses of two arms."""
        return paired_difference(self.mean_losses(own), self.mean_losses(other))


def _with_error(stat: Stat, *, most: int) -> str:
    """0.2760 ± 0.0002: the error to two significant digits, the mean to the same place.

    There are at most `most` decimals; a smaller error is rounded up to the last of them.
    """
    assert stat.error is not None
    error = max(stat.error, 10.0**-most) if stat.error > 0 else 0.0
    decimals = min(max(1 - math.floor(math.log10(error)), 0), most) if error > 0 else most
    return f"{stat.mean:.{decimals}f} ± {error:.{decimals}f}"


def perplexity_text(stat: Stat) -> str:
    """Perplexity with its standard error or, without one, to four digits; or "not finite"."""
    mean = stat.mean
    if not math.isfinite(mean):
        return "not finite"
    if stat.error is not None:
        return _with_error(stat, most=3)
    return f"{mean:.3f}" if mean < 10 else f"{mean:.2f}" if mean < 10_000 else f"{mean:.2e}"


def share_text(stat: Stat) -> str:
    """A domain weight, with its standard error where there is one."""
    return f"{stat.mean:.3f}" if stat.error is None else _with_error(stat, most=4)
