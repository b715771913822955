"""Data parallelism: a rank has some domains' gradients of the whole model."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from doge_fast.distributed.company import Company, all_gather
from doge_fast.distributed.exchange import Agreement, Bucket, Columns, Report, buckets_of, give
from doge_fast.flat_buffer import Block
from doge_fast.kernels import gram, weighted_sum


class Pieces(NamedTuple):
    """The pieces of rows in a step, rank by rank, and within a rank in the order of the rows."""

    num_of_ranks: Sequence[int]
    """Pieces on each rank."""
    shares_RP: Tensor
    """[R, P] float64 on the CPU: the share of each piece in its row."""

    @classmethod
    def of(cls, counts_nR: Tensor) -> "Pieces":
        """Find them in the counts of all ranks."""
        is_there_nR = counts_nR > 0
        rows_P = is_there_nR.nonzero()[:, 1]
        weights_P = (counts_nR / counts_nR.sum(0))[is_there_nR]
        shares_RP = counts_nR.new_zeros(counts_nR.shape[1], len(rows_P))
        shares_RP[rows_P, torch.arange(len(rows_P))] = weights_P
        return cls(is_there_nR.sum(1).tolist(), shares_RP)


class DataParallel:
    """Ranks that each have some domains' gradients of the whole model.

    Args:
        company: the processes.
    """

    has_shards = False
    has_own_rows = True

    def __init__(self, company: Company) -> None:
        self.company = company
        self.num_ranks = company.num_ranks
        self._has_compared = False
        self._sums: list[Tensor] = []
        # As agreed on in the step under way.
        self._pieces = Pieces((), torch.empty(0, 0))
        self._dtypes: Sequence[torch.dtype | None] = ()
        # Rows of the buffer here that have a piece, in the order of the pieces.
        self._mine: list[int] = []

    def agree(self, rows: Sequence[str], report: Report) -> Agreement:
        """And note the pieces of this step; the first time, compare the parameters too."""
        values = None if self._has_compared else [_checksum(param) for param in report.params]
        settings = {**report.settings, "the values of the parameters": values}
        counts_nR, agreement = self.company.told(rows, report._replace(settings=settings))
        self._has_compared = True
        self._dtypes = agreement.dtypes
        self._pieces = Pieces.of(counts_nR)
        place = {name: row for row, name in enumerate(dict.fromkeys(report.order))}
        self._mine = [place[name] for name in rows if report.counts.get(name)]
        return agreement

    def fail(self, rows: Sequence[str], num_params: int) -> str:
        """Tell the others."""
        return self.company.fail(rows, num_params)

    def complete(self, blocks: Sequence[Block], apart: Collection[int]) -> Columns:
        """An all-to-all: rows to the ranks of their columns."""
        dtypes = [dtype for dtype in self._dtypes if dtype is not None]
        buckets = buckets_of(blocks, dtypes, self.num_ranks, apart)
        received: list[Tensor] = []
        works = []
        for bucket in buckets:
            sent = bucket.shards(self._mine, self.num_ranks)
            received.append(sent.new_empty(sum(self._pieces.num_of_ranks), bucket.num_columns))
            works.append(
                dist.all_to_all_single(
                    received[-1].view(-1),
                    sent.view(-1),
                    [number * bucket.num_columns for number in self._pieces.num_of_ranks],
                    [len(self._mine) * bucket.num_columns] * self.num_ranks,
                    group=self.company.group,
                    async_op=True,
                )
            )
        with self.company.in_company():
            for work in works:
                work.wait()
        return Columns(buckets, received)

    def summed(self, rows: Sequence[Tensor]) -> Tensor:
        """The sum of the shards' Gram matrices, in the order of the ranks."""
        pieces_PP = gram(rows)
        shares_RP = self._shares_on(pieces_PP.device)
        mine_RR = shares_RP @ pieces_PP @ shares_RP.T
        gram_RR = self.company.summed(mine_RR, range(self.num_ranks))
        # A product of three matrices need not be symmetric to the bit.
        symmetric_RR: Tensor = gram_RR.tril() + gram_RR.tril(-1).T
        return symmetric_RR

    def deliver(self, columns: Columns, coefficients_R: Tensor, state_S: Tensor) -> list[Tensor]:
        """An all-gather of the shards' weighted sums."""
        buckets = columns.buckets
        self._fit(buckets)
        # All-gather in place: a rank's shard is where it belongs in the whole.
        mine = [whole_nC[self.company.rank] for whole_nC in self._sums]
        coefficients_P = self._shares_on(coefficients_R.device).T @ coefficients_R
        weighted_sum(columns.rows, coefficients_P, out=mine)
        self.company.share(state_S)
        with self.company.in_company():
            for whole_nC, mine_C in zip(self._sums, mine, strict=True):
                all_gather(whole_nC.view(-1), mine_C, group=self.company.group)
        gradients: list[Tensor] = []
        for bucket, whole_nC in zip(buckets, self._sums, strict=True):
            sizes = [block.num_columns for block in bucket.blocks]
            parts = torch.split(whole_nC.view(-1)[: sum(sizes)], sizes)
            gradients += [
                block.combined_as(values_N)
                for block, values_N in zip(bucket.blocks, parts, strict=True)
            ]
        return gradients

    def give(self, columns: Columns, gradients: Sequence[Tensor]) -> None:
        """Into `p.grad`."""
        give(columns, gradients)

    def release(self) -> None:
        """Give the memory of the sums back."""
        self._sums = []

    def _fit(self, buckets: Sequence[Bucket]) -> None:
        """Have memory for the sums; it lasts from step to step while its shape does."""
        likes = [(bucket.blocks[0].param, bucket.num_columns) for bucket in buckets]
        kinds = [((self.num_ranks, size), like.dtype, like.device) for like, size in likes]
        if kinds != [(each.shape, each.dtype, each.device) for each in self._sums]:
            self._sums = [
                torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in kinds
            ]

    def _shares_on(self, device: torch.device) -> Tensor:
        """[R, P] float64 on the device."""
        if device.type == "cuda":
            # Pinned, or the copy would make the host wait for the device.
            return self._pieces.shares_RP.pin_memory().to(device, non_blocking=True)
        return self._pieces.shares_RP.to(device)


def _checksum(values: Tensor) -> int:
    """A number for the bits of a tensor, whatever the order in which they are added."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.detach().contiguous().view(integers[values.itemsize])
    return int(bits.sum(dtype=torch.int64))
