"""What is drawn: mixtures, the way of the weights over the steps, arms set against each other."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from doge_fast.pipeline.reporting import plotting as plot
from doge_fast.pipeline.reporting.mixtures import effective_domains
from doge_fast.pipeline.reporting.plotting import INK, MUTED, PAGE, PALETTE
from doge_fast.pipeline.reporting.proxies import Proxy
from doge_fast.pipeline.reporting.statistics import PairedDifference, change_of
from doge_fast.pipeline.reporting.wording import Stat

_DOTTED: Any = {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (2, 2))}
_MARKERS = ("o", "D", "s", "^", "v")


def mixture_figure(
    mixtures: Mapping[str, Mapping[str, Stat]], natural: Mapping[str, float] | None
) -> Figure:
    """A bar for each domain and mixture, with the standard error over seeds where it is known.

    Args:
        mixtures: {label: {domain: weight}}.
        natural: {domain: weight by tokens}, as marks; None: not known, or not one for all.
    """
    names = list(dict.fromkeys(name for weights in mixtures.values() for name in weights))
    thick = 0.72 / len(mixtures)
    figure, axes = plot.canvas(max(2.2, 1.0 + (0.12 + 0.16 * len(mixtures)) * len(names)))
    for i, (label, weights) in enumerate(mixtures.items()):
        shift = (i - (len(mixtures) - 1) / 2) * thick
        places = [names.index(name) + shift for name in weights]
        widths = [stat.mean for stat in weights.values()]
        errors = [stat.error or 0.0 for stat in weights.values()]
        color = PALETTE[i % len(PALETTE)]
        axes.barh(places, widths, height=0.9 * thick, color=color, label=label)
        if any(errors):
            axes.errorbar(widths, places, xerr=errors, fmt="none", ecolor=INK, elinewidth=1.1)
        axes.axvline(1 / len(weights), label="uniform" if i == 0 else None, **_DOTTED)
    if natural is not None:
        hollow: Any = {"markersize": 5, "markerfacecolor": PAGE, "markeredgecolor": INK}
        shares = [natural[name] for name in names]
        axes.plot(shares, range(len(names)), "D", label="natural", zorder=4, **hollow)
    axes.set_xlim(left=0)
    plot.finish_places(axes, names, "domain weight (share of the tokens)")
    figure.legend(loc="outside upper left", ncols=3, handlelength=1.4)
    return figure


def course(proxy: Proxy) -> Figure:
    """Over the steps: weights and their average, how many domains it amounts to, how far it moved.

    Bands are what seeds differ by.
    """
    styles = plot.domain_styles(proxy.domains)
    steps_T, mean_STK = proxy.series("alpha_mean")
    each_TK, mean_TK = proxy.series("alpha")[1].mean(0), mean_STK.mean(0)
    last, tall = steps_T[-1], max(2.4, 0.5 + 0.19 * len(styles))
    figure, (weights, count, drift) = plot.panels(tall, 0.9, 0.9)
    error_TK = np.zeros_like(mean_TK)
    if len(mean_STK) > 1:
        error_TK = mean_STK.std(axis=0, ddof=1) / math.sqrt(len(mean_STK))
    steps, each = plot.thinned(steps_T, each_TK)
    _, mean = plot.thinned(steps_T, mean_TK)
    _, error = plot.thinned(steps_T, error_TK)
    for j, (color, dash) in enumerate(styles.values()):
        line: Any = {"color": color, "linestyle": dash}
        weights.plot(steps, each[:, j], linewidth=0.6, alpha=0.45, **line)
        weights.plot(steps, mean[:, j], linewidth=1.8, **line)
        low, high = mean[:, j] - error[:, j], mean[:, j] + error[:, j]
        weights.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
    weights.axhline(1 / len(styles), zorder=1, **_DOTTED)
    most = float(np.nanmax([mean_TK, each_TK]))
    plot.finish_steps(weights, "domain weight", last, 1.06 * most)
    plot.name_lines(figure, mean_TK[-1], styles)

    counts_T = np.array([effective_domains(row) for row in mean])
    count.plot(steps, counts_T, color=INK)
    plot.finish_steps(count, "effective domains", last, 1.06 * len(styles))
    # A mean over a handful of steps says nothing, and would set the scale.
    moved = proxy.movement
    shown = moved.steps >= 0.05 * moved.steps[-1]
    lines = np.stack([moved.drift[shown], moved.limit[shown]], axis=1)
    steps, lines = plot.thinned(moved.steps[shown], lines)
    drift.plot(steps, lines[:, 0], color=INK)
    drift.plot(steps, lines[:, 1], **_DOTTED)
    plot.finish_steps(drift, "drift over the last fifth", last, 1.15 * float(np.nanmax(lines)))
    drift.set_xlabel("step")
    return figure


def change_figure(
    rows: Mapping[str, Sequence[PairedDifference]], labels: Sequence[str], baseline: str
) -> Figure:
    """A mark an arm beside each label: its change of perplexity and the interval."""
    figure, axes = plot.canvas(max(2.2, 1.0 + (0.2 + 0.09 * len(rows)) * len(labels)))
    for i, (label, differences) in enumerate(rows.items()):
        known = [(place, found) for place, found in enumerate(differences) if found.is_known]
        if not known:
            continue
        values = np.array([change_of(found) for _, found in known])
        places = [place + 0.16 * (i - (len(rows) - 1) / 2) for place, _ in known]
        color = INK if i == 0 else MUTED
        mark: Any = {"color": color, "markerfacecolor": color if i < 2 else PAGE, "markersize": 5.5}
        reach = np.abs(values[:, 1:] - values[:, :1]).T
        kind = _MARKERS[i % len(_MARKERS)]
        axes.errorbar(values[:, 0], places, xerr=reach, fmt=kind, label=label, zorder=4, **mark)
    plot.finish_places(axes, labels, f"change of perplexity against {baseline}")
    axes.axvline(0, color=INK, linewidth=1.0)
    axes.grid(axis="x")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.margins(x=0.08)
    if len(rows) > 1 and axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper left", ncols=2, handlelength=1.2)
    return figure


def temperature_figure(
    losses: Mapping[float, Stat], changes: Mapping[float, PairedDifference], chosen: float
) -> Figure:
    """Mean loss over 1/T, with the interval of its difference to uniform weights.

    Args:
        losses: {1/T: mean loss over seeds}.
        changes: {1/T: difference to uniform weights}.
        chosen: 1/T of the weights that were written.
    """
    figure, axes = plot.canvas(2.6)
    means = {place: losses[place].mean for place in sorted(losses)}
    if 0.0 in means:
        axes.axhline(means[0.0], **_DOTTED)
    axes.plot(list(means), list(means.values()), color=INK)
    for place, mean in means.items():
        low, high = changes[place].low, changes[place].high
        color = PALETTE[0] if place == chosen else INK
        if place and low is not None and high is not None:
            ends = [means[0.0] + low, means[0.0] + high]
            axes.plot([place, place], ends, color=color, linewidth=1.1)
        axes.plot([place], [mean], "D" if place == chosen else "o", color=color, zorder=4)
    axes.set_title("held-out loss, nats per token", loc="left", color=MUTED, fontsize=9.5)
    axes.set_xlabel("1/T  (0: uniform, 1: the proxy's weights)")
    axes.xaxis.set_major_locator(plot.ticks())
    axes.yaxis.set_major_locator(plot.ticks())
    axes.grid(axis="y")
    axes.margins(y=0.12)
    return figure
