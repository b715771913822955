"""Data parallelism: a rank has some domains' gradients of the whole model."""

from collections.abc import Collection, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch import distributed as dist

from doge_fast.distributed.company import Company, all_gather
from doge_fast.distributed.exchange import (
    Agreement,
    Bucket,
    Columns,
    InParameters,
    Report,
    buckets_of,
)
from doge_fast.distributed.rounds import Rounds, pieces_of
from doge_fast.flat_buffer import Block, FlatBuffer
from doge_fast.kernels import gram, weighted_sum


class DataParallel(InParameters):
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
        self._rounds = Rounds(company)
        self._sums: list[Tensor] = []
        # As agreed on in the step under way.
        self._pieces = pieces_of((), (), ())
        self.dtypes: Sequence[torch.dtype | None] = ()
        """Of each parameter's rows; None where they do not travel."""
        # Rows here in the order in which they travel.
        self._order: list[int] = []
        # [R, F] float64: what each piece is of its row.
        self._shares_RF = torch.empty(0, 0)

    def begin(self) -> None:
        """Have the others begin to send."""
        self._rounds.begin()

    def send(
        self, row: int, params: Sequence[Tensor], apart: Collection[int], buffer: FlatBuffer
    ) -> None:
        """Ahead, if this rank had as many rows in the step before."""
        self._rounds.send(row, params, apart, buffer)

    def forget(self) -> None:
        """What this rank has sent in its step does not count."""
        self._rounds.forget()

    def agree(self, rows: Sequence[str], report: Report) -> Agreement:
        """And note the pieces of this step; the first time, compare the parameters too."""
        values = None if self._has_compared else [_checksum(param) for param in report.params]
        settings = {**report.settings, "the values of the parameters": values}
        self._order = list(self._rounds.rows)
        names = list(report.counts)
        place = {names[row]: 1.0 + piece for piece, row in enumerate(self._order)}
        more = [*(place.get(name, 0.0) for name in rows), self._rounds.num_void]
        with self._rounds.ended():
            counts_nR, more_nE, agreement = self.company.told(
                rows, report._replace(settings=settings), more
            )
        self._has_compared = True
        self.dtypes = self.travelling(report, agreement.dtypes)
        self._note(counts_nR, more_nE)
        return agreement

    def fail(self, rows: Sequence[str], num_params: int) -> str:
        """Tell the others."""
        with suppress(RuntimeError), self._rounds.ended():
            return self.company.fail(rows, num_params, num_more=len(rows) + 1)
        return ""

    def travelling(
        self, report: Report, dtypes: Sequence[torch.dtype | None]
    ) -> Sequence[torch.dtype | None]:
        """The dtypes of the rows that travel: all that have a gradient anywhere."""
        return list(dtypes)

    def _note(self, counts_nR: Tensor, more_nE: Tensor) -> None:
        """The pieces of this step, and the share of each in its row."""
        places_nR, void_n = more_nE[:, :-1], more_nE[:, -1].int().tolist()
        # Of each rank, in the order in which they travel.
        rows_n = [places_R.argsort()[places_R.sort()[0] > 0].tolist() for places_R in places_nR]
        counts = [len(rows) for rows in rows_n]
        self._pieces = pieces_of(counts, self._rounds.planned(self.dtypes), void_n)
        totals_R = counts_nR.sum(0)
        self._shares_RF = counts_nR.new_zeros(len(totals_R), len(self._pieces.slots))
        for column, (rank, piece) in enumerate(self._pieces.slots):
            row = rows_n[rank][piece]
            self._shares_RF[row, column] = counts_nR[rank, row] / totals_R[row]

    def complete(self, blocks: Sequence[Block], apart: Collection[int]) -> Columns:
        """All that has travelled ahead, and an all-to-all of the rest."""
        dtypes = [dtype for dtype in self.dtypes if dtype is not None]
        buckets = buckets_of(blocks, dtypes, self.num_ranks, apart)
        pieces = self._pieces
        come: list[list[Tensor]] = [[] for _ in buckets]
        if pieces.num_ahead:
            come = [[ahead_FC] for ahead_FC in self._rounds.received]
        if any(pieces.late):
            for parts, late_FC in zip(come, self._late(buckets, pieces.late), strict=True):
                parts.append(late_FC)
        self._rounds.plan_next(pieces.counts, self.dtypes, buckets)
        return Columns(buckets, [_in_order(parts, pieces.places) for parts in come])

    def _late(self, buckets: Sequence[Bucket], late: Sequence[int]) -> list[Tensor]:
        """[pieces, columns] of each bucket: what has not travelled ahead, rank by rank."""
        mine = self._order[len(self._order) - late[self.company.rank] :]
        rows, travelling = [], []
        for bucket in buckets:
            sent = bucket.shards(mine, self.num_ranks)
            rows.append(sent.new_empty(sum(late), bucket.num_columns))
            travelling.append(
                dist.all_to_all_single(
                    rows[-1].view(-1),
                    sent.view(-1),
                    [count * bucket.num_columns for count in late],
                    [len(mine) * bucket.num_columns] * self.num_ranks,
                    group=self.company.group,
                    async_op=True,
                )
            )
        with self.company.in_company():
            for work in travelling:
                work.wait()
        return rows

    def summed(self, rows: Sequence[Tensor]) -> Tensor:
        """The sum of the shards' Gram matrices, in the order of the ranks."""
        pieces_FF = gram(rows)
        shares_RF = self._shares_on(pieces_FF.device)
        mine_RR = shares_RF @ pieces_FF @ shares_RF.T
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
        self.weigh(columns, coefficients_R, mine)
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

    def weigh(self, columns: Columns, coefficients_R: Tensor, sums: list[Tensor]) -> None:
        """Write the weighted sums of this rank's columns into `sums`."""
        pieces_F = self._shares_on(coefficients_R.device).T @ coefficients_R
        weighted_sum(columns.rows, pieces_F, out=sums)

    def release(self) -> None:
        """Give the memory of what has travelled back."""
        self._rounds.release()
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
        """[R, F] float64 on the device."""
        if device.type == "cuda":
            # Pinned, or the copy would make the host wait for the device.
            return self._shares_RF.pin_memory().to(device, non_blocking=True)
        return self._shares_RF.to(device)


def _in_order(parts: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    """[F, columns]: the rows of all parts at these places; without a copy where they stand so."""
    if len(parts) == 1 and list(places) == list(range(len(parts[0]))):
        return parts[0]
    rows = [row for part in parts for row in part.unbind(0)]
    return torch.stack([rows[place] for place in places])


def _checksum(values: Tensor) -> int:
    """A number for the bits of a tensor, whatever the order in which they are added."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.detach().contiguous().view(integers[values.itemsize])
    return int(bits.sum(dtype=torch.int64))
