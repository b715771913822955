"""The tables of results: one function for each kind, whoever planned the runs."""

import math
from collections.abc import Iterable, Mapping, Sequence

from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting import paper
from doge_fast.pipeline.reporting.arms import Arm, Comparison
from doge_fast.pipeline.reporting.mixtures import effective_domains
from doge_fast.pipeline.reporting.statistics import CONFIDENCE, Difference, change_text, stat_of
from doge_fast.pipeline.reporting.study import Study
from doge_fast.pipeline.reporting.wording import (
    Stat,
    listed,
    perplexity_stat,
    perplexity_text,
    plural,
    weight_text,
)
from doge_fast.pipeline.tables import Cell, Row, Table

Columns = Mapping[str, Mapping[str, float]]
Changes = Mapping[str, Mapping[str, Difference]]
_MARKS = (
    f"Bold: better, and the {100 * CONFIDENCE:.0f} % interval over paired seeds (Student's) leaves "
    "out zero; with a !: worse likewise."
)
_ONE_SEED = " One seed has no interval, so that nothing is bold."
_ERRORS = " ±: standard error over seeds."


def _notes(arms: Iterable[Arm]) -> str:
    return _ERRORS if any(len(arm.losses) > 1 for arm in arms) else _ONE_SEED


def _paper_cells(columns: Columns, row: str, digits: int) -> list[Cell]:
    """A row of the paper's columns, blank where one has no number for it."""
    return [
        Cell(f"{column[row]:.{digits}f}" if row in column else "") for column in columns.values()
    ]


def _paper_heads(columns: Columns, table: str | None) -> list[tuple[str, str]]:
    return [(f"paper: {label}", str(table)) for label in columns]


def _arm_heads(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    return [(arm.label, f"{arm.about}, {plural(len(arm.losses), 'seed')}") for arm in arms]


def _difference_cell(found: Difference) -> Cell:
    """A change of perplexity, marked where its interval leaves out zero."""
    return Cell(change_text(found), is_strong=found.is_lower, is_warning=found.is_higher)


def perplexity_table(comparison: Comparison) -> Table:
    """Perplexity per domain for every arm, as tab:universal_ppl; targets first."""
    aim, others, group = comparison.aim, comparison.others, comparison.group
    baseline = comparison.baseline
    # Its averages are over its own domains.
    totals = {"average": "average", "worst case": "worst"} if paper.is_slimpajama(aim) else {}
    known = {name: paper.canonical(name) for name in aim}
    columns = paper.columns_beside(group["paper"], known | totals)
    columns = columns if any(name in column for column in columns.values() for name in aim) else {}

    def row(label: str, names: Sequence[str], *, is_total: bool = False) -> Row:
        cells = [_perplexity_cell(arm, baseline, names) for arm in comparison.arms]
        return Row(label, cells + _paper_cells(columns, label, 2), is_total)

    rows = [
        row(f"{name} (target)" if others else name, [name], is_total=bool(others)) for name in aim
    ]
    if len(aim) > 1 or not others:
        rows.append(row("average of targets" if others else "average", aim, is_total=True))
    rows += [row(name, [name]) for name in others]
    if others:
        rows.append(row("average, training domains", others, is_total=True))
    trained = others or aim
    worst = [Cell(perplexity_text(arm.worst(trained)[1])) for arm in comparison.arms]
    rows.append(Row("worst case", worst + _paper_cells(columns, "worst case", 2), True))
    if baseline is not None:
        counts = [
            "–" if arm is baseline else f"{count_below(arm, baseline, trained)} of {len(trained)}"
            for arm in comparison.arms
        ]
        cells = [Cell(text) for text in counts] + [Cell("")] * len(columns)
        rows.append(Row(f"lower than {baseline.label}", cells, True))
    about = f"; {group['about']}" if "about" in group else ""
    return Table(
        title=f"Perplexity per domain: {comparison.title}",
        note=(
            f"Held-out text{about}. {_MARKS} The average is the exponential of the mean loss."
            f"{_notes(comparison.arms)}{paper.NOTES['perplexity'] if columns else ''}"
        ),
        corner="domain",
        columns=_arm_heads(comparison.arms) + _paper_heads(columns, group["paper"]),
        rows=rows,
    )


def _perplexity_cell(arm: Arm, other: Arm | None, names: Sequence[str]) -> Cell:
    """Bold where the interval says that the arm is better than the other."""
    is_better = other is not None and arm is not other and arm.against(other, names).is_lower
    return Cell(perplexity_stat(arm.perplexity(names)) if arm.losses else "–", is_better)


def count_below(arm: Arm, other: Arm, names: Sequence[str]) -> int:
    """On how many of `names` the mean over common seeds is below the other's."""
    return sum(arm.against(other, [name]).mean < 0 for name in names)


def difference_table(comparison: Comparison) -> Table:
    """Changes of perplexity against the baseline, with their intervals over paired seeds."""
    baseline, rivals = comparison.baseline, comparison.rivals
    assert baseline is not None

    def row(label: str, names: Sequence[str], *, is_total: bool = False) -> Row:
        cells = [_difference_cell(arm.against(baseline, names)) for arm in rivals]
        return Row(label, cells, is_total)

    rows = [row(name, [name]) for name in (*comparison.aim, *comparison.others)]
    rows.append(row("average", comparison.others or comparison.aim, is_total=True))
    is_several = any(len(arm.losses) > 1 for arm in comparison.arms)
    chance = " Of twenty such intervals one is wrong by chance." if is_several else _ONE_SEED
    return Table(
        title=f"Against {baseline.label}, seed by seed: {comparison.title}",
        note=f"Change of perplexity. {_MARKS}{chance}",
        corner="domain",
        columns=_arm_heads(rivals),
        rows=rows,
    )


def targets_table(rows: Mapping[str, Sequence[Arm]], changes: Changes, group: Json) -> Table:
    """A target a row, as tab:ppl-ood; `rows` is {target: the same arms for each}."""
    columns = paper.columns_beside(
        group.get("paper"), {name: paper.canonical(name) for name in rows}
    )
    lines = []
    for target, arms in rows.items():
        by_label = {arm.label: arm for arm in arms}
        against = [by_label.get(arm.baseline or "uniform") for arm in arms]
        cells = [_perplexity_cell(arm, against[i], [target]) for i, arm in enumerate(arms)]
        cells += [_difference_cell(each[target]) for each in changes.values()]
        lines.append(Row(target, cells + _paper_cells(columns, target, 2)))
    first = next(iter(rows.values()))
    told = {"DoGE": "DoGE against uniform", "DoGE, fine-tuned": "both fine-tuned"}
    return Table(
        title="Perplexity on the target",
        note=(
            f"Held-out text of the target, against uniform without the target, or, fine-tuned, "
            f"against uniform fine-tuned. {_MARKS}"
            f"{_notes(arm for arms in rows.values() for arm in arms)}"
            f"{paper.NOTES['perplexity'] if columns else ''}"
        ),
        corner="target",
        columns=[(arm.label, arm.about) for arm in first]
        + [(told[own], "change") for own in changes]
        + _paper_heads(columns, group.get("paper")),
        rows=lines,
    )


def weights_table(study: Study, group: Json, stats: Mapping[str, Mapping[str, Stat]]) -> Table:
    """Weights by label of an arm, as tab:dw, tab:ood-dw, tab:robust and tab:cc-dw."""
    arms = [arm for arm in group["arms"] if arm["label"] in stats]
    targets = {arm["label"]: next((r.targets for r in study.runs_of(arm)), ()) for arm in arms}
    printed = _paper_weights(group, stats, targets)
    columns = {label: column for label, (_, column) in printed.items()}
    names = list(dict.fromkeys(name for weights in stats.values() for name in weights))
    rows = [
        Row(
            name,
            [_weight_cell(name, weights, targets[label]) for label, weights in stats.items()]
            + _paper_cells(columns, name, 3),
        )
        for name in names
    ]
    blank = [Cell("")] * len(columns)
    if group.get("has_uniform"):
        cells = [Cell(f"{1 / len(weights):.3f}") for weights in stats.values()]
        rows.append(Row("uniform would be", cells + blank, True))
    means = means_of(stats)
    effective = [
        Cell(f"{effective_domains(each.values()):.1f} of {len(each)}") for each in means.values()
    ]
    rows.append(Row("effective domains", effective + blank, True))
    reference = group.get("reference", "")
    if reference in stats:
        cells = _gap_cells(means, reference)
        own = _gap_cells(columns, "82M") if "82M" in columns else blank
        rows.append(Row(f"mean absolute difference from {reference}", cells + own, True))
    if group.get("has_columns"):
        shares = [study.share_saved(arm) for arm in arms]
        cells = [Cell("/" if share is None else f"{100 * share:.1f} %") for share in shares]
        own = [Cell(f"{paper.SAVED[name]} %" if name in paper.SAVED else "/") for name in columns]
        rows.append(Row("columns left out", cells + own, True))
    is_several = any(stat.error is not None for found in stats.values() for stat in found.values())
    return Table(
        title=group["title"],
        note=(
            f"Averages over the steps{', mean over seeds' if is_several else ''}. Bold: above "
            "uniform. Effective domains: exp of the entropy of the weights."
            f"{_ERRORS if is_several else ''}{paper.NOTES['weights'] if columns else ''}"
        ),
        corner="domain",
        columns=[(arm["label"], arm["about"]) for arm in arms]
        + [(f"paper: {label}", table) for label, (table, _) in printed.items()],
        rows=rows,
    )


def _paper_weights(
    group: Json,
    stats: Mapping[str, Mapping[str, Stat]],
    targets: Mapping[str, Sequence[str]],
) -> dict[str, tuple[str, dict[str, float]]]:
    """{column: (table, weights)} of the paper for the domains and the target of one of our arms."""
    asked = group.get("paper") or []
    found = {}
    for table in [asked] if isinstance(asked, str) else asked:
        for column, values in paper.TABLES[table].items():
            for label, weights in stats.items():
                wanted = [paper.canonical(name) for name in targets[label]]
                is_asked = [column] == [f"for {name}" for name in wanted] or (
                    not wanted and not column.startswith("for ")
                )
                known = {name: paper.canonical(name) for name in weights}
                if is_asked and set(known.values()) == set(values):
                    found[column] = (table, {own: values[name] for own, name in known.items()})
    return found


def _weight_cell(name: str, weights: Mapping[str, Stat], targets: Sequence[str]) -> Cell:
    if name not in weights:
        return Cell("target" if name in targets else "–")
    return Cell(weight_text(weights[name]), weights[name].mean > 1 / len(weights))


def means_of(stats: Mapping[str, Mapping[str, Stat]]) -> dict[str, dict[str, float]]:
    """Weights without their errors."""
    return {
        label: {name: stat.mean for name, stat in weights.items()}
        for label, weights in stats.items()
    }


def gaps_of(columns: Columns, reference: str) -> dict[str, float]:
    """{label: mean absolute difference from the weights of `reference`}, over domains of both."""
    other, gaps = columns[reference], {}
    for label, own in columns.items():
        if label != reference:
            names = own.keys() & other.keys()
            gaps[label] = math.fsum(abs(own[name] - other[name]) for name in names) / len(names)
    return gaps


def _gap_cells(columns: Columns, reference: str) -> list[Cell]:
    gaps = gaps_of(columns, reference)
    return [Cell(f"{100 * gaps[label]:.2f} %" if label in gaps else "/") for label in columns]


def task_table(group: Json, scores: Mapping[str, Sequence[Json]]) -> Table | None:
    """k-shot accuracies, as tab:fewshot; None where no task has been scored of all arms.

    `scores` is {label of an arm: fewshot.json of each seed}.
    """
    found = [record["tasks"] for records in scores.values() for record in records]
    names = [name for name in (found or [{}])[0] if all(name in tasks for tasks in found)]
    if not names:
        return None
    # The paper's average is of all its six tasks.
    printed = names if len(names) < 6 else [*names, "average"]
    columns = paper.columns_beside("tab:fewshot", {name: name for name in printed})
    rows = []
    for name in (*names, "average"):
        values = [
            [{**record["tasks"], "average": record["average"]}[name] for record in records]
            for records in scores.values()
        ]
        cells = [Cell(accuracy_text(each)) for each in values]
        cells.append(Cell(f"{100 * values[0][0]['chance']:.1f}"))
        rows.append(Row(name, cells + _paper_cells(columns, name, 1), name == "average"))
    shots = {record["shots"] for records in scores.values() for record in records}
    note = (
        "Accuracy in per cent; answered examples before a question: "
        f"{listed(map(str, sorted(shots)))}; ±: standard error, of documents and, where there are "
        "several, of seeds."
    )
    if any(task["truncated_requests"] for tasks in found for task in tasks.values()):
        note += " Prompts were cut to fit the models' positions: these are not full k-shot scores."
    abouts = {arm["label"]: arm["about"] for arm in group["arms"]}
    heads = [
        (label, f"{abouts[label]}, {plural(len(records), 'seed')}")
        for label, records in scores.items()
    ]
    heads += [("chance", "one of the choices"), *_paper_heads(columns, "tab:fewshot")]
    return Table(group["title"], note, "task", heads, rows)


def accuracy_text(scores: Sequence[Json]) -> str:
    """The mean over seeds, with the error of seeds and documents together."""
    seeds = stat_of(each["acc"] for each in scores)
    of_documents = [each["acc_stderr"] for each in scores]
    mean = f"{100 * seeds.mean:.1f}"
    if None in of_documents:
        return mean
    # Seeds answer the same documents, so that more of them do not make these fewer.
    error = math.hypot(seeds.error or 0.0, math.fsum(of_documents) / len(scores))
    return f"{mean} ± {100 * error:.1f}"
