"""Data parallelism: a rank has some domains' gradients of the whole model."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from doge_fast.distributed.company import Company, all_gather
from doge_fast.exchange import Agreement, Columns, Report, buckets_of
from doge_fast.flat_buffer import Block
from doge_fast.kernels import gram, weighted_sum


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
        # Of the step under way: rows here in the order in which they travel, pieces of every rank,
        # and their shares, [R, F] float64.
        self._order: list[int] = []
        self._num_pieces: list[int] = []
        self._shares_RF = torch.empty(0, 0)
        self._memory: dict[tuple[str, int], Tensor] = {}

    def agree(self, rows: Sequence[str], report: Report) -> Agreement:
        """And note the pieces of this step; the first time, compare the parameters too."""
        values = None if self._has_compared else [_checksum(param) for param in report.params]
        settings = {**report.settings, "the values of the parameters": values}
        counts_nR, agreement = self.company.told(rows, report._replace(settings=settings))
        self._has_compared = True
        self._note(counts_nR)
        place = {name: row for row, name in enumerate(report.counts)}
        self._order = [place[name] for name in rows if report.counts.get(name)]
        return agreement

    def enter(
        self, row: int, count: float, rows: Sequence[str], num_params: int, *, is_first: bool
    ) -> None:
        """The others hear of it in `agree`."""

    def parts(self, row: int, param: Tensor, grad: Tensor) -> Iterable[tuple[int, Tensor]]:
        """All of it; the others get theirs in `complete`."""
        return [(row, grad)]

    def fail(self, rows: Sequence[str], num_params: int) -> None:
        """Tell the others."""
        self.company.fail(rows, num_params)

    def _note(self, counts_nR: Tensor) -> None:
        """The pieces of this step, rank by rank, and the share of each in its row."""
        ranks_F, rows_F = counts_nR.nonzero(as_tuple=True)
        counts_F = counts_nR[ranks_F, rows_F]
        totals_R = counts_nR.sum(0)
        shares_RF = counts_F.new_zeros(counts_nR.shape[1], len(rows_F))
        shares_RF[rows_F, torch.arange(len(rows_F))] = counts_F / totals_R[rows_F]
        self._shares_RF = shares_RF
        self._num_pieces = torch.bincount(ranks_F, minlength=self.num_ranks).tolist()

    def complete(self, blocks: Sequence[Block], apart: Collection[int]) -> Columns:
        """An all-to-all: a shard of the columns for every rank."""
        buckets = buckets_of(blocks, self.num_ranks, apart)
        rows, travelling = [], []
        num_pieces = sum(self._num_pieces)
        for index, bucket in enumerate(buckets):
            size, like = bucket.num_columns, bucket.blocks[0].rows_RN
            # [n, pieces of mine, columns of a shard]
            sent = like.new_zeros(self.num_ranks, len(self._order), size)
            for shard, block, there, here in bucket.cuts(self.num_ranks):
                for piece, row in enumerate(self._order):
                    sent[shard, piece, there] = block.rows_RN[row, here]
            rows.append(self._kept("rows", index, like, num_pieces, size))
            travelling.append(
                dist.all_to_all_single(
                    rows[-1].view(-1),
                    sent.view(-1),
                    [count * size for count in self._num_pieces],
                    [len(self._order) * size] * self.num_ranks,
                    group=self.company.group,
                    async_op=True,
                )
            )
        with self.company.in_company():
            for work in travelling:
                work.wait()
        return Columns(buckets, rows)

    def summed(self, rows: Sequence[Tensor]) -> Tensor:
        """The sum of the shards' Gram matrices, in the order of the ranks."""
        pieces_FF = gram(rows)
        shares_RF = self._shares_on(pieces_FF.device)
        mine_RR = shares_RF @ pieces_FF @ shares_RF.T
        gram_RR = self.company.summed(mine_RR, range(self.num_ranks))
        # A product of three matrices need not be symmetric to the bit.
        symmetric_RR: Tensor = gram_RR.tril() + gram_RR.tril(-1).T
        return symmetric_RR

    def squared_norm(self, columns: Columns, gradients: Sequence[Tensor]) -> Tensor:
        """Every rank has the combined gradient as a whole."""
        norm_11: Tensor = gram([gradient.view(1, -1) for gradient in gradients])
        return norm_11[0, 0]

    def deliver(self, columns: Columns, coefficients_R: Tensor, state_S: Tensor) -> list[Tensor]:
        """An all-gather of the shards' weighted sums."""
        pieces_F = self._shares_on(coefficients_R.device).T @ coefficients_R
        buckets = columns.buckets
        wholes = [
            self._kept("sums", index, bucket.blocks[0].param, self.num_ranks, bucket.num_columns)
            for index, bucket in enumerate(buckets)
        ]
        # All-gather in place: a rank's shard is where it belongs in the whole.
        mine = [whole_nC[self.company.rank] for whole_nC in wholes]
        weighted_sum(columns.rows, pieces_F, out=mine)
        self.company.share(state_S)
        with self.company.in_company():
            for whole_nC, mine_C in zip(wholes, mine, strict=True):
                all_gather(whole_nC.view(-1), mine_C, group=self.company.group)
        gradients: list[Tensor] = []
        for bucket, whole_nC in zip(buckets, wholes, strict=True):
            sizes = [block.num_columns for block in bucket.blocks]
            parts = torch.split(whole_nC.view(-1)[: sum(sizes)], sizes)
            gradients += [
                block.combined_as(values_N)
                for block, values_N in zip(bucket.blocks, parts, strict=True)
            ]
        return gradients

    def release(self) -> None:
        """Give the memory of what has travelled back."""
        self._memory.clear()

    def _kept(self, what: str, index: int, like: Tensor, *shape: int) -> Tensor:
        """Memory that lasts from step to step while its shape does."""
        kind = (shape, like.dtype, like.device)
        found = self._memory.get((what, index))
        if found is None or (found.shape, found.dtype, found.device) != kind:
            found = torch.empty(shape, dtype=like.dtype, device=like.device)
            self._memory[what, index] = found
        return found

    def _shares_on(self, device: torch.device) -> Tensor:
        """[R, F] float64 on the device."""
        if device.type == "cuda":
            # Pinned, or the copy would make the host wait for the device.
            return self._shares_RF.pin_memory().to(device, non_blocking=True)
        return self._shares_RF.to(device)


def _checksum(values: Tensor) -> int:
    """A number for the bits of a tensor, whatever the order in which they are added."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.detach().contiguous().view(integers[values.itemsize])
    return int(bits.sum(dtype=torch.int64))
