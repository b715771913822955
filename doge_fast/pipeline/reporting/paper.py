"""The paper's numbers, as printed, by the labels of its tables: what ours stand beside.

The tables of paper.json are {label: {column: {row: value}}}, their rows under names that
`canonical` gives. tab:210M_ppl is the right half of the printed tab:124M_ppl; tab:fewshot is in per
cent; the columns of tab:ood-dw are targets, and that for arxiv sums to 0.910 as printed.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_PRINTED = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
TABLES: Mapping[str, Mapping[str, Mapping[str, float]]] = _PRINTED["tables"]
# Last row of tab:cc-ppl, in per cent.
SAVED: Mapping[str, float] = _PRINTED["columns left out"]
NOTES: Mapping[str, str] = _PRINTED["notes"]


def canonical(name: str) -> str:
    """RedPajamaCommonCrawl, cc and common_crawl are one domain."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("redpajama")
    return {"cc": "commoncrawl", "books": "book", "wiki": "wikipedia"}.get(plain, plain)


def is_slimpajama(names: Iterable[str]) -> bool:
    """Whether these are the paper's seven domains."""
    return {canonical(name) for name in names} == TABLES["tab:dw"]["DoGE"].keys()


def columns_beside(
    table: str | None, rows: Mapping[str, str], digits: int
) -> dict[tuple[str, str], dict[str, str]]:
    """{(column, table): {our name of a row: text}} of the paper; without columns of other rows.

    Args:
        table: the label; None: the paper prints no such table.
        rows: {our name: the paper's}.
        digits: after the point.
    """
    if table is None:
        return {}
    return {
        (column, table): {
            own: f"{values[paper]:.{digits}f}" for own, paper in rows.items() if paper in values
        }
        for column, values in TABLES[table].items()
        if any(paper in values for paper in rows.values())
    }
