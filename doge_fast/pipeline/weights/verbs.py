"""`doge-fast weights`: files in, tables and new files out.

`summary` and `bounds` compute the numbers; here files are read and written, and lines made.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from doge_fast.pipeline import failures, named, records, tables
from doge_fast.pipeline.baselines import MAX_EPOCHS
from doge_fast.pipeline.config import (
    WeightsAverageConfig,
    WeightsConstrainConfig,
    WeightsShowConfig,
)
from doge_fast.pipeline.failures import UserError
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.tables import text
from doge_fast.pipeline.weights import bounds, summary
from doge_fast.pipeline.weights.summary import (
    WeightsSummary,
    by_domain,
    figure_text,
    origin,
    story,
    tokens_text,
    weight_text,
)
from doge_fast.pipeline.wording import first_few, listed, wrapped

# Lines longer than this are hard to read, however wide the window is.
_LONGEST_LINE = 100


def show_files(config: WeightsShowConfig) -> list[str]:
    """For each file: what it is, where it comes from, its weights, its warnings."""
    by_source = summary.read_all(config.files)
    budget, tokens = config.budget_tokens, named.numbers(config.tokens, "--tokens")
    lines = list[str]()
    for source, record in by_source.items():
        mixture = summary.describe(record, budget_tokens=budget, tokens=tokens)
        lines += map(_wrapped, filter(None, (f"{source}: {story(record)}", origin(record))))
        lines.append(text(mixture.table()))
        lines += map(_wrapped, (*_remarks(mixture, budget, tokens), *_warnings(record)))
    return lines


def average_files(config: WeightsAverageConfig) -> list[str]:
    """Write the mean over files; the lines show mean, spread and warnings."""
    by_source = summary.read_all(config.files)
    record = summary.average(by_source)
    written = _write(config.out, record, config.files)
    means = records.weights_by_name(record)
    deviations = [entry["weight_std"] for entry in record["domains"]]
    each = [records.weights_by_name(member) for member in by_source.values()]
    values = [[by_name[name] for by_name in each] for name in means]
    columns = {
        "mean": means.values(),
        "std": deviations,
        "std error": [deviation / math.sqrt(len(by_source)) for deviation in deviations],
        "least": map(min, values),
        "most": map(max, values),
    }
    texts = {title: map(weight_text, column) for title, column in columns.items()}
    told = (_total(summary.describe(record)), *_warnings(record))
    return [text(by_domain(means, texts)), *map(_wrapped, told), *written]


def constrain_file(config: WeightsConstrainConfig) -> list[str]:
    """Write the nearest weights within bounds; the lines show the bounds that hold, and changes."""
    record = records.read_weights(config.file)
    tokens = named.numbers(config.tokens, "--tokens")
    bounded = bounds.constrain(
        record,
        floor=_bound(config.floor, "--floor", record),
        cap=_bound(config.cap, "--cap", record),
        max_epochs=_bound(config.max_epochs, "--max-epochs", record),
        budget_tokens=config.budget_tokens,
        tokens=tokens,
        source=str(config.file),
    )
    written = _write(config.out, bounded, [config.file])
    after = summary.describe(bounded, budget_tokens=config.budget_tokens, tokens=tokens)
    held = bounded["constraints"]["bound"]
    old, new = records.weights_by_name(record), records.weights_by_name(bounded)
    changes = {name: new[name] - old[name] for name in old}
    columns = {
        "before": map(weight_text, old.values()),
        "after": map(weight_text, new.values()),
        "change": [weight_text(change, "+") for change in changes.values()],
        "after / before": [figure_text(new[n] / old[n] if old[n] else None) for n in old],
        "bound by": [held.get(share.name, "").replace("_", " ") for share in after.domains],
        "epochs": [figure_text(share.epochs) for share in after.domains],
    }
    distance = math.fsum(map(abs, changes.values())) / 2
    remarks = [] if held else ["No bound holds any domain; the weights are as they were."]
    remarks.append(f"Moved: total variation {distance:.4f}.")
    return [
        text(by_domain(old, columns), left=[4] if held else []),
        *map(_wrapped, [*remarks, _total(after)]),
        *written,
    ]


def _bound(items: Sequence[str], what: str, record: Mapping[str, Any]) -> dict[str, float]:
    """A number for every domain, a domain's from NAME=NUMBER where that is given."""
    alone = [item for item in items if "=" not in item]
    if len(alone) > 1:
        raise UserError(
            f"{what} must be one number for all domains and NAME=NUMBER for some; got "
            f"{' '.join(items)}."
        )
    named_ones = named.numbers([item for item in items if "=" in item], what)
    everywhere = {
        name: named.number(each, each, what)
        for each in alone
        for name in records.weights_by_name(record)
    }
    return everywhere | named_ones


def _write(out: Path | None, record: Json, read: Sequence[Path]) -> list[str]:
    """Write weights to a file that is neither read here nor a run's record; a line says where."""
    if out is None:
        return ["Nothing is written without --out FILE."]
    file = records.weights_path(out)
    records.check_out(file, read)
    with failures.writing(file):
        records.write_weights(file, record)
    return [f"weights: {file}"]


def _remarks(
    mixture: WeightsSummary, budget: float | None, given: Mapping[str, float]
) -> list[str]:
    lines = [_total(mixture)]
    passes = sorted(((s.epochs or 0, s.name) for s in mixture.domains), key=lambda p: -p[0])
    often = [f"{name} ({figure_text(each)})" for each, name in passes if each > MAX_EPOCHS]
    unknown = [share.name for share in mixture.domains if share.epochs is None]
    if often:
        lines.append(
            f"More than {MAX_EPOCHS:g} epochs in {tokens_text(budget)} tokens, where repeated text "
            f"is worth less: {first_few(often)}. doge-fast weights constrain --max-epochs "
            "bounds them."
        )
    if any(share.name not in (*unknown, *given) for share in mixture.domains):
        lines.append(
            "Epochs are of the tokens that the run had, as the file says; --tokens NAME=NUMBER "
            "where the training has others."
        )
    if unknown and budget is not None:
        names = first_few(unknown)
        lines.append(f"No epochs without a number of tokens: {names}. Pass --tokens NAME=NUMBER.")
    return lines


def _warnings(record: Mapping[str, Any]) -> list[str]:
    return [f"Warning: {each}" for each in record.get("warnings") or ()]


def _total(mixture: WeightsSummary) -> str:
    zeros = [share.name for share in mixture.domains if share.weight == 0]
    zero = f" Weight zero: {listed(zeros)}." if zeros else ""
    return f"{mixture.effective_text}{zero}"


def _wrapped(words: str) -> str:
    """A paragraph in lines that fit the terminal."""
    return wrapped(words, min(tables.terminal_width(), _LONGEST_LINE))
