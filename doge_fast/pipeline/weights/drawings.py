"""Figures of domain weights: a bar for each domain, and their way over the steps of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from doge_fast.pipeline import records
from doge_fast.pipeline.reporting import plotting
from doge_fast.pipeline.reporting.plotting import Drawing
from doge_fast.pipeline.weights.summary import WeightsSummary, describe, story


def weights_drawing(record: Mapping[str, Any]) -> Drawing:
    """A bar for each domain of a record of weights, natural and uniform weights beside it."""
    with plotting.style():
        return plotting.drawing_of("", "Domain weights", story(record), _bars(describe(record)))


def _bars(mixture: WeightsSummary) -> Figure:
    # The first domain on top.
    shares = mixture.domains[::-1]
    names, places = [share.name for share in shares], np.arange(len(shares))
    figure, axes = plotting.canvas(plotting.height_for(len(names)))
    errors = [share.std or 0.0 for share in shares]
    axes.barh(
        places,
        [share.weight for share in shares],
        height=0.65,
        color=plotting.PALETTE[0],
        xerr=errors if any(errors) else None,
        error_kw={"ecolor": plotting.INK, "elinewidth": 0.9},
        label="weight",
    )
    known = [(place, share.prior) for place, share in enumerate(shares) if share.prior is not None]
    if known:
        at, priors = map(np.array, zip(*known, strict=True))
        marks: Any = {"color": plotting.INK, "linewidth": 1.6, "label": "natural"}
        axes.vlines(priors, at - 0.44, at + 0.44, **marks)
    dotted: Any = {"color": plotting.MUTED, "linewidth": 0.9, "linestyle": (0, (2, 2))}
    axes.axvline(1 / len(names), label="uniform", **dotted)
    plotting.finish_places(axes, names, "domain weight")
    axes.set_xlim(left=0)
    figure.legend(loc="outside upper left", ncols=3, handlelength=1.4)
    return figure


def steps_drawing(run: Path) -> list[Drawing]:
    """The weights over the steps of a run directory; nothing of what has no such steps."""
    if not (run / records.METRICS).exists():
        return []
    lines = [line for line in records.read_metrics(run, kind="train") if line.get("alpha_mean")]
    if len(lines) < 2:
        return []
    names = list(lines[0]["alpha_mean"])
    styles = plotting.domain_styles(names)
    steps_T = np.array([float(line["step"]) for line in lines])
    values_TK = np.array([[line["alpha_mean"][name] for name in names] for line in lines], float)
    shown = plotting.thinned(steps_T, values_TK, plotting.SMOOTH_POINTS)
    label, title = "domain weight, averaged", "Domain weights over the steps, averaged"
    with plotting.style():
        figure = plotting.steps_figure(*shown, styles, label, steps_T[-1], headroom=1.06)
        return [plotting.drawing_of("-steps", title, story(records.read_weights(run)), figure)]
