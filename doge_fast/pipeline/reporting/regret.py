"""How far each method's weights are from the best: as a swarm's regression says, and as measured.

A regret is a difference of mean losses, told as a change of perplexity like every other difference.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from doge_fast.pipeline import swarm
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.records.movement import Floats
from doge_fast.pipeline.reporting.arms import Arm, Comparison
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.statistics import (
    CONFIDENCE,
    NO_PAIR,
    Difference,
    change_of,
    change_text,
)
from doge_fast.pipeline.reporting.study import Study
from doge_fast.pipeline.reporting.verdicts import Verdict, headline_of, unanswered
from doge_fast.pipeline.reporting.wording import (
    Stat,
    count_text,
    listed,
    percent_text,
    plural,
    weight_text,
)
from doge_fast.pipeline.swarm import Regression
from doge_fast.pipeline.tables import Cell, Row, Table

# Half of the last digit of a change.
_SHOWN = 0.0005
# What runs at a regression's best mixture are called, whatever it was fitted to.
BEST = "base-best-of-"
# Marginal values are those of a weight multiplied by its e-th power.
_PUSH = 0.5


@dataclass(frozen=True)
class Regrets:
    """A group of methods, the regression that judges them, and what base models came to."""

    study: Study
    group: Json
    regression: Regression | None
    """None: the group has no swarm, or too little of it has been measured."""
    comparison: Comparison
    swarm: Sequence[Run] = ()
    """What the regression was fitted to."""

    @property
    def arms(self) -> list[Json]:
        """Methods whose weights are known."""
        return [arm for arm in self.group["arms"] if self.study.weights(arm)]

    def weights_K(self, arm: Json) -> Floats:
        """Mean over seeds, in the order of the swarm's domains."""
        assert self.regression is not None
        found = self.study.weights(arm)
        return np.array([found[name].mean for name in self.regression.swarm.names])

    def predicted(self, arm: Json) -> Difference:
        """Above the best by the regression; its interval is that of the bootstrap."""
        if self.regression is None:
            return NO_PAIR
        return _against(self.regression, self.weights_K(arm), self.regression.best_K)

    @property
    def lowest(self) -> Arm | None:
        """The method with the lowest mean loss over the seeds that all have."""
        aim = self.comparison.aim
        arms = [arm for arm in self.comparison.arms if np.isfinite(arm.perplexity(aim).mean)]
        return min(arms, key=lambda arm: arm.perplexity(aim).mean, default=None)

    def measured(self, arm: Json) -> Difference:
        """Above the lowest of the methods, seed by seed."""
        found = {each.label: each for each in self.comparison.arms}
        lowest = self.lowest
        if lowest is None or arm["label"] not in found:
            return NO_PAIR
        return found[arm["label"]].against(lowest, self.comparison.aim)

    def share(self, arm: Json) -> float:
        """What the domains that the question is about get together."""
        weights = self.study.weights(arm)
        return sum(weights[name].mean for name in self.group["special"])

    def tokens(self, arm: Json) -> float:
        """What finding the weights took, mean over the times it was done."""
        is_fitted = self.regression is not None and arm["label"] == self.group["focus"]
        fitted = {run.name for run in self.swarm} if is_fitted else set()
        runs = self.study.runs
        each = [
            sum(runs[name].tokens_seen for name in {*names, *fitted} if name in runs)
            for names in arm.get("spent", ())
        ]
        return sum(each) / len(each) if each else 0.0


def regrets_of(study: Study, group: Json) -> Regrets:
    """Fit the regression to those runs of the swarm that have been measured."""
    planned = study.runs_of({"runs": group.get("swarm", ())})
    measured = [run for run in planned if run.name not in study.unmeasured]
    comparison = study.comparison(group)
    if len(measured) < swarm.LEAST_RUNS:
        return Regrets(study, group, None, comparison)
    runs = swarm_of(study.runs.values(), group["apart"], measured[0])
    fitted = swarm.fitted(swarm.read([run.path for run in runs], group["aim"]))
    return Regrets(study, group, fitted, comparison, runs)


def swarm_of(runs: Iterable[Run], apart: Collection[str], like: Run) -> list[Run]:
    """Measured base models that differ from one of them in nothing but weights and seed.

    So base models of another experiment that are copied beside those of this one count too.

    Args:
        runs: all that there are.
        apart: names of runs that are judged by the swarm, and of what came of it.
        like: one of the swarm.
    """
    return [
        run
        for run in runs
        if run.stage == "base"
        and run.name not in apart
        and not run.name.startswith(BEST)
        and run.evaluation is not None
        and run.measured_blocks() == like.measured_blocks()
        and run.settings() == like.settings()
    ]


def _against(regression: Regression, own_K: Floats, other_K: Floats) -> Difference:
    pair = np.stack([own_K, other_K])
    own, other = regression.loss(pair)
    refits_B2 = regression.loss_B(pair)
    low, high = _interval(refits_B2[:, 0] - refits_B2[:, 1])
    return Difference(float(own - other), low, high, 1)


def _interval(values_B: Floats) -> tuple[float, float]:
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(values_B, [tail, 100 - tail])
    return float(low), float(high)


def regret_table(found: Regrets) -> Table:
    """A method a row: its regret by the regression and by its base models, and what it took."""
    has_swarm = found.regression is not None
    columns = [("measured", "above the lowest of these"), ("tokens", "to find the weights")]
    columns = [("predicted", "above the best"), *columns] if has_swarm else columns[:1]
    special = found.group.get("special", ())
    if special:
        columns.insert(0, ("share", f"of {listed(special)}"))
    rows = []
    for arm in found.arms:
        tokens = found.tokens(arm)
        cells = [Cell(_told(found.measured(arm))), Cell(count_text(tokens) if tokens else "none")]
        cells = [Cell(_told(found.predicted(arm))), *cells] if has_swarm else cells[:1]
        if special:
            cells.insert(0, Cell(f"{found.share(arm):.3f}"))
        rows.append(Row(arm["label"], cells))
    note = (
        "Mean loss above the best, as a change of perplexity. Measured: base models at these "
        f"weights, seed by seed, with {100 * CONFIDENCE:.0f} % intervals where there are several "
        "seeds."
    )
    if found.regression is not None:
        note += (
            f" Predicted: by the {found.regression.law} over "
            f"{plural(len(found.regression.swarm.losses), 'base model')}, at the mean weights over "
            "seeds; intervals of a bootstrap over these models, the best mixture held fixed. "
            "Models far from the best are left out."
        )
    return Table(f"{found.group['title']}: distance from the best", note, "method", columns, rows)


def _told(difference: Difference) -> str:
    """The best itself has nothing above it, as far as is printed."""
    values = [
        each for each in (difference.mean, difference.low, difference.high) if each is not None
    ]
    is_best = difference.pairs and max(map(abs, values)) < _SHOWN
    return "the lowest" if is_best else change_text(difference)


def laws_table(regression: Regression) -> Table:
    """How well each law predicts runs that it was not fitted to."""
    rows = [
        Row(name, [Cell(_percent(error.average)), Cell(_percent(error.domain))])
        for name, error in (*regression.errors.items(), ("spread of the swarm", regression.spread))
    ]
    return Table(
        title="How well the regression predicts",
        note=(
            "Root mean square error of the perplexity of models left out, in per cent; the spread "
            "is what predicting the mean would come to."
        ),
        corner="law",
        columns=[("average", "over the domains"), ("one domain", "all of them together")],
        rows=rows,
    )


def _percent(loss: float) -> str:
    return f"{100 * loss:.2f} %"


def best_table(found: Regrets) -> Table:
    """The best mixture, its interval, and what a domain is worth at uniform weights."""
    regression = found.regression
    assert regression is not None
    number = len(regression.swarm.names)
    uniform_K = np.full(number, 1 / number)
    stats = {arm["label"]: found.study.weights(arm) for arm in found.arms}
    told = {arm["label"]: arm["about"] for arm in found.arms}
    # Only the regression's weights come from it; they are the first column.
    shown = {label: each for label, each in stats.items() if label != found.group.get("focus")}
    rows = []
    for place, name in enumerate(regression.swarm.names):
        low, high = _interval(regression.best_BK[:, place])
        pushed_K = np.where(np.arange(number) == place, np.exp(_PUSH), 1.0) * uniform_K
        worth = _against(regression, pushed_K / pushed_K.sum(), uniform_K)
        cells = [
            Cell(f"{regression.best_K[place]:.3f} [{low:.3f}, {high:.3f}]"),
            Cell(change_text(worth), worth.is_lower, worth.is_higher),
        ]
        cells += [Cell(weight_text(Stat(each[name].mean))) for each in shown.values()]
        rows.append(Row(name, cells))
    return Table(
        title="The best mixture, and what each domain is worth",
        note=(
            "The best by the regression, with the interval over refits. Worth: the predicted "
            "change of the average perplexity when a domain's uniform weight is multiplied by "
            f"exp({_PUSH:g}), the others making room."
        ),
        corner="domain",
        columns=[
            ("best", "by the regression"),
            ("worth", "at uniform"),
            *((label, told[label]) for label in shown),
        ],
        rows=rows,
    )


def regret_verdict(found: Regrets) -> Verdict:
    """Was there anything to win, and who won it?"""
    title, group = found.group["title"], found.group
    arms = {arm.label: arm for arm in found.comparison.arms}
    focus = arms.get(group.get("focus", ""))
    uniform = arms.get("uniform")
    if focus is None or uniform is None or not found.comparison.aim:
        told = unanswered(found.study, title, "Not all base models have been measured yet")
        return told._replace(sentences=[*told.sentences, *_sentences(found)])
    difference = focus.against(uniform, found.comparison.aim)
    headline = headline_of(f"{focus.label}'s mixture", "uniform weights", difference)
    return Verdict(title, headline, list(_sentences(found)))


def _sentences(found: Regrets) -> Iterator[str]:
    regression = found.regression
    if regression is not None:
        number, error = len(regression.swarm.names), regression.errors[regression.law].average
        won = _against(regression, regression.best_K, np.full(number, 1 / number))
        yield (
            f"By the regression the best mixture is {change_text(won)} against uniform weights; "
            f"it predicts the average of models left out to {_percent(error)}, of a spread of "
            f"{_percent(regression.spread.average)}."
        )
    known = [arm for arm in found.arms if found.measured(arm).is_known]
    if known:
        told = listed(
            f"{arm['label']} {percent_text(change_of(found.measured(arm))[0])}" for arm in known
        )
        yield f"Measured regret: {told}."
    if found.group.get("special"):
        yield from _share_sentences(found)


def _share_sentences(found: Regrets) -> Iterator[str]:
    """Whether what is learned goes to the side of uniform that it must, and where the best is."""
    special, focus = found.group["special"], found.group["focus"]
    shares = {arm["label"]: found.share(arm) for arm in found.arms}
    if focus not in shares or "uniform" not in shares:
        return
    side = "more" if found.group["is_more"] else "less"
    is_right = (shares[focus] > shares["uniform"]) == found.group["is_more"]
    yield (
        f"{listed(special)} must get {side} than uniform weights give, {shares['uniform']:.3f}; "
        f"{focus} gives {shares[focus]:.3f}, {'as it must' if is_right else 'the wrong way'}."
    )
    if found.lowest is not None:
        yield (
            f"The lowest loss is that of {found.lowest.label}, where the share is "
            f"{shares[found.lowest.label]:.3f}."
        )
