"""`doge-fast weights`: files in, tables of eighty columns and new files out.

What the numbers are is computed in `weights`; here they are read, written and laid out.
"""

import json
import math
import string
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from doge_fast import weights_file
from doge_fast.pipeline import records, weights
from doge_fast.pipeline.config import (
    WeightsAverageConfig,
    WeightsConstrainConfig,
    WeightsDiffConfig,
    WeightsShowConfig,
)
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.mixtures import MAX_EPOCHS
from doge_fast.pipeline.reporting.wording import as_ascii, count_text, listed, plural
from doge_fast.pipeline.weights import Share, WeightsSummary
from doge_fast.pipeline.weights_fields import SCHEDULES

WIDTH = 80
_GAP = "  "
_SHORTEST_NAME = 12
# Side by side, columns have the room.
_LONGEST_NAME = 30
# Domains named in a sentence; more are counted.
_NAMED = 6


def show(config: WeightsShowConfig) -> list[str]:
    """What the weights of the files mean: one in full, several side by side.

    Raises:
        ValueError: a file does not hold weights, or a number is out of its range.
    """
    found = _read_all(config.files)
    tokens = by_name(config.tokens, "tokens")
    mixtures = [
        weights.describe(
            record,
            budget_tokens=config.budget_tokens,
            tokens=_of_these(tokens, record) if len(found) > 1 else tokens,
        )
        for record in found.values()
    ]
    if config.json:
        described = [
            {"source": source, **_about(record), **weights_file.plain(mixture)}
            for (source, record), mixture in zip(found.items(), mixtures, strict=True)
        ]
        return [_json({"budget_tokens": config.budget_tokens, "files": described})]
    budget = config.budget_tokens
    if len(mixtures) == 1:
        (source, record), mixture = next(iter(found.items())), mixtures[0]
        heading = _wrapped(f"{source}: {_story(record)}")
        return [heading, _full_table(mixture, config.sort), *_remarks(mixture, budget)]
    legend, letters = _legend(found)
    return [*legend, *_side_by_side(letters, mixtures, budget, config.sort)]


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
    rows = [["domain", "A", "B", "B - A", "B / A"]]
    for name, change in found.change.items():
        rows.append(
            [
                name,
                _weight(found.before.get(name)),
                _weight(found.after.get(name)),
                _signed(change),
                _figure(found.ratio[name]) if name in found.after else "",
            ]
        )
    lines = [
        f"{letter}  {source}: {_story(record)}"
        for letter, source, record in zip("AB", sources, (before, after), strict=True)
    ]
    lines = [_wrapped(line, indent="   ") for line in lines]
    lines.append(_table(rows))
    lines.append(
        _wrapped(
            f"Total variation {found.total_variation:.4f}, the share of a training that goes to "
            f"other domains; mean absolute difference {found.mean_absolute:.4f}."
        )
    )
    for what, names in (("Added", found.added), ("Dropped", found.dropped)):
        if names:
            lines.append(_wrapped(f"{what}: {listed(names)}."))
    if found.settings:
        told = (f"{key} {_setting(a)} and {_setting(b)}" for key, (a, b) in found.settings.items())
        lines.append(_wrapped(f"Also different: {'; '.join(told)}."))
    return lines


def average(config: WeightsAverageConfig) -> list[str]:
    """The mean over files, written; its spread, told.

    Raises:
        ValueError: what `weights.average` refuses, one file twice, or a place that is not to be
            written to; nothing is written.
    """
    found = _read_all(config.files)
    record = weights.average(found, different=config.different)
    written = _write(config.out, record, config.files)
    errors = weights.standard_errors(record)
    each = [records.weights_by_name(member) for member in found.values()]
    rows = [["domain", "mean", "std", "std error", "least", "most"]]
    for entry in record["domains"]:
        name = entry["name"]
        values = [by[name] for by in each]
        spread = [entry["weight_std"], errors[name], min(values), max(values)]
        rows.append([name, *map(_weight, [entry["weight"], *spread])])
    lines = [_table(rows), *_differences(found)]
    return [*lines, _total(weights.describe(record)), *written]


def constrain(config: WeightsConstrainConfig) -> list[str]:
    """The nearest weights within bounds, written; what bound and how far they moved, told.

    Raises:
        ValueError: what `weights.constrain` refuses, or a place that is not to be written to;
            nothing is written.
    """
    record = records.read_weights(config.file)
    before = records.weights_by_name(record)
    tokens = by_name(config.tokens, "tokens")
    found = weights.constrain(
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
    return [
        _bounds_table(before, after, found.bound),
        *_wrapped_all(_what_bound(found)),
        *_wrapped_all(_what_is_lost(record)),
        _total(after),
        *written,
    ]


def by_name(items: Sequence[str], what: str) -> dict[str, float]:
    """{name: number} of NAME=NUMBER words; a name may hold "=".

    Raises:
        ValueError: a word is not such, or names a domain twice.
    """
    found: dict[str, float] = {}
    for item in items:
        name, _, number = item.rpartition("=")
        if not name or name in found:
            raise ValueError(f"{what} must be NAME=NUMBER, each name once; got {' '.join(items)}.")
        found[name] = _parsed(number, item, what)
    return found


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
    everywhere = _parsed(alone[0], alone[0], what) if alone else none
    named = by_name([item for item in items if "=" in item], what)
    return dict.fromkeys(names, everywhere) | named


def _parsed(number: str, item: str, what: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{what} must be a number, or NAME=NUMBER; got {item!r}.")
    return value


def _of_these(tokens: Mapping[str, float], record: Mapping[str, Any]) -> dict[str, float]:
    """Of several files not each has every domain that tokens are given for."""
    names = records.weights_by_name(record)
    return {name: count for name, count in tokens.items() if name in names}


def _read_all(paths: Sequence[Path]) -> dict[str, Json]:
    """{path: record}, in order; a path given twice is a slip of the hand."""
    if not paths:
        raise ValueError("Name a weights.json, or a run directory that holds one.")
    files = [path / records.WEIGHTS if path.is_dir() else path for path in paths]
    twice = [str(path) for path, file in zip(paths, files, strict=True) if files.count(file) > 1]
    if twice:
        raise ValueError(f"A file is named once; {twice[0]} is named twice.")
    return {str(path): records.read_weights(path) for path in paths}


def _write(out: Path | None, record: Json, read: Sequence[Path]) -> list[str]:
    """Write weights where no run keeps its own; say where."""
    if out is None:
        return ["Nothing is written without --out FILE."]
    file = out / records.WEIGHTS if out.is_dir() else out
    folders = {path.resolve() if path.is_dir() else path.resolve().parent for path in read}
    is_source = any(file.resolve() == folder / records.WEIGHTS for folder in folders) or any(
        file.resolve() == path.resolve() for path in read
    )
    if is_source or (file.parent / records.CONFIG).exists():
        raise ValueError(
            f"out must be a file of its own; {file} is "
            f"{'what is read here' if is_source else 'in a run directory'}. Name another."
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        records.write_weights(file, record)
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror}.") from None
    return [f"weights: {file}"]


# What a record says of itself.


def _about(record: Mapping[str, Any]) -> Json:
    keys = ("method", "score", "target", "model", "steps", "seed", "tokenizer_sha256")
    return {key: record[key] for key in keys if key in record}


def _story(record: Mapping[str, Any]) -> str:
    """doge, target universal, 300 steps, seed 0."""
    parts = [str(record.get("method") or "method not known")]
    if record.get("score") not in (None, "paper"):
        parts.append(f"score {record['score']}")
    if record.get("target") is not None:
        parts.append(f"target {_setting(record['target'])}")
    if record.get("steps") is not None:
        parts.append(plural(record["steps"], "step"))
    if record.get("seed") is not None:
        parts.append(f"seed {record['seed']}")
    if record.get("average"):
        parts.append(f"mean of {plural(record['average'].get('count', 0), 'file')}")
    if record.get("constraints"):
        parts.append("constrained")
    return ", ".join(parts)


def _setting(value: Any) -> str:
    """A setting in a sentence: a target by names, a long hash by its beginning."""
    if value is None:
        return "not said"
    if isinstance(value, Mapping):
        return " + ".join(name if tau == 1 else f"{tau:g} {name}" for name, tau in value.items())
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}..."


def _differences(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What averaged files do not have in common, beside the seed; and seeds that they share."""
    told = []
    for key in ("method", "score", "mu", "target", "model", "tokenizer_sha256", "steps"):
        values = list(dict.fromkeys(_setting(record.get(key)) for record in found.values()))
        if len(values) > 1:
            told.append(f"{key} {listed(values)}")
    lines = [_wrapped(f"Not the same in all: {'; '.join(told)}.")] if told else []
    seeds = [record.get("seed") for record in found.values()]
    if None not in seeds and len(set(seeds)) < len(seeds):
        lines.append(
            _wrapped(
                f"Seeds {listed(map(str, seeds))}: runs of one seed are not independent, and the "
                "spread is that much too small."
            )
        )
    return lines


# Tables.


def _full_table(mixture: WeightsSummary, is_sorted: bool) -> str:
    """One file: every column of which somebody knows something."""
    columns: dict[str, Callable[[Share], str]] = {
        "weight": lambda share: _weight(share.weight),
        "std": lambda share: _weight(share.std),
        "last": lambda share: _weight(share.last),
        "prior": lambda share: _weight(share.prior),
        "ratio": lambda share: _figure(share.ratio),
        "tokens": lambda share: _count(share.tokens),
        "epochs": lambda share: _figure(share.epochs),
    }
    shares = _in_order(mixture.domains, is_sorted)
    cells = {title: [cell(share) for share in shares] for title, cell in columns.items()}
    kept = [title for title, column in cells.items() if any(column)]
    rows = [[share.name, *(cells[title][j] for title in kept)] for j, share in enumerate(shares)]
    return _table([["domain", *kept], *rows])


def _in_order(shares: Sequence[Share], is_sorted: bool) -> list[Share]:
    return sorted(shares, key=lambda share: -share.weight) if is_sorted else list(shares)


def _side_by_side(
    letters: Sequence[str],
    mixtures: Sequence[WeightsSummary],
    budget: float | None,
    is_sorted: bool,
) -> list[str]:
    """Several files: weights, then epochs; as many columns below each other as fit."""
    by_file = [{share.name: share for share in mixture.domains} for mixture in mixtures]
    shares = {share.name: share for mixture in reversed(mixtures) for share in mixture.domains}
    names = list(dict.fromkeys(share.name for mixture in mixtures for share in mixture.domains))
    if is_sorted:
        names.sort(key=lambda name: -max(by[name].weight for by in by_file if name in by))
    rows = [
        [name, *(_weight(by[name].weight if name in by else None) for by in by_file)]
        for name in names
    ]
    priors = [{name: share.prior for name, share in by.items()} for by in by_file]
    header = ["domain", *letters]
    if all(prior == priors[0] for prior in priors) and None not in priors[0].values():
        header.append("prior")
        rows = [[*row, _weight(shares[row[0]].prior)] for row in rows]
    effective = ["effective domains", *(f"{mixture.effective_domains:.2f}" for mixture in mixtures)]
    lines = _panels([header, *rows, effective])
    if budget is not None:
        epochs = [
            [name, *(_figure(by[name].epochs if name in by else None) for by in by_file)]
            for name in names
        ]
        lines += [f"Epochs in {_plain_count(budget)} tokens:"]
        lines += _panels([["domain", *letters], *epochs])
    return lines


def _bounds_table(
    before: Mapping[str, float], after: WeightsSummary, bound: Mapping[str, str]
) -> str:
    rows = [["domain", "before", "after", "after / before", "bound by", "epochs"]]
    for share in after.domains:
        old = before[share.name]
        rows.append(
            [
                share.name,
                _weight(old),
                _weight(share.weight),
                _figure(share.weight / old if old else None),
                bound.get(share.name, "").replace("_", " "),
                _figure(share.epochs),
            ]
        )
    has_epochs = any(row[-1] for row in rows[1:])
    return _table([row if has_epochs else row[:-1] for row in rows])


def _what_bound(found: weights.Constrained) -> list[str]:
    at = {
        what: [name for name, each in found.bound.items() if each == what]
        for what in ("floor", "cap", "max_epochs")
    }
    words = {"floor": "At the floor", "cap": "At the cap", "max_epochs": "At the epochs allowed"}
    lines = [f"{words[what]}: {listed(names)}." for what, names in at.items() if names]
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
        return lines
    often = [share for share in mixture.domains if (share.epochs or 0) > MAX_EPOCHS]
    unknown = [share.name for share in mixture.domains if share.epochs is None]
    if often:
        often.sort(key=lambda share: -(share.epochs or 0))
        named = _some([f"{share.name} ({_figure(share.epochs)})" for share in often])
        lines.append(
            f"More than {MAX_EPOCHS:g} epochs in {_plain_count(budget)} tokens, where repeated "
            f"text is worth less: {named}. doge-fast weights constrain --max-epochs bounds them."
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
    return _wrapped_all(lines)


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
    return _wrapped(f"{text} Weight zero: {listed(zeros)}." if zeros else text)


def _legend(found: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    letters = list(string.ascii_uppercase)
    if len(found) > len(letters):
        letters = [str(number + 1) for number in range(len(found))]
    lines = [
        _wrapped(f"{letter:<3}{source}: {_story(record)}", indent="   ")
        for letter, (source, record) in zip(letters, found.items(), strict=False)
    ]
    return lines, letters[: len(found)]


def _panels(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table cut into as many below each other as its columns need."""
    widths = _widths(rows)
    room, panels = WIDTH - min(widths[0], _LONGEST_NAME), [[0]]
    left = room
    for column in range(1, len(rows[0])):
        need = len(_GAP) + widths[column]
        if need > left and len(panels[-1]) > 1:
            panels.append([0])
            left = room
        panels[-1].append(column)
        left -= need
    return [
        _table([[row[column] if column < len(row) else "" for column in panel] for row in rows])
        for panel in panels
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Names to the left and shortened where they must be, numbers to the right."""
    widths = _widths(rows)
    first = min(widths[0], _name_width(widths[1:]))
    lines = []
    for row in rows:
        cells = [_shortened(row[0], first).ljust(first)]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(_GAP.join(cells).rstrip())
    return "\n".join(lines)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    number = len(rows[0])
    return [max(len(row[j]) if j < len(row) else 0 for row in rows) for j in range(number)]


def _name_width(others: Sequence[int]) -> int:
    return max(_SHORTEST_NAME, WIDTH - sum(len(_GAP) + width for width in others))


def _shortened(name: str, width: int) -> str:
    """Both ends of a name that is too long: they tell it from others."""
    if len(name) <= width:
        return name
    head = (width - 3 + 1) // 2
    return f"{name[:head]}...{name[len(name) - (width - 3 - head) :]}"


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _wrapped_all(lines: Sequence[str]) -> list[str]:
    return [_wrapped(line) for line in lines]


def _weight(value: float | None) -> str:
    """Four decimals, or a power of ten where these would all be zero."""
    if value is None:
        return ""
    return f"{value:.0e}" if 0 < value < 5e-5 else f"{value:.4f}"


def _signed(change: float) -> str:
    return f"{change:+.0e}" if 0 < abs(change) < 5e-5 else f"{change:+.4f}"


def _figure(value: float | None) -> str:
    """Three digits, and those of a whole number."""
    if value is None:
        return ""
    return f"{value:.0f}" if 100 <= value < 1e7 else f"{value:#.3g}"


def _count(value: float | None) -> str:
    return "" if value is None else _plain_count(value)


def _plain_count(value: float) -> str:
    return as_ascii(count_text(value))


def _json(value: Any) -> str:
    return json.dumps(weights_file.plain(value), indent=2, ensure_ascii=False, allow_nan=False)
