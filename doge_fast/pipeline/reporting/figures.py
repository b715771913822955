"""What is drawn: arms set against each other, and what a proxy did over its steps.

A function returns the figure; `findings` gives it its title and its caption.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from doge_fast.pipeline import baselines
from doge_fast.pipeline.records.movement import Floats, nan_mean
from doge_fast.pipeline.reporting import plotting as plot
from doge_fast.pipeline.reporting.plotting import INK, MUTED, PAGE, Styles
from doge_fast.pipeline.reporting.proxies import Proxy
from doge_fast.pipeline.reporting.statistics import Curve, Difference, change_of

_DOTTED = (0, (2, 2))
_MARKERS = ("o", "D", "s", "^", "v", "P", "X")
# Arms that one figure tells apart as lines.
_MOST_LINES = 8
# Of an arm, beside a figure of arms: what sets it apart comes last.
_LONGEST_ARM = 34
# More cells than these beside each other are too small for their numbers.
_MOST_NUMBERS = 12
# A mean over a handful of steps says nothing, and would set the scale.
_DRIFT_SHOWN_FROM = 0.05


def change_figure(
    rows: Mapping[str, Sequence[Difference]], labels: Sequence[str], baseline: str
) -> Figure:
    """A mark an arm beside each label: its change of perplexity and the interval."""
    figure, axes = plot.canvas(max(2.6, 1.3 + (0.2 + 0.09 * len(rows)) * len(labels)))
    for i, (label, differences) in enumerate(rows.items()):
        shift = 0.16 * ((len(rows) - 1) / 2 - i)
        known = [(place, found) for place, found in enumerate(differences) if found.is_known]
        if known:
            color = INK if i == 0 else MUTED
            style = {"color": color, "markerfacecolor": color if i < 2 else PAGE, "markersize": 5.5}
            marker = _MARKERS[i % len(_MARKERS)]
            places = [place + shift for place, _ in known]
            _mark(axes, [found for _, found in known], places, fmt=marker, label=label, **style)
    plot.finish_places(axes, labels, f"change of perplexity against {baseline}")
    _finish_change(axes)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper center", ncols=2, handlelength=1.2)
    return figure


def arms_figure(rows: Mapping[str, Sequence[Difference]], baseline: str) -> Figure:
    """A line an arm: its average, the first of its differences, among those of the domains."""
    labels = list(rows)[::-1]
    figure, axes = plot.canvas(max(2.6, 1.0 + 0.3 * len(labels)))
    for place, label in enumerate(labels):
        average, *of_domains = rows[label]
        each = [change_of(found)[0] for found in of_domains if found.is_known]
        places = [place] * len(each)
        axes.plot(each, places, "o", color=MUTED, markerfacecolor=PAGE, markersize=4.5)
        if average.is_known:
            _mark(axes, [average], [place], fmt="o", color=INK, markersize=6)
    # Its names leave less room.
    plot.finish_places(axes, labels, f"against {baseline}", _LONGEST_ARM)
    _finish_change(axes)
    return figure


def _mark(axes: Axes, found: Sequence[Difference], places: Sequence[float], **style: Any) -> None:
    """Changes with their intervals."""
    values = np.array([change_of(each) for each in found])
    reach = np.abs(values[:, 1:] - values[:, :1]).T
    axes.errorbar(values[:, 0], places, xerr=reach, elinewidth=1.0, zorder=4, **style)


def _finish_change(axes: Axes) -> None:
    axes.axvline(0, color=INK, linewidth=1.0)
    axes.grid(axis="x")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.margins(x=0.08)


def curves_figure(curves: Mapping[str, Curve]) -> Figure:
    """{arm: (steps, loss)}, a line an arm."""
    figure, axes = plot.canvas(plot.height_for(len(curves)))
    styles = {
        label: (INK if i % 2 == 0 else MUTED, plot.DASHES[i % len(plot.DASHES)])
        for i, label in enumerate(curves)
    }
    for label, (steps, losses) in curves.items():
        axes.plot(steps, losses, color=styles[label][0], linestyle=styles[label][1])
    last = max(steps[-1] for steps, _ in curves.values())
    plot.finish_steps(axes, "loss (nats per token)", last)
    plot.label_ends(figure, axes, [losses[-1] for _, losses in curves.values()], styles)
    return figure


def extremes(curves: Mapping[str, Curve], baseline: str) -> Mapping[str, Curve]:
    """All, or of too many the baseline and those whose loss ends lowest and highest."""
    if len(curves) <= _MOST_LINES:
        return curves
    rivals = sorted((each for each in curves if each != baseline), key=lambda x: curves[x][1][-1])
    side = (_MOST_LINES - 1) // 2
    kept = {baseline, *rivals[:side], *rivals[-side:]}
    return {label: curve for label, curve in curves.items() if label in kept}


def arms_weights_figure(arms: Mapping[str, Mapping[str, float]]) -> Figure:
    """Weights of several arms: a row an arm, a column a domain."""
    names = list(dict.fromkeys(name for each in arms.values() for name in each))
    values = np.array([[each.get(name, math.nan) for name in names] for each in arms.values()])
    figure, axes = plot.canvas(max(2.4, 1.5 + 0.32 * len(arms)))
    cells = _heat_map(axes, values, list(arms), names, vmax=float(np.nanmax(values)))
    if len(names) <= _MOST_NUMBERS:
        _write_cells(axes, values, cells, lambda value: f"{value:.2f}".lstrip("0"))
    return figure


def affinity_figure(proxy: Proxy) -> Figure:
    """Cosines between gradients; the diagonal is one by definition and would flatten the rest."""
    cosine_RR, names = proxy.cosine(), proxy.rows
    np.fill_diagonal(cosine_RR, math.nan)
    largest = float(np.nanmax(np.abs(cosine_RR), initial=0.0))
    reach = max(0.1, math.ceil(largest * 10) / 10)
    is_signed = bool(np.nanmin(cosine_RR, initial=0.0) < -0.05 * reach)
    is_small = len(names) <= _MOST_NUMBERS
    figure, axes = plot.canvas(max(3.4, 1.5 + (0.3 if is_small else 0.19) * len(names)))
    cells = _heat_map(axes, cosine_RR, names, names, vmax=reach, is_signed=is_signed)
    if is_small:
        # Adding zero takes the sign from minus zero.
        _write_cells(axes, cosine_RR, cells, lambda value: f"{round(value, 2) + 0.0:.2f}")
    else:
        bar = figure.colorbar(cells, ax=axes, label="cosine", location="top", aspect=40)
        bar.outline.set_visible(False)
    return figure


def _heat_map(
    axes: Axes,
    values: Floats,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    vmax: float,
    is_signed: bool = False,
) -> QuadMesh:
    is_small = len(columns) <= _MOST_NUMBERS
    cells = axes.pcolormesh(
        values,
        cmap="PuOr_r" if is_signed else "Blues",
        vmin=-vmax if is_signed else 0.0,
        vmax=vmax,
        edgecolors=PAGE,
        linewidth=1.5 if is_small else 0.3,
    )
    axes.invert_yaxis()
    turned: dict[str, Any] = {"rotation": 90, "fontsize": 7.5}
    if is_small:
        turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    names = [plot.shortened(name) for name in columns]
    axes.set_xticks(np.arange(len(columns)) + 0.5, names, **turned)
    names = [plot.shortened(name, _LONGEST_ARM) for name in rows]
    axes.set_yticks(np.arange(len(rows)) + 0.5, names)
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)
    return cells


def _write_cells(axes: Axes, values: Floats, cells: QuadMesh, text: Any) -> None:
    """The number in every cell, light on dark cells and dark on light ones, whatever the page's."""
    luminance = cells.to_rgba(np.nan_to_num(values))[..., :3] @ np.array([0.299, 0.587, 0.114])
    for (i, j), value in np.ndenumerate(values):
        ink = "#fefefe" if luminance[i, j] < 0.55 else "#1b1f25"
        told, color = (text(value).replace("-", "−"), ink) if math.isfinite(value) else ("–", MUTED)
        axes.text(j + 0.5, i + 0.5, told, ha="center", va="center", color=color, fontsize=8.5)


def final_figure(proxy: Proxy, styles: Styles) -> Figure:
    """The learned weights as bars, the heaviest domain on top."""
    natural = baselines.natural(proxy.first.train_tokens)
    names = sorted(proxy.domains, key=lambda name: proxy.weights[name].mean)
    places = np.arange(len(names))
    figure, axes = plot.canvas(max(2.2, 0.95 + 0.27 * len(names)))
    widths = [proxy.weights[name].mean for name in names]
    axes.barh(places, widths, height=0.62, color=[styles[name][0] for name in names])
    errors = [proxy.weights[name].error or 0.0 for name in names]
    if any(errors):
        axes.errorbar(widths, places, xerr=errors, fmt="none", ecolor=INK, elinewidth=1.1)
    uniform = 1 / len(names)
    axes.axvline(uniform, color=INK, linewidth=1.0, linestyle=_DOTTED, label="uniform")
    shares = [natural[name] for name in names]
    hollow: dict[str, Any] = {"markersize": 5, "markerfacecolor": PAGE, "markeredgecolor": INK}
    axes.plot(shares, places, "D", label="natural", zorder=4, **hollow)
    axes.set_xlim(0, 1.02 * max(*widths, *shares, uniform))
    _write_beside(axes, [f"{width:.3f}" for width in widths])
    plot.finish_places(axes, names, "domain weight")
    figure.legend(loc="outside upper right", ncols=2, handlelength=1.6)
    return figure


def _write_beside(axes: Axes, texts: Sequence[str]) -> None:
    """A column of numbers to the right of the bars."""
    for place, text in enumerate(texts):
        axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), va="center")


def weights_figure(proxy: Proxy, styles: Styles) -> Figure:
    """The running average, with what seeds differ by, over the weights of each step."""
    names = proxy.domains
    styles = {name: styles[name] for name in names}
    steps_T, average_STK = proxy.series("alpha_mean", names)
    mean_TK = nan_mean(average_STK)
    figure, axes = plot.canvas(plot.height_for(len(names)) + 0.6)
    each_TK = nan_mean(proxy.series("alpha", names)[1])
    thin = plot.thinned(steps_T, each_TK, plot.SMOOTH_POINTS)
    plot.plot_lines(axes, *thin, styles, linewidth=0.6, alpha=0.45)
    if len(average_STK) > 1:
        error_TK = average_STK.std(axis=0, ddof=1) / math.sqrt(len(average_STK))
        steps, low = plot.thinned(steps_T, mean_TK - error_TK, plot.SMOOTH_POINTS)
        _, high = plot.thinned(steps_T, mean_TK + error_TK, plot.SMOOTH_POINTS)
        for j, (color, _) in enumerate(styles.values()):
            axes.fill_between(steps, low[:, j], high[:, j], color=color, alpha=0.25, linewidth=0)
    mean = plot.thinned(steps_T, mean_TK, plot.SMOOTH_POINTS)
    plot.plot_lines(axes, *mean, styles, linewidth=1.8)
    axes.set_ylim(0, 1.06 * max(float(np.nanmax([mean_TK, each_TK])), 1e-3))
    plot.finish_steps(axes, "domain weight", steps_T[-1])
    axes.axhline(1 / len(names), color=MUTED, linewidth=0.9, linestyle=_DOTTED, zorder=1)
    plot.label_ends(figure, axes, mean_TK[-1], styles)
    return figure


def drift_figure(proxy: Proxy) -> Figure:
    """How far the last fifth of the steps moved the average, and how far it may have."""
    moved = proxy.movement
    shown = moved.steps >= _DRIFT_SHOWN_FROM * moved.steps[-1]
    lines = np.stack([moved.drift[shown], moved.limit[shown]], axis=1)
    steps, values = plot.thinned(moved.steps[shown], lines, plot.SMOOTH_POINTS)
    names = [f"{word} {end:.3f}" for word, end in zip(("moved", "limit"), values[-1], strict=True)]
    styles = dict(zip(names, ((INK, "-"), (MUTED, _DOTTED)), strict=True))
    label, last = "change over the last fifth", moved.steps[-1]
    return plot.steps_figure(steps, values, styles, label, last, headroom=1.15)


def parts_figure(proxy: Proxy, styles: Styles) -> Figure:
    """What W is made of: the influence on the others, and the domain's own difficulty."""
    gain_K, influence_K, difficulty_K = (
        proxy.mean_over_steps(key) for key in ("gain", "influence", "difficulty")
    )
    names = proxy.domains
    has_difficulty = bool(np.nanmax(np.abs(difficulty_K), initial=0.0) > 0)
    order = np.argsort(np.nan_to_num(influence_K + difficulty_K))
    places = np.arange(len(names))
    figure, axes = plot.canvas(max(2.2, 0.95 + (0.36 if has_difficulty else 0.27) * len(names)))
    shades = [styles[names[j]][0] for j in order]
    thick, shift = (0.36, 0.19) if has_difficulty else (0.62, 0.0)
    axes.barh(places + shift, influence_K[order], height=thick, color=shades)
    if has_difficulty:
        axes.barh(places - shift, difficulty_K[order], height=thick, color=shades, alpha=0.45)
        # In grey, for the shade tells the part and the colour the domain.
        handles = [Patch(color=MUTED, alpha=alpha) for alpha in (1.0, 0.45)]
        words = ["influence on the others", "own difficulty"]
        figure.legend(handles, words, loc="outside upper right", ncols=2, handlelength=1.2)
    axes.axvline(0, color=MUTED, linewidth=0.8)
    # W is their sum only where no other score replaced it.
    if proxy.first.config["score"] != "published":
        _write_beside(axes, plot.column_texts(gain_K[order]))
        axes.text(1.02, 1.0, "W", transform=axes.transAxes, va="bottom", color=MUTED)
    plot.finish_places(axes, [names[j] for j in order], "loss decrease per unit of learning rate")
    return figure


def loss_figure(proxy: Proxy, key: str, styles: Styles) -> Figure:
    """Losses of the proxy on every domain, or what they exceed a reference's by."""
    names = proxy.rows
    steps_T, values_STR = proxy.series(key, names)
    steps, losses = plot.mean_points(steps_T, nan_mean(values_STR), plot.NOISY_POINTS)
    styles = {name: styles[name] for name in names}
    return plot.steps_figure(steps, losses, styles, f"{key} (nats per token)", steps_T[-1])
