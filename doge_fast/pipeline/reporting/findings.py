"""An experiment's records -> the answer in words, its tables beside the paper's, its figures."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple, TypeGuard

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from doge_fast.pipeline import records
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.figures import Section, curves_figure
from doge_fast.pipeline.reporting.mixtures import (
    PAPER_NOTE,
    effective_domains,
    is_slimpajama,
)
from doge_fast.pipeline.reporting.paper import canonical, columns_beside
from doge_fast.pipeline.reporting.plotting import (
    INK,
    MUTED,
    PAGE,
    Drawing,
    canvas,
    drawing_of,
    name_places,
    shortened,
    style,
    ticks,
)
from doge_fast.pipeline.reporting.runs import Run, open_runs
from doge_fast.pipeline.reporting.statistics import (
    CONFIDENCE,
    Difference,
    change_of,
    change_text,
    paired_difference,
)
from doge_fast.pipeline.reporting.study import mean_loss
from doge_fast.pipeline.reporting.tables import Cell, Row, Table, accuracy_text, task_table
from doge_fast.pipeline.reporting.verdicts import Verdict
from doge_fast.pipeline.reporting.wording import (
    Stat,
    count_text,
    exp_or_inf,
    listed,
    nan_as_inf,
    perplexity_stat,
    perplexity_text,
    plural,
    stat_of,
    to_floats,
    weight_text,
)

RUNS = "runs"
# The arms that experiments are about.
FOCUS = "DoGE"
# Arms that one figure tells apart, beside each domain and as lines.
_MOST_BESIDE, _MOST_LINES = 5, 8
# Of an arm, beside a figure of arms: what sets it apart comes last.
_LONGEST_ARM = 34
_MARKERS = ("o", "D", "s", "^", "v", "P", "X")


@dataclass(frozen=True)
class Findings:
    """What an experiment came to."""

    title: str
    question: str
    told: list[str]
    """What was run, in sentences."""
    verdicts: list[Verdict]
    tables: list[Table]
    sections: list[Section]
    warnings: list[str]
    missing: list[str]
    """Runs that are not complete yet; the tables leave them out."""


class Measured(NamedTuple):
    """An arm: its label and the held-out losses of each seed that was measured."""

    label: str
    about: str
    losses: dict[int, dict[str, float]]
    runs: list[Run]
    is_baseline: bool
    baseline: str | None

    def perplexity(self, names: Sequence[str]) -> Stat:
        """exp of the mean loss over `names`, over seeds."""
        return stat_of(exp_or_inf(mean_loss(each, names)) for each in self.losses.values())

    def against(self, other: "Measured", names: Sequence[str]) -> Difference | None:
        """Difference of the mean loss over `names`, seed by seed; None without a common seed."""
        seeds = [seed for seed in self.losses if seed in other.losses]
        if not seeds:
            return None
        return paired_difference(
            [mean_loss(self.losses[seed], names) for seed in seeds],
            [mean_loss(other.losses[seed], names) for seed in seeds],
        )


@dataclass
class Experiment:
    """An experiment's directory, as its records tell it."""

    path: Path
    record: Json
    runs: Mapping[str, Run] = field(repr=False)

    def is_complete(self, name: str) -> bool:
        """Whether a run came to its end."""
        run = self.runs.get(name)
        return run is not None and run.last_step >= run.steps

    @cached_property
    def missing(self) -> list[str]:
        """Runs of the plan that are not there, not complete, or not measured as the plan says."""
        unscored = {
            name
            for group in self.record["groups"]
            if group["kind"] == "tasks"
            for arm in group["arms"]
            for name in arm["runs"]
            if not is_scored(self.path / RUNS / name, group)
        }
        return [name for name in self.record["runs"] if name in {*self.unmeasured, *unscored}]

    @cached_property
    def unmeasured(self) -> list[str]:
        """Those whose perplexities are not known."""
        blocks = self.record["settings"].get("eval_blocks")
        compared = {
            name
            for group in self.record["groups"]
            for arm in [
                *group.get("arms", []),
                *(a for r in group.get("rows", []) for a in r["arms"]),
            ]
            if group["kind"] in ("perplexity", "targets")
            for name in arm["runs"]
        }
        return [
            name
            for name in self.record["runs"]
            if not self.is_complete(name)
            or (name in compared and not is_measured(self.runs[name].path, blocks))
        ]

    def scores(self, group: Json) -> dict[str, dict[int, Json]]:
        """{arm: {seed: fewshot.json}} of the runs that were scored on the group's tasks."""
        return {
            arm["label"]: {
                run.seed: run.few_shot
                for name in arm["runs"]
                if (run := self.runs.get(name)) is not None
                and run.few_shot is not None
                and is_scored(run.path, group)
            }
            for arm in group["arms"]
        }

    def measured(self, arm: Json, until: float = 1.0) -> Measured:
        """An arm's losses at the end, or as measured last before a share of the steps."""
        losses: dict[int, dict[str, float]] = {}
        runs = [self.runs[name] for name in arm["runs"] if name in self.runs]
        for run in (run for run in runs if until < 1 or run.name not in self.unmeasured):
            found = run.losses() if until >= 1 else _losses_until(run, until)
            if found is not None:
                losses[run.seed] = found
        return Measured(
            arm["label"],
            arm["about"],
            losses,
            runs,
            bool(arm.get("is_baseline")),
            arm.get("baseline"),
        )

    def weights(self, arm: Json) -> dict[int, dict[str, float]]:
        """{seed: {domain: weight}} of the runs that have learned some."""
        return {
            run.seed: records.weights_by_name(run.weights)
            for name in arm["runs"]
            if (run := self.runs.get(name)) is not None and run.weights is not None
        }


def open_experiment(path: Path) -> Experiment:
    """Read an experiment's records.

    Raises:
        ValueError: `path` is not an experiment's directory, or a record is not what it should be.
    """
    record = records.read_experiment(path)
    opened = open_runs([path / RUNS]) if any((path / RUNS).glob("*/config.json")) else []
    return Experiment(path, record, {run.name: run for run in opened})


def is_measured(run: Path, blocks: int | None) -> bool:
    """Whether evaluation.json holds every domain and target on so many blocks, or all there are."""
    if not (run / records.EVALUATION).exists():
        return False
    corpus = records.read_config(run)["corpus"]
    held_out = {
        name: entry["validation_blocks"]
        for name, entry in {**corpus["domains"], **corpus["targets"]}.items()
    }
    wanted = {
        name: count if blocks is None else min(blocks, count) for name, count in held_out.items()
    }
    return bool(records.read_evaluation(run)["blocks"] == wanted)


def is_scored(run: Path, group: Json) -> bool:
    """Whether fewshot.json holds just the group's tasks, scored as it says."""
    if not (run / records.FEWSHOT).exists():
        return False
    record = records.read_few_shot(run)
    return list(record["tasks"]) == group["tasks"] and all(
        record.get(key) == value
        for key, value in {
            "shots": group["shots"],
            "task_limit": group["task_limit"],
            "task_data_sha256": group["task_data_sha256"],
        }.items()
    )


def findings_of(experiment: Experiment) -> Findings:
    """Tables, figures and the answer, of the runs that there are so far."""
    verdicts, tables, drawings = [], [], []
    with style():
        for number, group in enumerate(experiment.record["groups"], start=1):
            part = _PARTS[group["kind"]](experiment, group, f"experiment-{number}")
            verdicts += part.verdicts
            tables += part.tables
            drawings += part.drawings
    about = "Marks: means over seeds; bars: 95 % intervals of the difference, seed by seed."
    return Findings(
        title=experiment.record["title"],
        question=experiment.record["question"],
        told=_told(experiment),
        verdicts=verdicts,
        tables=tables,
        sections=[Section("The experiment", about, drawings)] if drawings else [],
        warnings=list(_warnings(experiment)),
        missing=experiment.missing,
    )


class _Part(NamedTuple):
    verdicts: list[Verdict]
    tables: list[Table]
    drawings: list[Drawing]


def _told(experiment: Experiment) -> list[str]:
    settings = experiment.record["settings"]
    seeds = listed(map(str, settings["seeds"]))
    tokens = settings["batch_size"] * settings["block_size"]
    plural_s = "s" if len(settings["seeds"]) > 1 else ""
    return [
        f"Text: {experiment.record['data']}. Every arm with seed{plural_s} {seeds}; runs of one "
        "seed begin with the same numbers and see each domain's blocks in the same order, so arms "
        "are compared seed by seed.",
        f"Proxies: {settings['proxy_steps']} steps of {settings['sequences_per_domain']} blocks of "
        f"every domain, mu {settings['mu']:g}, score {settings['score']}. Base models: "
        f"{settings['base_steps']} steps of {settings['batch_size']} blocks, "
        f"{count_text(settings['base_steps'] * tokens)} tokens. A block is "
        f"{settings['block_size']} tokens.",
    ]


def _warnings(experiment: Experiment) -> Iterator[str]:
    unscored = [name for name in experiment.missing if name not in experiment.unmeasured]
    for missing, told in (
        (experiment.unmeasured, "not complete yet"),
        (unscored, "not scored on the tasks yet"),
    ):
        if missing:
            shown = listed(missing[:5]) + (" and others" if len(missing) > 5 else "")
            yield (
                f"{plural(len(missing), 'run')} of {len(experiment.record['runs'])} {told}, so "
                f"left out: {shown}. The same command goes on with them."
            )
    seeds = experiment.record["settings"]["seeds"]
    if len(seeds) == 1:
        yield "1 seed: differences cannot be told from chance. Take three or more."
    elif len(seeds) == 2:
        yield "2 seeds: every interval rests on how two numbers differ. Take three or more."
    for group in experiment.record["groups"]:
        if group["kind"] == "tasks":
            yield from _task_warnings(experiment, group)
    if experiment.record["preset"] == "smoke":
        yield "preset smoke: runs of a few steps, which show that everything works and no more."


def _losses_until(run: Run, until: float) -> dict[str, float] | None:
    lines = [line for line in run.evals if line["step"] <= until * run.steps]
    return to_floats(lines[-1]["loss"]) if lines else None


# Perplexity per domain: tab:universal_ppl and its kin.


def _perplexity(experiment: Experiment, group: Json, prefix: str) -> _Part:
    arms = [experiment.measured(arm, group.get("until", 1.0)) for arm in group["arms"]]
    arms = _of_common_seeds([arm for arm in arms if arm.losses])
    baseline = next((arm for arm in arms if arm.is_baseline), None)
    if baseline is None or len(arms) < 2:
        return _Part([_nothing_yet(group["title"])], [], [])
    names = [
        name
        for name in group["aim"]
        if all(name in losses for arm in arms for losses in arm.losses.values())
    ]
    drawings = [_change_drawing(arms, baseline, names, group["title"], prefix)]
    curves = _curves(arms, names, group.get("until", 1.0))
    if curves:
        shown = _extremes(curves, baseline.label)
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
    return _Part(
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


def _nothing_yet(title: str) -> Verdict:
    return Verdict(title, "Nothing to compare yet", ["The same command goes on with the runs."])


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
    return Verdict(group["title"], _headline(focus.label, baseline.label, difference), sentences)


def _ranking(rivals: Sequence[Measured], baseline: Measured, names: Sequence[str]) -> Iterator[str]:
    """How many arms are better, and which come out best and worst."""
    found = {arm.label: arm.against(baseline, names) for arm in rivals}
    known = {label: each for label, each in found.items() if _is_known(each)}
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


def _headline(
    own: str, other: str, difference: Difference | None, *, is_more_better: bool = False
) -> str:
    """Which one is better, as far as the seeds tell."""
    if difference is None:
        return f"{own} and {other} have no seed in common"
    if not math.isfinite(difference.mean):
        return f"{own} or {other} diverged"
    if difference.mean == 0:
        return f"{own} and {other} come out the same"
    if not difference.is_decided:
        side = "below" if difference.mean < 0 else "above"
        where = "in the one seed" if difference.pairs == 1 else "on average"
        seeds = "" if difference.pairs == 1 else f" {difference.pairs}"
        return (
            f"{own} comes out {side} {other} {where}, which{seeds or ' one'} "
            f"seed{'s' if difference.pairs > 1 else ''} cannot tell from chance"
        )
    return f"{own} {'beats' if (difference.mean > 0) is is_more_better else 'loses to'} {other}"


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
        rows.append(Row(name, cells + _paper_cells(paper, name, 2)))
    cells = [_perplexity_cell(arm, baseline, names) for arm in arms]
    rows.append(Row("average", cells + _paper_cells(paper, "average", 2), True))
    worst = [
        Cell(perplexity_text(max(arm.perplexity([name]).mean for name in names))) for arm in arms
    ]
    rows.append(Row("worst case", worst + _paper_cells(paper, "worst case", 2), True))
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


def _paper_cells(paper: Mapping[str, Mapping[str, float]], row: str, digits: int) -> list[Cell]:
    return [Cell(f"{column[row]:.{digits}f}" if row in column else "") for column in paper.values()]


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
        Row(name, [_difference_cell(arm.against(baseline, [name])) for arm in rivals])
        for name in names
    ]
    cells = [_difference_cell(arm.against(baseline, names)) for arm in rivals]
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


def _difference_cell(difference: Difference | None) -> Cell:
    if difference is None:
        return Cell("–")
    return Cell(
        change_text(difference),
        is_strong=difference.is_decided and difference.mean < 0,
        is_warning=difference.is_decided and difference.mean > 0,
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
        figure = _arms_figure(rows, baseline.label)
    else:
        figure = _change_figure(rows, [label for label, _ in groups], baseline.label)
    return drawing_of(
        f"{prefix}-change", f"Perplexity against {baseline.label}: {title}", about, figure
    )


def _arms_figure(rows: Mapping[str, Sequence[Difference | None]], baseline: str) -> Figure:
    """A line an arm: its average, the first of its differences, among those of the domains."""
    labels = list(rows)[::-1]
    figure, axes = canvas(max(2.6, 1.0 + 0.3 * len(labels)))
    for place, label in enumerate(labels):
        average, *of_domains = rows[label]
        each = [change_of(found)[0] for found in of_domains if _is_known(found)]
        axes.plot(
            each,
            [place] * len(each),
            linestyle="none",
            marker="o",
            markersize=4.5,
            color=MUTED,
            markerfacecolor=PAGE,
        )
        if not _is_known(average):
            continue
        mean, low, high = change_of(average)
        axes.errorbar(
            [mean],
            [place],
            xerr=[[mean - low], [high - mean]],
            fmt="o",
            markersize=6,
            color=INK,
            elinewidth=1.0,
            zorder=4,
        )
    axes.axvline(0, color=INK, linewidth=1.0)
    name_places(axes, labels, _LONGEST_ARM)
    # Its names leave less room.
    _finish_change(axes, f"against {baseline}")
    return figure


def _is_known(found: Difference | None) -> TypeGuard[Difference]:
    return found is not None and math.isfinite(found.mean)


def _finish_change(axes: Axes, label: str) -> None:
    axes.grid(axis="x")
    axes.xaxis.set_major_locator(ticks())
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_xlabel(label)
    axes.margins(x=0.08)


def _change_figure(
    rows: Mapping[str, Sequence[Difference | None]], labels: Sequence[str], baseline: str
) -> Figure:
    figure, axes = canvas(max(2.6, 1.3 + (0.2 + 0.09 * len(rows)) * len(labels)))
    for i, (label, differences) in enumerate(rows.items()):
        shift = 0.16 * ((len(rows) - 1) / 2 - i)
        known = [(place, found) for place, found in enumerate(differences) if _is_known(found)]
        if not known:
            continue
        values = np.array([change_of(found) for _, found in known])
        color = INK if i == 0 else MUTED
        axes.errorbar(
            values[:, 0],
            [place + shift for place, _ in known],
            xerr=np.abs(values[:, 1:] - values[:, :1]).T,
            fmt=_MARKERS[i % len(_MARKERS)],
            markersize=5.5,
            color=color,
            markerfacecolor=color if i < 2 else PAGE,
            markeredgecolor=color,
            elinewidth=1.0,
            label=label,
            zorder=4 - 0.1 * i,
        )
    axes.axvline(0, color=INK, linewidth=1.0)
    name_places(axes, labels)
    _finish_change(axes, f"change of perplexity against {baseline}")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper center", ncols=2, handlelength=1.2)
    return figure


_Curve = tuple[list[int], list[float]]


def _curves(arms: Sequence[Measured], names: Sequence[str], until: float) -> dict[str, _Curve]:
    """{arm: (steps, mean loss)} where all seeds were measured at least three times."""
    found = {}
    for arm in arms:
        curve = _curve(arm.runs, names, until)
        if len(curve[0]) < 3:
            return {}
        found[arm.label] = curve
    return found


def _extremes(curves: Mapping[str, _Curve], baseline: str) -> Mapping[str, _Curve]:
    """All, or of too many the baseline and those whose loss ends lowest and highest."""
    if len(curves) <= _MOST_LINES:
        return curves
    rivals = sorted(
        (label for label in curves if label != baseline), key=lambda x: curves[x][1][-1]
    )
    side = (_MOST_LINES - 1) // 2
    kept = {baseline, *rivals[:side], *rivals[-side:]}
    return {label: curve for label, curve in curves.items() if label in kept}


def _curve(runs: Sequence[Run], names: Sequence[str], until: float) -> _Curve:
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for line in run.evals:
            if line["step"] <= until * run.steps and all(name in line["loss"] for name in names):
                loss = mean_loss(to_floats(line["loss"]), names)
                by_step.setdefault(line["step"], []).append(loss)
    steps = sorted(step for step, losses in by_step.items() if len(losses) == len(runs))
    return steps, [float(np.mean(by_step[step])) for step in steps]


def _domain_curves(
    arms: Sequence[Measured], names: Sequence[str], until: float, prefix: str
) -> list[Drawing]:
    drawings = []
    for place, name in enumerate(names):
        curves = _curves(arms, [name], until)
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


# A target at a time: tab:ppl-ood.


def _targets(experiment: Experiment, group: Json, prefix: str) -> _Part:
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
        return _Part([_nothing_yet(group["title"])], [], [])
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
        _change_figure(figure_rows, targets[::-1], "uniform"),
    )
    drawings = [drawing, *_target_curves(rows, prefix)]
    return _Part(
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
        cells += [_difference_cell(each[target]) for each in changes.values()]
        lines.append(Row(target, cells + _paper_cells(paper, target, 2)))
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
        headline = f"{_headline('DoGE', 'uniform', difference)} on {target}"
    else:
        count = sum(each.mean < 0 for each in first.values())
        headline = f"DoGE is better than uniform on {count} of {len(first)} targets"
    return Verdict("Out of domain", headline, sentences)


def _target_curves(rows: Mapping[str, Sequence[Measured]], prefix: str) -> Iterator[Drawing]:
    for place, (target, arms) in enumerate(rows.items()):
        shown = [arm for arm in arms if arm.losses and "fine-tuned" not in arm.label]
        curves = _curves(shown, [target], 1.0)
        if curves:
            yield drawing_of(
                f"{prefix}-target-{place}",
                f"Held-out loss on {target} during training",
                "Mean over seeds, one line an arm.",
                curves_figure(curves),
            )


# Weights: tab:dw, tab:ood-dw, tab:robust, tab:cc-dw.


def _weights(experiment: Experiment, group: Json, prefix: str) -> _Part:
    arms = {arm["label"]: (arm, experiment.weights(arm)) for arm in group["arms"]}
    arms = {label: pair for label, pair in arms.items() if pair[1]}
    if not arms:
        return _Part([], [], [])
    names = list(
        dict.fromkeys(
            name for _, seeds in arms.values() for weights in seeds.values() for name in weights
        )
    )
    stats = {
        label: {
            name: stat_of(weights[name] for weights in seeds.values())
            for name in names
            if all(name in weights for weights in seeds.values())
        }
        for label, (_, seeds) in arms.items()
    }
    verdicts = _scale_verdict(group, stats)
    drawing = drawing_of(
        f"{prefix}-weights",
        group["title"],
        "Average domain weights, mean over seeds; darker is more."
        + (
            " A row is a target; where it stands is left blank." if group.get("is_affinity") else ""
        ),
        _weights_figure(stats, names),
    )
    return _Part(verdicts, [_weights_table(experiment, group, arms, stats, names)], [drawing])


def _weights_table(
    experiment: Experiment,
    group: Json,
    arms: Mapping[str, tuple[Json, Mapping[int, Mapping[str, float]]]],
    stats: Mapping[str, Mapping[str, Stat]],
    names: Sequence[str],
) -> Table:
    paper = columns_beside(group.get("paper"), {name: canonical(name) for name in names})
    known = {canonical(name) for name in names}
    full = {label: column for label, column in paper.items() if len(column) >= len(known) - 1}
    paper = full if group.get("paper") else {}
    if group.get("is_affinity"):
        targets = {f"for {canonical(arm['target'])}" for arm, _ in arms.values()}
        paper = {label: column for label, column in paper.items() if label in targets}
    rows = []
    for name in names:
        cells = [
            Cell(weight_text(found[name]), found[name].mean > 1 / len(found))
            if name in found
            else Cell("target" if arms[label][0].get("target") == name else "–")
            for label, found in stats.items()
        ]
        rows.append(Row(name, cells + _paper_cells(paper, name, 3)))
    blank = [Cell("")] * len(paper)
    effective = [
        Cell(f"{effective_domains(found):.1f} of {len(found)}") for found in stats.values()
    ]
    rows.append(Row("effective domains", effective + blank, True))
    reference = group.get("reference", "")
    if reference in stats:
        cells = [
            Cell("/" if label == reference else f"{100 * _distance(found, stats[reference]):.2f} %")
            for label, found in stats.items()
        ]
        own = [
            Cell("/" if label == "82M" else f"{100 * _mean_gap(column, paper['82M']):.2f} %")
            for label, column in paper.items()
        ]
        rows.append(Row(f"mean absolute difference from {reference}", cells + own, True))
    if group.get("has_columns"):
        cells = [Cell(_columns_saved(experiment, arm)) for arm, _ in arms.values()]
        own = [Cell(PAPER_SAVED.get(label, "/")) for label in paper]
        rows.append(Row("columns left out", cells + own, True))
    return Table(
        title=group["title"],
        note=(
            "Averages over the steps, mean over seeds; ±: standard error over seeds. Bold: above "
            f"uniform. Effective domains: exp of the entropy.{PAPER_NOTE if paper else ''}"
        ),
        corner="domain",
        columns=[(label, arm["about"]) for label, (arm, _) in arms.items()]
        + [(f"paper: {label}", str(group["paper"])) for label in paper],
        rows=rows,
    )


def _distance(own: Mapping[str, Stat], other: Mapping[str, Stat]) -> float:
    return _mean_gap(
        {name: stat.mean for name, stat in own.items()},
        {name: stat.mean for name, stat in other.items()},
    )


def _mean_gap(own: Mapping[str, float], other: Mapping[str, float]) -> float:
    names = own.keys() & other.keys()
    return math.fsum(abs(own[name] - other[name]) for name in names) / len(names)


# Last row of tab:cc-ppl.
PAPER_SAVED = {
    "low10": "66.9 %",
    "low30": "42.8 %",
    "low50": "24.4 %",
    "high30": "97.5 %",
    "high10": "99.9 %",
}


def _columns_saved(experiment: Experiment, arm: Json) -> str:
    """Share of the parameters whose gradients stay out of W, mean over seeds."""
    shares = [
        _share_saved(experiment, experiment.runs[name])
        for name in arm["runs"]
        if name in experiment.runs
    ]
    known = [share for share in shares if share is not None]
    return f"{100 * float(np.mean(known)):.1f} %" if known else "/"


def _share_saved(experiment: Experiment, run: Run) -> float | None:
    selection = run.config.get("selection")
    if selection is None:
        return None
    folder = Path(selection).parent
    # Runs may have been moved since.
    source = experiment.path / RUNS / folder.name
    columns = records.read_json(source / "cancellation.json")["columns"]
    chosen = json.loads((source / Path(selection).name).read_text(encoding="utf-8"))
    return 1.0 - float(sum(columns[name] for name in chosen) / sum(columns.values()))


def _scale_verdict(group: Json, stats: Mapping[str, Mapping[str, Stat]]) -> list[Verdict]:
    reference = group.get("reference", "")
    if reference not in stats or len(stats) < 2:
        return []
    gaps = {
        label: _distance(found, stats[reference])
        for label, found in stats.items()
        if label != reference
    }
    told = listed(f"{label} {100 * gap:.2f} %" for label, gap in gaps.items())
    return [
        Verdict(
            group["title"],
            f"Mean absolute difference from the {reference} proxy's weights: {told}",
            [
                "The paper: 1.45 % (60M) and 0.48 % (124M) from its 82M proxy; in the text less "
                "than 0.015 and 0.005."
            ],
        )
    ]


def _weights_figure(stats: Mapping[str, Mapping[str, Stat]], names: Sequence[str]) -> Figure:
    """A row an arm, a column a domain."""
    values = np.array(
        [
            [found[name].mean if name in found else math.nan for name in names]
            for found in stats.values()
        ]
    )
    figure, axes = canvas(max(2.4, 1.5 + 0.32 * len(stats)))
    cells = axes.pcolormesh(
        values,
        cmap="Blues",
        vmin=0.0,
        vmax=float(np.nanmax(values)),
        edgecolors=PAGE,
        linewidth=1.5,
    )
    axes.invert_yaxis()
    axes.set_xticks(
        np.arange(len(names)) + 0.5,
        [shortened(name) for name in names],
        rotation=40,
        ha="right",
        rotation_mode="anchor",
    )
    axes.set_yticks(
        np.arange(len(stats)) + 0.5, [shortened(label, _LONGEST_ARM) for label in stats]
    )
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)
    if len(names) <= 12:
        for (row, column), value in np.ndenumerate(values):
            if math.isfinite(value):
                red, green, blue, _ = cells.to_rgba(value)
                is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
                axes.text(
                    column + 0.5,
                    row + 0.5,
                    f"{value:.2f}".lstrip("0"),
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    # On the colour of its cell, whatever the page's.
                    color="#fefefe" if is_dark else "#1b1f25",
                )
    return figure


# Cost: tab:robust's last row.


def _cost(experiment: Experiment, group: Json, prefix: str) -> _Part:
    methods = {}
    for method in group["methods"]:
        seeds = [
            [experiment.runs[name] for name in names]
            for names in method["runs"]
            if all(experiment.is_complete(name) for name in names)
        ]
        if seeds:
            methods[method["label"]] = [_cost_of(runs) for runs in seeds]
    if not methods:
        return _Part([], [], [])
    first = next(iter(methods.values()))
    keys = (("tokens", "tokens", 1), ("FLOPs", "flops", 1), ("hours", "seconds", 3600))
    rows = []
    for label, key, unit in keys:
        means = {
            name: float(np.mean([getattr(each, key) for each in costs])) / unit
            for name, costs in methods.items()
        }
        rows.append(
            Row(
                label,
                [
                    Cell(f"{value:.3g}" if unit > 1 else count_text(value))
                    for value in means.values()
                ],
            )
        )
        base = float(np.mean([getattr(each, key) for each in first])) / unit
        rows.append(
            Row(
                f"{label}, against {next(iter(methods))}",
                [Cell(f"{value / base:.2f} ×" if base else "–") for value in means.values()],
                True,
            )
        )
    table = Table(
        title=group["title"],
        note=(
            "All models that have to be trained, mean over seeds. FLOPs: 6 for each parameter and "
            "token of a step, 2 for each that the reference only reads, and 2 for each entry of "
            "the Gram matrix and parameter. Hours: steps at their median time on this machine. "
            "The paper (tab:robust, four A100): 6.0 hours for DoGE and 39.0 for DoReMi at 82M."
        ),
        corner="",
        columns=[(name, plural(len(costs), "seed")) for name, costs in methods.items()],
        rows=rows,
    )
    return _Part([], [table], [])


# Accuracies of base models: tab:fewshot.


def _tasks(experiment: Experiment, group: Json, prefix: str) -> _Part:
    scores = {label: each for label, each in experiment.scores(group).items() if each}
    seeds = set.intersection(*map(set, scores.values())) if scores else set()
    about = {arm["label"]: arm["about"] for arm in group["arms"]}
    baseline = next((arm["label"] for arm in group["arms"] if arm.get("is_baseline")), None)
    if baseline not in scores or len(scores) < 2 or not seeds:
        return _Part([_nothing_yet(group["title"])], [], [])
    kept = {label: [each[seed] for seed in sorted(seeds)] for label, each in scores.items()}
    table = task_table(
        group["title"], {label: (about[label], found) for label, found in kept.items()}
    )
    assert table is not None
    rivals = [label for label in kept if label != baseline]
    wanted = group["focus"] or FOCUS
    focus = next((label for label in rivals if label.startswith(wanted)), rivals[-1])
    differences = {label: _accuracy_gain(kept[label], kept[baseline]) for label in rivals}
    sentences = [
        f"{label}: {_points_text(found)} against {baseline} in the average of "
        f"{plural(len(group['tasks']), 'task')}, over {plural(found.pairs, 'paired seed')}."
        for label, found in differences.items()
    ]
    average = [score["average"] for score in kept[baseline]]
    sentences.append(
        f"{baseline} answers {accuracy_text(average)} % rightly, guessing "
        f"{100 * average[0]['chance']:.1f} %."
    )
    headline = _headline(focus, baseline, differences[focus], is_more_better=True)
    return _Part([Verdict(group["title"], headline, sentences)], [table], [])


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


def _task_warnings(experiment: Experiment, group: Json) -> Iterator[str]:
    told = [record for each in experiment.scores(group).values() for record in each.values()]
    scores = [task for record in told for task in record["tasks"].values()]
    if group["task_limit"] is not None:
        yield (
            f"{group['title']}: of every task the first {plural(group['task_limit'], 'document')} "
            "alone; the paper's are whole."
        )
    cut = sum(task["truncated_requests"] for task in scores)
    if cut:
        requests = sum(task["requests"] for task in scores)
        yield (
            f"{group['title']}: {100 * cut / requests:.0f} % of the prompts were cut to fit "
            f"{plural(told[0]['positions'], 'position')}; their first shots are lost."
        )


def _points_text(difference: Difference) -> str:
    text = f"{difference.mean:+.1f} points"
    if difference.low is not None and difference.high is not None:
        text += f" [{difference.low:+.1f}, {difference.high:+.1f}]"
    return text.replace("-", "−")


class _Cost(NamedTuple):
    tokens: float
    flops: float
    seconds: float


def _cost_of(runs: Sequence[Run]) -> _Cost:
    """Of one seed's runs together."""
    tokens = sum(run.tokens_seen for run in runs)
    seconds = sum(run.steps * run.seconds_per_step for run in runs)
    flops = 0.0
    for run in runs:
        flops += 6 * run.num_parameters * run.tokens_seen
        if run.stage == "proxy":
            rows = len(run.domains) * run.tokens_seen // run.tokens
            flops += rows * (rows + 1) * run.num_parameters * run.steps
        if run.stage == "doremi":
            references = [other for other in runs if other.stage == "base"]
            flops += sum(2 * other.num_parameters for other in references) * run.tokens
    return _Cost(tokens, flops, seconds)


_PARTS = {
    "perplexity": _perplexity,
    "targets": _targets,
    "weights": _weights,
    "cost": _cost,
    "tasks": _tasks,
}
