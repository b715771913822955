"""The report's figures: mixtures, their course over the steps, and loss over 1/T.

Colours are hex values here; inside the page they become its CSS variables.
"""

import io
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from doge_fast.pipeline.reporting.proxies import Proxy
from doge_fast.pipeline.reporting.statistics import PairedDifference, Stat
from doge_fast.pipeline.tables import shortened
from doge_fast.weights.projection import effective_domains

# Eight hues whose least distance, in OKLab, is 12 under normal sight, protanopia, deuteranopia and
# tritanopia; each has a lighter twin for dark pages in report.css. A ninth domain is dashed.
PALETTE = (
    *("#033fb2", "#b66c18", "#66b79c", "#672a5c"),
    *("#1e8691", "#e49e22", "#a870f2", "#9e170c"),
)
DASHES = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)))
INK, MUTED, GRID, PAGE = "#1b1f24", "#5c6570", "#dfe3e8", "#ffffff"
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    PAGE: "var(--page)",
    **{color: f"var(--domain-{place})" for place, color in enumerate(PALETTE)},
}
_DOTTED: Any = {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (2, 2))}
# In inches; makes letters nine to fourteen pixels high on screens from phone to desktop.
_WIDTH = 4.6
_LONGEST_NAME = 26
# A line of that width shows no more.
_MOST_POINTS = 400


@dataclass(frozen=True)
class Drawing:
    """A figure that is drawn when `svg` is read, with its title and caption."""

    title: str
    caption: str
    """Also the figure's text alternative."""
    make: Callable[[], Figure]

    @cached_property
    def svg(self) -> str:
        """The figure as the text of an SVG file."""
        settings, svg = Path(__file__).with_name("figures.mplstyle"), io.StringIO()
        with matplotlib.rc_context(fname=settings), warnings.catch_warnings():
            # A name in a script that the layout font lacks: the page's own fonts will show it.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            # No date: the same records give the same bytes.
            self.make().savefig(svg, format="svg", metadata={"Date": None})
        return svg.getvalue()


def canvas(height: float) -> tuple[Figure, Axes]:
    """A figure of the page's width and its axes."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def mixture_figure(
    mixtures: Mapping[str, Mapping[str, Stat]], natural: Mapping[str, Stat] | None
) -> Figure:
    """A bar for each domain and mixture, with the standard error over seeds where it is known.

    Args:
        mixtures: {label: {domain: weight}}.
        natural: {domain: weight by tokens}, drawn as marks; None: the mixtures' domains differ.
    """
    names = list(dict.fromkeys(name for weights in mixtures.values() for name in weights))
    thick = 0.72 / len(mixtures)
    figure, axes = canvas(max(2.2, 1.0 + (0.12 + 0.16 * len(mixtures)) * len(names)))
    for i, (label, weights) in enumerate(mixtures.items()):
        shift = (i - (len(mixtures) - 1) / 2) * thick
        places = [names.index(name) + shift for name in weights]
        widths = [stat.mean for stat in weights.values()]
        errors = [stat.error or 0.0 for stat in weights.values()]
        axes.barh(places, widths, height=0.9 * thick, color=PALETTE[i], label=label)
        if any(errors):
            axes.errorbar(widths, places, xerr=errors, fmt="none", ecolor=INK, elinewidth=1.1)
        axes.axvline(1 / len(weights), label="uniform" if i == 0 else None, **_DOTTED)
    if natural is not None:
        hollow: Any = {"markersize": 5, "markerfacecolor": PAGE, "markeredgecolor": INK}
        shares = [natural[name].mean for name in names]
        axes.plot(shares, range(len(names)), "D", label="natural", zorder=4, **hollow)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("domain weight (share of the tokens)")
    axes.set_yticks(range(len(names)), _shortened(names))
    axes.tick_params(axis="y", labelcolor=INK)
    # The first domain on top.
    axes.set_ylim(len(names) - 0.4, -0.6)
    figure.legend(loc="outside upper left", ncols=3, handlelength=1.4)
    return figure


def course(proxy: Proxy) -> Figure:
    """Over the steps: weights, their running average, its effective domains and its drift.

    Bands are one standard error over seeds.
    """
    steps_T, mean_STK = proxy.series("alpha_mean")
    alpha_STK = proxy.series("alpha")[1]
    step = max(1, math.ceil(len(steps_T) / _MOST_POINTS))
    kept = np.unique([*range(0, len(steps_T), step), len(steps_T) - 1])
    steps, each, mean = steps_T[kept], alpha_STK[:, kept].mean(0), mean_STK[:, kept].mean(0)
    num_domains = len(proxy.domains)
    heights = (max(2.4, 0.5 + 0.19 * num_domains), 0.9, 0.9)
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.5), layout="constrained")
    weights, count, drift = figure.subplots(3, sharex=True, height_ratios=heights)
    styles = cycler(linestyle=DASHES) * cycler(color=PALETTE)
    weights.set_prop_cycle(styles)
    weights.plot(steps, each, linewidth=0.6, alpha=0.45)
    weights.set_prop_cycle(styles)
    lines = weights.plot(steps, mean, linewidth=1.8)
    for j, line in enumerate(lines if len(mean_STK) > 1 else ()):
        error = mean_STK[:, kept, j].std(axis=0, ddof=1) / math.sqrt(len(mean_STK))
        low, high = mean[:, j] - error, mean[:, j] + error
        weights.fill_between(steps, low, high, color=line.get_color(), alpha=0.25, linewidth=0)
    weights.axhline(1 / num_domains, zorder=1, **_DOTTED)
    _finish(weights, "domain weight (share of the tokens)", float(np.nanmax([mean, each])))
    # Names in the order of the final averages.
    order = [int(j) for j in np.argsort(-mean[-1], kind="stable") if math.isfinite(mean[-1, j])]
    figure.legend(
        [lines[j] for j in order],
        _shortened(proxy.domains[j] for j in order),
        loc="outside right upper",
        handlelength=1.4,
        fontsize=9,
    )
    count.plot(steps, [effective_domains(row) for row in mean], color=INK)
    _finish(count, "effective domains (number)", num_domains)
    # The mean over the first few steps is mostly noise, and would set the scale.
    shown = kept[steps >= 0.05 * steps[-1]]
    # Half of the sum of absolute differences is the share of the tokens that moves.
    far, limit = proxy.movement.drift[shown] / 2, proxy.movement.limit[shown] / 2
    drift.plot(steps_T[shown], far, color=INK)
    drift.plot(steps_T[shown], limit, **_DOTTED)
    _finish(drift, "drift over the last fifth (share of the tokens)", np.nanmax([far, limit]))
    drift.set_xlim(0, max(steps[-1], 1))
    drift.locator_params(axis="x", integer=True)
    drift.set_xlabel("step")
    return figure


def temperature_figure(
    losses: Mapping[float, float], changes: Mapping[float, PairedDifference], chosen: float
) -> Figure:
    """Mean loss over 1/T, with the interval of its difference to uniform weights.

    Args:
        losses: {1/T: mean loss over seeds}.
        changes: {1/T: difference to uniform weights}.
        chosen: 1/T of the weights that were written.
    """
    figure, axes = canvas(2.6)
    means = dict(sorted(losses.items()))
    if 0.0 in means:
        axes.axhline(means[0.0], **_DOTTED)
    axes.plot(list(means), list(means.values()), color=INK)
    for place, mean in means.items():
        color = PALETTE[0] if place == chosen else INK
        if place and 0.0 in means and changes[place].pairs > 1:
            ends = [means[0.0] + each for each in changes[place][1:3]]
            axes.plot([place, place], ends, color=color, linewidth=1.1)
        axes.plot([place], [mean], "D" if place == chosen else "o", color=color, zorder=4)
    _finish(axes, "held-out loss, nats per token")
    axes.set_xlabel("1/T  (0: uniform, 1: the proxy's weights)")
    axes.margins(y=0.12)
    return figure


def _shortened(names: Iterable[str]) -> list[str]:
    return [shortened(name, _LONGEST_NAME) for name in names]


def _finish(axes: Axes, title: str, most: float | None = None) -> None:
    """Title, grid and ticks; with `most` the vertical axis goes from 0 to a bit above that."""
    axes.set_title(title, loc="left", color=MUTED, fontsize=9.5)
    axes.grid(axis="y")
    axes.locator_params(nbins=5)
    if most is not None:
        axes.set_ylim(0, max(1.1 * most, 1e-6))
