"""`doge-fast weights card`: weights with provenance, table and figure, as a folder for the Hub."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from doge_fast.pipeline import named, records, tables, weights
from doge_fast.pipeline.config import WeightsCardConfig
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.wording import listed, plural
from doge_fast.pipeline.weight_texts import setting_text, tokens_text
from doge_fast.pipeline.weights import WeightsSummary
from doge_fast.pipeline.weights_plot import steps_drawing, weights_drawing, written

PAGE = "README.md"
# How a card begins, and by what one that may be written again is known.
_HEAD = "---\nlibrary_name: doge_fast\n"

_FIELDS = {
    "method": "method",
    "score": "score",
    "target": "target",
    "model": "proxy model",
    "parameters": "parameters",
    "steps": "steps",
    "tokens": "tokens seen",
    "block_size": "tokens in a block",
    "batch_size": "blocks in a step",
    "seed": "seed",
    "mu": "mu",
    "step_size": "step size",
    "smoothing": "smoothing",
    "average_from": "share of the steps left out of the average",
    "drift": "drift over the last fifth",
    "tokenizer_sha256": "tokenizer, SHA-256",
}
"""Of the record, where it has them: what the table of provenance calls each."""


def card(config: WeightsCardConfig) -> list[str]:
    """Write a folder with README.md, the weights and their figures. Nothing is pushed anywhere.

    Returns:
        What was written where.

    Raises:
        ValueError: the file does not hold weights, a number is out of its range, or the folder
            holds a README.md that is no card, or other weights.
    """
    record = records.read_weights(config.file)
    mixture = weights.describe(
        record,
        budget_tokens=config.budget_tokens,
        tokens=named.numbers(config.tokens, "tokens"),
    )
    folder = config.out.parent if config.out.suffix == ".md" else config.out
    page = config.out if config.out.suffix == ".md" else folder / PAGE
    source = config.file / records.WEIGHTS if config.file.is_dir() else config.file
    copy = folder / records.WEIGHTS
    is_copied = copy.resolve() != source.resolve()
    _check_place(page, copy if is_copied else None)
    drawings = [weights_drawing({str(config.file): record}), *steps_drawing(config.file)]
    figures = {f"weights{drawing.name}.png": drawing for drawing in drawings}
    for file, drawing in figures.items():
        written(drawing, folder / file)
    if is_copied:
        records.write_weights(copy, record)
    provenance = _provenance(record, config.file)
    titles = {file: drawing.title for file, drawing in figures.items()}
    page.write_text(
        _page(record, mixture, provenance, titles, config.budget_tokens), encoding="utf-8"
    )
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
    figures: Mapping[str, str],
    budget: float | None,
) -> str:
    method = str(record.get("method") or "not known")
    count = plural(len(mixture.domains), "domain")
    parts = [
        f"{_HEAD}tags:\n- domain-weights\n- data-mixture\n- pretraining\n"
        "# license: name the one that you give these weights under\n---",
        f"# Domain weights of {count}",
        "How much of each domain a language model should see in pretraining, as shares of its "
        f"tokens. Method: {method}; target: {_target(record)}. `weights.json` holds the same for "
        "programs.",
        "## Weights",
        tables.markdown(mixture.table()),
        " ".join(_legend(mixture, budget)),
        *(f"![{title}]({file})" for file, title in figures.items()),
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


def _legend(mixture: WeightsSummary, budget: float | None) -> Iterator[str]:
    """What the columns are that the table has."""
    columns = [label for label, _ in mixture.table().columns]
    meanings = {
        "std": "`std` is the standard deviation over seeds.",
        "last": "`last` is the weight after the last step.",
        "prior": "`prior` is the share of the tokens there are, `ratio` the weight over it.",
        "tokens": "`tokens` are those there are.",
        "epochs": f"`epochs` are the passes over them in a training of {tokens_text(budget)} "
        "tokens.",
    }
    yield from (meanings[label] for label in columns if label in meanings)
    yield (
        f"Effective domains, exp of the entropy: {mixture.effective_domains:.2f} of "
        f"{len(mixture.domains)}."
    )


def _provenance(record: Mapping[str, Any], path: Path) -> dict[str, str]:
    """What is known of how the weights came about; no path of the machine they were made on."""
    found = {
        label: _value(field, record[field])
        for field, label in _FIELDS.items()
        if record.get(field) is not None
    }
    if (average := record.get("average")) is not None:
        seeds = [
            str(each["seed"]) for each in average.get("of", ()) if each.get("seed") is not None
        ]
        text = f"mean of {plural(int(average['count']), 'run')}"
        found["average"] = f"{text}, seeds {listed(seeds)}" if seeds else text
    if (constraints := record.get("constraints")) is not None:
        found["bounds"] = _bounds(constraints)
    if (path / records.CONFIG).exists():
        found["begun"] = str(records.read_json(path / records.CONFIG).get("created", "not known"))
    if (versions := record.get("versions")) is not None:
        found["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return found


def _value(field: str, value: Any) -> str:
    if field == "target":
        return _target({"target": value})
    if field == "model":
        # A checkpoint of one's own is named, and not where it lies.
        return Path(value).name if Path(value).is_absolute() else str(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _target(record: Mapping[str, Any]) -> str:
    target = record.get("target")
    return "all domains alike" if target == "universal" else setting_text(target)


def _bounds(constraints: Json) -> str:
    """floor 0.05 of code; cap 0.6 of prose."""
    words = {"floor": "floor", "cap": "cap", "max_epochs": "epochs at most"}
    parts = [
        f"{word} {value:g} of {name}"
        for kind, word in words.items()
        for name, value in (constraints.get(kind) or {}).items()
    ]
    return "; ".join(parts) or "none that held"
