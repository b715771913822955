"""`doge-fast weights plot` and `card`: figures of domain weights, and a page for the Hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from doge_fast import atomic_file, failures
from doge_fast.pipeline import named, records, tables
from doge_fast.pipeline.config import WeightsCardConfig, WeightsPlotConfig
from doge_fast.pipeline.reporting.plotting import Drawing
from doge_fast.pipeline.reporting.wording import listed, plural
from doge_fast.pipeline.weights.drawings import steps_drawing, weights_drawing
from doge_fast.pipeline.weights.summary import (
    WeightsSummary,
    describe,
    setting_text,
    tokens_text,
)
from doge_fast.pipeline.weights.verbs import read_all

FORMATS = (".png", ".svg")
PAGE = "README.md"
# How a card begins, and by what one that may be written again is known.
_HEAD = "---\nlibrary_name: doge_fast\n"

_FIELDS = (
    *("method", "score", "target", "model", "parameters", "steps", "tokens", "block_size"),
    *("batch_size", "seed", "mu", "step_size", "smoothing", "average_from", "drift"),
    "tokenizer_sha256",
)
"""Of the record, where it has them, for the list of provenance."""

_LABELS = {
    "model": "proxy model",
    "tokens": "tokens seen",
    "block_size": "tokens in a block",
    "batch_size": "blocks in a step",
    "step_size": "step size",
    "average_from": "share of the steps left out of the average",
    "drift": "drift over the last fifth",
    "tokenizer_sha256": "tokenizer, SHA-256",
}
"""What that list calls a field whose own name does not say it."""


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
    page = config.out if config.out.suffix == ".md" else config.out / PAGE
    source = config.file / records.WEIGHTS if config.file.is_dir() else config.file
    copy = page.with_name(records.WEIGHTS)
    is_copied = copy.resolve() != source.resolve()
    _check_place(page, copy if is_copied else None)
    drawings = [weights_drawing({str(config.file): record}), *steps_drawing(config.file)]
    figures = {f"weights{drawing.name}.png": drawing for drawing in drawings}
    text = _page(record, mixture, _provenance(record, config.file), figures, config.budget_tokens)
    with failures.writing(page):
        for file, drawing in figures.items():
            atomic_file.write(page.with_name(file), drawing.png)
        if is_copied:
            records.write_weights(copy, record)
        atomic_file.write(page, text)
    return [f"card: {page}"]


def _check_place(page: Path, copy: Path | None) -> None:
    """A card may be written again; another page, or other weights, are somebody's work."""
    is_card = page.exists() and page.read_text(encoding="utf-8").startswith(_HEAD)
    for file in (page, copy):
        if file is not None and file.exists() and not is_card:
            raise ValueError(
                f"out must be a new place or an earlier card; {file} is there already. Name "
                "another with --out."
            )
    if copy is not None:
        records.check_out(copy, [])


def _page(
    record: Mapping[str, Any],
    mixture: WeightsSummary,
    provenance: Mapping[str, str],
    figures: Mapping[str, Drawing],
    budget: float | None,
) -> str:
    parts = [
        f"{_HEAD}tags:\n- domain-weights\n- data-mixture\n- pretraining\n"
        "# license: name the one that you give these weights under\n---",
        f"# Domain weights of {plural(len(mixture.domains), 'domain')}",
        "How much of each domain a language model should see in pretraining, as shares of its "
        f"tokens. Method: {provenance.get('method', 'not known')}; target: "
        f"{provenance.get('target', 'not said')}. `weights.json` holds the same for programs.",
        "## Weights",
        tables.markdown(mixture.table()),
        _legend(mixture, budget),
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


def _legend(mixture: WeightsSummary, budget: float | None) -> str:
    """What the columns are that the table has."""
    meanings = {
        "std": "`std` is the standard deviation over seeds.",
        "last": "`last` is the weight after the last step.",
        "prior": "`prior` is the share of the tokens there are, `ratio` the weight over it.",
        "tokens": "`tokens` are those there are.",
        "epochs": f"`epochs` are the passes over them in a training of {tokens_text(budget)} "
        "tokens.",
    }
    labels = [label for label, _ in mixture.table().columns]
    told = [meanings[label] for label in labels if label in meanings]
    return " ".join([*told, mixture.effective_text])


def _provenance(record: Mapping[str, Any], path: Path) -> dict[str, str]:
    """What is known of how the weights came about; no path of the machine they were made on."""
    found = {
        _LABELS.get(field, field): _value(field, record[field])
        for field in _FIELDS
        if record.get(field) is not None
    }
    if (average := record.get("average")) is not None:
        seeds = [
            str(each["seed"]) for each in average.get("of", ()) if each.get("seed") is not None
        ]
        text = f"mean of {plural(int(average['count']), 'run')}"
        found["average"] = f"{text}, seeds {listed(seeds)}" if seeds else text
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


_TARGETS = {"universal": "all domains alike", "worst": "the domains that improve least"}


def _value(field: str, value: Any) -> str:
    if field == "target":
        return _TARGETS[value] if isinstance(value, str) else setting_text(value)
    if field == "model":
        # A checkpoint of one's own is named, and not where it lies.
        return Path(value).name if Path(value).is_absolute() else str(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
