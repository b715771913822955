"""Sharded parameters: a rank has its columns of every domain's gradient."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from doge_fast.distributed.company import Company, refuse_others
from doge_fast.distributed.exchange import Agreement, Alone, Columns, InPlace, Report
from doge_fast.distributed.fragments import Fragments
from doge_fast.flat_buffer import Block, local_gradient, weighted_gradients
from doge_fast.kernels import gram


class Sharded(InPlace):
    """Ranks that each have some columns of every domain's gradient, as with FSDP2's `fully_shard`.

    All ranks run the same domains, and reduce each one's gradient over their batches, or each runs
    its own and they exchange fragments. Rows and combined gradient stay in shards.

    Args:
        company: the processes of the parameters' mesh.
        fragments: what reduces where ranks run other domains.
    """

    has_shards = True
    has_own_rows = False

    def __init__(self, company: Company, fragments: Fragments | None = None) -> None:
        self.company = company
        self._fragments = fragments
        self.num_ranks = company.num_ranks
        self._counted: set[int] = set()
        # Rows in the order in which this rank has entered their domains.
        self._order: list[int] = []

    def agree(self, rows: Sequence[str], report: Report) -> Agreement:
        """And refuse ranks that have entered other domains, unless they exchange fragments."""
        if self._fragments is not None:
            return self.company.told(rows, report)[2]
        settings = {**report.settings, "the order of their domains": self._order}
        counts_nR, _, agreement = self.company.told(rows, report._replace(settings=settings))
        for row, counts in enumerate(counts_nR.T.tolist()):
            refuse_others(counts, f"how often or with which count they entered {rows[row]!r}")
        return agreement

    def enter(self, row: int, count: float, rows: Sequence[str], num_params: int) -> None:
        """Note the order, or hear which domains the others enter, where those may be others."""
        if self._fragments is None:
            self._order.append(row)
            return
        if count != 1:
            self.fail(rows, num_params)
            raise ValueError(
                f"with Fragments a domain's gradient is the sum over ranks; got count={count}. "
                "Leave count out, and divide the loss by the domain's examples in the whole batch."
            )
        self._fragments.begin(self.company.entered(row, rows, num_params))

    def forget(self) -> None:
        """Another step begins."""
        self._order.clear()

    def parts(self, row: int, param: Tensor, grad: Tensor) -> Iterable[tuple[int, Tensor]]:
        """This rank's part of the gradient, or of every rank's."""
        # FSDP2 leaves the reduction out where there is one rank.
        if self._fragments is None or self.num_ranks == 1:
            return [(row, local_gradient(param, grad))]
        return self._fragments.parts(grad)

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


def _counts_here(param: Any) -> bool:
    """Whether this rank is the first of those that have the same part of a DTensor."""
    coordinates = param.device_mesh.get_coordinate()
    return not any(
        placement.is_replicate() and place
        for placement, place in zip(param.placements, coordinates, strict=True)
    )
