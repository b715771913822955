"""A target at a time: tab:ppl-ood."""

from collections.abc import Iterator, Mapping, Sequence

from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.arm_figures import change_figure, curves_of
from doge_fast.pipeline.reporting.arms import (
    Part,
    difference_cell,
    headline_of,
    nothing_yet,
    paper_cells,
)
from doge_fast.pipeline.reporting.experiment import Experiment, Measured
from doge_fast.pipeline.reporting.figures import curves_figure
from doge_fast.pipeline.reporting.paper import canonical, columns_beside
from doge_fast.pipeline.reporting.plotting import Drawing, drawing_of
from doge_fast.pipeline.reporting.statistics import Difference, change_text
from doge_fast.pipeline.reporting.verdicts import Verdict
from doge_fast.pipeline.reporting.wording import listed, perplexity_stat
from doge_fast.pipeline.tables import Cell, Row, Table


def targets_part(experiment: Experiment, group: Json, prefix: str) -> Part:
    """DoGE against uniform on each target, before and after further steps on it."""
    rows: dict[str, list[Measured]] = {}
    for row in group["rows"]:
        arms = [experiment.measured(arm) for arm in row["arms"]]
        rows[row["target"]] = arms
    labels = [arm["label"] for arm in group["rows"][0]["arms"]]
    pairs = [("DoGE", "uniform"), ("DoGE, fine-tuned", "uniform, fine-tuned")]
    changes = {
        own: {target: _between(arms, own, other, target) for target, arms in rows.items()}
        for own, other in pairs
    }
    known = {
        own: {target: found for target, found in each.items() if found is not None}
        for own, each in changes.items()
    }
    if not any(known.values()):
        return Part([nothing_yet(group["title"])], [], [])
    targets = list(rows)
    figure_rows = {
        label: [*(changes[own][target] for target in reversed(targets))]
        for label, (own, _) in zip(
            ("before", "after fine-tuning on the target"), pairs, strict=True
        )
    }
    drawing = drawing_of(
        f"{prefix}-change",
        "Perplexity on the target: DoGE against uniform",
        "Both without the target among the domains; then both after further steps on it.",
        change_figure(figure_rows, targets[::-1], "uniform"),
    )
    drawings = [drawing, *_target_curves(rows, prefix)]
    return Part(
        [_targets_verdict(known, rows, pairs)],
        [_targets_table(rows, labels, changes, group)],
        drawings,
    )


def _between(arms: Sequence[Measured], own: str, other: str, target: str) -> Difference | None:
    by_label = {arm.label: arm for arm in arms if arm.losses}
    if own not in by_label or other not in by_label:
        return None
    return by_label[own].against(by_label[other], [target])


def _targets_table(
    rows: Mapping[str, Sequence[Measured]],
    labels: Sequence[str],
    changes: Mapping[str, Mapping[str, Difference | None]],
    group: Json,
) -> Table:
    paper = columns_beside(group.get("paper"), {name: canonical(name) for name in rows})
    lines = []
    for target, arms in rows.items():
        by_label = {arm.label: arm for arm in arms}
        cells = []
        for arm in arms:
            other = by_label.get(arm.baseline or "uniform")
            if not arm.losses:
                cells.append(Cell("–"))
                continue
            difference = other.against(arm, [target]) if other and other.losses else None
            is_better = arm is not other and difference is not None and difference.mean > 0
            cells.append(Cell(perplexity_stat(arm.perplexity([target])), is_better))
        cells += [difference_cell(each[target]) for each in changes.values()]
        lines.append(Row(target, cells + paper_cells(paper, target, 2)))
    note = (
        "Perplexity on held-out text of the target. Bold: better than uniform without the target, "
        "or, fine-tuned, than uniform fine-tuned. ±: standard error over seeds; changes with their "
        "95 % intervals over paired seeds."
    )
    if paper:
        note += " The paper's columns are of its models on its corpus: compare directions."
    abouts = [arm.about for arm in next(iter(rows.values()))]
    columns = list(zip(labels, abouts, strict=True))
    told = {"DoGE": "DoGE against uniform", "DoGE, fine-tuned": "both fine-tuned"}
    columns += [(told[own], "change") for own in changes]
    columns += [(f"paper: {label}", str(group["paper"])) for label in paper]
    return Table("Perplexity on the target", note, "target", columns, lines)


def _targets_verdict(
    known: Mapping[str, Mapping[str, Difference]],
    rows: Mapping[str, Sequence[Measured]],
    pairs: Sequence[tuple[str, str]],
) -> Verdict:
    sentences = []
    for own, other in pairs:
        found = known[own]
        if not found:
            continue
        better = [target for target, each in found.items() if each.mean < 0]
        surely = [target for target, each in found.items() if each.is_decided and each.mean < 0]
        worse = [target for target, each in found.items() if each.is_decided and each.mean > 0]
        told = listed(f"{target} {change_text(each)}" for target, each in found.items())
        sentence = f"{own}: better on {len(better)} of {len(found)} than {other}: {told}."
        if surely or worse:
            parts = [f"better on {listed(surely)}"] if surely else []
            parts += [f"worse on {listed(worse)}"] if worse else []
            sentence += f" Beyond the interval: {listed(parts)}."
        sentences.append(sentence)
    beaten = [
        target
        for target, arms in rows.items()
        if (each := _between(arms, "DoGE", "oracle", target)) is not None and each.mean < 0
    ]
    if beaten:
        sentences.append(f"DoGE beats even the oracle, which trains on it, on {listed(beaten)}.")
    first = known[pairs[0][0]]
    if len(first) == 1:
        (target, difference), *_ = first.items()
        headline = f"{headline_of('DoGE', 'uniform', difference)} on {target}"
    else:
        count = sum(each.mean < 0 for each in first.values())
        headline = f"DoGE is better than uniform on {count} of {len(first)} targets"
    return Verdict("Out of domain", headline, sentences)


def _target_curves(rows: Mapping[str, Sequence[Measured]], prefix: str) -> Iterator[Drawing]:
    for place, (target, arms) in enumerate(rows.items()):
        shown = [arm for arm in arms if arm.losses and "fine-tuned" not in arm.label]
        curves = curves_of(shown, [target], 1.0)
        if curves:
            yield drawing_of(
                f"{prefix}-target-{place}",
                f"Held-out loss on {target} during training",
                "Mean over seeds, one line an arm.",
                curves_figure(curves),
            )
