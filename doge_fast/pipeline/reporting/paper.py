"""The paper's numbers, as printed, by the labels of its tables: what ours stand beside.

paper.json holds {label of the table: {column: {row: value}}}, its rows under names that
`canonical` gives. tab:210M_ppl is the right half of the printed tab:124M_ppl; tab:fewshot is in per
cent; the columns of tab:ood-dw are targets, and that for arxiv sums to 0.910 as printed.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

TABLES: Mapping[str, Mapping[str, Mapping[str, float]]] = json.loads(
    Path(__file__).with_name("paper.json").read_text(encoding="utf-8")
)
_SLIMPAJAMA = frozenset(TABLES["tab:dw"]["DoGE"])
# Last row of tab:cc-ppl.
SAVED = {"low10": 66.9, "low30": 42.8, "low50": 24.4, "high30": 97.5, "high10": 99.9}
WEIGHTS_NOTE = (
    " The paper's weights are those of an 82M proxy after 10k steps on the full corpora: compare "
    "the order of the domains, not the digits."
)
PERPLEXITY_NOTE = " The paper's columns are of its models on its corpus: compare directions."
# tab:universal_ppl.
VERDICT = (
    "The paper, with 684M models on the full SlimPajama: lower on 5 of 7 domains than uniform; "
    "average perplexity 15.81 against 16.53 (−4.4 %)."
)


def canonical(name: str) -> str:
    """RedPajamaCommonCrawl, cc and common_crawl are one domain."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("redpajama")
    return {"cc": "commoncrawl", "books": "book", "wiki": "wikipedia"}.get(plain, plain)


def is_slimpajama(names: Iterable[str]) -> bool:
    """Whether these are the paper's seven domains."""
    return {canonical(name) for name in names} == _SLIMPAJAMA


def columns_beside(table: str | None, rows: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """The paper's columns of a table, by our names of its rows; none where a row is not in it.

    Args:
        table: the label; None: the paper prints no such table.
        rows: {our name: the paper's}.
    """
    if table is None:
        return {}
    return {
        column: {own: values[paper] for own, paper in rows.items() if paper in values}
        for column, values in TABLES[table].items()
        if any(paper in values for paper in rows.values())
    }
