"""Figures that set arms against each other: changes of perplexity, and losses during training."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from doge_fast.pipeline.reporting.experiment import Measured
from doge_fast.pipeline.reporting.plotting import INK, MUTED, PAGE, canvas, name_places, ticks
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.statistics import Difference, change_of, is_known
from doge_fast.pipeline.reporting.study import mean_loss
from doge_fast.pipeline.reporting.wording import to_floats

# Arms that one figure tells apart as lines.
_MOST_LINES = 8
# Of an arm, beside a figure of arms: what sets it apart comes last.
LONGEST_ARM = 34
_MARKERS = ("o", "D", "s", "^", "v", "P", "X")


def change_figure(
    rows: Mapping[str, Sequence[Difference | None]], labels: Sequence[str], baseline: str
) -> Figure:
    """A mark an arm beside each label: its change of perplexity and the interval."""
    figure, axes = canvas(max(2.6, 1.3 + (0.2 + 0.09 * len(rows)) * len(labels)))
    for i, (label, differences) in enumerate(rows.items()):
        shift = 0.16 * ((len(rows) - 1) / 2 - i)
        known = [(place, found) for place, found in enumerate(differences) if is_known(found)]
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


def arms_figure(rows: Mapping[str, Sequence[Difference | None]], baseline: str) -> Figure:
    """A line an arm: its average, the first of its differences, among those of the domains."""
    labels = list(rows)[::-1]
    figure, axes = canvas(max(2.6, 1.0 + 0.3 * len(labels)))
    for place, label in enumerate(labels):
        average, *of_domains = rows[label]
        each = [change_of(found)[0] for found in of_domains if is_known(found)]
        axes.plot(
            each,
            [place] * len(each),
            linestyle="none",
            marker="o",
            markersize=4.5,
            color=MUTED,
            markerfacecolor=PAGE,
        )
        if not is_known(average):
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
    name_places(axes, labels, LONGEST_ARM)
    # Its names leave less room.
    _finish_change(axes, f"against {baseline}")
    return figure


def _finish_change(axes: Axes, label: str) -> None:
    axes.grid(axis="x")
    axes.xaxis.set_major_locator(ticks())
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_xlabel(label)
    axes.margins(x=0.08)


_Curve = tuple[list[int], list[float]]


def curves_of(arms: Sequence[Measured], names: Sequence[str], until: float) -> dict[str, _Curve]:
    """{arm: (steps, mean loss)} where all seeds were measured at least three times."""
    found = {}
    for arm in arms:
        curve = _curve(arm.runs, names, until)
        if len(curve[0]) < 3:
            return {}
        found[arm.label] = curve
    return found


def _curve(runs: Sequence[Run], names: Sequence[str], until: float) -> _Curve:
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for line in run.evals:
            if line["step"] <= until * run.steps and all(name in line["loss"] for name in names):
                loss = mean_loss(to_floats(line["loss"]), names)
                by_step.setdefault(line["step"], []).append(loss)
    steps = sorted(step for step, losses in by_step.items() if len(losses) == len(runs))
    return steps, [float(np.mean(by_step[step])) for step in steps]


def extremes(curves: Mapping[str, _Curve], baseline: str) -> Mapping[str, _Curve]:
    """All, or of too many the baseline and those whose loss ends lowest and highest."""
    if len(curves) <= _MOST_LINES:
        return curves
    rivals = sorted(
        (label for label in curves if label != baseline), key=lambda x: curves[x][1][-1]
    )
    side = (_MOST_LINES - 1) // 2
    kept = {baseline, *rivals[:side], *rivals[-side:]}
    return {label: curve for label, curve in curves.items() if label in kept}
