"""What the report draws, and how it looks: mixtures, their course over the steps, loss over 1/T.

Colours are written as hex and, within the page, become the page's own variables.
"""

import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from doge_fast.pipeline.records.movement import Floats
from doge_fast.pipeline.reporting.statistics import PairedDifference
from doge_fast.pipeline.reporting.study import Proxy
from doge_fast.pipeline.reporting.wording import Stat
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
# Widths such that a letter is nine to fourteen pixels high from a phone to a desktop.
_WIDTH = 4.6
_LONGEST_NAME = 26
_MOST_POINTS = 400


class Drawing(NamedTuple):
    """A figure as files hold it, and the words around it."""

    name: str
    title: str
    caption: str
    svg: str


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's settings for the figures, within the block only."""
    settings = Path(__file__).with_name("figures.mplstyle")
    with matplotlib.rc_context(fname=settings), warnings.catch_warnings():
        # A name in a script that the layout font lacks: the page's own fonts will show it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def drawing_of(name: str, title: str, caption: str, figure: Figure) -> Drawing:
    """Render a figure."""
    svg = io.StringIO()
    # No date: the same records give the same bytes.
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return Drawing(name, title, caption, svg.getvalue())


@dataclass(frozen=True)
class Sketch:
    """A figure that is drawn when it is asked for; its caption is its text alternative too."""

    title: str
    caption: str
    make: Callable[[], Figure]

    def draw(self, name: str) -> Drawing:
        """Rendered, under a name."""
        with style():
            return drawing_of(name, self.title, self.caption, self.make())


def canvas(height: float) -> tuple[Figure, Axes]:
    """A figure of the page's width and its axes."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


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
    figure, axes = canvas(max(2.2, 1.0 + (0.12 + 0.16 * len(mixtures)) * len(names)))
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
    _finish_places(axes, names, "domain weight (share of the tokens)")
    figure.legend(loc="outside upper left", ncols=3, handlelength=1.4)
    return figure


def course(proxy: Proxy) -> Figure:
    """Over the steps: weights and their average, how many domains it amounts to, how far it moved.

    Bands are what seeds differ by.
    """
    num_domains = len(proxy.domains)
    steps_T, mean_STK = proxy.series("alpha_mean")
    each_TK, mean_TK = proxy.series("alpha")[1].mean(0), mean_STK.mean(0)
    heights = (max(2.4, 0.5 + 0.19 * num_domains), 0.9, 0.9)
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.5), layout="constrained")
    weights, count, drift = figure.subplots(3, sharex=True, height_ratios=heights)
    error_TK = np.zeros_like(mean_TK)
    if len(mean_STK) > 1:
        error_TK = mean_STK.std(axis=0, ddof=1) / math.sqrt(len(mean_STK))
    steps, each, mean, error = _thinned(steps_T, each_TK, mean_TK, error_TK)
    handles = {}
    for j, name in enumerate(proxy.domains):
        color = PALETTE[j % len(PALETTE)]
        line: Any = {"color": color, "linestyle": DASHES[j // len(PALETTE) % len(DASHES)]}
        weights.plot(steps, each[:, j], linewidth=0.6, alpha=0.45, **line)
        weights.plot(steps, mean[:, j], linewidth=1.8, **line)
        low, high = mean[:, j] - error[:, j], mean[:, j] + error[:, j]
        weights.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
        handles[name] = Line2D([], [], linewidth=1.8, **line)
    weights.axhline(1 / num_domains, zorder=1, **_DOTTED)
    _finish_steps(
        weights, "domain weight (share of the tokens)", 1.06 * float(np.nanmax([mean_TK, each_TK]))
    )
    # Names in the order of the lines' ends.
    ends = zip(mean_TK[-1], proxy.domains, strict=True)
    named = [name for end, name in sorted(ends, reverse=True) if math.isfinite(end)]
    figure.legend(
        [handles[name] for name in named],
        [shortened(name, _LONGEST_NAME) for name in named],
        loc="outside right upper",
        handlelength=1.4,
        fontsize=9,
    )
    count.plot(steps, [effective_domains(row) for row in mean], color=INK)
    _finish_steps(count, "effective domains (number)", 1.06 * num_domains)
    # A mean over a handful of steps says nothing, and would set the scale.
    moved = proxy.movement
    shown = moved.steps >= 0.05 * moved.steps[-1]
    # Half of a sum of differences is the share of the tokens that goes elsewhere.
    halves = moved.drift[shown] / 2, moved.limit[shown] / 2
    steps, far, limit = _thinned(moved.steps[shown], *halves)
    drift.plot(steps, far, color=INK)
    drift.plot(steps, limit, **_DOTTED)
    most = 1.15 * float(np.nanmax([far, limit]))
    _finish_steps(drift, "drift over the last fifth (share of the tokens)", most)
    drift.set_xlim(0, max(steps_T[-1], 1))
    drift.set_xlabel("step")
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
    figure, axes = canvas(2.6)
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
    _finish(axes, "held-out loss, nats per token")
    axes.set_xlabel("1/T  (0: uniform, 1: the proxy's weights)")
    axes.margins(y=0.12)
    return figure


def _thinned(*series: Floats) -> list[Floats]:
    """Of each every n-th step, the first and the last among them: what a line can show."""
    length = len(series[0])
    kept = np.unique([*range(0, length, max(1, -(-length // _MOST_POINTS))), length - 1])
    return [each[kept] for each in series]


def _ticks(*, integer: bool = False) -> MaxNLocator:
    """At most five or so places on an axis, at round numbers."""
    return MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=integer)


def _finish(axes: Axes, title: str, *, integer: bool = False) -> None:
    axes.set_title(title, loc="left", color=MUTED, fontsize=9.5)
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(_ticks(integer=integer))
    axes.yaxis.set_major_locator(_ticks())


def _finish_steps(axes: Axes, title: str, most: float) -> None:
    """Axes over training steps, whose vertical one begins at 0."""
    _finish(axes, title, integer=True)
    axes.set_ylim(0, max(most, 1e-6))


def _finish_places(axes: Axes, names: Iterable[str], xlabel: str) -> None:
    """Axes whose vertical one is names, a line each, the first on top."""
    shown = [shortened(name, _LONGEST_NAME) for name in names]
    axes.set_yticks(range(len(shown)), shown)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel(xlabel)
    axes.xaxis.set_major_locator(_ticks())
