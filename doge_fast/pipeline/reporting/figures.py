"""The report's figures: what is drawn of a comparison and of a proxy, and the words around it."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from doge_fast.pipeline.reporting.mixtures import baselines_of
from doge_fast.pipeline.reporting.plotting import (
    DASHES,
    GRID,
    INK,
    MUTED,
    NOISY_POINTS,
    PAGE,
    SMOOTH_POINTS,
    Drawing,
    canvas,
    chunk_size,
    color_of,
    column_texts,
    domain_styles,
    drawing_of,
    finish_steps,
    height_for,
    label_ends,
    mean_points,
    name_places,
    plot_lines,
    shortened,
    style,
    thinned,
    ticks,
)
from doge_fast.pipeline.reporting.study import (
    MAX_DRIFT,
    UNIVERSAL,
    Comparison,
    Proxy,
    Study,
    mean_loss,
)
from doge_fast.pipeline.reporting.verdicts import drift_sentence
from doge_fast.pipeline.reporting.wording import (
    Floats,
    listed,
    nan_mean,
    plural,
    relative_change,
    to_floats,
)

_DRIFT_SHOWN_FROM = 0.05
BASE_MODELS = "Base models"


class Section(NamedTuple):
    """Figures that belong together."""

    title: str
    text: str
    drawings: list[Drawing]


def draw(study: Study) -> list[Section]:
    """Every figure of a study, by section."""
    with style():
        sections = [_base_section(study)]
        drawn = [proxy for proxy in study.proxies if proxy.has_steps]
        sections += [
            _proxy_section(proxy, study, prefix)
            for proxy, prefix in zip(drawn, _prefixes(drawn), strict=True)
        ]
    return [section for section in sections if section.drawings]


def _told(comparisons: Iterable[Comparison]) -> Iterator[tuple[int, Comparison]]:
    """Comparisons in which something stands against uniform, numbered."""
    for number, comparison in enumerate(comparisons, start=1):
        if comparison.domains and comparison.uniform and comparison.rivals:
            yield number, comparison


def _base_section(study: Study) -> Section:
    drawings = [
        drawing
        for number, comparison in _told(study.comparisons)
        for drawing in _comparison_drawings(comparison, f"comparison-{number}")
    ]
    return Section(BASE_MODELS, "Against uniform weights, at equal tokens.", drawings)


def _comparison_drawings(comparison: Comparison, prefix: str) -> Iterator[Drawing]:
    yield drawing_of(
        f"{prefix}-change",
        f"Perplexity against uniform: {comparison.title.lower()}",
        "Change of held-out perplexity. Left of the line is better than uniform. "
        f"{comparison.settings.capitalize()}.",
        _change_figure(comparison),
    )
    curves = _held_out_curves(comparison)
    if curves:
        what = listed(comparison.targets) if comparison.targets else "the mean of all domains"
        yield drawing_of(
            f"{prefix}-held-out",
            f"Held-out loss during training: {comparison.title.lower()}",
            f"Loss on {what}, one line an arm (first seed).",
            curves_figure(curves),
        )


def _prefixes(proxies: Sequence[Proxy]) -> list[str]:
    """Names for files and ids, of letters, digits and hyphens, no two alike."""
    slugs = [re.sub(r"[^A-Za-z0-9]+", "-", proxy.label).strip("-") for proxy in proxies]
    return [
        f"proxy-{slug}" if slug and slugs.count(slug) == 1 else f"proxy-{number}-{slug or 'run'}"
        for number, slug in enumerate(slugs, start=1)
    ]


def _proxy_section(proxy: Proxy, study: Study, prefix: str) -> Section:
    seeds = "" if len(proxy.runs) == 1 else f" Mean of {len(proxy.runs)} seeds"
    band = f"{seeds}; bands: ± one standard error." if seeds else ""
    steps = len(proxy.series("loss", proxy.domains)[0])
    chunk = chunk_size(steps, NOISY_POINTS)
    binned = f" Each point is the mean of {chunk} logged steps." if chunk > 1 else ""
    drawings = [
        drawing_of(
            f"{prefix}-weights-final",
            "Learned weights",
            "Average domain weights, the result, against uniform weights and the natural ones, "
            f"which follow the tokens there are.{band.replace('bands', 'bars')}",
            _final_figure(proxy, study.colors),
        ),
        drawing_of(
            f"{prefix}-weights-average",
            "Running average of the weights",
            f"Mean of the domain weights over all steps so far.{band}",
            _weights_figure(proxy, "alpha_mean", study.colors),
        ),
        drawing_of(
            f"{prefix}-weights",
            "Weights at each step",
            f"The weights that the model was trained with, not averaged.{band}",
            _weights_figure(proxy, "alpha", study.colors),
        ),
        drawing_of(
            f"{prefix}-drift",
            "Has the average settled?",
            f"{drift_sentence(proxy)} The line shows this change up to every step, as the sum "
            f"of absolute differences; below {MAX_DRIFT:g} it counts as settled.",
            _drift_figure(proxy),
        ),
        *_cause_drawings(proxy, study, prefix, binned),
        drawing_of(
            f"{prefix}-loss",
            "Training loss of each domain",
            f"Loss of the proxy on the batches of every domain.{binned}",
            _loss_figure(proxy, "loss", study.colors),
        ),
    ]
    return Section(f"{proxy.label}: weights for {proxy.target}", _settings(proxy), drawings)


def _cause_drawings(proxy: Proxy, study: Study, prefix: str, binned: str) -> Iterator[Drawing]:
    """What moved the weights."""
    if proxy.is_doremi:
        yield drawing_of(
            f"{prefix}-excess",
            "What moves the weights",
            "Loss of the proxy in excess of the reference model's, on the batches of every "
            f"domain.{binned}",
            _loss_figure(proxy, "excess", study.colors),
        )
        return
    yield drawing_of(
        f"{prefix}-affinity",
        "How alike the domains' gradients are",
        f"Cosine between the gradients of two domains, mean over the steps.{_affinity_note(proxy)}",
        _affinity_figure(proxy),
    )
    yield drawing_of(
        f"{prefix}-gain",
        "What moves the weights",
        f"Generalization estimation W, mean over the steps weighted by learning rate. "
        f"{_parts_note(proxy)}",
        _parts_figure(proxy, study.colors),
    )


def _settings(proxy: Proxy) -> str:
    config = proxy.first.config
    if proxy.is_doremi:
        return _doremi_settings(proxy)
    cut = config["domain_max_grad_norm"]
    return (
        f"{config['model']['model']} model, {proxy.first.steps} steps of "
        f"{plural(config['sequences_per_domain'], 'block')} of every domain, mu {config['mu']:g}, "
        f"score as in the {config['score']}{'' if config['score'] == 'paper' else ' code'}"
        f"{f', domain gradients cut to norm {cut:g}' if cut else ''}, "
        f"{plural(len(proxy.runs), 'seed')}."
    )


def _doremi_settings(proxy: Proxy) -> str:
    config, told = proxy.first.config, proxy.first.weights or {}
    # Not in the configuration where the variant's own were taken.
    step = f", step size {told['step_size']:g}" if "step_size" in told else ""
    return (
        f"{config['model']['model']} model, {proxy.first.steps} steps of "
        f"{plural(config['batch_size'], 'block')}, DoReMi (variant {config['variant']}){step}, "
        f"{plural(len(proxy.runs), 'seed')}."
    )


def _affinity_note(proxy: Proxy) -> str:
    targets = [name for name in proxy.rows if name not in proxy.domains]
    return f" {listed(targets)}: measured only, not trained on." if targets else ""


def _parts_note(proxy: Proxy) -> str:
    parts = (
        "It is the influence on the target alone, for no training domain is a target."
        if all(name not in (UNIVERSAL,) for name in proxy.first.config["target"])
        else "It is the domain's influence on the others plus its own difficulty, the squared "
        "norm of its gradient."
    )
    if proxy.first.config["score"] == "published":
        parts += (
            " The weights moved with the published code's score: W over the mean gradient norm, "
            "cut to [0, 5]; the parts are as before that."
        )
    return parts


def _weights_figure(proxy: Proxy, key: str, colors: Mapping[str, int]) -> Figure:
    names = proxy.domains
    steps_T, values_STK = proxy.series(key, names)
    mean_TK = nan_mean(values_STK)
    figure, axes = canvas(height_for(len(names)))
    if len(values_STK) > 1:
        error_TK = values_STK.std(axis=0, ddof=1) / math.sqrt(len(values_STK))
        steps, low = thinned(steps_T, mean_TK - error_TK, SMOOTH_POINTS)
        _, high = thinned(steps_T, mean_TK + error_TK, SMOOTH_POINTS)
        for j, name in enumerate(names):
            axes.fill_between(
                steps, low[:, j], high[:, j], color=color_of(name, colors), alpha=0.2, linewidth=0
            )
    width = 1.6 if key == "alpha_mean" else 1.0
    plot_lines(axes, *thinned(steps_T, mean_TK, SMOOTH_POINTS), names, colors, width=width)
    axes.set_ylim(0, 1.06 * max(float(np.nanmax(mean_TK)), 1e-3))
    finish_steps(axes, "domain weight", steps_T[-1])
    _mark_uniform(axes, len(names))
    label_ends(
        figure, axes, dict(zip(names, mean_TK[-1], strict=True)), domain_styles(names, colors)
    )
    return figure


def _mark_uniform(axes: Axes, num_domains: int) -> None:
    axes.axhline(1 / num_domains, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)


def _final_figure(proxy: Proxy, colors: Mapping[str, int]) -> Figure:
    """Bars, the heaviest domain on top."""
    natural = baselines_of(proxy.first)[1].weights
    names = sorted(proxy.domains, key=lambda name: proxy.weights[name].mean)
    places = np.arange(len(names))
    figure, axes = canvas(max(2.2, 0.95 + 0.27 * len(names)))
    widths = [proxy.weights[name].mean for name in names]
    bars = axes.barh(places, widths, height=0.62, color=[color_of(name, colors) for name in names])
    errors = [proxy.weights[name].error or 0.0 for name in names]
    if any(errors):
        axes.errorbar(widths, places, xerr=errors, fmt="none", ecolor=INK, elinewidth=1.1)
    axes.axvline(1 / len(names), color=INK, linewidth=1.0, linestyle=(0, (2, 2)), label="uniform")
    axes.plot(
        [natural[name].mean for name in names],
        places,
        marker="D",
        markersize=5,
        linestyle="none",
        markerfacecolor=PAGE,
        markeredgecolor=INK,
        markeredgewidth=1.1,
        label="natural",
        zorder=4,
    )
    reach = max(*widths, *(natural[name].mean for name in names), 1 / len(names))
    axes.set_xlim(0, 1.02 * reach)
    for bar, name in zip(bars, names, strict=True):
        axes.text(
            1.02,
            bar.get_y() + bar.get_height() / 2,
            f"{proxy.weights[name].mean:.3f}",
            transform=axes.get_yaxis_transform(),
            va="center",
        )
    name_places(axes, names)
    axes.set_xlabel("domain weight")
    axes.xaxis.set_major_locator(ticks())
    figure.legend(loc="outside upper right", ncols=2, handlelength=1.6)
    return figure


def _drift_figure(proxy: Proxy) -> Figure:
    steps_T, drift_T = proxy.drift()
    figure, axes = canvas(2.9)
    # A mean over a handful of steps says nothing, and would set the scale.
    shown = steps_T >= _DRIFT_SHOWN_FROM * steps_T[-1]
    thin_T, thin_T1 = thinned(steps_T[shown], drift_T[shown, None], SMOOTH_POINTS)
    axes.plot(thin_T, thin_T1, color=INK)
    axes.axhline(MAX_DRIFT, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
    axes.set_ylim(0, 1.15 * max(float(drift_T[shown].max()), MAX_DRIFT))
    finish_steps(axes, "change over the last fifth", steps_T[-1])
    ends = {f"now {drift_T[-1]:.3f}": float(drift_T[-1]), f"settled {MAX_DRIFT:g}": MAX_DRIFT}
    plain = (0, (2, 2))
    label_ends(figure, axes, ends, dict(zip(ends, ((INK, "-"), (MUTED, plain)), strict=True)))
    return figure


# More cells than these are too small for their numbers.
_MOST_NUMBERS = 12


def _affinity_figure(proxy: Proxy) -> Figure:
    """Heat map; the diagonal is one by definition and would only flatten the rest."""
    cosine_RR, names = proxy.cosine(), [shortened(name) for name in proxy.rows]
    np.fill_diagonal(cosine_RR, math.nan)
    reach = _reach(cosine_RR)
    is_signed = bool(np.nanmin(cosine_RR, initial=0.0) < -0.05 * reach)
    is_small = len(names) <= _MOST_NUMBERS
    figure, axes = canvas(max(3.4, 1.5 + (0.3 if is_small else 0.19) * len(names)))
    cells = axes.pcolormesh(
        cosine_RR,
        cmap="PuOr_r" if is_signed else "Blues",
        vmin=-reach if is_signed else 0.0,
        vmax=reach,
        edgecolors=PAGE,
        linewidth=1.5 if is_small else 0.3,
    )
    centres = np.arange(len(names)) + 0.5
    axes.invert_yaxis()
    turned: dict[str, Any] = (
        {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
        if is_small
        else {"rotation": 90, "fontsize": 7.5}
    )
    axes.set_xticks(centres, names, **turned)
    axes.set_yticks(centres, names)
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)
    if is_small:
        _write_cells(axes, cosine_RR, cells)
    else:
        bar = figure.colorbar(cells, ax=axes, label="cosine", location="top", aspect=40)
        bar.outline.set_visible(False)
    return figure


def _reach(cosine_RR: Floats) -> float:
    """Upper end of the colours: the largest entry, up to the next tenth."""
    largest = float(np.nanmax(np.abs(cosine_RR), initial=0.0))
    return max(0.1, math.ceil(largest * 10) / 10)


def _write_cells(axes: Axes, cosine_RR: Floats, cells: QuadMesh) -> None:
    """The number in every cell, light on dark cells and dark on light ones."""
    colors = cells.to_rgba(np.nan_to_num(cosine_RR))[..., :3]
    luminance = colors @ np.array([0.299, 0.587, 0.114])
    for (i, j), value in np.ndenumerate(cosine_RR):
        if i == j:
            axes.text(j + 0.5, i + 0.5, "–", ha="center", va="center", color=MUTED)
        elif math.isfinite(value):
            ink = "#fefefe" if luminance[i, j] < 0.55 else "#111111"
            # Adding zero takes the sign from minus zero.
            text = f"{round(value, 2) + 0.0:.2f}".replace("-", "−")
            axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", color=ink, fontsize=8.5)


def _parts_figure(proxy: Proxy, colors: Mapping[str, int]) -> Figure:
    gain_K, influence_K, difficulty_K = (
        proxy.mean_over_steps(key) for key in ("gain", "influence", "difficulty")
    )
    names = proxy.domains
    has_difficulty = bool(np.nanmax(np.abs(difficulty_K), initial=0.0) > 0)
    # W is their sum only where no other score replaced it.
    is_sum = proxy.first.config["score"] == "paper"
    order = np.argsort(np.nan_to_num(influence_K + difficulty_K))
    places = np.arange(len(names))
    figure, axes = canvas(max(2.2, 0.95 + (0.36 if has_difficulty else 0.27) * len(names)))
    shades = [color_of(names[j], colors) for j in order]
    thick, shift = (0.36, 0.19) if has_difficulty else (0.62, 0.0)
    axes.barh(places + shift, influence_K[order], height=thick, color=shades)
    if has_difficulty:
        axes.barh(places - shift, difficulty_K[order], height=thick, color=shades, alpha=0.45)
    axes.axvline(0, color=MUTED, linewidth=0.8)
    if is_sum:
        for place, text in zip(places, column_texts(gain_K[order]), strict=True):
            axes.text(1.02, float(place), text, transform=axes.get_yaxis_transform(), va="center")
        axes.text(1.02, 1.0, "W", transform=axes.transAxes, va="bottom", color=MUTED)
    name_places(axes, [names[j] for j in order])
    axes.set_xlabel("loss decrease per unit of learning rate")
    axes.xaxis.set_major_locator(ticks())
    if has_difficulty:
        _parts_legend(figure)
    return figure


def _parts_legend(figure: Figure) -> None:
    """In grey, for the shade tells the part and the colour the domain."""
    handles = [Patch(color=MUTED, alpha=alpha) for alpha in (1.0, 0.45)]
    figure.legend(
        handles,
        ["influence on the others", "own difficulty"],
        loc="outside upper right",
        ncols=2,
        handlelength=1.2,
    )


def _loss_figure(proxy: Proxy, key: str, colors: Mapping[str, int]) -> Figure:
    names = proxy.rows
    steps_T, values_STR = proxy.series(key, names)
    steps, losses = mean_points(steps_T, nan_mean(values_STR), NOISY_POINTS)
    figure, axes = canvas(height_for(len(names)))
    plot_lines(axes, steps, losses, names, colors)
    finish_steps(axes, f"{key} (nats per token)", steps_T[-1])
    label_ends(
        figure, axes, dict(zip(names, losses[-1], strict=True)), domain_styles(names, colors)
    )
    return figure


_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def _change_figure(comparison: Comparison) -> Figure:
    """A mark an arm on every domain's line: change of perplexity against uniform."""
    uniform = comparison.uniform
    assert uniform is not None
    rows = [*comparison.targets, *comparison.domains]
    groups = [("average", comparison.domains), *((name, (name,)) for name in reversed(rows))]
    figure, axes = canvas(max(2.6, 1.2 + 0.27 * len(groups)))
    for i, arm in enumerate(comparison.rivals):
        changes = [
            relative_change(arm.perplexity(names).mean, uniform.perplexity(names).mean)
            for _, names in groups
        ]
        axes.plot(
            changes,
            range(len(groups)),
            marker=_MARKERS[i % len(_MARKERS)],
            linestyle="none",
            markersize=7,
            markerfacecolor=PAGE if arm.kind == "natural" else _arm_color(i),
            markeredgecolor=MUTED if arm.kind == "natural" else PAGE,
            markeredgewidth=1.3 if arm.kind == "natural" else 0.8,
            label=arm.label,
            zorder=3 + (arm.kind != "natural"),
        )
    axes.axvline(0, color=INK, linewidth=1.0)
    axes.axhline(0.5, color=GRID, linewidth=0.8)
    labels = [f"{label} (target)" if label in comparison.targets else label for label, _ in groups]
    name_places(axes, labels)
    axes.grid(axis="x")
    axes.xaxis.set_major_locator(ticks())
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_xlabel("change of perplexity against uniform")
    axes.margins(x=0.08)
    figure.legend(loc="outside upper center", ncols=2, handlelength=1.2)
    return figure


# Arms are not domains, and have no colour of theirs: ink, then shapes.
def _arm_color(number: int) -> str:
    return INK if number == 0 else MUTED


def _held_out_curves(comparison: Comparison) -> dict[str, tuple[list[int], list[float]]]:
    """{arm: (steps, loss)} where the runs were measured on their way at least three times."""
    curves = {}
    for arm in comparison.arms:
        lines = arm.runs[0].evals
        if len(lines) < 3:
            return {}
        losses = [mean_loss(to_floats(line["loss"]), comparison.aim) for line in lines]
        curves[arm.label] = ([line["step"] for line in lines], losses)
    return curves


def curves_figure(curves: Mapping[str, tuple[list[int], list[float]]]) -> Figure:
    """{arm: (steps, loss)}, a line an arm."""
    figure, axes = canvas(height_for(len(curves)))
    styles = {
        label: (INK if i % 2 == 0 else MUTED, DASHES[i % len(DASHES)])
        for i, label in enumerate(curves)
    }
    for label, (steps, losses) in curves.items():
        color, dash = styles[label]
        axes.plot(steps, losses, color=color, linestyle=dash)
    finish_steps(axes, "loss (nats per token)", max(steps[-1] for steps, _ in curves.values()))
    label_ends(figure, axes, {label: losses[-1] for label, (_, losses) in curves.items()}, styles)
    return figure
