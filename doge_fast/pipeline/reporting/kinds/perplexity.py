"""Perplexity per domain: tab:universal_ppl and its kin."""

from collections.abc import Iterator, Sequence

from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.arm_figures import arms_figure, change_figure, curves_of, extremes
from doge_fast.pipeline.reporting.arms import (
    FOCUS,
    Part,
    difference_cell,
    headline_of,
    nothing_yet,
    paper_cells,
)
from doge_fast.pipeline.reporting.experiment import Experiment, Measured
from doge_fast.pipeline.reporting.figures import curves_figure
from doge_fast.pipeline.reporting.mixtures import is_slimpajama
from doge_fast.pipeline.reporting.paper import canonical, columns_beside
from doge_fast.pipeline.reporting.plotting import Drawing, drawing_of
from doge_fast.pipeline.reporting.statistics import CONFIDENCE, change_text, is_known
from doge_fast.pipeline.reporting.verdicts import Verdict
from doge_fast.pipeline.reporting.wording import (
    listed,
    nan_as_inf,
    perplexity_stat,
    perplexity_text,
    plural,
)
from doge_fast.pipeline.tables import Cell, Row, Table

# Arms that one figure tells apart beside each domain.
_MOST_BESIDE = 5


def perplexity_part(experiment: Experiment, group: Json, prefix: str) -> Part:
    """Arms against a baseline, domain by domain, and their losses during training."""
    arms = [experiment.measured(arm, group.get("until", 1.0)) for arm in group["arms"]]
    arms = _of_common_seeds([arm for arm in arms if arm.losses])
    baseline = next((arm for arm in arms if arm.is_baseline), None)
    if baseline is None or len(arms) < 2:
        return Part([nothing_yet(group["title"])], [], [])
    names = [
        name
        for name in group["aim"]
        if all(name in losses for arm in arms for losses in arm.losses.values())
    ]
    drawings = [_change_drawing(arms, baseline, names, group["title"], prefix)]
    curves = curves_of(arms, names, group.get("until", 1.0))
    if curves:
        shown = extremes(curves, baseline.label)
        told = f"; of {len(curves)} arms {baseline.label} and those that end lowest and highest"
        drawings.append(
            drawing_of(
                f"{prefix}-curves",
                f"Held-out loss during training: {group['title']}",
                "Mean over the domains and over seeds, one line an arm"
                f"{told if len(shown) < len(curves) else ''}.",
                curves_figure(shown),
            )
        )
    if "until" in group:
        drawings += _domain_curves(arms, names, group["until"], prefix)
    return Part(
        [_verdict(arms, baseline, names, group)],
        [
            _perplexity_table(arms, baseline, names, group),
            _difference_table(arms, baseline, names, group["title"]),
        ],
        drawings,
    )


def _of_common_seeds(arms: Sequence[Measured]) -> list[Measured]:
    """The arms with the seeds that all of them have; one without any of the others' is left out."""
    arms = [arm for arm in arms if arm.losses]
    if not arms:
        return []
    most = max(len(arm.losses) for arm in arms)
    full = [set(arm.losses) for arm in arms if len(arm.losses) == most]
    seeds = set.intersection(*full)
    shared = set.intersection(seeds, *(set(arm.losses) for arm in arms))
    kept = shared or seeds
    told = [
        arm._replace(
            losses={seed: arm.losses[seed] for seed in arm.losses if seed in kept},
            runs=[run for run in arm.runs if run.seed in kept],
        )
        for arm in arms
    ]
    return [arm for arm in told if arm.losses]


def _verdict(
    arms: Sequence[Measured], baseline: Measured, names: Sequence[str], group: Json
) -> Verdict:
    rivals = [arm for arm in arms if arm is not baseline]
    by_label = {arm.label: arm for arm in arms}
    wanted = group.get("focus", FOCUS)
    focus = next((arm for arm in rivals if arm.label.startswith(wanted)), rivals[-1])
    told = rivals if len(rivals) <= _MOST_BESIDE else [focus]
    sentences = [sentence for arm in told if (sentence := _sentence(arm, baseline, names))]
    if len(told) < len(rivals):
        sentences += _ranking(rivals, baseline, names)
    for own, other in group.get("pairs", []):
        if own in by_label and other in by_label:
            difference = by_label[own].against(by_label[other], names)
            if difference is not None:
                sentences.append(f"{own} against {other}: average {change_text(difference)}.")
    difference = focus.against(baseline, names)
    best = min(arms, key=lambda arm: nan_as_inf(arm.perplexity(names).mean))
    if len(arms) > 2:
        text = perplexity_text(best.perplexity(names).mean)
        sentences.append(f"Lowest average perplexity: {best.label}, {text}.")
    return Verdict(group["title"], headline_of(focus.label, baseline.label, difference), sentences)


def _ranking(rivals: Sequence[Measured], baseline: Measured, names: Sequence[str]) -> Iterator[str]:
    """How many arms are better, and which come out best and worst."""
    found = {arm.label: arm.against(baseline, names) for arm in rivals}
    known = {label: each for label, each in found.items() if is_known(each)}
    if not known:
        return
    order = sorted(known, key=lambda label: known[label].mean)
    below = sum(each.mean < 0 for each in known.values())
    best, worst = (
        "; ".join(f"{label}: {change_text(known[label])}" for label in chosen)
        for chosen in (order[:3], order[:-4:-1])
    )
    yield f"{below} of {plural(len(known), 'arm')} below {baseline.label} on average."
    yield f"Lowest: {best}. Highest: {worst}."


def _sentence(arm: Measured, baseline: Measured, names: Sequence[str]) -> str | None:
    """better on 5 of 7; average −2.1 % [−3.0, −1.2]."""
    average = arm.against(baseline, names)
    if average is None:
        return None
    each = {name: arm.against(baseline, [name]) for name in names}
    better = [name for name, found in each.items() if found and found.mean < 0]
    decided = {name: found for name, found in each.items() if found and found.is_decided}
    clearly = {
        "better": [name for name, found in decided.items() if found.mean < 0],
        "worse": [name for name, found in decided.items() if found.mean > 0],
    }
    words = [f"{word} on {listed(found)}" for word, found in clearly.items() if found]
    told = f"; beyond its interval {'; '.join(words)}" if words else ""
    worst, other = (max(one.perplexity([name]).mean for name in names) for one in (arm, baseline))
    return (
        f"{arm.label}: better on {len(better)} of {len(names)} than {baseline.label}; average "
        f"{change_text(average)} over {plural(average.pairs, 'paired seed')}; worst domain at "
        f"{perplexity_text(worst)} against {perplexity_text(other)}{told}."
    )


def _perplexity_table(
    arms: Sequence[Measured], baseline: Measured, names: Sequence[str], group: Json
) -> Table:
    # Its averages are over its own domains.
    totals = _TOTALS if is_slimpajama(names) else {}
    paper = columns_beside(
        group.get("paper"), {**{name: canonical(name) for name in names}, **totals}
    )
    paper = paper if any(name in column for column in paper.values() for name in names) else {}
    rows = []
    for name in names:
        cells = [_perplexity_cell(arm, baseline, [name]) for arm in arms]
        rows.append(Row(name, cells + paper_cells(paper, name, 2)))
    cells = [_perplexity_cell(arm, baseline, names) for arm in arms]
    rows.append(Row("average", cells + paper_cells(paper, "average", 2), True))
    worst = [
        Cell(perplexity_text(max(arm.perplexity([name]).mean for name in names))) for arm in arms
    ]
    rows.append(Row("worst case", worst + paper_cells(paper, "worst case", 2), True))
    better = [Cell(_better_count(arm, baseline, names)) for arm in arms]
    rows.append(Row(f"better than {baseline.label}", better + [Cell("")] * len(paper), True))
    note = (
        f"Held-out text. Bold: better than {baseline.label}. The average is the exponential of the "
        "mean loss. ±: standard error over seeds."
    )
    if paper:
        note += " The paper's columns are of its models on its corpus: compare directions."
    return Table(
        title=f"Perplexity per domain: {group['title']}",
        note=note,
        corner="domain",
        columns=_columns(arms) + [(f"paper: {label}", group["paper"]) for label in paper],
        rows=rows,
    )


_TOTALS = {"average": "average", "worst case": "worst"}


def _columns(arms: Sequence[Measured]) -> list[tuple[str, str]]:
    return [(arm.label, f"{arm.about}, {plural(len(arm.losses), 'seed')}") for arm in arms]


def _perplexity_cell(arm: Measured, baseline: Measured, names: Sequence[str]) -> Cell:
    difference = None if arm is baseline else arm.against(baseline, names)
    is_better = difference is not None and difference.mean < 0
    return Cell(perplexity_stat(arm.perplexity(names)), is_better)


def _better_count(arm: Measured, baseline: Measured, names: Sequence[str]) -> str:
    if arm is baseline:
        return "–"
    found = [arm.against(baseline, [name]) for name in names]
    return f"{sum(each is not None and each.mean < 0 for each in found)} of {len(names)}"


def _difference_table(
    arms: Sequence[Measured], baseline: Measured, names: Sequence[str], title: str
) -> Table:
    rivals = [arm for arm in arms if arm is not baseline]
    rows = [
        Row(name, [difference_cell(arm.against(baseline, [name])) for arm in rivals])
        for name in names
    ]
    cells = [difference_cell(arm.against(baseline, names)) for arm in rivals]
    rows.append(Row("average", cells, True))
    return Table(
        title=f"Against {baseline.label}, seed by seed: {title}",
        note=(
            f"Change of perplexity and its {100 * CONFIDENCE:.0f} % interval over paired seeds "
            "(Student's). Bold: better, and the interval leaves out zero; of twenty such intervals "
            "one is wrong by chance."
        ),
        corner="domain",
        columns=_columns(rivals),
        rows=rows,
    )


def _change_drawing(
    arms: Sequence[Measured],
    baseline: Measured,
    names: Sequence[str],
    title: str,
    prefix: str,
) -> Drawing:
    rivals = [arm for arm in arms if arm is not baseline]
    # The one that is asked about first, in ink.
    rivals.sort(key=lambda arm: not arm.label.startswith(FOCUS))
    groups: list[tuple[str, Sequence[str]]] = [("average", names)]
    groups += [(name, (name,)) for name in reversed(names)]
    rows = {arm.label: [arm.against(baseline, members) for _, members in groups] for arm in rivals}
    about = f"Change of held-out perplexity. Left of the line is better than {baseline.label}."
    if len(rows) > _MOST_BESIDE:
        about += " Filled: the average over the domains; hollow: one domain."
        figure = arms_figure(rows, baseline.label)
    else:
        figure = change_figure(rows, [label for label, _ in groups], baseline.label)
    return drawing_of(
        f"{prefix}-change", f"Perplexity against {baseline.label}: {title}", about, figure
    )


def _domain_curves(
    arms: Sequence[Measured], names: Sequence[str], until: float, prefix: str
) -> list[Drawing]:
    drawings = []
    for place, name in enumerate(names):
        curves = curves_of(arms, [name], until)
        if curves:
            drawings.append(
                drawing_of(
                    f"{prefix}-domain-{place}",
                    f"Held-out loss on {name}",
                    "Mean over seeds, one line an arm.",
                    curves_figure(curves),
                )
            )
    return drawings
