"""Sharded parameters: a rank has its columns of every domain's gradient."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from doge_fast.distributed.company import Company, refuse_others
from doge_fast.distributed.exchange import Agreement, Alone, Columns, Report, give
from doge_fast.flat_buffer import Block, weighted_gradients
from doge_fast.kernels import gram


class Sharded:
    """Ranks that each have some columns of every domain's gradient, as with FSDP2's `fully_shard`.

    All ranks run the same domains, and reduce each one's gradient over their batches. Rows and
    combined gradient stay in shards.

    Args:
        company: the processes of the parameters' mesh.
    """

    has_shards = True
    has_own_rows = False

    def __init__(self, company: Company) -> None:
        self.company = company
        self.num_ranks = company.num_ranks
        self._counted: set[int] = set()

    def agree(self, rows: Sequence[str], report: Report) -> Agreement:
        """And refuse ranks that have entered other domains, or in another order."""
        settings = {**report.settings, "the order of their domains": report.order}
        counts_nR, agreement = self.company.told(rows, report._replace(settings=settings))
        for row, counts in enumerate(counts_nR.T.tolist()):
            refuse_others(counts, f"how often or with which count they entered {rows[row]!r}")
        return agreement

    def fail(self, rows: Sequence[str], num_params: int) -> str:
        """Tell the others; those that have ended are why a collective of the model has failed."""
        return self.company.fail(rows, num_params)

    def complete(self, blocks: Sequence[Block], apart: Collection[int]) -> Columns:
        """They are; of what is replicated over ranks one of them counts."""
        columns = Alone().complete(blocks, apart)
        self._counted = {id(b.rows_RN) for b in columns.blocks if _counts_here(b.param)}
        return columns

    def summed(self, rows: Sequence[Tensor]) -> Tensor:
        """The sum of the shards' Gram matrices, in the order of the ranks."""
        counted = [rows_RN for rows_RN in rows if id(rows_RN) in self._counted]
        num_rows = len(rows[0])
        mine_RR = rows[0].new_zeros(num_rows, num_rows, dtype=torch.float64)
        return self.company.summed(gram(counted) if counted else mine_RR, range(self.num_ranks))

    def deliver(self, columns: Columns, coefficients_R: Tensor, state_S: Tensor) -> list[Tensor]:
        """The weighted sums of the shards."""
        self.company.share(state_S)
        return weighted_gradients(columns.blocks, coefficients_R)

    def give(self, columns: Columns, gradients: Sequence[Tensor]) -> None:
        """Into `p.grad`."""
        give(columns, gradients)

    def release(self) -> None:
        """Nothing was exchanged."""


def _counts_here(param: Any) -> bool:
    """Whether this rank is the first of those that have the same part of a DTensor."""
    coordinates = param.device_mesh.get_coordinate()
    return not any(
        placement.is_replicate() and place
        for placement, place in zip(param.placements, coordinates, strict=True)
    )
