"""What a step asks of the ranks that share it: six methods, here as one process answers them."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from doge_fast.distributed.process_group import Agreement, Report
from doge_fast.flat_buffer import Block, weighted_gradients
from doge_fast.kernels import gram


class Columns(NamedTuple):
    """The columns that a rank computes with, and all rows of them."""

    blocks: Sequence[Sequence[Block]]
    """Of each tensor of rows, the blocks whose columns it has."""
    rows: Sequence[Tensor]
    """[P, columns] each; P pieces of rows, which are the B rows except in `ColumnExchange`."""

    def split(self, selected: Collection[int]) -> tuple[list[Tensor], list[Tensor]]:
        """The rows of the parameters with these ids, and those of the others."""
        inside: list[Tensor] = []
        outside: list[Tensor] = []
        for blocks, rows_PC in zip(self.blocks, self.rows, strict=True):
            (inside if id(blocks[0].param) in selected else outside).append(rows_PC)
        return inside, outside


class Exchange:
    """One process, which has all rows and all columns. Kinds of several ranks derive from it.

    A step calls `agree`, `complete`, `gram` and `deliver`, in this order; or `fail`.
    """

    num_ranks = 1
    has_shards = False
    """Whether parameters and gradients are DTensors."""
    has_own_rows = False
    """Whether a rank has rows of its own domains alone, in order of entry."""

    def agree(self, rows: Sequence[str], report: Report) -> Agreement:
        """What all ranks together have.

        Args:
            rows: names of the rows of this step, the same on all ranks.
            report: of this rank.

        Raises:
            RuntimeError: ranks differ in what must be the same, or one has dropped its step; the
                same sentence on all of them.
        """
        seen = frozenset(name for name, count in report.counts.items() if count > 0)
        return Agreement(seen, report.dtypes)

    def complete(self, blocks: Sequence[Block], apart: Collection[int]) -> Columns:
        """All rows of this rank's columns.

        Args:
            blocks: of all parameters that have a gradient on any rank.
            apart: ids of parameters that share no tensor of rows with others.
        """
        return Columns([(block,) for block in blocks], [block.rows_BN for block in blocks])

    def gram(self, rows: Sequence[Tensor]) -> Tensor:
        """[B, B] float64: the Gram matrix over the columns of all ranks.

        Args:
            rows: at least one of the tensors that `complete` returned.
        """
        gram_BB: Tensor = gram(rows)
        return gram_BB

    def deliver(self, columns: Columns, coefficients_B: Tensor, state_S: Tensor) -> None:
        """Write sum_b c_b g_b into `p.grad` on all ranks, and the state of rank 0 into `state_S`.

        Args:
            columns: what `complete` returned.
            coefficients_B: [B] float64, of the rows.
            state_S: the domain weights.
        """
        blocks = [block for (block,) in columns.blocks]
        for block, gradient in zip(blocks, weighted_gradients(blocks, coefficients_B), strict=True):
            block.give(gradient)

    def fail(self) -> str:
        """Say that this rank has dropped its step; the others raise in `agree`.

        Returns:
            A sentence that names the ranks that did not answer; empty where all did.
        """
        return ""

    def release(self) -> None:
        """Free the memory that is kept from step to step."""
