"""Runs put in order: seeds make an arm or a proxy, arms that may be compared a comparison."""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from doge_fast.pipeline import records
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.runs import Run, open_runs
from doge_fast.pipeline.reporting.wording import (
    Floats,
    Stat,
    count_text,
    exp_or_inf,
    listed,
    nan_as_inf,
    nan_mean,
    stat_of,
    to_float,
    to_floats,
)

# The running average has settled where its last fifth moved less than this, in L1: half of it is
# the share of the tokens that would go elsewhere, so 0.02 is one token in a hundred.
MAX_DRIFT = 0.02
DRIFT_FROM = 0.8
UNIVERSAL, MIX = "universal", "mix"


@dataclass(frozen=True)
class Proxy:
    """Proxy runs that differ in nothing but their seed."""

    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """Stands for all seeds in what they share."""
        return self.runs[0]

    @property
    def domains(self) -> tuple[str, ...]:
        """Training domains, in the order of the simplex."""
        return self.first.domains

    @property
    def is_doremi(self) -> bool:
        """Whether excess loss over a reference moved its weights, the baseline, and not W."""
        return self.first.stage == "doremi"

    @property
    def is_for_all_domains(self) -> bool:
        """Whether every training domain is to get better."""
        return self.is_doremi or set(self.first.config["target"]) <= {UNIVERSAL, MIX}

    @property
    def about(self) -> str:
        """Where the weights come from, in words."""
        return "learned by DoReMi" if self.is_doremi else f"learned for {self.target}"

    @property
    def target(self) -> str:
        """For whom the weights are, in words."""
        if self.is_doremi:
            return "all domains"
        names = self.first.config["target"]
        if list(names) == [UNIVERSAL]:
            return "all domains"
        words = [_target_word(name, alone=len(names) == 1) for name in names]
        return listed(words)

    @cached_property
    def weights(self) -> dict[str, Stat]:
        """{domain: average domain weight}; empty where no run has a step."""
        found = [_average_weights(run) for run in self.runs]
        known = [weights for weights in found if weights]
        if not known:
            return {}
        return {name: stat_of(weights[name] for weights in known) for name in self.domains}

    @property
    def has_steps(self) -> bool:
        """Whether there is something to draw: a step past the first line that all seeds logged."""
        return bool(self._common_steps("excess" if self.is_doremi else "gain"))

    def series(self, key: str, names: Sequence[str]) -> tuple[Floats, Floats]:
        """(steps [T], values [S, T, len(names)]) of the steps that all S seeds have logged."""
        steps = self._common_steps(key)
        values = [
            [[to_float(line[key].get(name)) for name in names] for line in self._lines(run, steps)]
            for run in self.runs
        ]
        return np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)

    @property
    def rows(self) -> tuple[str, ...]:
        """Domains and targets that the proxy saw, in the order of the Gram matrix."""
        if self.is_doremi:
            return self.domains
        return tuple(next(line["rows"] for line in self.first.train if "rows" in line))

    def cosine(self) -> Floats:
        """[R, R]: cosines between the gradients of `rows`, mean over steps and seeds."""
        lines = [line for run in self.runs for line in run.train if "cosine" in line]
        stacked = np.array([line["cosine"] for line in lines], dtype=np.float64)
        return nan_mean(stacked)

    def mean_over_steps(self, key: str) -> Floats:
        """[K]: mean of W or a part of it, every step weighing as much as its learning rate.

        The logarithm of a domain weight moves by lr * W / mu (eq. update_dw), so this is what
        moved the weights, up to the common factor.
        """
        _, values_STK = self.series(key, self.domains)
        lr_ST1 = self._rates()
        kept = np.isfinite(values_STK)
        weighted = np.where(kept, values_STK, 0.0) * lr_ST1
        total = (kept * lr_ST1).sum((0, 1))
        ratio: Floats = weighted.sum((0, 1)) / np.where(total > 0, total, math.nan)
        return ratio

    def _rates(self) -> Floats:
        """[S, T, 1]: learning rates of the steps that moved the weights."""
        steps = self._common_steps("gain")
        rates = [[[to_float(line["lr"])] for line in self._lines(run, steps)] for run in self.runs]
        return np.asarray(rates, dtype=np.float64)

    def _common_steps(self, key: str) -> list[int]:
        steps = [{line["step"] for line in run.train if key in line} for run in self.runs]
        return sorted(set.intersection(*steps))

    @staticmethod
    def _lines(run: Run, steps: Sequence[int]) -> list[Json]:
        by_step = {line["step"]: line for line in run.train}
        return [by_step[step] for step in steps]

    def drift(self) -> tuple[Floats, Floats]:
        """(steps [T], L1 change [T] of the running average over the last fifth of its steps).

        drift(t)  =  sum_j | alpha_bar_j(t) - alpha_bar_j(a + 0.8 (t - a)) |,     mean over seeds,
        a the steps that the average leaves out, as long as that is less than t
        """
        steps_T, mean_STK = self.series("alpha_mean", self.domains)
        start = self.first.config.get("average_from", 0.0) * steps_T[-1]
        index = int(np.searchsorted(steps_T, start, side="right")) - 1
        if index >= 0:
            start, left_out = steps_T[index], mean_STK[:, index : index + 1]
            after = steps_T > start
            since_T1 = (steps_T[after] - start)[:, None]
            mean_STK[:, after] = (
                steps_T[after, None] * mean_STK[:, after] - start * left_out
            ) / since_T1
        begin_T = np.where(steps_T > start, start, 0.0)
        fifth_T = begin_T + DRIFT_FROM * (steps_T - begin_T)
        before_T = np.searchsorted(steps_T, fifth_T, side="right") - 1
        # The first step after `a` has none before it in the average.
        change_ST = np.abs(mean_STK - mean_STK[:, np.maximum(before_T, 0)]).sum(-1)
        return steps_T, change_ST.mean(0)

    @property
    def is_settled(self) -> bool:
        """Whether more steps would hardly change the result."""
        return bool(self.drift()[1][-1] <= MAX_DRIFT)


def _target_word(item: str, *, alone: bool) -> str:
    name, _, weight = item.partition("=")
    word = "a held-out mixture of all domains" if name == MIX else name
    return word if alone or not weight else f"{word} ({weight})"


def _average_weights(run: Run) -> dict[str, float]:
    """The result of a proxy run; of one that is not complete, its average so far."""
    if run.weights is not None:
        return records.weights_by_name(run.weights)
    for line in reversed(run.train):
        if "alpha_mean" in line:
            return to_floats(line["alpha_mean"])
    return {}


@dataclass(frozen=True)
class Arm:
    """Base runs at the same weights that differ in nothing but their seed."""

    label: str
    kind: str
    """uniform, natural, learned (by a proxy of this report) or given (from a file)."""
    about: str
    runs: tuple[Run, ...]

    @cached_property
    def losses(self) -> list[dict[str, float]]:
        """Held-out losses per domain, a dictionary a seed."""
        return [losses for run in self.runs if (losses := run.losses()) is not None]

    def perplexity(self, names: Sequence[str]) -> Stat:
        """exp of the mean loss over `names`: the paper's average, and one domain's perplexity."""
        return stat_of(exp_or_inf(mean_loss(losses, names)) for losses in self.losses)

    def loss(self, names: Sequence[str]) -> Stat:
        """Mean loss over `names`."""
        return stat_of(mean_loss(losses, names) for losses in self.losses)

    def worst(self, names: Sequence[str]) -> tuple[str, Stat]:
        """The domain of `names` with the highest perplexity, and that perplexity."""
        stats = {name: self.perplexity([name]) for name in names}
        # A diverged model has no number; that is the worst there is.
        name = max(stats, key=lambda name: nan_as_inf(stats[name].mean))
        return name, stats[name]


def mean_loss(losses: Mapping[str, float], names: Sequence[str]) -> float:
    """Mean over `names`, each weighing the same."""
    return math.fsum(losses[name] for name in names) / len(names)


@dataclass(frozen=True)
class Comparison:
    """Base models that may be compared: same corpus, model, settings and number of tokens."""

    arms: tuple[Arm, ...]
    """Only such as have been measured; uniform first, then natural, then the others."""
    num_seen: int
    """Arms before the unmeasured were left out."""
    first: Run
    domains: tuple[str, ...]
    """Training domains that every arm was measured on."""
    targets: tuple[str, ...]
    """Domains that no arm was trained on and every arm was measured on."""

    @property
    def uniform(self) -> Arm | None:
        """The baseline."""
        return next((arm for arm in self.arms if arm.kind == "uniform"), None)

    @property
    def rivals(self) -> list[Arm]:
        """What is set against uniform, learned weights first."""
        others = [arm for arm in self.arms if arm.kind != "uniform"]
        return sorted(others, key=lambda arm: arm.kind == "natural")

    @property
    def aim(self) -> tuple[str, ...]:
        """The domains whose loss the weights are to lower."""
        return self.targets or self.domains

    @property
    def title(self) -> str:
        """What kind of generalization is asked for."""
        targets = self.first.targets
        return f"Out of domain, {listed(targets)}" if targets else "All domains"

    @property
    def settings(self) -> str:
        """What all arms share."""
        model = self.first.config["model"]["model"]
        return f"{model} models, {count_text(self.first.tokens)} tokens each"


@dataclass(frozen=True)
class Study:
    """All runs of a report, put in order."""

    runs: tuple[Run, ...]
    proxies: tuple[Proxy, ...]
    comparisons: tuple[Comparison, ...]
    colors: Mapping[str, int] = field(repr=False)
    """Domain -> its place in the palette, the same in every figure."""

    @property
    def bases(self) -> list[Run]:
        """Base runs, in the order they were named."""
        return [run for run in self.runs if run.stage == "base"]


def read_study(runs: Sequence[Path]) -> Study:
    """Read runs and put them in order; see `write_report` for what is refused."""
    opened = open_runs(runs)
    proxies = _proxies([run for run in opened if run.stage in ("proxy", "doremi")])
    bases = [run for run in opened if run.stage == "base"]
    comparisons = [_comparison(group, proxies) for group in _grouped(bases, Run.settings)]
    comparisons.sort(key=lambda comparison: bool(comparison.first.targets))
    return Study(tuple(opened), proxies, tuple(comparisons), _places(opened, proxies))


def _proxies(runs: Sequence[Run]) -> tuple[Proxy, ...]:
    groups = _grouped(runs, Run.settings)
    # What is asked of all domains comes before what is asked of one, the baseline after both.
    groups.sort(key=lambda group: (group[0].stage == "doremi", bool(group[0].targets)))
    labels = _distinct([_common_name(group) for group in groups], groups)
    return tuple(Proxy(label, tuple(group)) for label, group in zip(labels, groups, strict=True))


def _grouped(runs: Iterable[Run], key: Callable[[Run], str]) -> list[list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def _common_name(runs: Sequence[Run]) -> str:
    """ca-seed0, ca-seed1 -> ca."""
    if len(runs) == 1:
        return runs[0].name
    prefix = os.path.commonprefix([run.name for run in runs])  # noqa: RUF071
    stem = re.sub(r"[-_. ]*(seed|s)?[-_. ]*\d*$", "", prefix)
    return stem or runs[0].name


def _distinct(labels: Sequence[str], groups: Sequence[Sequence[Run]]) -> list[str]:
    """Directories of one name are told apart by the folder they lie in."""
    return [
        label if labels.count(label) == 1 else f"{group[0].path.parent.name}/{group[0].name}"
        for label, group in zip(labels, groups, strict=True)
    ]


def _comparison(runs: Sequence[Run], proxies: Sequence[Proxy]) -> Comparison:
    sources = {run.path: _source(run, proxies) for run in runs}
    groups = _grouped(runs, lambda run: sources[run.path].key)
    arms = [sources[group[0].path].arm(tuple(group)) for group in groups]
    order = {"uniform": 0, "natural": 1, "learned": 2, "given": 3}
    arms.sort(key=lambda arm: order[arm.kind])
    measured = [arm for arm in arms if arm.losses]
    first = runs[0]
    return Comparison(
        arms=tuple(measured),
        num_seen=len(arms),
        first=first,
        domains=_measured_by_all(first.domains, measured),
        targets=_measured_by_all(first.targets, measured),
    )


def _measured_by_all(names: Sequence[str], arms: Sequence[Arm]) -> tuple[str, ...]:
    losses = [losses for arm in arms for losses in arm.losses]
    return tuple(name for name in names if all(name in measured for measured in losses))


class _Source(NamedTuple):
    """Where a base run's weights came from."""

    key: str
    label: str
    kind: str
    about: str

    def arm(self, runs: tuple[Run, ...]) -> Arm:
        return Arm(self.label, self.kind, self.about, runs)


def _source(run: Run, proxies: Sequence[Proxy]) -> _Source:
    """`weights` of a base run is a baseline's name, or the path of a file or of a proxy run."""
    weights = str(run.config["weights"])
    if weights in ("uniform", "natural"):
        about = {"uniform": "baseline", "natural": "by tokens"}[weights]
        return _Source(weights, weights, weights, about)
    path = Path(weights)
    folder = path.parent if path.name == records.WEIGHTS else path
    proxy = _proxy_of(folder, proxies)
    if proxy is not None:
        return _Source(proxy.label, proxy.label, "learned", proxy.about)
    return _Source(weights, folder.stem or weights, "given", "from a file")


def _proxy_of(folder: Path, proxies: Sequence[Proxy]) -> Proxy | None:
    """The proxy that lies there, or, where runs have been moved, the only one of that name."""
    for proxy in proxies:
        if any(run.path == folder.resolve() for run in proxy.runs):
            return proxy
    named = [proxy for proxy in proxies if any(run.name == folder.name for run in proxy.runs)]
    return named[0] if len(named) == 1 else None


def _places(runs: Sequence[Run], proxies: Sequence[Proxy]) -> dict[str, int]:
    """Domains in order of first appearance, training domains before targets."""
    names = [name for run in runs for name in run.domains]
    names += [name for run in runs for name in run.targets]
    names += [name for proxy in proxies if proxy.has_steps for name in proxy.rows]
    return {name: place for place, name in enumerate(dict.fromkeys(names))}
