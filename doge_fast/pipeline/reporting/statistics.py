"""Arms compared seed by seed: means over seeds, and the one statistic of every table."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy import stats

from doge_fast.pipeline.records import Json
from doge_fast.pipeline.records.measures import exp_or_inf
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.wording import Stat, percent_text, to_floats

CONFIDENCE = 0.95
Curve = tuple[list[int], list[float]]


def stat_of(values: Iterable[float]) -> Stat:
    """Mean and standard error of one value a seed."""
    array = np.asarray(list(values), dtype=np.float64)
    if len(array) == 1:
        return Stat(float(array[0]))
    if not np.isfinite(array).all():
        return Stat(float(array.mean()), math.nan)
    return Stat(float(array.mean()), float(array.std(ddof=1) / math.sqrt(len(array))))


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


def _mean_loss(losses: Mapping[str, float], names: Sequence[str]) -> float:
    """Mean over `names`, each weighing the same."""
    return float(np.mean([losses[name] for name in names]))


@dataclass(frozen=True)
class Arm:
    """Base models at the same weights that differ in nothing but their seed."""

    label: str
    about: str
    runs: Mapping[int, Run]
    """By seed."""
    losses: Mapping[int, Mapping[str, float]]
    """Held-out losses by domain of each seed that has been measured."""
    is_baseline: bool = False
    baseline: str | None = None
    """Label of the arm that this one is told against, where it is not the group's."""

    def perplexity(self, names: Sequence[str]) -> Stat:
        """exp of the mean loss over `names`: the paper's average, and one domain's perplexity."""
        return stat_of(exp_or_inf(_mean_loss(each, names)) for each in self.losses.values())

    def worst(self, names: Sequence[str]) -> tuple[str, float]:
        """The domain of `names` with the highest perplexity; a diverged one is the highest."""
        found = {name: self.perplexity([name]).mean for name in names}
        name = max(names, key=lambda name: np.nan_to_num(found[name], nan=np.inf))
        return name, found[name]

    def against(self, other: "Arm", names: Sequence[str]) -> Difference:
        """Difference of the mean loss over `names`, over the seeds that both have."""
        seeds = [seed for seed in self.losses if seed in other.losses]
        return paired_difference(
            [_mean_loss(self.losses[seed], names) for seed in seeds],
            [_mean_loss(other.losses[seed], names) for seed in seeds],
        )

    def count_below(self, other: "Arm", names: Sequence[str]) -> int:
        """On how many of `names` the mean over common seeds is below the other's."""
        return sum(self.against(other, [name]).mean < 0 for name in names)

    def curve(self, names: Sequence[str], until: float) -> Curve:
        """(steps, mean loss over `names`) up to a share of the steps, where all seeds have it."""
        by_step: dict[int, list[float]] = {}
        for run in self.runs.values():
            for line in run.evals:
                if line["step"] <= until * run.steps and set(names) <= set(line["loss"]):
                    loss = _mean_loss(to_floats(line["loss"]), names)
                    by_step.setdefault(line["step"], []).append(loss)
        steps = sorted(step for step, found in by_step.items() if len(found) == len(self.runs))
        return steps, [float(np.mean(by_step[step])) for step in steps]


def curves_of(arms: Sequence[Arm], names: Sequence[str], until: float = 1.0) -> dict[str, Curve]:
    """{arm: (steps, loss)} where all were measured at least three times; else none."""
    found = {arm.label: arm.curve(names, until) for arm in arms}
    return found if all(len(steps) >= 3 for steps, _ in found.values()) else {}


@dataclass(frozen=True)
class Comparison:
    """Measured arms of a group that may be compared."""

    arms: Sequence[Arm]
    baseline: Arm | None
    """What the others are set against."""
    rivals: Sequence[Arm]
    """The others; the question is about the first."""
    aim: Sequence[str]
    """Domains whose loss the weights are to lower, as far as every arm was measured on them."""
    others: Sequence[str]
    """Training domains beside targets that are not trained on; none where these are the aim."""


def compared(group: Json, arms: Sequence[Arm]) -> Comparison:
    """The measured arms with the seeds that all of them have, or, without such, each with its own.

    Each difference is over the seeds of its two arms in any case.
    """
    arms = [arm for arm in arms if arm.losses]
    common = set.intersection(*(set(arm.losses) for arm in arms)) if arms else set()
    if common:
        arms = [
            replace(
                arm,
                runs={seed: run for seed, run in arm.runs.items() if seed in common},
                losses={seed: each for seed, each in arm.losses.items() if seed in common},
            )
            for arm in arms
        ]
    losses = [each for arm in arms for each in arm.losses.values()]
    aim, others = (
        [name for name in group.get(key, ()) if all(name in each for each in losses)]
        for key in ("aim", "others")
    )
    rivals = [arm for arm in arms if not arm.is_baseline]
    focus = focus_of(group, [arm.label for arm in rivals])
    return Comparison(
        arms,
        next((arm for arm in arms if arm.is_baseline), None),
        sorted(rivals, key=lambda arm: arm.label != focus),
        aim,
        others,
    )


def focus_of(group: Json, rivals: Sequence[str]) -> str:
    """Label of the rival that a question is about: experiments are about DoGE."""
    wanted = group.get("focus") or "DoGE"
    found = [label for label in rivals if label.startswith(wanted)]
    return next(iter(found or rivals[-1:]), "")
