"""The five methods by which a step communicates, implemented for one process."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from doge_fast.distributed.process_group import Agreement, Communicator, Report
from doge_fast.flat_buffer import Block, weighted_gradients
from doge_fast.kernels import gram


class Columns(NamedTuple):
    """All rows of the columns that this rank computes with."""

    blocks: Sequence[Sequence[Block]]
    """For each tensor in `rows`, the blocks of its columns."""
    rows: Sequence[Tensor]
    """[P, columns] each. P pieces in `ColumnExchange`; otherwise the B rows."""

    def split(self, selected: Collection[int]) -> tuple[list[Tensor], list[Tensor]]:
        """The rows of the parameters with these ids, and those of the others."""
        inside: list[Tensor] = []
        outside: list[Tensor] = []
        for blocks, rows_PC in zip(self.blocks, self.rows, strict=True):
            (inside if id(blocks[0].param) in selected else outside).append(rows_PC)
        return inside, outside


class Exchange:
    """One process, which has all rows and all columns; base class of the others.

    A step calls `agree`, `complete`, `gram` and `deliver`, in this order.
    """

    has_shards = False
    """Whether parameters and gradients are DTensors."""
    has_own_rows = False
    """Whether a rank has rows only for the domains that it entered, in the order of entry."""
    num_ranks = 1

    def __init__(self, communicator: Communicator | None = None) -> None:
        if communicator is not None:
            self._communicator, self.num_ranks = communicator, communicator.num_ranks

    def agree(self, names: Sequence[str], report: Report) -> Agreement:
        """Gather what all ranks have collected; `names` are the domains of this step's B rows.

        Raises:
            RuntimeError: ranks differ in a setting. Raised on all ranks, with the same message.
        """
        return Agreement(frozenset(report.entries), report.dtypes)

    def complete(self, blocks: Sequence[Block], apart: Collection[int]) -> Columns:
        """All rows of this rank's columns.

        `blocks` are those of all parameters that have a gradient on any rank. No tensor of the
        result has both columns of parameters whose ids are in `apart` and other columns.
        """
        return Columns([(block,) for block in blocks], [block.rows_BN for block in blocks])

    def gram(self, rows: Sequence[Tensor]) -> Tensor:
        """[B, B] float64: the Gram matrix over the columns of all ranks.

        `rows` are some of the tensors that `complete` returned, at least one.
        """
        gram_BB: Tensor = gram(rows)
        return gram_BB

    def deliver(self, columns: Columns, coefficients_B: Tensor, state_S: Tensor) -> None:
        """Write sum_b c_b g_b into `p.grad` on all ranks, and rank 0's weights into `state_S`."""
        blocks = [block for (block,) in columns.blocks]
        for block, gradient in zip(blocks, weighted_gradients(blocks, coefficients_B), strict=True):
            block.give(gradient)

    def release(self) -> None:
        """Free the memory kept from step to step."""
