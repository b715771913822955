"""Weights for people and for other programs: Markdown, JSON, CSV."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from doge_fast.pipeline.exports.mixture import Mixture
from doge_fast.pipeline.exports.target import Found, Phases, Target
from doge_fast.pipeline.exports.text import plain, to_json

_TOO_MANY = 4


def _rows(mixture: Mixture) -> list[dict[str, Any]]:
    """A row per domain, largest weight first; columns that no domain has are left out."""
    shares = mixture.shares()
    rows = []
    for name in sorted(shares, key=lambda name: (-shares[name], name)):
        entry, share = mixture.entries[name], float(shares[name])
        prior, epochs = entry.get("prior"), mixture.passes(name, share)
        rows.append(
            {
                "domain": name,
                "weight": shares[name],
                "weight_std": entry.get("weight_std"),
                "last": entry.get("weight_last"),
                "prior": prior,
                "ratio": share / prior if prior else None,
                "tokens": entry.get("tokens"),
                "epochs": float(epochs) if epochs else None,
            }
        )
    kept = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    return [{key: row[key] for key in kept} for row in rows]


def _markdown(mixture: Mixture) -> str:
    rows = _rows(mixture)
    header = list(rows[0])
    cells = [[_cell(mixture, key, row[key]) for key in header] for row in rows]
    widths = [max(len(line[column]) for line in [header, *cells]) for column in range(len(header))]
    rule = [
        "-" * width if column == 0 else "-" * (width - 1) + ":"
        for column, width in enumerate(widths)
    ]
    lines = [_line(line, widths) for line in [header, rule, *cells]]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if column == 0 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"


def _cell(mixture: Mixture, key: str, value: Any) -> str:
    if value is None:
        return ""
    if key == "domain":
        return str(value).replace("|", "\\|")
    if key == "weight":
        return plain(value)
    if key == "tokens":
        return f"{value:,}"
    if key in ("ratio", "epochs"):
        return f"{value:.2f}"
    return f"{value:.{mixture.settings.decimals}f}"


def _csv(mixture: Mixture) -> str:
    rows = _rows(mixture)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "weight": plain(row["weight"])} for row in rows)
    return text.getvalue()


def _read_csv(text: str) -> Phases:
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows or not {"domain", "weight"} <= set(rows[0]):
        raise ValueError("A CSV of weights must have the columns domain and weight.")
    return [(0, [Found(_number(row["weight"]), name=row["domain"]) for row in rows])]


def _json(mixture: Mixture) -> str:
    if len(mixture.phases) == 1:
        return to_json(mixture.numbers())
    return to_json(
        [
            {"first_step": phase.first_step, "weights": mixture.numbers(index)}
            for index, phase in enumerate(mixture.phases)
        ]
    )


def _read_json(text: str) -> Phases:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"Weights in JSON must be JSON: {error}.") from None
    if isinstance(value, dict):
        value = [{"first_step": 0, "weights": value}]
    try:
        return [(int(each["first_step"]), _named(each["weights"])) for each in value]
    except (TypeError, KeyError):
        raise ValueError(
            'Weights in JSON must be {domain: weight}, or a list of {"first_step", "weights"}; got '
            f"{text.strip()[:60]}."
        ) from None


def _named(weights: Mapping[str, Any]) -> list[Found]:
    return [Found(_number(weight), name=name) for name, weight in weights.items()]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"A weight must be a number; got {value!r}.") from None


TARGETS: Sequence[Target] = (
    Target(
        "markdown",
        "a table for people",
        _markdown,
        needs_paths=False,
        has_paths=False,
        comment=None,
        traps=(
            f"Weights are shares of tokens; epochs, with a budget, above {_TOO_MANY} repeat a "
            "domain more often than is known to help.",
        ),
    ),
    Target(
        "json",
        "{domain: share}, or a list of phases",
        _json,
        has_phases=True,
        needs_paths=False,
        has_paths=False,
        comment=None,
        traps=("Weights are shares of tokens.",),
        read=_read_json,
    ),
    Target(
        "csv",
        "the table, for spreadsheets",
        _csv,
        needs_paths=False,
        has_paths=False,
        comment=None,
        traps=("Weights are shares of tokens.",),
        read=_read_csv,
    ),
)
