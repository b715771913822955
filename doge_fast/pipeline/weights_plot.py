"""`doge-fast weights plot`: a figure of domain weights, and of their way there."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from doge_fast.pipeline import records, tables, weights
from doge_fast.pipeline.config import WeightsPlotConfig
from doge_fast.pipeline.reporting.plotting import (
    INK,
    MUTED,
    PALETTE,
    Drawing,
    canvas,
    domain_styles,
    drawing_of,
    finish_steps,
    height_for,
    label_ends,
    name_places,
    plot_lines,
    style,
    thinned,
    ticks,
)
from doge_fast.pipeline.weight_texts import story
from doge_fast.pipeline.weights import WeightsSummary
from doge_fast.pipeline.weights_verbs import read_all

FORMATS = (".png", ".svg")
_LINE_POINTS = 400
_LONGEST_LABEL = 48


def plot(config: WeightsPlotConfig) -> list[str]:
    """Draw the weights of one file or several; of one run its weights over the steps too.

    Returns:
        What was written where.

    Raises:
        ValueError: a file does not hold weights, or the figure's name has another ending.
    """
    if config.out.suffix not in FORMATS:
        raise ValueError(f"out must end in {' or '.join(FORMATS)}; got {config.out}.")
    found = read_all(config.files)
    drawings = [weights_drawing(found)]
    if len(config.files) == 1:
        drawings += steps_drawing(config.files[0])
    return [
        f"figure: {written(drawing, config.out.with_stem(config.out.stem + drawing.name))}"
        for drawing in drawings
    ]


def written(drawing: Drawing, file: Path) -> Path:
    """`file`, which now holds the drawing.

    Raises:
        ValueError: it cannot be written.
    """
    content = drawing.png if file.suffix == ".png" else drawing.svg.encode()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror}.") from None
    return file


def weights_drawing(found: Mapping[str, Mapping[str, Any]]) -> Drawing:
    """A bar for each domain and file, beside natural and uniform weights.

    Args:
        found: {where it was read: record}.
    """
    mixtures = {label: weights.describe(found[source]) for source, label in _labels(found).items()}
    caption = "; ".join(f"{source}: {story(record)}" for source, record in found.items())
    with style():
        return drawing_of("", "Domain weights", caption, _bars(mixtures))


def steps_drawing(run: Path) -> list[Drawing]:
    """The weights over the steps of a run directory; nothing of what has no such steps."""
    if not (run / records.METRICS).exists():
        return []
    lines = [line for line in records.read_metrics(run, kind="train") if line.get("alpha_mean")]
    if len(lines) < 2:
        return []
    with style():
        title = "Domain weights over the steps, averaged"
        return [drawing_of("-steps", title, story(records.read_weights(run)), _lines(lines))]


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
    figure, axes = canvas(height_for(max(len(names), len(names) * len(mixtures) // 2)))
    for i, (label, mixture) in enumerate(mixtures.items()):
        shares = {share.name: share for share in mixture.domains}
        offset = (len(mixtures) / 2 - i - 0.5) * thickness
        places = np.array([names.index(name) for name in shares]) + offset
        errors = [share.std or 0.0 for share in shares.values()]
        axes.barh(
            places,
            [share.weight for share in shares.values()],
            height=0.9 * thickness,
            color=PALETTE[i % len(PALETTE)],
            xerr=errors if any(errors) else None,
            error_kw={"ecolor": INK, "elinewidth": 0.9},
            label=label,
        )
    priors = _priors(list(mixtures.values()))
    if priors:
        axes.vlines(
            list(priors.values()),
            [names.index(name) - 0.44 for name in priors],
            [names.index(name) + 0.44 for name in priors],
            color=INK,
            linewidth=1.6,
            label="natural",
        )
    if all(len(mixture.domains) == len(names) for mixture in mixtures.values()):
        dotted = (0, (2, 2))
        axes.axvline(1 / len(names), color=MUTED, linewidth=0.9, linestyle=dotted, label="uniform")
    name_places(axes, names)
    axes.set_xlim(left=0)
    axes.set_xlabel("domain weight")
    axes.xaxis.set_major_locator(ticks())
    handles, labels = axes.get_legend_handles_labels()
    # Weights before what they stand beside, as the bars come before the marks.
    order = sorted(range(len(labels)), key=lambda i: labels[i] in ("natural", "uniform"))
    figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="outside upper left",
        ncols=1 if len(mixtures) > 1 else 3,
        handlelength=1.4,
    )
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
    figure, axes = canvas(height_for(len(names)))
    plot_lines(axes, *thinned(steps_T, values_TK, _LINE_POINTS), names, colors)
    axes.set_ylim(0, 1.06 * float(np.nanmax(values_TK)))
    finish_steps(axes, "domain weight, averaged", steps_T[-1])
    ends = dict(zip(names, values_TK[-1], strict=True))
    label_ends(figure, axes, ends, domain_styles(names, colors))
    return figure
