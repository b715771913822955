"""What came out, in words: better, worse or undecided, as far as the seeds' interval tells."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting import paper
from doge_fast.pipeline.reporting.arms import Arm, Comparison, focus_of
from doge_fast.pipeline.reporting.cautions import has_moved, proxy_warnings
from doge_fast.pipeline.reporting.mixtures import effective_domains
from doge_fast.pipeline.reporting.proxies import Proxy
from doge_fast.pipeline.reporting.statistics import (
    CONFIDENCE,
    NO_PAIR,
    Difference,
    change_of,
    change_text,
    paired_difference,
)
from doge_fast.pipeline.reporting.study import Study, open_study
from doge_fast.pipeline.reporting.tables import (
    Changes,
    accuracy_text,
    count_below,
)
from doge_fast.pipeline.reporting.wording import (
    as_ascii,
    listed,
    perplexity_text,
    plural,
    weight_text,
    wrapped,
)

# Arms of which each gets a sentence, and a mark beside each domain in a figure.
MOST_TOLD = 5


class Verdict(NamedTuple):
    """The answer of a group."""

    title: str
    headline: str
    sentences: list[str]


def headline_of(own: str, other: str, difference: Difference, *, is_accuracy: bool = False) -> str:
    """Which one is better, if the interval says so; with one seed it is undecided.

    `difference` is of losses, or of accuracies in percentage points, of which more is better.
    """
    if not difference.pairs:
        return f"Undecided: {own} and {other} have no seed in common"
    if not difference.is_known:
        return f"{own} or {other} diverged"
    if difference.is_decided:
        return f"{own} {'beats' if (difference.mean > 0) is is_accuracy else 'loses to'} {other}"
    seeds = "in the one seed" if difference.pairs == 1 else f"over {difference.pairs} seeds"
    if difference.mean == 0:
        return f"Undecided: {own} and {other} come out the same {seeds}"
    size = abs(difference.mean if is_accuracy else 100 * change_of(difference)[0])
    told = f"{size:.1f}" if size >= 0.05 else "less than 0.1"
    unit = "points" if is_accuracy else "%"
    side = "below" if difference.mean < 0 else "above"
    return f"Undecided: {own} comes out {told}\N{NO-BREAK SPACE}{unit} {side} {other} {seeds}"


def unanswered(study: Study, title: str, headline: str, way_out: str = "") -> Verdict:
    """There is nothing to compare; of an experiment all ways out are one."""
    told = "The same command goes on with the runs." if study.is_experiment else way_out
    return Verdict(title, headline, [told] if told else [])


def comparison_verdict(study: Study, comparison: Comparison) -> Verdict:
    """Whether weights other than the baseline's helped, whichever way it went."""
    title, baseline, aim = comparison.title, comparison.baseline, comparison.aim
    evaluate = "Run doge-fast evaluate on each finished base run."
    if not comparison.arms:
        return unanswered(study, title, "No base model here has been measured", evaluate)
    if not aim:
        headline = "No domain or target that this is about has been measured by every arm"
        return unanswered(study, title, headline, evaluate)
    if baseline is None:
        named = (arm["label"] for arm in comparison.group["arms"] if arm.get("is_baseline"))
        headline = f"Nothing to compare with: no base model at {next(named, 'uniform')} weights"
        train = "Train one with doge-fast base --weights uniform and the settings of the others."
        return unanswered(study, title, headline, train)
    if not comparison.rivals:
        headline = f"Nothing to compare yet: only {baseline.label} weights have been tried"
        return unanswered(study, title, headline)
    where = f" on {listed(aim)}" if comparison.others else ""
    difference = comparison.focus.against(baseline, aim)
    headline = headline_of(comparison.focus.label, baseline.label + where, difference)
    return Verdict(title, headline, list(_sentences(study, comparison, baseline)))


def _sentences(study: Study, comparison: Comparison, baseline: Arm) -> Iterator[str]:
    aim, group = comparison.aim, comparison.group
    rivals = sorted(comparison.rivals, key=lambda arm: arm is not comparison.focus)
    told = rivals if len(rivals) <= MOST_TOLD else [comparison.focus]
    yield from (_sentence(arm, baseline, comparison) for arm in told)
    if len(told) < len(rivals):
        yield from _ranking(rivals, baseline, aim)
    by_label = {arm.label: arm for arm in comparison.arms}
    for own, other in group.get("pairs", []):
        if own in by_label and other in by_label:
            difference = by_label[own].against(by_label[other], aim)
            yield f"{own} against {other}: average {change_text(difference)}."
    if len(comparison.arms) > 2:
        means = {arm.label: arm.perplexity(aim).mean for arm in comparison.arms}
        best = min(means, key=lambda label: np.nan_to_num(means[label], nan=np.inf))
        yield f"Lowest average perplexity: {best}, {perplexity_text(means[best])}."
    if group.get("oracle"):
        reached = study.arm(group["oracle"])
        if all(set(aim) <= set(losses) for losses in reached.losses.values()) and reached.losses:
            text = perplexity_text(reached.perplexity(aim).mean)
            yield f"For scale: uniform weights with {listed(aim)} among the domains reach {text}."
    if not study.is_experiment and paper.is_slimpajama(aim):
        yield paper.NOTES["tab:universal_ppl"]


def _sentence(arm: Arm, baseline: Arm, comparison: Comparison) -> str:
    """lower on 5 of 7 domains than uniform; average 118.13 against 121.84, −3.0 % [−3.2, −2.9]."""
    aim, trained = comparison.aim, comparison.others or comparison.aim
    if not arm.against(baseline, aim).pairs:
        return f"{arm.label}: no seed in common with {baseline.label}."
    worst, mean = arm.worst(trained)
    other_worst, other_mean = baseline.worst(trained)
    each = {name: arm.against(baseline, [name]) for name in trained}
    clearly = _clearly(each)
    where = ""
    if comparison.others:
        where = f"on {listed(aim)}, which is not trained on, {_versus(arm, baseline, aim)}; "
    return (
        f"{arm.label}: {where}lower on {count_below(arm, baseline, trained)} of {len(trained)} "
        f"domains than {baseline.label}; average {_versus(arm, baseline, trained)}; worst domain "
        f"{worst} at {perplexity_text(mean)}, with {baseline.label} {other_worst} at "
        f"{perplexity_text(other_mean)}{'; beyond its interval ' if clearly else ''}{clearly}."
    )


def _clearly(found: Mapping[str, Difference]) -> str:
    """better on a and b; worse on c: as far as the intervals tell."""
    sides = {
        "better": [name for name, difference in found.items() if difference.is_lower],
        "worse": [name for name, difference in found.items() if difference.is_higher],
    }
    return "; ".join(f"{word} on {listed(names)}" for word, names in sides.items() if names)


def _versus(arm: Arm, baseline: Arm, names: Sequence[str]) -> str:
    """15.81 against 16.53, −4.4 % [−5.0, −3.8] over 3 paired seeds."""
    difference = arm.against(baseline, names)
    own, other = (perplexity_text(each.perplexity(names).mean) for each in (arm, baseline))
    seeds = plural(difference.pairs, "paired seed")
    return f"{own} against {other}, {change_text(difference)} over {seeds}"


def _ranking(rivals: Sequence[Arm], baseline: Arm, names: Sequence[str]) -> Iterator[str]:
    """How many arms are lower, and which come out lowest and highest."""
    found = {arm.label: arm.against(baseline, names) for arm in rivals}
    known = {label: each for label, each in found.items() if each.is_known}
    if not known:
        return
    order = sorted(known, key=lambda label: known[label].mean)
    below = sum(each.mean < 0 for each in known.values())
    lowest, highest = (
        "; ".join(f"{label}: {change_text(known[label])}" for label in chosen)
        for chosen in (order[:3], order[:-4:-1])
    )
    yield f"{below} of {plural(len(known), 'arm')} below {baseline.label} on average."
    yield f"Lowest: {lowest}. Highest: {highest}."


# Of a table of targets: what is told against what, where the experiment has both.
_TARGET_PAIRS = {"DoGE": "uniform", "DoGE, fine-tuned": "uniform, fine-tuned"}


def target_changes(rows: Mapping[str, Sequence[Arm]]) -> Changes:
    """{label: {target: difference from uniform}}, before and after further steps on the target."""
    labels = {arm.label for arms in rows.values() for arm in arms}
    return {
        own: {target: _between(arms, own, other, target) for target, arms in rows.items()}
        for own, other in _TARGET_PAIRS.items()
        if {own, other} <= labels
    }


def _between(arms: Sequence[Arm], own: str, other: str, target: str) -> Difference:
    by_label = {arm.label: arm for arm in arms}
    if own not in by_label or other not in by_label:
        return NO_PAIR
    return by_label[own].against(by_label[other], [target])


def targets_verdict(rows: Mapping[str, Sequence[Arm]], changes: Changes) -> Verdict:
    """How DoGE comes out on each target."""
    sentences = []
    for own, each_target in changes.items():
        other = _TARGET_PAIRS[own]
        found = {target: each for target, each in each_target.items() if each.pairs}
        if not found:
            continue
        below = sum(each.mean < 0 for each in found.values())
        told = listed(f"{target} {change_text(each)}" for target, each in found.items())
        clearly = _clearly(found)
        sentences.append(
            f"{own}: lower on {below} of {len(found)} than {other}: {told}."
            f"{f' Beyond the interval: {clearly}.' if clearly else ''}"
        )
    beaten = [
        target for target, arms in rows.items() if _between(arms, "DoGE", "oracle", target).is_lower
    ]
    if beaten:
        sentences.append(f"DoGE beats even the oracle, which trains on it, on {listed(beaten)}.")
    known = {target: each for target, each in changes["DoGE"].items() if each.pairs}
    if len(known) == 1:
        ((target, difference),) = known.items()
        headline = headline_of("DoGE", f"uniform on {target}", difference)
    else:
        better = sum(each.is_lower for each in known.values())
        worse = sum(each.is_higher for each in known.values())
        headline = (
            f"DoGE beats uniform on {better} of {len(known)} targets, loses on {worse}, "
            f"undecided on {len(known) - better - worse}"
        )
    return Verdict("Out of domain", headline, sentences)


def scale_verdict(group: Json, gaps: Mapping[str, float]) -> Verdict:
    """How far the weights of other proxies are from those of the reference."""
    told = listed(f"{label} {100 * gap:.2f} %" for label, gap in gaps.items())
    headline = f"Mean absolute difference from the {group['reference']} proxy's weights: {told}"
    return Verdict(group["title"], headline, [paper.NOTES["tab:robust"]])


def tasks_verdict(group: Json, scores: Mapping[str, Sequence[Json]], baseline: str) -> Verdict:
    """Accuracies against the baseline's, in points, over the same seeds."""
    rivals = [label for label in scores if label != baseline]
    focus = focus_of(group, rivals)
    gains = {label: _accuracy_gain(scores[label], scores[baseline]) for label in rivals}
    number = len(scores[baseline][0]["tasks"])
    sentences = [
        f"{label}: {_points_text(found)} against {baseline} in the average of "
        f"{plural(number, 'task')}, over {plural(found.pairs, 'paired seed')}."
        for label, found in gains.items()
    ]
    average = [score["average"] for score in scores[baseline]]
    sentences.append(
        f"{baseline} answers {accuracy_text(average)} % rightly, guessing "
        f"{100 * average[0]['chance']:.1f} %."
    )
    headline = headline_of(focus, baseline, gains[focus], is_accuracy=True)
    return Verdict(group["title"], headline, sentences)


def _accuracy_gain(own: Sequence[Json], other: Sequence[Json]) -> Difference:
    """Of the average accuracy over tasks, in percentage points.

    Seeds answer the same documents, so the error of these is in the interval too, beside that of
    the seeds; as if each arm had drawn its own, which is too much rather than too little.
    """
    ours, theirs = ([each["average"] for each in arm] for arm in (own, other))
    found = paired_difference(
        [100 * each["acc"] for each in ours], [100 * each["acc"] for each in theirs]
    )
    errors = [each["acc_stderr"] for each in (*ours, *theirs)]
    if found.low is None or None in errors:
        return found._replace(low=None, high=None)
    of_documents = 100 * math.sqrt(2 * math.fsum(error**2 for error in errors) / len(errors))
    reach = math.hypot(
        found.mean - found.low, NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * of_documents
    )
    return found._replace(low=found.mean - reach, high=found.mean + reach)


def _points_text(difference: Difference) -> str:
    text = f"{difference.mean:+.1f} points"
    if difference.low is not None and difference.high is not None:
        text += f" [{difference.low:+.1f}, {difference.high:+.1f}]"
    return text.replace("-", "−")


def summary_of(proxy: Proxy) -> str:
    """What a proxy learned, and whether its average has settled."""
    if not proxy.has_steps:
        return f"{proxy.label}: has not logged a step yet."
    first, *others = sorted(proxy.weights.items(), key=lambda item: -item[1].mean)
    top = listed(
        f"{name} {weight_text(stat)} ({stat.mean * len(proxy.domains):.1f}\N{NO-BREAK SPACE}× "
        "uniform)"
        for name, stat in [first, *others[:-1]][:2]
    )
    least = f", least to {others[-1][0]} {weight_text(others[-1][1])}" if others else ""
    count = effective_domains(stat.mean for stat in proxy.weights.values())
    return (
        f"{proxy.label}, for {proxy.target}: most goes to {top}{least}; effectively "
        f"{count:.1f} of {plural(len(proxy.domains), 'domain')}. "
        f"{drift_sentence(proxy)}"
    )


def drift_sentence(proxy: Proxy) -> str:
    """Whether a proxy's running average has settled, and the numbers that say so."""
    moved = proxy.movement
    drift, distance = _share(moved.drift[-1]), _share(moved.distance[-1])
    told = (
        f"the last fifth of the {int(moved.steps[-1])} steps reassigned {drift} of the tokens; "
        f"from uniform weights it is {distance}"
    )
    if moved.spread is not None:
        told += f", and between seeds {_share(moved.spread[-1])}"
    if not has_moved(proxy):
        return f"The running average has hardly moved: {told}."
    state = "has settled" if moved.is_settled else "is still moving"
    return f"The running average {state}: {told}."


def _share(distance: float) -> str:
    """A sum of absolute differences as a share of the tokens, to two digits."""
    percent = 50 * distance
    return f"{percent:.{1 if percent >= 1 else 2}f}\N{NO-BREAK SPACE}%"


def remarks_on(run: Path) -> list[str]:
    """What a run of stage one found and what to know before using it, in lines for a terminal.

    Raises:
        ValueError: `run` is no such run.
    """
    (proxy,) = open_study([run]).proxies
    warnings = (*proxy.first.warnings, *proxy_warnings(proxy))
    remarks = [summary_of(proxy), *(f"Warning: {each}" for each in warnings)]
    return [as_ascii(wrapped(each)) for each in remarks]
