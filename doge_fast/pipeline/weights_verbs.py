"""`doge-fast weights`: files in, tables and new files out.

What the numbers are is computed in `weights` and `bounds`; here they are read, written and told.
"""

import json
import math
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from doge_fast import weights_file
from doge_fast.pipeline import bounds, named, records, weights
from doge_fast.pipeline.config import (
    WeightsAverageConfig,
    WeightsConstrainConfig,
    WeightsDiffConfig,
    WeightsShowConfig,
)
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.mixtures import MAX_EPOCHS
from doge_fast.pipeline.reporting.wording import listed
from doge_fast.pipeline.tables import table_of, text
from doge_fast.pipeline.weight_texts import (
    all_wrapped,
    change_text,
    figure_text,
    setting_text,
    story,
    tokens_text,
    weight_text,
    wrapped,
)
from doge_fast.pipeline.weights import WeightsSummary
from doge_fast.pipeline.weights_fields import SCHEDULES

# Domains named in a sentence; more are counted.
_NAMED = 6


def show(config: WeightsShowConfig) -> list[str]:
    """What the weights of the files mean: one in full, several side by side.

    Raises:
        ValueError: a file does not hold weights, or a number is out of its range.
    """
    found = read_all(config.files)
    budget, tokens = config.budget_tokens, named.numbers(config.tokens, "tokens")
    mixtures = [
        weights.describe(
            record,
            budget_tokens=budget,
            tokens=_of_these(tokens, record) if len(found) > 1 else tokens,
        )
        for record in found.values()
    ]
    if config.json:
        described = [
            {"source": source, **_about(record), **weights_file.plain(mixture)}
            for (source, record), mixture in zip(found.items(), mixtures, strict=True)
        ]
        return [_json({"budget_tokens": budget, "files": described})]
    if len(mixtures) > 1:
        return _side_by_side(found, mixtures, budget, config.sort)
    (source, record), mixture = next(iter(found.items())), mixtures[0]
    return [
        wrapped(f"{source}: {story(record)}"),
        text(mixture.table(largest_first=config.sort)),
        *_remarks(mixture, budget),
    ]


def diff(config: WeightsDiffConfig) -> list[str]:
    """How two files differ, by name.

    Raises:
        ValueError: a file does not hold weights.
    """
    sources = [str(config.before), str(config.after)]
    before, after = (records.read_weights(path) for path in (config.before, config.after))
    found = weights.compare(before, after)
    if config.json:
        return [_json({"sources": sources, **weights_file.plain(found)})]
    rows = [
        [
            name,
            weight_text(found.before.get(name)),
            weight_text(found.after.get(name)),
            change_text(change),
            figure_text(found.ratio[name]) if name in found.after else "",
        ]
        for name, change in found.change.items()
    ]
    remarks = [
        f"Total variation {found.total_variation:.4f}, the share of a training that goes to other "
        f"domains; mean absolute difference {found.mean_absolute:.4f}."
    ]
    for what, names in (("Added", found.added), ("Dropped", found.dropped)):
        if names:
            remarks.append(f"{what}: {listed(names)}.")
    if found.settings:
        pairs = found.settings.items()
        told = (f"{key} {setting_text(a)} and {setting_text(b)}" for key, (a, b) in pairs)
        remarks.append(f"Also different: {'; '.join(told)}.")
    return [
        *_legend("AB", dict(zip(sources, (before, after), strict=True))),
        text(table_of(["domain", "A", "B", "B - A", "B / A"], rows)),
        *all_wrapped(remarks),
    ]


def average(config: WeightsAverageConfig) -> list[str]:
    """The mean over files, written; its spread, told.

    Raises:
        ValueError: what `weights.average` refuses, one file twice, or a place that is not to be
            written to; nothing is written.
    """
    found = read_all(config.files)
    record = weights.average(found, different=config.different)
    written = _write(config.out, record, config.files)
    errors = weights.standard_errors(record)
    each = [records.weights_by_name(member) for member in found.values()]
    rows = []
    for entry in record["domains"]:
        name = entry["name"]
        values = [by_name[name] for by_name in each]
        spread = [entry["weight_std"], errors[name], min(values), max(values)]
        rows.append([name, *map(weight_text, [entry["weight"], *spread])])
    return [
        text(table_of(["domain", "mean", "std", "std error", "least", "most"], rows)),
        *all_wrapped([*_differences(found), _total(weights.describe(record))]),
        *written,
    ]


def constrain(config: WeightsConstrainConfig) -> list[str]:
    """The nearest weights within bounds, written; what bound and how far they moved, told.

    Raises:
        ValueError: what `bounds.constrain` refuses, or a place that is not to be written to;
            nothing is written.
    """
    record = records.read_weights(config.file)
    before = records.weights_by_name(record)
    tokens = named.numbers(config.tokens, "tokens")
    found = bounds.constrain(
        record,
        floor=_bound(config.floor, "floor", before, 0.0),
        cap=_bound(config.cap, "cap", before, 1.0),
        max_epochs=_bound(config.max_epochs, "max_epochs", before, math.inf),
        budget_tokens=config.budget_tokens,
        tokens=tokens,
        source=str(config.file),
    )
    written = _write(config.out, found.record, [config.file])
    after = weights.describe(found.record, budget_tokens=config.budget_tokens, tokens=tokens)
    rows = [
        [
            share.name,
            weight_text(before[share.name]),
            weight_text(share.weight),
            figure_text(share.weight / before[share.name] if before[share.name] else None),
            found.bound.get(share.name, "").replace("_", " "),
            figure_text(share.epochs),
        ]
        for share in after.domains
    ]
    header = ["domain", "before", "after", "after / before", "bound by", "epochs"]
    if config.budget_tokens is None:
        header, rows = header[:-1], [row[:-1] for row in rows]
    return [
        text(table_of(header, rows), left=[3]),
        *all_wrapped([*_what_bound(found), *_what_is_lost(record), _total(after)]),
        *written,
    ]


def read_all(paths: Sequence[Path]) -> dict[str, Json]:
    """{path: record}, in order.

    Raises:
        ValueError: no path, one twice, which is a slip of the hand, or one without weights.
    """
    if not paths:
        raise ValueError("Name a weights.json, or a run directory that holds one.")
    files = [path / records.WEIGHTS if path.is_dir() else path for path in paths]
    twice = [str(path) for path, file in zip(paths, files, strict=True) if files.count(file) > 1]
    if twice:
        raise ValueError(f"A file is named once; {twice[0]} is named twice.")
    return {str(path): records.read_weights(path) for path in paths}


def _bound(
    items: Sequence[str], what: str, names: Mapping[str, float], none: float
) -> dict[str, float]:
    """A number for every domain, those named by their own."""
    alone = [item for item in items if "=" not in item]
    if len(alone) > 1:
        raise ValueError(
            f"{what} must be one number for all domains and NAME=NUMBER for some; got "
            f"{' '.join(items)}."
        )
    everywhere = named.number(alone[0], alone[0], what) if alone else none
    return dict.fromkeys(names, everywhere) | named.numbers(
        [item for item in items if "=" in item], what
    )


def _of_these(tokens: Mapping[str, float], record: Mapping[str, Any]) -> dict[str, float]:
    """Of several files not each has every domain that tokens are given for."""
    names = records.weights_by_name(record)
    return {name: count for name, count in tokens.items() if name in names}


def _write(out: Path | None, record: Json, read: Sequence[Path]) -> list[str]:
    """Write weights, though not over what is read or what a run keeps; say where."""
    if out is None:
        return ["Nothing is written without --out FILE."]
    file = out / records.WEIGHTS if out.is_dir() else out
    records.check_out(file, read)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        records.write_weights(file, record)
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror}.") from None
    return [f"weights: {file}"]


def _about(record: Mapping[str, Any]) -> Json:
    keys = ("method", "score", "target", "model", "steps", "seed", "tokenizer_sha256")
    return {key: record[key] for key in keys if key in record}


def _side_by_side(
    found: Mapping[str, Mapping[str, Any]],
    mixtures: Sequence[WeightsSummary],
    budget: float | None,
    is_sorted: bool,
) -> list[str]:
    """Several files: a letter for each, their weights, then their epochs."""
    is_few = len(found) <= len(string.ascii_uppercase)
    letters = [string.ascii_uppercase[i] if is_few else str(i + 1) for i in range(len(found))]
    by_file = [{share.name: share for share in mixture.domains} for mixture in mixtures]
    names = list(dict.fromkeys(name for by_name in by_file for name in by_name))
    if is_sorted:
        names.sort(key=lambda name: -max(by[name].weight for by in by_file if name in by))
    header = ["domain", *letters]
    rows = [
        [name, *(weight_text(by[name].weight if name in by else None) for by in by_file)]
        for name in names
    ]
    rows.append(["effective domains", *(f"{each.effective_domains:.2f}" for each in mixtures)])
    priors = [{name: share.prior for name, share in by.items()} for by in by_file]
    if all(prior == priors[0] for prior in priors) and None not in priors[0].values():
        header.append("prior")
        rows = [[*row, weight_text(priors[0].get(row[0]))] for row in rows]
    lines = [*_legend(letters, found), text(table_of(header, rows))]
    if budget is not None:
        epochs = [
            [name, *(figure_text(by[name].epochs if name in by else None) for by in by_file)]
            for name in names
        ]
        lines.append(f"Epochs in {tokens_text(budget)} tokens:")
        lines.append(text(table_of(["domain", *letters], epochs)))
    return lines


def _legend(letters: Sequence[str], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        wrapped(f"{letter:<3}{source}: {story(record)}", indent="   ")
        for letter, (source, record) in zip(letters, found.items(), strict=True)
    ]


def _differences(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What averaged files do not have in common, beside the seed; and seeds that they share."""
    told = []
    for key in ("method", "score", "mu", "target", "model", "tokenizer_sha256", "steps"):
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


def _what_bound(found: bounds.Constrained) -> list[str]:
    words = {"floor": "At the floor", "cap": "At the cap", "max_epochs": "At the epochs allowed"}
    lines = []
    for what, place in words.items():
        names = [name for name, each in found.bound.items() if each == what]
        if names:
            lines.append(f"{place}: {listed(names)}.")
    if not lines:
        lines = ["No bound holds any domain; the weights are as they were."]
    kl = f"{found.kl:.4g} nats" if math.isfinite(found.kl) else "infinite (a zero was lifted)"
    return [*lines, f"Moved: KL {kl}, total variation {found.total_variation:.4f}."]


def _what_is_lost(record: Mapping[str, Any]) -> list[str]:
    """What the new file does not repeat, being true of the old weights only."""
    lost = ["deviations over seeds"] if any("weight_std" in e for e in record["domains"]) else []
    lost += ["the schedule of weights"] if any(record.get(s) for s in SCHEDULES) else []
    return [f"Left out, being those of the weights before: {listed(lost)}."] if lost else []


def _remarks(mixture: WeightsSummary, budget: float | None) -> list[str]:
    lines = [_total(mixture)]
    if budget is None:
        return all_wrapped(lines)
    often = [share for share in mixture.domains if (share.epochs or 0) > MAX_EPOCHS]
    unknown = [share.name for share in mixture.domains if share.epochs is None]
    if often:
        often.sort(key=lambda share: -(share.epochs or 0))
        most = _some([f"{share.name} ({figure_text(share.epochs)})" for share in often])
        lines.append(
            f"More than {MAX_EPOCHS:g} epochs in {tokens_text(budget)} tokens, where repeated text "
            f"is worth less: {most}. doge-fast weights constrain --max-epochs bounds them."
        )
    if len(unknown) < len(mixture.domains):
        lines.append(
            "Epochs are of the tokens that the run had, as the file says; --tokens NAME=NUMBER "
            "where the training has others."
        )
    if unknown:
        lines.append(
            f"No epochs without a number of tokens: {_some(unknown)}. Pass --tokens NAME=NUMBER."
        )
    return all_wrapped(lines)


def _some(words: Sequence[str]) -> str:
    """a, b and 3 more."""
    if len(words) <= _NAMED:
        return listed(words)
    return listed([*words[: _NAMED - 1], f"{len(words) - _NAMED + 1} more"])


def _total(mixture: WeightsSummary) -> str:
    zeros = [share.name for share in mixture.domains if share.weight == 0]
    text = (
        f"Effective domains, exp of the entropy: {mixture.effective_domains:.2f} of "
        f"{len(mixture.domains)}."
    )
    return f"{text} Weight zero: {listed(zeros)}." if zeros else text


def _json(value: Any) -> str:
    return json.dumps(weights_file.plain(value), indent=2, ensure_ascii=False, allow_nan=False)
