"""Data parallelism: a rank has whole gradients of some domains, and gets all rows of some columns.

The Gram matrix is a sum over columns and needs all rows of a column on one rank. So an all-to-all
sends each rank all rows of its section of the columns. The rank computes the Gram matrix of its
section; these are gathered and added in the order of the ranks. Each rank sums the rows of its
section, with the new weights or, where the rule has a mixture before, on the way of the Gram
matrix, and an all-gather delivers the sums. With P pieces of rows over n ranks a
rank sends (1 + P / n) (n - 1) / n N elements; plain data parallelism sends 2 (n - 1) / n N.

A domain that several ranks entered has one piece on each of them, or two if the rule has halves.
Its gradient is the mean over ranks, weighted by their counts. Pieces are not added up: with the
share of each piece in its domain, A [B, P], the Gram matrix is A G_PP A^T and the coefficients of
the pieces are A^T c. If the rule has halves, A is a sum F + S of those of first and of second
halves, whose products are the diagonal of F G_PP S^T.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from doge_fast.distributed.exchange import Columns, Exchange
from doge_fast.distributed.process_group import (
    Agreement,
    Communicator,
    Report,
    all_gather,
    first_shares_of,
)
from doge_fast.flat_buffer import ALIGNMENT, Block, grad_dtype_of, on_device
from doge_fast.kernels import gram, gram_and_sum, weighted_sum
from doge_fast.metric import Metric

# Columns sent in one call; sender and receiver each hold a copy meanwhile.
BUCKET_COLUMNS = 1 << 24


class Bucket(NamedTuple):
    """Blocks that are sent together: their columns concatenated, padded to n equal sections."""

    blocks: tuple[Block, ...]
    dtype: torch.dtype
    """Of the rows."""
    num_columns: int
    """Of a section."""

    def sections(self, rows: Sequence[int], num_ranks: int) -> Tensor:
        """[n, rows, columns of a section]: a copy of the rows; zeros where none was written."""
        size = self.num_columns
        sections = self.blocks[0].rows_BN.new_zeros(num_ranks, len(rows), size, dtype=self.dtype)
        first = 0
        for block in self.blocks:
            last = first + block.num_columns
            for section in range(first // size, -(-last // size)):
                low, high = max(first, section * size), min(last, (section + 1) * size)
                there = slice(low - section * size, high - section * size)
                for piece, row in enumerate(rows):
                    if block.written >> row & 1:
                        sections[section, piece, there] = block.rows_BN[
                            row, low - first : high - first
                        ]
            first = last
        return sections


class ColumnExchange(Exchange):
    """Data parallel ranks, each with whole gradients of its own domains."""

    has_own_rows = True

    def __init__(self, num_halves: int, communicator: Communicator) -> None:
        super().__init__(num_halves, communicator)
        self.first_half = communicator.rank % num_halves
        # {id of a bucket's first parameter: [n, columns of a section]}: memory of the sums, which
        # p.grad views.
        self._sums: dict[int, Tensor] = {}

    def agree(self, names: Sequence[str], report: Report) -> Agreement:
        """As `Exchange.agree`; the first time, the parameters' values must be the same too."""
        values = [_checksum(param) for param in report.params] if report.is_first else None
        settings = {**report.settings, "the values of the parameters": values}
        counts_nB2, agreement = self._communicator.agree(names, report._replace(settings=settings))
        if self._num_halves == 2:
            counts_nB2 = _in_two_halves(counts_nB2)
            agreement = agreement._replace(first_shares=first_shares_of(names, counts_nB2))
        # The dtype in which each block's rows are sent.
        self._dtypes = [dtype for dtype in agreement.dtypes if dtype is not None]
        # Pieces of this step: the number on each rank, the share of each in its row, and the rows
        # of this rank's buffer that hold this rank's pieces.
        has_piece_nC = counts_nB2[:, :, : self._num_halves].flatten(1) > 0
        self._pieces_n: list[int] = has_piece_nC.sum(1).tolist()
        # Pieces are sorted by rank, then by row.
        rows_P = has_piece_nC.nonzero()[:, 1]
        self._shares_CP = counts_nB2.new_zeros(has_piece_nC.shape[1], len(rows_P))
        # Of a rank in the mean over ranks: its halves are sums, and add up.
        counts_nB = counts_nB2.sum(2)
        shares_nC = (counts_nB / counts_nB.sum(0)).repeat_interleave(self._num_halves, dim=1)
        self._shares_CP[rows_P, torch.arange(len(rows_P))] = shares_nC[has_piece_nC]
        row_of = {name: row for row, name in enumerate(report.entries)}
        self._rows_here = [
            row_of[name] * self._num_halves + half
            for name in names
            if name in row_of
            for half in range(self._num_halves)
            if report.entries[name].counts[half]
        ]
        return agreement

    def complete(self, blocks: Sequence[Block], apart: Collection[int]) -> Columns:
        """An all-to-all."""
        buckets = _buckets_of(blocks, self._dtypes, self.num_ranks, apart)
        received: list[Tensor] = []
        works = []
        for bucket in buckets:
            sent = bucket.sections(self._rows_here, self.num_ranks)
            received.append(sent.new_empty(sum(self._pieces_n), bucket.num_columns))
            works.append(
                dist.all_to_all_single(
                    received[-1].view(-1),
                    sent.view(-1),
                    [number * bucket.num_columns for number in self._pieces_n],
                    [len(self._rows_here) * bucket.num_columns] * self.num_ranks,
                    group=self._communicator.group,
                    async_op=True,
                )
            )
        for work in works:
            work.wait()
        firsts = {id(bucket.blocks[0].param) for bucket in buckets}
        self._sums = {first: sums for first, sums in self._sums.items() if first in firsts}
        return Columns([bucket.blocks for bucket in buckets], received)

    def _second_moments(self, columns: Columns, metric: Metric | None) -> dict[str, Any]:
        """Those of this rank's section of each bucket's columns."""
        if metric is None:
            return {}
        rank = self._communicator.rank
        moments = [
            metric.section([block.param for block in blocks], rows_PC.shape[1], rank)
            for blocks, rows_PC in zip(columns.blocks, columns.rows, strict=True)
        ]
        return {"second_moments": moments, "eps": metric.eps}

    def gram(
        self, columns: Columns, metric: Metric | None = None, mixture_B: Tensor | None = None
    ) -> Tensor:
        """The sum of the sections' Gram matrices."""
        moments = self._second_moments(columns, metric)
        if mixture_B is None:
            gram_PP = gram(columns.rows, **moments)
        else:
            coefficients_P = self._of_pieces(mixture_B.repeat_interleave(self._num_halves))
            with self._sections(columns) as mine:
                gram_PP = gram_and_sum(columns.rows, coefficients_P, out=mine, **moments)
        shares_CP = on_device(self._shares_CP, gram_PP.device, torch.float64)
        # [B, P] of each half
        halves = [shares_CP[half :: self._num_halves] for half in range(self._num_halves)]
        shares_BP = torch.stack(halves).sum(0)
        found = [shares_BP @ gram_PP @ shares_BP.T]
        if self._num_halves == 2:
            found.append((halves[0] @ gram_PP * halves[1]).sum(1)[None])
        matrices = self._communicator.sum(torch.cat(found))
        # A product of three matrices need not be symmetric to the bit, and where the pieces of a
        # row cancel, its square may be negative.
        gram_BB = matrices[: len(shares_BP)]
        gram_BB.diagonal().clamp_(min=0)
        gram_BB.copy_(gram_BB.tril() + gram_BB.tril(-1).T)
        return matrices

    def deliver(self, columns: Columns, coefficients_C: Tensor) -> None:
        """An all-gather of the sections' weighted sums."""
        with self._sections(columns) as mine:
            weighted_sum(columns.rows, self._of_pieces(coefficients_C), out=mine)

    def share(self, state_S: Tensor) -> None:
        """A broadcast."""
        self._communicator.broadcast(state_S)

    def _of_pieces(self, coefficients_C: Tensor) -> Tensor:
        """[P]"""
        shares_CP = on_device(self._shares_CP, coefficients_C.device, torch.float64)
        return shares_CP.T @ coefficients_C

    @contextmanager
    def _sections(self, columns: Columns) -> Iterator[list[Tensor]]:
        """Memory for this rank's sections of the sums; blocks have all sections afterwards."""
        sums = [
            self._memory(blocks[0].param, rows_PC.shape[1])
            for blocks, rows_PC in zip(columns.blocks, columns.rows, strict=True)
        ]
        # A rank writes its section at its place in the memory of all sections.
        mine = [whole_nC[self._communicator.rank] for whole_nC in sums]
        yield mine
        for whole_nC, mine_C in zip(sums, mine, strict=True):
            all_gather(whole_nC.view(-1), mine_C, group=self._communicator.group)
        for blocks, whole_nC in zip(columns.blocks, sums, strict=True):
            sizes = [block.num_columns for block in blocks]
            parts = torch.split(whole_nC.view(-1)[: sum(sizes)], sizes)
            for block, values_N in zip(blocks, parts, strict=True):
                block.combined_as(values_N)

    def _memory(self, param: Tensor, num_columns: int) -> Tensor:
        """For the sums of a bucket; the same as in the step before, unless its kind has changed."""
        kind = (self.num_ranks, num_columns), grad_dtype_of(param), param.device
        sums = self._sums.get(id(param))
        if sums is None or (sums.shape, sums.dtype, sums.device) != kind:
            shape, dtype, device = kind
            sums = self._sums[id(param)] = torch.empty(shape, dtype=dtype, device=device)
        return sums

    def release(self) -> None:
        """Free the memory of the sums."""
        self._sums = {}


def _in_two_halves(counts_nB2: Tensor) -> Tensor:
    """The counts, where ranks that all have the same half of a domain take turns.

    So a domain that few ranks have, each in one piece, has two halves. Those ranks send one piece
    of it each, in whatever row; which half it belongs to is decided here.
    """
    has_one_half_B = (counts_nB2.sum(0) == 0).any(1)
    is_there_nB = counts_nB2.sum(2) > 0
    is_second_nB = is_there_nB & (is_there_nB.cumsum(0) % 2 == 0)
    turns_nB = has_one_half_B & is_second_nB
    return torch.where(turns_nB[:, :, None], counts_nB2.flip(2), counts_nB2)


def _buckets_of(
    blocks: Sequence[Block], dtypes: Sequence[torch.dtype], num_ranks: int, apart: Collection[int]
) -> list[Bucket]:
    """Buckets of about `BUCKET_COLUMNS` columns, each of one device and one pair of dtypes."""
    groups: dict[tuple[bool, torch.device, torch.dtype, torch.dtype], list[list[Block]]] = {}
    for block, dtype in zip(blocks, dtypes, strict=True):
        if not block.num_columns:
            continue
        is_apart = id(block.param) in apart
        kind = (is_apart, block.param.device, dtype, grad_dtype_of(block.param))
        group = groups.setdefault(kind, [[]])
        if sum(other.num_columns for other in group[-1]) >= BUCKET_COLUMNS:
            group.append([])
        group[-1].append(block)
    unit = ALIGNMENT * num_ranks
    return [
        Bucket(tuple(each), dtype, -(-sum(b.num_columns for b in each) // unit) * ALIGNMENT)
        for (_, _, dtype, _), group in groups.items()
        for each in group
    ]


def _checksum(values: Tensor) -> int:
    """The sum of a tensor's bits as integers, which does not depend on the order of addition."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.detach().contiguous().view(integers[values.itemsize])
    return int(bits.sum(dtype=torch.int64))
