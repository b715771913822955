"""`doge-fast weights`: files in, tables and new files out.

What the numbers are is computed in `summary` and `bounds`; here they are read, written and told.
"""

import json
import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from doge_fast.pipeline import failures, named, records, tables
from doge_fast.pipeline.config import (
    WeightsAverageConfig,
    WeightsConstrainConfig,
    WeightsDiffConfig,
    WeightsShowConfig,
)
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.records.weights import SCHEDULES
from doge_fast.pipeline.reporting.mixtures import MAX_EPOCHS
from doge_fast.pipeline.reporting.wording import listed, wrapped
from doge_fast.pipeline.tables import text
from doge_fast.pipeline.weights import bounds, summary
from doge_fast.pipeline.weights.summary import (
    SETTINGS,
    WeightsSummary,
    by_domain,
    figure_text,
    setting_text,
    story,
    tokens_text,
    weight_text,
)
from doge_fast.weights import weights_file

# Domains named in a sentence; more are counted.
_NAMED = 6
# Lines longer than this are hard to read, however wide the window is.
_LONGEST_LINE = 100


def show(config: WeightsShowConfig) -> list[str]:
    """What the weights of the files mean: one in full, several side by side."""
    found = summary.read_all(config.files)
    budget, tokens = config.budget_tokens, named.numbers(config.tokens, "tokens")
    mixtures = []
    for record in found.values():
        names = records.weights_by_name(record) if len(found) > 1 else tokens
        # Of several files not each has every domain that tokens are given for.
        known = {name: count for name, count in tokens.items() if name in names}
        mixtures.append(summary.describe(record, budget_tokens=budget, tokens=known))
    if config.json:
        described = [
            {"source": source, **{key: record[key] for key in SETTINGS if key in record}}
            | weights_file.plain(mixture)
            for (source, record), mixture in zip(found.items(), mixtures, strict=True)
        ]
        return [_json({"budget_tokens": budget, "files": described})]
    if len(mixtures) > 1:
        return _side_by_side(found, mixtures, budget, config.sort)
    ((source, record),) = found.items()
    return [
        _wrapped(f"{source}: {story(record)}"),
        text(mixtures[0].table(largest_first=config.sort)),
        *map(_wrapped, _remarks(mixtures[0], budget)),
    ]


def diff(config: WeightsDiffConfig) -> list[str]:
    """How two files differ, by name."""
    sources = [str(config.before), str(config.after)]
    before, after = (records.read_weights(path) for path in (config.before, config.after))
    found = summary.compare(before, after)
    if config.json:
        return [_json({"sources": sources, **weights_file.plain(found)})]
    ratios = (found.ratio[name] if name in found.after else None for name in found.change)
    columns = {
        "A": map(weight_text, map(found.before.get, found.change)),
        "B": map(weight_text, map(found.after.get, found.change)),
        "B - A": [weight_text(change, "+") for change in found.change.values()],
        "B / A": map(figure_text, ratios),
    }
    remarks = [
        f"Total variation {found.total_variation:.4f}, the share of a training that goes to other "
        f"domains; mean absolute difference {found.mean_absolute:.4f}."
    ]
    for what, names in {"Added": found.added, "Dropped": found.dropped}.items():
        remarks += [f"{what}: {listed(names)}."] if names else []
    if found.settings:
        pairs = found.settings.items()
        told = (f"{key} {setting_text(a)} and {setting_text(b)}" for key, (a, b) in pairs)
        remarks.append(f"Also different: {'; '.join(told)}.")
    return [
        *_legend("AB", zip(sources, (before, after), strict=True)),
        text(by_domain(found.change, columns)),
        *map(_wrapped, remarks),
    ]


def average(config: WeightsAverageConfig) -> list[str]:
    """The mean over files, written; its spread, told."""
    found = summary.read_all(config.files)
    record = summary.average(found, different=config.different)
    written = _write(config.out, record, config.files)
    means = records.weights_by_name(record)
    deviations = [entry["weight_std"] for entry in record["domains"]]
    each = [records.weights_by_name(member) for member in found.values()]
    values = [[by_name[name] for by_name in each] for name in means]
    columns = {
        "mean": means.values(),
        "std": deviations,
        "std error": [deviation / math.sqrt(len(found)) for deviation in deviations],
        "least": map(min, values),
        "most": map(max, values),
    }
    texts = {title: map(weight_text, column) for title, column in columns.items()}
    remarks = [*_differences(found), _total(summary.describe(record))]
    return [text(by_domain(means, texts)), *map(_wrapped, remarks), *written]


def constrain(config: WeightsConstrainConfig) -> list[str]:
    """The nearest weights within bounds, written; what bound and how far they moved, told."""
    record = records.read_weights(config.file)
    tokens = named.numbers(config.tokens, "tokens")
    found = bounds.constrain(
        record,
        floor=_bound(config.floor, "floor", record, 0.0),
        cap=_bound(config.cap, "cap", record, 1.0),
        max_epochs=_bound(config.max_epochs, "max_epochs", record, math.inf),
        budget_tokens=config.budget_tokens,
        tokens=tokens,
        source=str(config.file),
    )
    written = _write(config.out, found.record, [config.file])
    after = summary.describe(found.record, budget_tokens=config.budget_tokens, tokens=tokens)
    moved = summary.compare(record, found.record)
    columns = {
        "before": map(weight_text, moved.before.values()),
        "after": map(weight_text, moved.after.values()),
        "after / before": map(figure_text, moved.ratio.values()),
        "bound by": [found.bound.get(name, "").replace("_", " ") for name in moved.before],
        "epochs": [figure_text(share.epochs) for share in after.domains],
    }
    return [
        text(by_domain(moved.before, columns), left=[3] if found.bound else []),
        *map(_wrapped, [*_what_moved(found, record), _total(after)]),
        *written,
    ]


def _bound(
    items: Sequence[str], what: str, record: Mapping[str, Any], none: float
) -> dict[str, float]:
    """A number for every domain, those named by their own."""
    alone = [item for item in items if "=" not in item]
    if len(alone) > 1:
        raise ValueError(
            f"{what} must be one number for all domains and NAME=NUMBER for some; got "
            f"{' '.join(items)}."
        )
    everywhere = named.number(alone[0], alone[0], what) if alone else none
    own = named.numbers([item for item in items if "=" in item], what)
    return dict.fromkeys(records.weights_by_name(record), everywhere) | own


def _write(out: Path | None, record: Json, read: Sequence[Path]) -> list[str]:
    """Write weights, though not over what is read or what a run keeps; say where."""
    if out is None:
        return ["Nothing is written without --out FILE."]
    file = out / records.WEIGHTS if out.is_dir() else out
    records.check_out(file, read)
    with failures.writing(file):
        records.write_weights(file, record)
    return [f"weights: {file}"]


def _side_by_side(
    found: Mapping[str, Json],
    mixtures: Sequence[WeightsSummary],
    budget: float | None,
    is_sorted: bool,
) -> list[str]:
    """Several files: a letter for each, their weights, then their epochs."""
    is_few = len(found) <= len(string.ascii_uppercase)
    letters = [string.ascii_uppercase[i] if is_few else str(i + 1) for i in range(len(found))]
    by_file = [{share.name: share for share in mixture.domains} for mixture in mixtures]
    names = list(dict.fromkeys(name for shares in by_file for name in shares))
    if is_sorted:
        names.sort(key=lambda name: -max(by[name].weight for by in by_file if name in by))

    def columns(field: str, as_text: Callable[[Any], str]) -> dict[str, list[str]]:
        """A column for each file; nothing for a domain that it lacks."""
        return {
            letter: [as_text(getattr(shares.get(name), field, None)) for name in names]
            for letter, shares in zip(letters, by_file, strict=True)
        }

    weights = columns("weight", weight_text)
    for column, mixture in zip(weights.values(), mixtures, strict=True):
        column.append(f"{mixture.effective_domains:.2f}")
    prior, *others = columns("prior", weight_text).values()
    if all(prior) and all(other == prior for other in others):
        weights["prior"] = [*prior, ""]
    table = by_domain([*names, "effective domains"], weights)
    lines = [*_legend(letters, found.items()), text(table)]
    if budget is not None:
        epochs = by_domain(names, columns("epochs", figure_text))
        lines += [f"Epochs in {tokens_text(budget)} tokens:", text(epochs)]
    return lines


def _legend(letters: Iterable[str], found: Iterable[tuple[str, Json]]) -> list[str]:
    return [
        _wrapped(f"{letter:<3}{source}: {story(record)}", indent="   ")
        for letter, (source, record) in zip(letters, found, strict=True)
    ]


def _differences(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What averaged files do not have in common, beside the seed; and seeds that they share."""
    told = []
    for key in (each for each in SETTINGS if each != "seed"):
        values = list(dict.fromkeys(setting_text(record.get(key)) for record in found.values()))
        if len(values) > 1:
            told.append(f"{key} {listed(values)}")
    lines = [f"Not the same in all: {'; '.join(told)}."] if told else []
    seeds = [record.get("seed") for record in found.values()]
    if None not in seeds and len(set(seeds)) < len(seeds):
        lines.append(
            f"Seeds {listed(map(str, seeds))}: runs of one seed are not independent, and the "
            "spread is that much too small."
        )
    return lines


def _what_moved(found: bounds.Constrained, record: Mapping[str, Any]) -> list[str]:
    """What bound, how far the weights moved, and what the new file does not repeat."""
    words = {"floor": "At the floor", "cap": "At the cap", "max_epochs": "At the epochs allowed"}
    lines = []
    for what, place in words.items():
        if names := [name for name, each in found.bound.items() if each == what]:
            lines.append(f"{place}: {listed(names)}.")
    kl = f"{found.kl:.4g} nats" if math.isfinite(found.kl) else "infinite (a zero was lifted)"
    lines = lines or ["No bound holds any domain; the weights are as they were."]
    lines.append(f"Moved: KL {kl}, total variation {found.total_variation:.4f}.")
    lost = ["deviations over seeds"] if any("weight_std" in e for e in record["domains"]) else []
    lost += ["the schedule of weights"] if any(record.get(s) for s in SCHEDULES) else []
    if lost:
        lines.append(f"Left out, being those of the weights before: {listed(lost)}.")
    return lines


def _remarks(mixture: WeightsSummary, budget: float | None) -> list[str]:
    lines = [_total(mixture)]
    passes = sorted(((s.epochs or 0, s.name) for s in mixture.domains), key=lambda p: -p[0])
    often = [f"{name} ({figure_text(each)})" for each, name in passes if each > MAX_EPOCHS]
    unknown = [share.name for share in mixture.domains if share.epochs is None]
    if often:
        lines.append(
            f"More than {MAX_EPOCHS:g} epochs in {tokens_text(budget)} tokens, where repeated text "
            f"is worth less: {_some(often)}. doge-fast weights constrain --max-epochs bounds them."
        )
    if len(unknown) < len(mixture.domains):
        lines.append(
            "Epochs are of the tokens that the run had, as the file says; --tokens NAME=NUMBER "
            "where the training has others."
        )
    if unknown and budget is not None:
        lines.append(
            f"No epochs without a number of tokens: {_some(unknown)}. Pass --tokens NAME=NUMBER."
        )
    return lines


def _some(words: Sequence[str]) -> str:
    """a, b and 3 more."""
    if len(words) <= _NAMED:
        return listed(words)
    return listed([*words[: _NAMED - 1], f"{len(words) - _NAMED + 1} more"])


def _total(mixture: WeightsSummary) -> str:
    zeros = [share.name for share in mixture.domains if share.weight == 0]
    zero = f" Weight zero: {listed(zeros)}." if zeros else ""
    return f"{mixture.effective_text}{zero}"


def _wrapped(words: str, indent: str = "") -> str:
    """A paragraph in lines that fit the terminal."""
    return wrapped(words, min(tables.terminal_width(), _LONGEST_LINE), indent=indent)


def _json(value: Any) -> str:
    return json.dumps(weights_file.plain(value), indent=2, ensure_ascii=False, allow_nan=False)
