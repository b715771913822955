"""How far each method's weights are from the best: as a swarm's regression says, and as measured.

A regret is a difference of mean losses, told as a change of perplexity like every other difference.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from doge_fast.pipeline import swarm
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.records.movement import Floats
from doge_fast.pipeline.reporting import figures, parts
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.statistics import (
    CONFIDENCE,
    NO_PAIR,
    Arm,
    Comparison,
    Difference,
    change_of,
    change_text,
)
from doge_fast.pipeline.reporting.study import Study
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
# Of a weight: other machines find the same best mixture to less than this.
_SAME = 0.005
# What runs at a regression's best mixture are called, whatever it was fitted to.
BEST = "base-best-of-"
# Marginal values are those of a weight multiplied by its e-th power.
_PUSH = 0.5


class Method(NamedTuple):
    """A method whose weights are known, and how far they are from the best."""

    label: str
    about: str
    weights: dict[str, float]
    """Mean over seeds."""
    predicted: Difference
    """Above the best by the regression, where it has tried such weights; its interval is that of
    the bootstrap."""
    measured: Difference
    """Above the lowest of the methods, seed by seed."""
    share: float
    """What the domains that the question is about get together."""
    tokens: float
    """What finding the weights took, mean over the times it was done."""


class Regrets(NamedTuple):
    """A group of methods, the regression that judges them, and what base models came to."""

    methods: list[Method]
    regression: Regression | None
    """None: the group has no swarm, or too little of it has been measured."""
    comparison: Comparison
    swarm: Sequence[Run]
    """What the regression was fitted to."""


def regrets_of(study: Study, group: Json) -> Regrets:
    """Fit the regression to those runs of the swarm that have been measured, and ask it."""
    planned = study.runs_of({"runs": group.get("swarm", ())})
    measured = [run for run in planned if run.name not in study.unmeasured]
    regression, runs = None, []
    if len(measured) >= swarm.LEAST_RUNS:
        runs = swarm_of(study.runs.values(), group["apart"], measured[0])
        regression = swarm.fitted(swarm.read([run.path for run in runs], group["aim"]))
    comparison = study.comparison(group)
    aim, arms = comparison.aim, {arm.label: arm for arm in comparison.arms}
    lowest, methods = _lowest(comparison.arms, aim), []
    for arm in group["arms"]:
        label, weights = arm["label"], study.mean_weights(arm)
        if not weights:
            continue
        predicted = above = NO_PAIR
        if regression is not None:
            own_K = np.array([weights[name] for name in regression.swarm.names])
            if regression.has_tried(own_K):
                predicted = against(regression, own_K, regression.best_K)
        if lowest is not None and label in arms:
            above = arms[label].against(lowest, aim)
        share = sum(weights[name] for name in group.get("special", ()))
        fitted = runs if label == group.get("focus") else ()
        tokens = _tokens(study, arm, fitted)
        methods.append(Method(label, arm["about"], weights, predicted, above, share, tokens))
    return Regrets(methods, regression, comparison, runs)


def _lowest(arms: Iterable[Arm], aim: Sequence[str]) -> Arm | None:
    means = {arm.label: arm.perplexity(aim).mean for arm in arms}
    finite = [arm for arm in arms if np.isfinite(means[arm.label])]
    return min(finite, key=lambda arm: means[arm.label], default=None)


def _tokens(study: Study, arm: Json, fitted: Iterable[Run]) -> float:
    names = {run.name for run in fitted}
    each = [
        sum(study.runs[name].tokens_seen for name in {*spent, *names} if name in study.runs)
        for spent in arm.get("spent", ())
    ]
    return sum(each) / len(each) if each else 0.0


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


def against(regression: Regression, own_K: Floats, other_K: Floats) -> Difference:
    """Predicted mean losses at two mixtures, with the interval of the bootstrap."""
    pair = np.stack([own_K, other_K])
    own, other = regression.loss(pair)
    refits_B2 = regression.loss_B(pair)
    low, high = _interval(refits_B2[:, 0] - refits_B2[:, 1])
    return Difference(float(own - other), low, high, 1)


def worth_of(regression: Regression, place: int) -> Difference:
    """Of a domain: uniform weights, its own multiplied by exp(0.5), against uniform ones."""
    uniform_K = np.full(len(regression.swarm.names), 1 / len(regression.swarm.names))
    pushed_K = uniform_K.copy()
    pushed_K[place] *= np.exp(_PUSH)
    return against(regression, pushed_K / pushed_K.sum(), uniform_K)


def _interval(values_B: Floats) -> tuple[float, float]:
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(values_B, [tail, 100 - tail])
    return float(low), float(high)


def regret_part(study: Study, group: Json, prefix: str) -> parts.Part:
    """How far each method is from the best mixture."""
    found = regrets_of(study, group)
    shown = [_regret_table(group, found)] if found.methods else []
    methods, sketches = found.methods[::-1], []
    marks = {"measured": [method.measured for method in methods]}
    if found.regression is not None:
        shown += [
            _best_table(group, found.methods, found.regression),
            _laws_table(found.regression),
        ]
        marks["predicted"] = [method.predicted for method in methods]
    if any(each.is_known for differences in marks.values() for each in differences):
        labels = [method.label for method in methods]
        make = partial(figures.change_figure, marks, labels, "the best")
        sketches.append(parts.sketch("regret", f"{prefix}-regret", make, title=group["title"]))
    return parts.Part([_verdict(study, group, found)], shown, sketches)


def _regret_table(group: Json, found: Regrets) -> Table:
    """A method a row: its regret by the regression and by its base models, and what it took."""
    special, regression = group.get("special", ()), found.regression
    columns = [("measured", "above the lowest of these")]
    if special:
        columns.insert(0, ("share", f"of {listed(special)}"))
    if regression is not None:
        columns.insert(-1, ("predicted", "above the best"))
        columns.append(("tokens", "to find the weights"))
    rows = []
    for method in found.methods:
        texts = {
            "share": f"{method.share:.3f}",
            "predicted": _told(method.predicted),
            "measured": _told(method.measured),
            "tokens": count_text(method.tokens) if method.tokens else "none",
        }
        rows.append(Row(method.label, [Cell(texts[name]) for name, _ in columns]))
    note = (
        "Mean loss above the best, as a change of perplexity. Measured: base models at these "
        f"weights, seed by seed, with {100 * CONFIDENCE:.0f} % intervals where there are several "
        "seeds."
    )
    if regression is not None:
        note += (
            f" Predicted: by the {regression.law} over "
            f"{plural(len(regression.swarm.losses), 'base model')}, at the mean weights over "
            "seeds; intervals of a bootstrap over these models, the best mixture held fixed. "
            "Models far from the best are left out."
        )
    return Table(f"{group['title']}: distance from the best", note, "method", columns, rows)


def _told(difference: Difference) -> str:
    """The best itself has nothing above it, as far as is printed."""
    ends = (difference.mean, difference.low or 0.0, difference.high or 0.0)
    is_best = difference.pairs and max(map(abs, ends)) < _SHOWN
    return "the lowest" if is_best else change_text(difference)


def _laws_table(regression: Regression) -> Table:
    """How well each law predicts runs that it was not fitted to."""
    rows = [
        Row(name, [Cell(_percent(error.average)), Cell(_percent(error.domain))])
        for name, error in (*regression.errors.items(), ("spread of the swarm", regression.spread))
    ]
    note = (
        "Root mean square error of the perplexity of models left out, in per cent; the spread "
        "is what predicting the mean would come to."
    )
    heads = [("average", "over the domains"), ("one domain", "all of them together")]
    return Table("How well the regression predicts", note, "law", heads, rows)


def _percent(loss: float) -> str:
    return f"{100 * loss:.2f} %"


def _best_table(group: Json, methods: Sequence[Method], regression: Regression) -> Table:
    """The best mixture, its interval, and what a domain is worth at uniform weights."""
    # The regression's own weights are the first column, unless it has found others since.
    focus, is_stale = group.get("focus"), _is_stale(group, methods, regression)
    shown = [method for method in methods if method.label != focus or is_stale]
    rows = []
    for place, name in enumerate(regression.swarm.names):
        low, high = _interval(regression.best_BK[:, place])
        worth = worth_of(regression, place)
        best = Cell(f"{regression.best_K[place]:.3f} [{low:.3f}, {high:.3f}]")
        others = [Cell(weight_text(Stat(method.weights[name]))) for method in shown]
        rows.append(Row(name, [best, parts.difference_cell(worth), *others]))
    note = (
        "The best by the regression, with the interval over refits. Worth: the predicted change "
        "of the average perplexity when a domain's uniform weight is multiplied by "
        f"exp({_PUSH:g}), the others making room."
    )
    heads = [("best", "by the regression"), ("worth", "at uniform")]
    heads += [(method.label, method.about) for method in shown]
    return Table("The best mixture, and what each domain is worth", note, "domain", heads, rows)


def _is_stale(group: Json, methods: Sequence[Method], regression: Regression) -> bool:
    """Whether base models were trained at a best mixture that is not the one found now."""
    trained = [method.weights for method in methods if method.label == group.get("focus")]
    best = dict(zip(regression.swarm.names, regression.best_K, strict=True))
    return any(abs(own[name] - best[name]) > _SAME for own in trained for name in best)


def _verdict(study: Study, group: Json, found: Regrets) -> parts.Verdict:
    """Was there anything to win, and who won it?"""
    arms, title = {arm.label: arm for arm in found.comparison.arms}, group["title"]
    focus, uniform = arms.get(group.get("focus", "")), arms.get("uniform")
    sentences = list(_sentences(group, found))
    if focus is None or uniform is None or not found.comparison.aim:
        told = parts.unanswered(study, title, "Not all base models have been measured yet")
        return told._replace(sentences=told.sentences + sentences)
    difference = focus.against(uniform, found.comparison.aim)
    headline = parts.headline_of(f"{focus.label}'s mixture", "uniform weights", difference)
    return parts.Verdict(title, headline, sentences)


def _sentences(group: Json, found: Regrets) -> Iterator[str]:
    yield from _predictions(group, found)
    known = [method for method in found.methods if method.measured.is_known]
    if known:
        told = listed(f"{each.label} {percent_text(change_of(each.measured)[0])}" for each in known)
        yield f"Measured regret: {told}."
    yield from _constructions(group, found)


def _predictions(group: Json, found: Regrets) -> Iterator[str]:
    regression = found.regression
    if regression is not None:
        number, error = len(regression.swarm.names), regression.errors[regression.law].average
        even_K = np.full(number, 1 / number)
        if regression.has_tried(even_K):
            won = against(regression, regression.best_K, even_K)
            best = f"the best mixture is {change_text(won)} against uniform weights"
            yield f"By the regression {best}."
        yield (
            f"The regression predicts the average of models left out to {_percent(error)}, of a "
            f"spread of {_percent(regression.spread.average)}."
        )
        if beyond := [method.label for method in found.methods if not method.predicted.pairs]:
            yield (
                f"Nothing is predicted of {listed(beyond)}: a weight is outside the range that the "
                "regression's models have of its domain."
            )
        if _is_stale(group, found.methods, regression):
            yield (
                f"The base models of {group['focus']} were trained at another mixture than the one "
                f"that it finds now, over {plural(len(found.swarm), 'run')}: remove them and their "
                "weights in mixtures/, and repeat the command that made them."
            )


def _constructions(group: Json, found: Regrets) -> Iterator[str]:
    shares = {method.label: method.share for method in found.methods}
    focus = group.get("focus")
    if not group.get("special") or focus not in shares or "uniform" not in shares:
        return
    # To which side of uniform the best share lies by construction, as learned and as measured.
    side, even = "more" if group["is_more"] else "less", shares["uniform"]
    yield (
        f"By construction {listed(group['special'])} should get {side} than uniform weights give, "
        f"{even:.3f}; {focus} gives {shares[focus]:.3f}."
    )
    sides: tuple[list[Arm], list[Arm]] = ([], [])
    for arm in found.comparison.arms:
        if (share := shares.get(arm.label)) is not None:
            sides[share <= even if group["is_more"] else share >= even].append(arm)
    best, other = (_lowest(side, found.comparison.aim) for side in sides)
    if best is None or other is None:
        return
    difference = best.against(other, found.comparison.aim)
    if difference.pairs:
        yield (
            f"Of the mixtures that give {side}, {best.label} ({shares[best.label]:.3f}) has the "
            f"lowest loss; against the best of the others, {other.label} "
            f"({shares[other.label]:.3f}), it is {change_text(difference)}: {_holds(difference)}."
        )


def _holds(difference: Difference) -> str:
    """What the best of the right side against the best of the wrong one says."""
    if difference.pairs > 1 and not difference.is_decided:
        return "whether the construction holds on this corpus is undecided"
    holds = f"the construction {'holds' if difference.mean < 0 else 'does not hold'} on this corpus"
    return holds if difference.pairs > 1 else f"{holds}, by one seed"
