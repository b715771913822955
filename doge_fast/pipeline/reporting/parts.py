"""What a group of runs comes to: an answer in words, tables, and figures with their captions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from matplotlib.figure import Figure

from doge_fast.pipeline.reporting.plotting import Drawing, drawing_of
from doge_fast.pipeline.reporting.proxies import Proxy
from doge_fast.pipeline.reporting.statistics import (
    CONFIDENCE,
    Arm,
    Difference,
    change_of,
    change_text,
)
from doge_fast.pipeline.reporting.study import Study
from doge_fast.pipeline.tables import Cell, Table

MARKS = (
    f"Bold: better, and the {100 * CONFIDENCE:.0f} % interval over paired seeds (Student's) leaves "
    "out zero; with a !: worse likewise."
)
ONE_SEED = " One seed has no interval, so that nothing is bold."
ERRORS = " ±: standard error over seeds."
NOTHING = "Nothing to compare yet"
TEXTS = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text(encoding="utf-8"))


class Verdict(NamedTuple):
    """The answer of a group."""

    title: str
    headline: str
    sentences: list[str]


# A figure that is drawn when the page is made.
Sketch = Callable[[], Drawing]


class Part(NamedTuple):
    """What a group, or a proxy, came to."""

    verdicts: Sequence[Verdict] = ()
    tables: Sequence[Table] = ()
    sketches: Sequence[Sketch] = ()
    title: str = ""
    """`parts_of` gives it that of the group."""
    proxy: Proxy | None = None


def sketch(kind: str, name: str, make: Callable[[], Figure], **words: object) -> Sketch:
    """With its words in figures.yaml, filled in."""
    title, caption = (TEXTS[kind][key].format(**words) for key in ("title", "caption"))
    return lambda: drawing_of(name, title, caption, make())


def unanswered(study: Study, title: str, headline: str = NOTHING, way_out: str = "") -> Verdict:
    """There is nothing to compare; of an experiment all ways out are one."""
    told = "The same command goes on with the runs." if study.is_experiment else way_out
    return Verdict(title, headline, [told] if told else [])


def headline_of(own: str, other: str, difference: Difference, *, is_accuracy: bool = False) -> str:
    """Which one is better, if the interval says so; with one seed it is undecided.

    `difference` is of losses, or of accuracies in percentage points, of which more is better.
    """
    if not difference.pairs:
        return f"Undecided: {own} and {other} have no seed in common"
    if not difference.is_known:
        return f"{own} or {other} diverged"
    if difference.is_decided:
        return f"{own} {'beats' if (difference.mean > 0) is is_accuracy else 'loses to'} {other}"
    seeds = "in the one seed" if difference.pairs == 1 else f"over {difference.pairs} seeds"
    if difference.mean == 0:
        return f"Undecided: {own} and {other} come out the same {seeds}"
    size = abs(difference.mean if is_accuracy else 100 * change_of(difference)[0])
    told = f"{size:.1f}" if size >= 0.05 else "less than 0.1"
    unit = "points" if is_accuracy else "%"
    side = "below" if difference.mean < 0 else "above"
    return f"Undecided: {own} comes out {told}\N{NO-BREAK SPACE}{unit} {side} {other} {seeds}"


def difference_cell(found: Difference) -> Cell:
    """A change of perplexity, marked where its interval leaves out zero."""
    return Cell(change_text(found), is_strong=found.is_lower, is_warning=found.is_higher)


def seeds_note(arms: Iterable[Arm]) -> str:
    """What seeds say of the numbers in a table."""
    return ERRORS if any(len(arm.losses) > 1 for arm in arms) else ONE_SEED


def beside_paper(
    table: Table, columns: Mapping[tuple[str, str], Mapping[str, str]], note: str = ""
) -> Table:
    """Ours with columns of `paper.columns_beside` to the right, and what to know of them.

    A place is blank where the paper has no number for a row.
    """
    rows = [
        row._replace(cells=row.cells + [Cell(each.get(row.label, "")) for each in columns.values()])
        for row in table.rows
    ]
    heads = [(f"paper: {column}", source) for column, source in columns]
    note = table.note + (note if columns else "")
    return table._replace(note=note, columns=table.columns + heads, rows=rows)
