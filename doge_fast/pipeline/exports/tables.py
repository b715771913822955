"""Weights for people and for other programs: Markdown, JSON, CSV."""

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

from doge_fast.pipeline.exports.blend import Blend, Format, Phases, named
from doge_fast.pipeline.exports.text import plain, to_json
from doge_fast.pipeline.tables import markdown, table_of


def _rows(blend: Blend) -> list[dict[str, Any]]:
    """A row per domain, largest weight first; columns that no domain has are left out."""
    shares = blend.shares()
    rows = []
    for name in sorted(shares, key=lambda name: (-shares[name], name)):
        entry, share = blend.entries[name], float(shares[name])
        prior, tokens, budget = (
            entry.get("prior"),
            entry.get("tokens"),
            blend.settings.budget_tokens,
        )
        rows.append(
            {
                "domain": name,
                "weight": shares[name],
                "weight_std": entry.get("weight_std"),
                "last": entry.get("weight_last"),
                "prior": prior,
                "ratio": share / prior if prior else None,
                "tokens": tokens,
                "epochs": budget * share / tokens if budget and tokens else None,
            }
        )
    kept = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    return [{key: row[key] for key in kept} for row in rows]


def _markdown(blend: Blend) -> str:
    share = f".{blend.settings.decimals}f"
    forms = {"domain": "", "weight": "f", "tokens": ",", "ratio": ".2f", "epochs": ".2f"}
    rows = _rows(blend)
    cells = [
        [
            "" if value is None else format(value, forms.get(key, share))
            for key, value in row.items()
        ]
        for row in rows
    ]
    return markdown(table_of(list(rows[0]), cells)) + "\n"


def _csv(blend: Blend) -> str:
    rows = _rows(blend)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "weight": plain(row["weight"])} for row in rows)
    return text.getvalue()


def _read_csv(text: str) -> Phases:
    rows = csv.DictReader(io.StringIO(text))
    return [(0, named((row["domain"], row["weight"]) for row in rows))]


def _json(blend: Blend) -> str:
    if len(blend.phases) == 1:
        return to_json(blend.numbers())
    return to_json(
        [
            {"first_step": phase.first_step, "weights": blend.numbers(index)}
            for index, phase in enumerate(blend.phases)
        ]
    )


def _read_json(text: str) -> Phases:
    value = json.loads(text)
    if isinstance(value, dict):
        value = [{"first_step": 0, "weights": value}]
    return [(int(each["first_step"]), named(each["weights"].items())) for each in value]


FORMATS: Mapping[str, Format] = {
    "markdown": (_markdown, None),
    "json": (_json, _read_json),
    "csv": (_csv, _read_csv),
}
