"""Arms set against each other, in the words and cells that several kinds of table share."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from doge_fast.pipeline.reporting.plotting import Drawing
from doge_fast.pipeline.reporting.statistics import Difference, change_text
from doge_fast.pipeline.reporting.verdicts import Verdict
from doge_fast.pipeline.tables import Cell, Table

# The arms that experiments are about.
FOCUS = "DoGE"


class Part(NamedTuple):
    """What a group of an experiment came to."""

    verdicts: list[Verdict]
    tables: list[Table]
    drawings: list[Drawing]


def nothing_yet(title: str) -> Verdict:
    """The answer while no two arms can be compared."""
    return Verdict(title, "Nothing to compare yet", ["The same command goes on with the runs."])


def headline_of(
    own: str, other: str, difference: Difference | None, *, is_more_better: bool = False
) -> str:
    """Which one is better, as far as the seeds tell."""
    if difference is None:
        return f"{own} and {other} have no seed in common"
    if not math.isfinite(difference.mean):
        return f"{own} or {other} diverged"
    if difference.mean == 0:
        return f"{own} and {other} come out the same"
    if not difference.is_decided:
        side = "below" if difference.mean < 0 else "above"
        where = "in the one seed" if difference.pairs == 1 else "on average"
        seeds = "" if difference.pairs == 1 else f" {difference.pairs}"
        return (
            f"{own} comes out {side} {other} {where}, which{seeds or ' one'} "
            f"seed{'s' if difference.pairs > 1 else ''} cannot tell from chance"
        )
    return f"{own} {'beats' if (difference.mean > 0) is is_more_better else 'loses to'} {other}"


def difference_cell(difference: Difference | None) -> Cell:
    """A change of perplexity, marked where its interval leaves out zero."""
    if difference is None:
        return Cell("–")
    return Cell(
        change_text(difference),
        is_strong=difference.is_decided and difference.mean < 0,
        is_warning=difference.is_decided and difference.mean > 0,
    )


def paper_cells(paper: Mapping[str, Mapping[str, float]], row: str, digits: int) -> list[Cell]:
    """A row of the paper's columns, blank where one has no number for it."""
    return [Cell(f"{column[row]:.{digits}f}" if row in column else "") for column in paper.values()]
