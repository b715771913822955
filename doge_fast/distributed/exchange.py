"""The five methods by which a step communicates, implemented for one process."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from doge_fast.distributed.process_group import Agreement, Communicator, Report
from doge_fast.flat_buffer import Block, weighted_gradients
from doge_fast.kernels import gram
from doge_fast.metric import Metric


class Columns(NamedTuple):
    """All rows of the columns that this rank computes with."""

    blocks: list[Sequence[Block]]
    """For each tensor in `rows`, the blocks of its columns."""
    rows: list[Tensor]
    """[P, columns] each. P pieces in `ColumnExchange`; otherwise the C rows."""

    def split(self, selected: Collection[int]) -> tuple["Columns", "Columns"]:
        """The columns of the parameters with these ids, and the others."""
        parts: tuple[Columns, Columns] = Columns([], []), Columns([], [])
        for blocks, rows_PC in zip(self.blocks, self.rows, strict=True):
            part = parts[id(blocks[0].param) not in selected]
            part.blocks.append(blocks)
            part.rows.append(rows_PC)
        return parts


class Exchange:
    """One process, which has all rows and all columns; base class of the others.

    A step calls `agree`, `complete`, `gram` and `deliver`, in this order.
    """

    has_shards = False
    """Whether parameters and gradients are DTensors."""
    has_own_rows = False
    """Whether a rank has rows only for the domains that it entered, in the order of entry."""
    first_half = 0
    """The half that this rank's first gradient of a domain goes to, where a rule has halves."""
    num_ranks = 1

    def __init__(self, communicator: Communicator | None = None) -> None:
        if communicator is not None:
            self._communicator, self.num_ranks = communicator, communicator.num_ranks

    def agree(self, names: Sequence[str], report: Report) -> Agreement:
        """Gather what all ranks have collected; `names` are the domains of this step's B rows.

        Raises:
            RuntimeError: ranks differ in a setting. Raised on all ranks, with the same message.
        """
        first_halves = {
            name: entry.halves[0] / sum(entry.halves) for name, entry in report.entries.items()
        }
        return Agreement(first_halves, report.dtypes)

    def complete(self, blocks: Sequence[Block], apart: Collection[int]) -> Columns:
        """All rows of this rank's columns.

        `blocks` are those of all parameters that have a gradient on any rank. No tensor of the
        result has both columns of parameters whose ids are in `apart` and other columns.
        """
        return Columns([(block,) for block in blocks], [block.rows_BN for block in blocks])

    def moments(self, columns: Columns, metric: Metric) -> list[Tensor | None]:
        """For each tensor in `columns.rows`, the second moments of its columns."""
        return [metric.moment_of(block.param) for (block,) in columns.blocks]

    def gram(
        self,
        rows: Sequence[Tensor],
        moments: Sequence[Tensor | None] | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """[C, C] float64: the Gram matrix over the columns of all ranks.

        `rows` are some of the tensors that `complete` returned, at least one; `moments` are None or
        theirs, for a Gram matrix in AdamW's metric.
        """
        gram_CC: Tensor = gram(rows, second_moments=moments, eps=eps)
        return gram_CC

    def deliver(self, columns: Columns, coefficients_C: Tensor, state_S: Tensor) -> None:
        """Write sum_c x_c g_c into `p.grad` on all ranks, and rank 0's weights into `state_S`."""
        blocks = [block for (block,) in columns.blocks]
        for block, gradient in zip(blocks, weighted_gradients(blocks, coefficients_C), strict=True):
            block.give(gradient)

    def release(self) -> None:
        """Free the memory kept from step to step."""
