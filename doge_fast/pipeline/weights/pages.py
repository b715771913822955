"""`doge-fast weights plot` and `card`: figures of domain weights, and a page for the Hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from doge_fast import atomic_file
from doge_fast.pipeline import failures, named, records, tables
from doge_fast.pipeline.config import WeightsCardConfig, WeightsPlotConfig
from doge_fast.pipeline.reporting import plotting
from doge_fast.pipeline.reporting.plotting import Drawing
from doge_fast.pipeline.reporting.wording import listed, plural
from doge_fast.pipeline.weights.summary import (
    WeightsSummary,
    describe,
    read_all,
    setting_text,
    story,
    tokens_text,
)

_LONGEST_LABEL = 48
# How a card begins, and by what one that may be written again is known.
_HEAD = "---\nlibrary_name: doge_fast\n"
_PROVENANCE = {
    **{"method": "method", "score": "score", "target": "target", "model": "proxy model"},
    **{"parameters": "parameters", "steps": "steps", "tokens": "tokens seen"},
    **{"block_size": "tokens in a block", "batch_size": "blocks in a step", "seed": "seed"},
    **{"mu": "mu", "step_size": "step size"},
    "smoothing": "smoothing",
    "average_from": "share of the steps left out of the average",
    "drift": "drift over the last fifth",
    "tokenizer_sha256": "tokenizer, SHA-256",
}
"""Fields of the record that a card lists where it has them, and what it calls them."""


def weights_drawing(found: Mapping[str, Mapping[str, Any]]) -> Drawing:
    """A bar for each domain and file, {where it was read: record}, and natural weights."""
    names = [Path(source).name for source in found]
    if len(set(names)) < len(names):
        names = [tables.shortened(source, _LONGEST_LABEL) for source in found]
    labels = names if len(found) > 1 else ["weight"]
    mixtures = dict(zip(labels, map(describe, found.values()), strict=True))
    caption = "; ".join(f"{source}: {story(record)}" for source, record in found.items())
    with plotting.style():
        return plotting.drawing_of("", "Domain weights", caption, _bars(mixtures))


def _bars(mixtures: Mapping[str, WeightsSummary]) -> Figure:
    shares = [share for mixture in mixtures.values() for share in mixture.domains]
    # The first domain on top.
    names = list(dict.fromkeys(share.name for share in shares))[::-1]
    thickness = 0.72 / len(mixtures)
    figure, axes = plotting.canvas(
        plotting.height_for(max(len(names), len(names) * len(mixtures) // 2))
    )
    for i, (label, mixture) in enumerate(mixtures.items()):
        offset = (len(mixtures) / 2 - i - 0.5) * thickness
        errors = [share.std or 0.0 for share in mixture.domains]
        axes.barh(
            [names.index(share.name) + offset for share in mixture.domains],
            [share.weight for share in mixture.domains],
            height=0.9 * thickness,
            color=plotting.PALETTE[i % len(plotting.PALETTE)],
            xerr=errors if any(errors) else None,
            error_kw={"ecolor": plotting.INK, "elinewidth": 0.9},
            label=label,
        )
    # The natural weights, where all that know some agree on them.
    told = [(share.name, share.prior) for share in shares if share.prior is not None]
    priors = dict(told)
    if priors and len(priors) == len(set(told)):
        places = np.array([names.index(name) for name in priors])
        marks: Any = {"color": plotting.INK, "linewidth": 1.6, "label": "natural"}
        axes.vlines(list(priors.values()), places - 0.44, places + 0.44, **marks)
    if all(len(mixture.domains) == len(names) for mixture in mixtures.values()):
        dotted: Any = {"color": plotting.MUTED, "linewidth": 0.9, "linestyle": (0, (2, 2))}
        axes.axvline(1 / len(names), label="uniform", **dotted)
    plotting.finish_places(axes, names, "domain weight")
    axes.set_xlim(left=0)
    columns = 1 if len(mixtures) > 1 else 3
    figure.legend(loc="outside upper left", ncols=columns, handlelength=1.4)
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


def plot(config: WeightsPlotConfig) -> list[str]:
    """Draw the weights of one file or several; of one run its weights over the steps too.

    Returns:
        What was written where.

    Raises:
        ValueError: a file does not hold weights, or the figure's name has another ending.
    """
    if config.out.suffix not in (".png", ".svg"):
        raise ValueError(f"out must end in .png or .svg; got {config.out}.")
    drawings = [weights_drawing(read_all(config.files))]
    if len(config.files) == 1:
        drawings += steps_drawing(config.files[0])
    lines = []
    for drawing in drawings:
        file = config.out.with_stem(config.out.stem + drawing.name)
        with failures.writing(file):
            atomic_file.write(file, drawing.png if file.suffix == ".png" else drawing.svg)
        lines.append(f"figure: {file}")
    return lines


def card(config: WeightsCardConfig) -> list[str]:
    """Write a folder with README.md, the weights and their figures. Nothing is pushed anywhere.

    Returns:
        What was written where.

    Raises:
        ValueError: the file does not hold weights, a number is out of its range, or the folder
            holds a README.md that is no card, or other weights.
    """
    record = records.read_weights(config.file)
    tokens = named.numbers(config.tokens, "tokens")
    mixture = describe(record, budget_tokens=config.budget_tokens, tokens=tokens)
    page = config.out if config.out.suffix == ".md" else config.out / "README.md"
    source = config.file / records.WEIGHTS if config.file.is_dir() else config.file
    copy = page.with_name(records.WEIGHTS)
    is_copied = copy.resolve() != source.resolve()
    # A card may be written again; another page, or other weights, are somebody's work.
    is_card = page.exists() and page.read_bytes().startswith(_HEAD.encode())
    taken = [file for file in ([page, copy] if is_copied else [page]) if file.exists()]
    if taken and not is_card:
        raise ValueError(
            f"out must be a new place or an earlier card; {taken[0]} is there already. Name "
            "another with --out."
        )
    if is_copied:
        records.check_out(copy, [])
    drawings = [weights_drawing({str(config.file): record}), *steps_drawing(config.file)]
    figures = {f"weights{drawing.name}.png": drawing for drawing in drawings}
    text = _page(mixture, _provenance(record, config.file), figures, config.budget_tokens)
    with failures.writing(page):
        for file, drawing in figures.items():
            atomic_file.write(page.with_name(file), drawing.png)
        if is_copied:
            records.write_weights(copy, record)
        atomic_file.write(page, text)
    return [f"card: {page}"]


def _page(
    mixture: WeightsSummary,
    provenance: Mapping[str, str],
    figures: Mapping[str, Drawing],
    budget: float | None,
) -> str:
    table = mixture.table()
    meanings = {
        "std": "`std` is the standard deviation over seeds.",
        "last": "`last` is the weight after the last step.",
        "prior": "`prior` is the share of the tokens there are, `ratio` the weight over it.",
        "tokens": "`tokens` are those there are.",
        "epochs": f"`epochs` are the passes over them in a training of {tokens_text(budget)} "
        "tokens.",
    }
    legend = [meanings[label] for label, _ in table.columns if label in meanings]
    parts = [
        f"{_HEAD}tags:\n- domain-weights\n- data-mixture\n- pretraining\n"
        "# license: name the one that you give these weights under\n---",
        f"# Domain weights of {plural(len(mixture.domains), 'domain')}",
        "How much of each domain a language model should see in pretraining, as shares of its "
        f"tokens. Method: {provenance.get('method', 'not known')}; target: "
        f"{provenance.get('target', 'not said')}. `weights.json` holds the same for programs.",
        "## Weights",
        tables.markdown(table),
        " ".join([*legend, mixture.effective_text]),
        *(f"![{drawing.title}]({file})" for file, drawing in figures.items()),
        "## Where they come from",
        "\n".join(f"- {what}: {value}" for what, value in provenance.items()),
        "## How to use them",
        "Train on a corpus of the same domains, or write the weights as a training framework reads "
        "them (`doge-fast export --list` names the frameworks):",
        "```bash\n"
        "pip install 'doge-fast[pipeline]'\n"
        "doge-fast base --data CORPUS --weights weights.json --out run\n"
        "doge-fast export weights.json --to FRAMEWORK\n"
        "```",
    ]
    return "\n\n".join(parts) + "\n"


def _provenance(record: Mapping[str, Any], path: Path) -> dict[str, str]:
    """What is known of how the weights came about; no path of the machine they were made on."""
    found = {
        label: _value(field, record[field])
        for field, label in _PROVENANCE.items()
        if record.get(field) is not None
    }
    if (average := record.get("average")) is not None:
        seeds = [each.get("seed") for each in average.get("of") or ()]
        known = [str(seed) for seed in seeds if seed is not None]
        text = f"mean of {plural(int(average['count']), 'run')}"
        found["average"] = f"{text}, seeds {listed(known)}" if known else text
    if (constraints := record.get("constraints")) is not None:
        words = {"floor": "floor", "cap": "cap", "max_epochs": "epochs at most"}
        parts = [
            f"{word} {value:g} of {name}"
            for kind, word in words.items()
            for name, value in (constraints.get(kind) or {}).items()
        ]
        found["bounds"] = "; ".join(parts) or "none that held"
    if (path / records.CONFIG).exists():
        found["begun"] = str(records.read_json(path / records.CONFIG).get("created", "not known"))
    if (versions := record.get("versions")) is not None:
        found["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return found


def _value(field: str, value: Any) -> str:
    if field == "target":
        return "all domains alike" if isinstance(value, str) else setting_text(value)
    if field == "model":
        # A checkpoint of one's own is named, and not where it lies.
        return Path(value).name if Path(value).is_absolute() else str(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
