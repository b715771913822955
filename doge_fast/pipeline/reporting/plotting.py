"""How every figure of the report looks: colours, lines, labels.

Colours are written as hex and, within the page, become the page's own variables.
"""

import io
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from doge_fast.pipeline.records.movement import Floats
from doge_fast.pipeline.tables import shortened

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
# {name of a line: its colour and dash}.
Styles = Mapping[str, tuple[str, Any]]
# Widths such that a letter is nine to fourteen pixels high from a phone to a desktop.
_WIDTH = 4.6
_PNG_DPI = 200
_STYLE = Path(__file__).with_name("figures.mplstyle")
_LONGEST_NAME = 26
_MOST_POINTS = 400


class Drawing(NamedTuple):
    """A figure as files hold it, and the words around it."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's settings for the figures, within the block only."""
    with matplotlib.rc_context(fname=_STYLE), warnings.catch_warnings():
        # A name in a script that the layout font lacks: the page's own fonts will show it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def drawing_of(name: str, title: str, caption: str, figure: Figure) -> Drawing:
    """Render a figure, laid out once for both formats."""
    svg, png = io.StringIO(), io.BytesIO()
    # No date: the same records give the same bytes.
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.set_layout_engine("none")
    figure.savefig(png, format="png", dpi=_PNG_DPI, metadata={"Software": None})
    return Drawing(name, title, caption, svg.getvalue(), png.getvalue())


def canvas(height: float) -> tuple[Figure, Axes]:
    """A figure of the page's width and its axes."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def panels(*heights: float) -> tuple[Figure, list[Axes]]:
    """A figure of the page's width and axes above each other, over the same steps."""
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.5), layout="constrained")
    rows = figure.subplots(len(heights), sharex=True, height_ratios=heights)
    return figure, list(rows)


def thinned(steps_T: Floats, values_TK: Floats) -> tuple[Floats, Floats]:
    """Every n-th step, the first and the last among them: what a line can show."""
    size = max(1, -(-len(steps_T) // _MOST_POINTS))
    kept = np.unique([*range(0, len(steps_T), size), len(steps_T) - 1])
    return steps_T[kept], values_TK[kept]


def ticks(*, integer: bool = False) -> MaxNLocator:
    """At most five or so places on an axis, at round numbers."""
    return MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=integer)


def finish_steps(axes: Axes, title: str, last_step: float, most: float) -> None:
    """Axes whose horizontal one is the training step, and whose vertical one begins at 0."""
    axes.set_title(title, loc="left", color=MUTED, fontsize=9.5)
    axes.grid(axis="y")
    axes.set_xlim(0, max(last_step, 1))
    axes.set_ylim(0, max(most, 1e-6))
    axes.xaxis.set_major_locator(ticks(integer=True))
    axes.yaxis.set_major_locator(ticks())


def name_lines(figure: Figure, ends: Iterable[float], styles: Styles) -> None:
    """Names of lines beside their axes, in the order of the values at their ends."""
    named = zip(styles, ends, strict=True)
    finite = [(value, name) for name, value in named if math.isfinite(value)]
    handles = [
        Line2D([], [], color=styles[name][0], linestyle=styles[name][1], linewidth=1.8)
        for _, name in sorted(finite, reverse=True)
    ]
    names = [shortened(name, _LONGEST_NAME) for _, name in sorted(finite, reverse=True)]
    figure.legend(handles, names, loc="outside right upper", handlelength=1.4, fontsize=9)


def domain_styles(names: Iterable[str]) -> Styles:
    """Colour and dash of every domain, by its place."""
    number = len(PALETTE)
    return {
        name: (PALETTE[place % number], DASHES[place // number % len(DASHES)])
        for place, name in enumerate(names)
    }


def finish_places(axes: Axes, names: Sequence[str], xlabel: str) -> None:
    """Axes whose vertical one is names, a line each, the first on top."""
    axes.set_yticks(range(len(names)), [shortened(name, _LONGEST_NAME) for name in names])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(xlabel)
    axes.xaxis.set_major_locator(ticks())
