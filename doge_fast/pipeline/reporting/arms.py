"""Runs of one setting as an arm, and arms over their common seeds as a comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from doge_fast.pipeline.records import Json
from doge_fast.pipeline.records.measures import exp_or_inf
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.statistics import Difference, paired_difference, stat_of
from doge_fast.pipeline.reporting.wording import Stat, to_floats

Curve = tuple[list[int], list[float]]


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

    def of_seeds(self, seeds: set[int]) -> "Arm":
        """The arm with these seeds alone."""
        runs = {seed: run for seed, run in self.runs.items() if seed in seeds}
        losses = {seed: each for seed, each in self.losses.items() if seed in seeds}
        return replace(self, runs=runs, losses=losses)

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


@dataclass(frozen=True)
class Comparison:
    """Arms that may be compared, each over the seeds that all of them have."""

    group: Json
    arms: tuple[Arm, ...]
    """Only such as have been measured."""

    @property
    def title(self) -> str:
        """Of its tables and of its answer."""
        return str(self.group["title"])

    @property
    def baseline(self) -> Arm | None:
        """What the others are set against."""
        return next((arm for arm in self.arms if arm.is_baseline), None)

    @property
    def rivals(self) -> list[Arm]:
        """What is set against the baseline."""
        return [arm for arm in self.arms if not arm.is_baseline]

    @property
    def focus(self) -> Arm:
        """The rival that the question is about."""
        arms = {arm.label: arm for arm in self.rivals}
        return arms[focus_of(self.group, list(arms))]

    @cached_property
    def aim(self) -> tuple[str, ...]:
        """Domains whose loss the weights are to lower, as far as every arm was measured on them."""
        return self._measured(self.group["aim"])

    @cached_property
    def others(self) -> tuple[str, ...]:
        """Training domains beside targets that are not trained on; none where these are the aim."""
        return self._measured(self.group.get("others", ()))

    @property
    def until(self) -> float:
        """Share of the steps after which losses are compared."""
        return float(self.group.get("until", 1.0))

    def _measured(self, names: Sequence[str]) -> tuple[str, ...]:
        losses = [each for arm in self.arms for each in arm.losses.values()]
        return tuple(name for name in names if all(name in each for each in losses))


def focus_of(group: Json, rivals: Sequence[str]) -> str:
    """Label of the rival that a question is about: experiments are about DoGE."""
    wanted = group.get("focus") or "DoGE"
    return next((label for label in rivals if label.startswith(wanted)), rivals[-1])


def curves_of(arms: Sequence[Arm], names: Sequence[str], until: float = 1.0) -> dict[str, Curve]:
    """{arm: (steps, loss)} where all were measured at least three times; else none."""
    found = {arm.label: arm.curve(names, until) for arm in arms}
    return found if all(len(steps) >= 3 for steps, _ in found.values()) else {}


def compared(group: Json, arms: Sequence[Arm]) -> Comparison:
    """The measured arms with the seeds that all of them have, or, without such, each with its own.

    Each difference is over the seeds of its two arms in any case.
    """
    arms = [arm for arm in arms if arm.losses]
    common = set.intersection(*(set(arm.losses) for arm in arms)) if arms else set()
    return Comparison(group, tuple(arm.of_seeds(common) if common else arm for arm in arms))
