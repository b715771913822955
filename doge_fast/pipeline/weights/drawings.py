"""Figures of domain weights: a bar for each, and how they moved over the steps of a run."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from doge_fast.pipeline import records, tables
from doge_fast.pipeline.reporting import plotting
from doge_fast.pipeline.reporting.plotting import Drawing
from doge_fast.pipeline.weights.summary import WeightsSummary, describe, story

_LONGEST_LABEL = 48


def weights_drawing(found: Mapping[str, Mapping[str, Any]]) -> Drawing:
    """A bar for each domain and file, {where it was read: record}, and natural weights."""
    mixtures = {label: describe(found[source]) for source, label in _labels(found).items()}
    caption = "; ".join(f"{source}: {story(record)}" for source, record in found.items())
    with plotting.style():
        return plotting.drawing_of("", "Domain weights", caption, _bars(mixtures))


def steps_drawing(run: Path) -> list[Drawing]:
    """The weights over the steps of a run directory; nothing of what has no such steps."""
    if not (run / records.METRICS).exists():
        return []
    lines = [line for line in records.read_metrics(run, kind="train") if line.get("alpha_mean")]
    if len(lines) < 2:
        return []
    with plotting.style():
        title = "Domain weights over the steps, averaged"
        return [
            plotting.drawing_of("-steps", title, story(records.read_weights(run)), _lines(lines))
        ]


def _labels(sources: Collection[str]) -> dict[str, str]:
    """{where it was read: what the legend calls it}: the last part of a path, if all differ."""
    if len(sources) == 1:
        return dict.fromkeys(sources, "weight")
    names = [Path(source).name for source in sources]
    is_clear = len(set(names)) == len(names)
    texts = names if is_clear else [tables.shortened(source, _LONGEST_LABEL) for source in sources]
    return dict(zip(sources, texts, strict=True))


def _bars(mixtures: Mapping[str, WeightsSummary]) -> Figure:
    names = list(dict.fromkeys(s.name for mixture in mixtures.values() for s in mixture.domains))
    # The first domain on top.
    names.reverse()
    thickness = 0.72 / len(mixtures)
    figure, axes = plotting.canvas(
        plotting.height_for(max(len(names), len(names) * len(mixtures) // 2))
    )
    for i, (label, mixture) in enumerate(mixtures.items()):
        shares = mixture.domains
        offset = (len(mixtures) / 2 - i - 0.5) * thickness
        errors = [share.std or 0.0 for share in shares]
        axes.barh(
            [names.index(share.name) + offset for share in shares],
            [share.weight for share in shares],
            height=0.9 * thickness,
            color=plotting.PALETTE[i % len(plotting.PALETTE)],
            xerr=errors if any(errors) else None,
            error_kw={"ecolor": plotting.INK, "elinewidth": 0.9},
            label=label,
        )
    priors = _priors(list(mixtures.values()))
    if priors:
        places = np.array([names.index(name) for name in priors])
        marks: Any = {"color": plotting.INK, "linewidth": 1.6, "label": "natural"}
        axes.vlines(list(priors.values()), places - 0.44, places + 0.44, **marks)
    if all(len(mixture.domains) == len(names) for mixture in mixtures.values()):
        dotted: Any = {"color": plotting.MUTED, "linewidth": 0.9, "linestyle": (0, (2, 2))}
        axes.axvline(1 / len(names), label="uniform", **dotted)
    plotting.name_places(axes, names)
    axes.set_xlim(left=0)
    axes.set_xlabel("domain weight")
    axes.xaxis.set_major_locator(plotting.ticks())
    columns = 1 if len(mixtures) > 1 else 3
    figure.legend(loc="outside upper left", ncols=columns, handlelength=1.4)
    return figure


def _priors(mixtures: Sequence[WeightsSummary]) -> dict[str, float]:
    """The natural weights, where all that know some agree on them."""
    known: dict[str, float] = {}
    for mixture in mixtures:
        for share in mixture.domains:
            if share.prior is not None and known.setdefault(share.name, share.prior) != share.prior:
                return {}
    return known


def _lines(lines: Sequence[Mapping[str, Any]]) -> Figure:
    names = list(lines[0]["alpha_mean"])
    colors = {name: place for place, name in enumerate(names)}
    steps_T = np.array([float(line["step"]) for line in lines])
    values_TK = np.array([[line["alpha_mean"][name] for name in names] for line in lines], float)
    shown = plotting.thinned(steps_T, values_TK, plotting.SMOOTH_POINTS)
    styles, label = plotting.domain_styles(names, colors), "domain weight, averaged"
    return plotting.steps_figure(*shown, styles, label, steps_T[-1], headroom=1.06)
