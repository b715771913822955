"""Base models set against a baseline, domain by domain, and against each other on one target."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting import figures, paper, parts
from doge_fast.pipeline.reporting.statistics import (
    Arm,
    Comparison,
    Difference,
    change_text,
    curves_of,
)
from doge_fast.pipeline.reporting.study import Study
from doge_fast.pipeline.reporting.wording import listed, perplexity_stat, perplexity_text, plural
from doge_fast.pipeline.tables import Cell, Row, Table

# Arms of which each gets a sentence, and a mark beside each domain in a figure.
_MOST_TOLD = 5


def perplexity_part(study: Study, group: Json, prefix: str) -> parts.Part:
    """Arms against a baseline, domain by domain, and their losses during training."""
    found = study.comparison(group)
    answer = [comparison_verdict(study, group, found)]
    if not found.arms or not (found.aim or found.others):
        return parts.Part(answer)
    shown = [_perplexity_table(group, found)]
    if found.baseline is None or not found.rivals or not found.aim:
        return parts.Part(answer, shown)
    shown.append(_difference_table(group, found, found.baseline))
    sketches = list(_sketches(group, found, found.baseline, prefix))
    return parts.Part(answer, shown, sketches)


def _heads(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    return [(arm.label, f"{arm.about}, {plural(len(arm.losses), 'seed')}") for arm in arms]


def _perplexity_cell(arm: Arm, other: Arm | None, names: Sequence[str]) -> Cell:
    """Bold where the interval says that the arm is better than the other."""
    is_better = other is not None and arm is not other and arm.against(other, names).is_lower
    return Cell(perplexity_stat(arm.perplexity(names)) if arm.losses else "–", is_better)


def _perplexity_table(group: Json, found: Comparison) -> Table:
    """Perplexity per domain for every arm, as tab:universal_ppl; targets first."""
    arms, baseline, aim, others = found.arms, found.baseline, found.aim, found.others

    def row(label: str, names: Sequence[str], *, is_total: bool = False) -> Row:
        return Row(label, [_perplexity_cell(arm, baseline, names) for arm in arms], is_total)

    rows = [
        row(f"{name} (target)" if others else name, [name], is_total=bool(others)) for name in aim
    ]
    if len(aim) > 1 or not others:
        rows.append(row("average of targets" if others else "average", aim, is_total=True))
    rows += [row(name, [name]) for name in others]
    if others:
        rows.append(row("average, training domains", others, is_total=True))
    trained = others or aim
    worst = [Cell(perplexity_text(arm.worst(trained)[1])) for arm in arms]
    rows.append(Row("worst case", worst, True))
    if baseline is not None:
        counts = [
            "–" if arm is baseline else f"{arm.count_below(baseline, trained)} of {len(trained)}"
            for arm in arms
        ]
        rows.append(Row(f"lower than {baseline.label}", [Cell(text) for text in counts], True))
    about = f"; {group['about']}" if "about" in group else ""
    note = (
        f"Held-out text{about}. {parts.MARKS} The average is the exponential of the mean loss."
        f"{parts.seeds_note(arms)}"
    )
    title = f"Perplexity per domain: {group['title']}"
    # The paper's averages are over its own domains.
    totals = {"average": "average", "worst case": "worst"} if paper.is_slimpajama(aim) else {}
    known = {name: paper.canonical(name) for name in aim}
    beside = paper.columns_beside(group["paper"], known | totals, 2)
    table = Table(title, note, "domain", _heads(arms), rows)
    return parts.beside_paper(table, beside, paper.NOTES["perplexity"])


def _difference_table(group: Json, found: Comparison, baseline: Arm) -> Table:
    """Changes of perplexity against the baseline, with their intervals over paired seeds."""
    rivals = [arm for arm in found.arms if not arm.is_baseline]

    def row(label: str, names: Sequence[str], *, is_total: bool = False) -> Row:
        differences = [arm.against(baseline, names) for arm in rivals]
        return Row(label, [parts.difference_cell(each) for each in differences], is_total)

    rows = [row(name, [name]) for name in (*found.aim, *found.others)]
    rows.append(row("average", found.others or found.aim, is_total=True))
    is_several = any(len(arm.losses) > 1 for arm in found.arms)
    chance = " Of twenty such intervals one is wrong by chance." if is_several else parts.ONE_SEED
    title = f"Against {baseline.label}, seed by seed: {group['title']}"
    note = f"Change of perplexity. {parts.MARKS}{chance}"
    return Table(title, note, "domain", _heads(rivals), rows)


def _sketches(group: Json, found: Comparison, baseline: Arm, prefix: str) -> Iterator[parts.Sketch]:
    aim, others, until = found.aim, found.others, group.get("until", 1.0)
    is_crowded = len(found.rivals) > _MOST_TOLD
    places: list[tuple[str, Sequence[str]]] = [
        ("average", aim if is_crowded else others or aim),
        *((name, [name]) for name in reversed(others)),
        *((f"{name} (target)" if others else name, [name]) for name in reversed(aim)),
    ]
    # The one that is asked about first, in ink.
    rows = {
        arm.label: [arm.against(baseline, names) for _, names in places] for arm in found.rivals
    }
    make = partial(figures.change_figure, rows, [label for label, _ in places], baseline.label)
    if is_crowded:
        make = partial(figures.arms_figure, rows, baseline.label)
    filled = " Filled: the average over the domains; hollow: one domain." if is_crowded else ""
    words = {"baseline": baseline.label, "title": group["title"], "filled": filled}
    yield parts.sketch("change", f"{prefix}-change", make, **words)
    if curves := curves_of(found.arms, aim, until):
        shown = figures.extremes(curves, baseline.label)
        cut = f"; of {len(curves)} arms {baseline.label} and those that end lowest and highest"
        words = {
            "title": group["title"],
            "domains": listed(aim) if others else "the domains",
            "cut": cut if len(shown) < len(curves) else "",
        }
        make = partial(figures.curves_figure, shown)
        yield parts.sketch("curves", f"{prefix}-curves", make, **words)
    for place, name in enumerate(aim if until < 1 else ()):
        yield from _curves(found.arms, name, f"{prefix}-domain-{place}", f"on {name}", until)


def _curves(
    arms: Sequence[Arm], domain: str, name: str, where: str, until: float = 1.0
) -> Iterator[parts.Sketch]:
    if curves := curves_of(arms, [domain], until):
        make = partial(figures.curves_figure, curves)
        yield parts.sketch("domain-curves", name, make, where=where)


def comparison_verdict(study: Study, group: Json, found: Comparison) -> parts.Verdict:
    """Whether weights other than the baseline's helped, whichever way it went."""
    title, baseline, aim = group["title"], found.baseline, found.aim
    evaluate = "Run doge-fast evaluate on each finished base run."
    if not found.arms:
        return parts.unanswered(study, title, "No base model here has been measured", evaluate)
    if not aim:
        headline = "No domain or target that this is about has been measured by every arm"
        return parts.unanswered(study, title, headline, evaluate)
    if baseline is None:
        named = (arm["label"] for arm in group["arms"] if arm.get("is_baseline"))
        headline = f"Nothing to compare with: no base model at {next(named, 'uniform')} weights"
        train = "Train one with doge-fast base --weights uniform and the settings of the others."
        return parts.unanswered(study, title, headline, train)
    if not found.rivals:
        headline = f"{parts.NOTHING}: only {baseline.label} weights have been tried"
        return parts.unanswered(study, title, headline)
    focus, where = found.rivals[0], f" on {listed(aim)}" if found.others else ""
    headline = parts.headline_of(focus.label, baseline.label + where, focus.against(baseline, aim))
    return parts.Verdict(title, headline, list(_sentences(study, group, found, baseline)))


def _sentences(study: Study, group: Json, found: Comparison, baseline: Arm) -> Iterator[str]:
    aim, rivals = found.aim, found.rivals
    is_crowded = len(rivals) > _MOST_TOLD
    yield from (_sentence(arm, baseline, found) for arm in rivals[: 1 if is_crowded else None])
    if is_crowded:
        yield from _ranking(rivals, baseline, aim)
    by_label = {arm.label: arm for arm in found.arms}
    for own, other in group.get("pairs", []):
        if own in by_label and other in by_label:
            difference = by_label[own].against(by_label[other], aim)
            yield f"{own} against {other}: average {change_text(difference)}."
    if len(found.arms) > 2:
        means = {arm.label: arm.perplexity(aim).mean for arm in found.arms}
        best = min(means, key=lambda label: np.nan_to_num(means[label], nan=np.inf))
        yield f"Lowest average perplexity: {best}, {perplexity_text(means[best])}."
    if group.get("oracle"):
        reached = study.arm(group["oracle"])
        if reached.losses and all(set(aim) <= set(losses) for losses in reached.losses.values()):
            text = perplexity_text(reached.perplexity(aim).mean)
            yield f"For scale: uniform weights with {listed(aim)} among the domains reach {text}."
    if not study.is_experiment and paper.is_slimpajama(aim):
        yield paper.NOTES["tab:universal_ppl"]


def _sentence(arm: Arm, baseline: Arm, found: Comparison) -> str:
    """lower on 5 of 7 domains than uniform; average 118.13 against 121.84, −3.0 % [−3.2, −2.9]."""
    aim, trained = found.aim, found.others or found.aim
    if not arm.against(baseline, aim).pairs:
        return f"{arm.label}: no seed in common with {baseline.label}."
    worst, mean = arm.worst(trained)
    other_worst, other_mean = baseline.worst(trained)
    clearly = _clearly({name: arm.against(baseline, [name]) for name in trained})
    where = ""
    if found.others:
        where = f"on {listed(aim)}, which is not trained on, {_versus(arm, baseline, aim)}; "
    return (
        f"{arm.label}: {where}lower on {arm.count_below(baseline, trained)} of {len(trained)} "
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
    found = [(arm.label, arm.against(baseline, names)) for arm in rivals]
    known = sorted((each for each in found if each[1].is_known), key=lambda each: each[1].mean)
    if not known:
        return
    below = sum(each.mean < 0 for _, each in known)
    lowest, highest = (
        "; ".join(f"{label}: {change_text(each)}" for label, each in chosen)
        for chosen in (known[:3], known[:-4:-1])
    )
    yield f"{below} of {plural(len(known), 'arm')} below {baseline.label} on average."
    yield f"Lowest: {lowest}. Highest: {highest}."


# Of a table of targets: what is told against what, where the experiment has both.
_TARGET_PAIRS = {"DoGE": "uniform", "DoGE, fine-tuned": "uniform, fine-tuned"}
Changes = Mapping[str, Mapping[str, Difference]]
Rows = Mapping[str, Mapping[str, Arm]]


def targets_part(study: Study, group: Json, prefix: str) -> parts.Part:
    """DoGE against uniform on each target, before and after further steps on it."""
    rows = {
        row["target"]: {arm["label"]: study.arm(arm) for arm in row["arms"]}
        for row in group["rows"]
    }
    # The plan has the same arms for every target.
    changes = {
        own: {target: arms[own].against(arms[other], [target]) for target, arms in rows.items()}
        for own, other in _TARGET_PAIRS.items()
        if all({own, other} <= arms.keys() for arms in rows.values())
    }
    if not any(found.pairs for each in changes.values() for found in each.values()):
        return parts.Part([parts.unanswered(study, group["title"])])
    targets = list(reversed(rows))
    marks = {label: [each[target] for target in targets] for label, each in changes.items()}
    after = "; then both after further steps on it" if len(changes) > 1 else ""
    make = partial(figures.change_figure, marks, targets, "uniform")
    sketches = [parts.sketch("target-change", f"{prefix}-change", make, after=after)]
    for place, (target, arms) in enumerate(rows.items()):
        shown = [arm for arm in arms.values() if arm.losses and "fine-tuned" not in arm.label]
        where = f"on {target} during training"
        sketches += _curves(shown, target, f"{prefix}-target-{place}", where)
    answer = [_targets_verdict(rows, changes)]
    return parts.Part(answer, [_targets_table(rows, changes, group)], sketches)


def _targets_table(rows: Rows, changes: Changes, group: Json) -> Table:
    """A target a row, as tab:ppl-ood, with the same arms for each."""
    lines = []
    for target, arms in rows.items():
        found = [
            _perplexity_cell(arm, arms.get(arm.baseline or "uniform"), [target])
            for arm in arms.values()
        ]
        found += [parts.difference_cell(each[target]) for each in changes.values()]
        lines.append(Row(target, found))
    told = {"DoGE": "DoGE against uniform", "DoGE, fine-tuned": "both fine-tuned"}
    note = (
        "Held-out text of the target, against uniform weights without it"
        f"{', both fine-tuned where an arm is' if len(changes) > 1 else ''}. {parts.MARKS}"
        f"{parts.seeds_note(arm for arms in rows.values() for arm in arms.values())}"
    )
    heads = [(arm.label, arm.about) for arm in next(iter(rows.values())).values()]
    heads += [(told[own], "change") for own in changes]
    known = {name: paper.canonical(name) for name in rows}
    table = Table("Perplexity on the target", note, "target", heads, lines)
    beside = paper.columns_beside(group.get("paper"), known, 2)
    return parts.beside_paper(table, beside, paper.NOTES["perplexity"])


def _targets_verdict(rows: Rows, changes: Changes) -> parts.Verdict:
    """How DoGE comes out on each target."""
    sentences = []
    known = {
        own: {target: each for target, each in found.items() if each.pairs}
        for own, found in changes.items()
    }
    for own, found in known.items():
        if found:
            below = sum(each.mean < 0 for each in found.values())
            told = listed(f"{target} {change_text(each)}" for target, each in found.items())
            clearly = _clearly(found)
            sentences.append(
                f"{own}: lower on {below} of {len(found)} than {_TARGET_PAIRS[own]}: {told}."
                f"{f' Beyond the interval: {clearly}.' if clearly else ''}"
            )
    beaten = [
        target
        for target, arms in rows.items()
        if "oracle" in arms and arms["DoGE"].against(arms["oracle"], [target]).is_lower
    ]
    if beaten:
        sentences.append(f"DoGE beats even the oracle, which trains on it, on {listed(beaten)}.")
    differences = known["DoGE"].values()
    if len(differences) == 1:
        ((target, difference),) = known["DoGE"].items()
        headline = parts.headline_of("DoGE", f"uniform on {target}", difference)
    else:
        better = sum(each.is_lower for each in differences)
        worse = sum(each.is_higher for each in differences)
        headline = (
            f"DoGE beats uniform on {better} of {len(differences)} targets, loses on {worse}, "
            f"undecided on {len(differences) - better - worse}"
        )
    return parts.Verdict("Out of domain", headline, sentences)
