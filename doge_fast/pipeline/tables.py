"""Tables, and their form as text for a terminal or a pipe.

The report's template makes HTML of the same tables.
"""

import os
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console

from doge_fast.pipeline.wording import as_ascii

# For output without a terminal: a pipe, a file.
PIPE_WIDTH = 100
_NARROWEST = 40


class Cell(NamedTuple):
    """The text of a table's cell, and how it is marked."""

    text: str
    is_strong: bool = False
    is_warning: bool = False


class TableRow(NamedTuple):
    """A row: its label and its cells."""

    label: str
    cells: list[Cell]
    is_total: bool = False


class Table(NamedTuple):
    """A table, before it becomes text or HTML."""

    title: str
    note: str
    corner: str
    columns: list[tuple[str, str]]
    """(label, explanation) of every column but the first."""
    rows: list[TableRow]


def table_of(
    header: Sequence[str | tuple[str, str]],
    rows: Iterable[Sequence[str | Cell]],
    *,
    title: str = "",
    note: str = "",
    totals: Iterable[Sequence[str | Cell]] = (),
) -> Table:
    """A table of texts or cells.

    An item of `header` is a label or (label, explanation). A row is its label and its cells.
    `totals` are rows that are set apart.
    """
    corner, *heads = header
    columns = [(head, "") if isinstance(head, str) else head for head in heads]
    lines = [
        TableRow(
            str(label), [Cell(each) if isinstance(each, str) else each for each in cells], is_total
        )
        for is_total, group in ((False, rows), (True, totals))
        for label, *cells in group
    ]
    return Table(title, note, str(corner), columns, lines)


def terminal_width() -> int:
    """Width of the terminal in characters; `PIPE_WIDTH` without a terminal.

    The environment variable COLUMNS overrides both.
    """
    console = Console()
    is_known = console.is_terminal or "COLUMNS" in os.environ
    return max(_NARROWEST, console.width) if is_known else PIPE_WIDTH


def text(table: Table, *, width: int | None = None, left: Sequence[int] = ()) -> str:
    """The table as aligned text, without title and note: labels to the left, cells to the right.

    A strong cell ends in `*`, a warning in `!`. Columns that do not fit `width` (None: the
    terminal's) follow below, with the labels repeated. A label longer than half of `width` is
    shortened. `left` has the indices of columns of words, not counting the labels: these are
    left-aligned and wrapped.
    """
    width = terminal_width() if width is None else width
    labels = [table.corner, *(row.label for row in table.rows)]
    first = min(max(map(cell_len, labels)), width // 2)
    labels = [_padded(shortened(label, first), first) for label in labels]
    parts: list[list[list[str]]] = [[]]
    room = first
    for i, (head, _) in enumerate(table.columns):
        cells = [Cell(head), *(row.cells[i] for row in table.rows)]
        marks = [" *" if cell.is_strong else " !" if cell.is_warning else "" for cell in cells]
        blank = "  " if any(marks) else ""
        pairs = zip(cells, marks, strict=True)
        texts = [as_ascii(cell.text) + (mark or blank) for cell, mark in pairs]
        size = max(map(cell_len, texts))
        if i in left:
            size = min(size, max(_NARROWEST, width - first - 2))
        if parts[-1] and room + 2 + size > width:
            parts.append([])
            room = first
        room += 2 + size
        parts[-1].append(
            [_block(each, size) if i in left else _right(each, size) for each in texts]
        )
    return "\n\n".join(_joined(labels, columns) for columns in parts)


def _padded(text: str, size: int) -> str:
    return set_cell_size(text, max(size, cell_len(text)))


def _right(text: str, size: int) -> str:
    return " " * (size - cell_len(text)) + text


def _block(words: str, size: int) -> str:
    """The words, wrapped and padded to lines of `size`."""
    return "\n".join(_padded(line, size) for line in textwrap.wrap(words, size) or [""])


def _joined(labels: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    """The columns side by side, with a rule below their heads."""
    lines = []
    for label, *cells in zip(labels, *columns, strict=True):
        blocks = [label.split("\n"), *(cell.split("\n") for cell in cells)]
        for i in range(max(map(len, blocks))):
            parts = [block[i] if i < len(block) else " " * cell_len(block[0]) for block in blocks]
            lines.append("  ".join(parts).rstrip())
        if len(lines) == 1:
            lines.append("-" * sum((cell_len(each) for each in (label, *cells)), 2 * len(cells)))
    return "\n".join(lines)


def shortened(name: str, width: int) -> str:
    """A name in at most `width` characters; a longer one keeps both ends, as either may differ."""
    if cell_len(name) <= width:
        return name
    kept = width - 2
    return f"{name[: kept - kept // 2]}..{name[len(name) - kept // 2 :]}"
