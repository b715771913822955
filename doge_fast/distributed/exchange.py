"""The methods by which a step communicates, implemented for one process."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from doge_fast.distributed.process_group import Agreement, Communicator, Report
from doge_fast.flat_buffer import Block, combined_gradients, combined_norm
from doge_fast.kernels import gram, gram_and_sum, weighted_sum
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

    A step calls `agree`, `complete`, `gram`, `deliver` unless `gram` has done so, and `share`, in
    this order, and `norm` if its rule needs it.
    """

    has_shards = False
    """Whether parameters and gradients are DTensors."""
    has_own_rows = False
    """Whether a rank has rows only for the domains that it entered, in the order of entry."""
    first_half = 0
    """The half that this rank's first gradient of a domain goes to, where a rule has halves."""
    num_ranks = 1

    def __init__(self, num_halves: int, communicator: Communicator | None = None) -> None:
        """`num_halves` is the number of rows of each domain."""
        self._num_halves = num_halves
        if communicator is not None:
            self._communicator, self.num_ranks = communicator, communicator.num_ranks

    def agree(self, names: Sequence[str], report: Report) -> Agreement:
        """Gather what all ranks have collected; `names` are the domains of this step's B rows.

        Raises:
            RuntimeError: ranks differ in a setting. Raised on all ranks, with the same message.
        """
        return Agreement(report.first_shares, report.dtypes)

    def complete(self, blocks: Sequence[Block], apart: Collection[int]) -> Columns:
        """All rows of this rank's columns.

        `blocks` are those of all parameters that have a gradient on any rank. No tensor of the
        result has both columns of parameters whose ids are in `apart` and other columns.
        """
        return Columns([(block,) for block in blocks], [block.rows_BN for block in blocks])

    def gram(
        self, columns: Columns, metric: Metric | None = None, mixture_B: Tensor | None = None
    ) -> Tensor:
        """One of `Matrices`, over the columns of all ranks, in a metric or Euclidean.

        `columns` are some of those that `complete` returned, at least one. With a mixture it makes
        their combined gradient, sum_b x_b g_b, on all ranks, too.
        """
        options = self._second_moments(columns, metric) | {"halves": self._num_halves == 2}
        if mixture_B is None:
            return gram(columns.rows, **options)
        with combined_gradients([block for (block,) in columns.blocks]) as outs:
            return gram_and_sum(columns.rows, mixture_B, out=outs, **options)

    def _second_moments(self, columns: Columns, metric: Metric | None) -> dict[str, Any]:
        """Arguments of the operator: a metric's second moments of each tensor's columns."""
        if metric is None:
            return {}
        moments = [metric.moment_of(block.param) for (block,) in columns.blocks]
        return {"second_moments": moments, "eps": metric.eps}

    def deliver(self, columns: Columns, coefficients_C: Tensor) -> None:
        """Make the combined gradient, sum_c x_c g_c, on all ranks."""
        with combined_gradients([block for (block,) in columns.blocks]) as outs:
            weighted_sum(columns.rows, coefficients_C, out=outs)

    def share(self, state_S: Tensor) -> None:
        """Write rank 0's weights into `state_S`: machines may round differently."""

    def norm(self, blocks: Sequence[Block]) -> Tensor:
        """Float64 scalar: the norm of what is in `p.grad`, of all ranks' columns."""
        return combined_norm(blocks)

    def release(self) -> None:
        """Free the memory kept from step to step."""
