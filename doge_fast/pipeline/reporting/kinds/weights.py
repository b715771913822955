"""Domain weights of several arms: tab:dw, tab:ood-dw, tab:robust, tab:cc-dw."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from doge_fast.pipeline import records
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.arm_figures import LONGEST_ARM
from doge_fast.pipeline.reporting.arms import Part, paper_cells
from doge_fast.pipeline.reporting.experiment import RUNS, Experiment
from doge_fast.pipeline.reporting.mixtures import PAPER_NOTE, effective_domains
from doge_fast.pipeline.reporting.paper import canonical, columns_beside
from doge_fast.pipeline.reporting.plotting import INK, PAGE, canvas, drawing_of, shortened
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.verdicts import Verdict
from doge_fast.pipeline.reporting.wording import Stat, listed, stat_of, weight_text
from doge_fast.pipeline.tables import Cell, Row, Table


def weights_part(experiment: Experiment, group: Json, prefix: str) -> Part:
    """The weights that the arms learned, beside each other and the paper's."""
    arms = {arm["label"]: (arm, experiment.weights(arm)) for arm in group["arms"]}
    arms = {label: pair for label, pair in arms.items() if pair[1]}
    if not arms:
        return Part([], [], [])
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
    return Part(verdicts, [_weights_table(experiment, group, arms, stats, names)], [drawing])


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
        rows.append(Row(name, cells + paper_cells(paper, name, 3)))
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
    axes.set_yticks(np.arange(len(stats)) + 0.5, [shortened(label, LONGEST_ARM) for label in stats])
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
