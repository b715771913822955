"""Tables, and their one printer: text for a terminal or a pipe.

The report's page takes the same tables; its template makes HTML of them.
"""

import io
import os
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

# Where nobody says how wide the reader's window is: a pipe, a file.
PIPE_WIDTH = 100
_NARROWEST = 40
_ENDLESS = 10_000
# A rule below the header and nothing else, in ASCII.
_RULE = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


class Cell(NamedTuple):
    """What stands in a place of a table, and whether it is to be seen."""

    text: str
    is_strong: bool = False
    is_warning: bool = False


class Row(NamedTuple):
    """A line of a table."""

    label: str
    cells: list[Cell]
    is_total: bool = False


class Table(NamedTuple):
    """A table before it is text, markdown or part of a page."""

    title: str
    note: str
    corner: str
    columns: list[tuple[str, str]]
    """(label, what it is) of each column but the first."""
    rows: list[Row]


def table_of(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> Table:
    """A table of plain texts.

    Args:
        header: labels of the columns; the first is that of the rows' labels.
        rows: as many texts each as the header has.
        title: of the table.
    """
    corner, *labels = header
    lines = [Row(label, [Cell(text) for text in texts]) for label, *texts in rows]
    return Table(title, "", corner, [(label, "") for label in labels], lines)


def terminal_width() -> int:
    """Columns of the terminal that is written to; `PIPE_WIDTH` where there is none.

    COLUMNS in the environment has the last word.
    """
    console = Console()
    is_known = console.is_terminal or "COLUMNS" in os.environ
    return max(_NARROWEST, console.width) if is_known else PIPE_WIDTH


def text(table: Table, *, width: int | None = None, left: Sequence[int] = ()) -> str:
    """Aligned text: the first column to the left, the others to the right.

    A cell to be seen ends in `*`. Columns that do not fit follow below, under their rows' labels
    again; a row's label that takes more than half the width is cut. Title and note are not in it.

    Args:
        table: what to print.
        width: of the longest line; None: the terminal's.
        left: places of columns of words, counted from 0, the first after the rows' labels: they
            stand to the left and are broken into lines where the width ends.
    """
    width = terminal_width() if width is None else width
    labels = [table.corner, *(row.label for row in table.rows)]
    first = min(max(map(cell_len, labels)), width // 2)
    parts: list[dict[int, list[str]]] = [{}]
    room = first
    for i, (head, _) in enumerate(table.columns):
        cells = [row.cells[i] for row in table.rows]
        mark = "  " if any(cell.is_strong for cell in cells) else ""
        texts = [f"{cell.text} *" if cell.is_strong else cell.text + mark for cell in cells]
        widest = max(map(cell_len, [head + mark, *texts]))
        own = 2 + (min(widest, _NARROWEST) if i in left else widest)
        if parts[-1] and room + own > width:
            parts.append({})
            room = first
        parts[-1][i] = [head + mark, *texts]
        room += own
    return "\n\n".join(_part(labels, part, first, left, width) for part in parts)


def _part(
    labels: Sequence[str],
    columns: Mapping[int, Sequence[str]],
    first: int,
    left: Sequence[int],
    width: int,
) -> str:
    """Some of the columns, by their places, beside the rows' labels."""
    made = RichTable(
        box=_RULE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True
    )
    made.add_column(Text(labels[0]), width=first, no_wrap=True)
    for i, (head, *_) in columns.items():
        side: Literal["left", "right"] = "left" if i in left else "right"
        made.add_column(Text(head), justify=side, no_wrap=i not in left)
    for place, label in enumerate(labels[1:], start=1):
        texts = (Text(column[place]) for column in columns.values())
        made.add_row(Text(shortened(label, first)), *texts)
    file = io.StringIO()
    room = width if columns.keys() & set(left) else _ENDLESS
    Console(file=file, width=room, color_system=None, force_terminal=False).print(made)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))


def shortened(name: str, width: int) -> str:
    """A name in at most `width` columns; of a longer one both ends, for names differ at either."""
    if cell_len(name) <= width:
        return name
    kept = width - 2
    return f"{name[: kept - kept // 2]}..{name[len(name) - kept // 2 :]}"
