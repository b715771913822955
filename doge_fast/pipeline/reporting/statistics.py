"""Arms compared seed by seed: means over seeds, and the one statistic of every table."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy import stats

from doge_fast.pipeline.records.runs import exp_or_inf
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


class PairedDifference(NamedTuple):
    """Mean of paired differences with its interval: none for one pair, and no mean for none."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def is_decided(self) -> bool:
        """Whether the interval leaves out zero; with one pair it never does."""
        return self.is_lower or self.is_higher

    @property
    def is_known(self) -> bool:
        """Whether there is a pair and every value is finite."""
        return math.isfinite(self.mean)

    @property
    def is_lower(self) -> bool:
        """Whether the interval says that the first is lower."""
        return self.high is not None and self.high < 0

    @property
    def is_higher(self) -> bool:
        """Whether the interval says that the first is higher."""
        return self.low is not None and self.low > 0


def paired_difference(own: Sequence[float], other: Sequence[float]) -> PairedDifference:
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
        return PairedDifference(math.nan, None, None, 0)
    mean = float(np.mean(np.subtract(own, other)))
    if len(own) == 1 or not math.isfinite(mean):
        return PairedDifference(mean, None, None, len(own))
    with warnings.catch_warnings():
        # Seeds that differ by the same to the last digit: their interval has no width.
        warnings.filterwarnings("ignore", "Precision loss occurred", RuntimeWarning)
        interval = stats.ttest_rel(own, other).confidence_interval(CONFIDENCE)
    return PairedDifference(mean, float(interval.low), float(interval.high), len(own))


def change_text(difference: PairedDifference) -> str:
    """A difference of losses as a change of perplexity: -2.1 % [-3.0, -1.2]."""
    if not difference.pairs:
        return "–"
    mean, low, high = change_of(difference)
    text = percent_text(mean)
    if difference.low is None:
        return text
    return f"{text} [{100 * low:+.1f}, {100 * high:+.1f}]".replace("-", "−")


def change_of(difference: PairedDifference) -> tuple[float, float, float]:
    """(mean, low, high) of a difference of losses as relative changes of perplexity."""
    ends = (difference.mean, difference.low, difference.high)
    mean, low, high = (exp_or_inf(difference.mean if end is None else end) - 1 for end in ends)
    return mean, low, high


# Domains that weigh the same, or {domain: weight}.
Aim = Sequence[str] | Mapping[str, float]


def _mean_loss(losses: Mapping[str, float], aim: Aim) -> float:
    weights = list(aim.values()) if isinstance(aim, Mapping) else None
    return float(np.average([losses[name] for name in aim], weights=weights))


@dataclass(frozen=True)
class Arm:
    """Base models at the same weights that differ in nothing but their seed."""

    label: str
    about: str
    losses: Mapping[int, Mapping[str, float]]
    """Held-out losses by domain of each seed that has been measured."""
    is_baseline: bool = False
    baseline: str | None = None
    """Label of the arm that this one is told against, where it is not the group's."""

    def loss(self, aim: Aim) -> Stat:
        """Mean loss over `aim`."""
        return stat_of(_mean_loss(each, aim) for each in self.losses.values())

    def perplexity(self, names: Sequence[str]) -> Stat:
        """exp of the mean loss over `names`: the paper's average, and one domain's perplexity."""
        return stat_of(exp_or_inf(_mean_loss(each, names)) for each in self.losses.values())

    def worst(self, names: Sequence[str]) -> float:
        """The highest perplexity of a domain of `names`; nan where one has diverged."""
        return float(np.max([self.perplexity([name]).mean for name in names]))

    def against(self, other: "Arm", aim: Aim) -> PairedDifference:
        """Difference of the mean loss over `aim`, over the seeds that both have."""
        seeds = [seed for seed in self.losses if seed in other.losses]
        return paired_difference(
            [_mean_loss(self.losses[seed], aim) for seed in seeds],
            [_mean_loss(other.losses[seed], aim) for seed in seeds],
        )


@dataclass(frozen=True)
class Line:
    """A line of a table of perplexities: the mean loss of some arms over some domains."""

    label: str
    arms: Mapping[str, Arm]
    """By label."""
    names: Sequence[str]
    is_total: bool = False

    def difference(self, own: str, other: str) -> PairedDifference:
        """Of two arms, seed by seed."""
        return self.arms[own].against(self.arms[other], self.names)


def lines_of(aim: Sequence[str], arms: Sequence[Arm]) -> list[Line]:
    """A line a domain and their average, of the arms that are measured.

    Arms are taken with the seeds that all of them have, or, without such, each with its own; each
    difference is over the seeds of its two arms in any case. Domains that an arm was not measured
    on are left out.
    """
    arms = [arm for arm in arms if arm.losses]
    common = set.intersection(*(set(arm.losses) for arm in arms)) if arms else set()
    if common:
        kept = ({seed: arm.losses[seed] for seed in arm.losses if seed in common} for arm in arms)
        arms = [replace(arm, losses=losses) for arm, losses in zip(arms, kept, strict=True)]
    losses = [each for arm in arms for each in arm.losses.values()]
    names = [name for name in aim if losses and all(name in each for each in losses)]
    by_label = {arm.label: arm for arm in arms}
    lines = [Line(name, by_label, [name]) for name in names]
    return [*lines, Line("average", by_label, names, is_total=True)] if names else []
