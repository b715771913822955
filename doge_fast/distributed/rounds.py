"""Rows that travel while a rank computes its next ones.

What a rank will have in a step, no other knows before they agree. So what travels ahead is a guess
that all ranks make alike: as many rows of each rank, over the same columns, as in the step before.
It goes in rounds, the last of which are those of ranks with fewer rows: in equal pieces of a batch
all ranks come to their last row at the same time. A round is an all-to-all of each bucket, begun
when a domain is left for good; ranks without a row in it send nothing.

Nobody hangs: all ranks begin the same rounds in the same order, and all of them before they agree,
with zeros where a row is not there. Then each says which rows its rounds hold. What the guess
lacked travels after that. The rounds have a group of ranks of their own, since a loop may reduce
its losses, or DistributedDataParallel broadcast buffers, between two domains.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup, Work

from doge_fast.distributed.company import Company
from doge_fast.distributed.exchange import Bucket, buckets_of
from doge_fast.flat_buffer import FlatBuffer


class Layout(NamedTuple):
    """Columns in which rows travel."""

    dtypes: Sequence[torch.dtype | None]
    """Of each parameter's rows; None where it has no gradient."""
    buckets: Sequence[tuple[int, torch.dtype, torch.device]]
    """Columns of a shard, dtype and device of each."""


class Plan(NamedTuple):
    """What travels before the ranks agree."""

    pieces: tuple[int, ...]
    """Rows of each rank."""
    layout: Layout


def slots_of(pieces: Sequence[int]) -> list[tuple[int, int]]:
    """(round, rank) of all rows in their order, of which each rank has so many."""
    num_rounds = max(pieces, default=0)
    return [
        (number, rank)
        for number in range(num_rounds)
        for rank, num_rows in enumerate(pieces)
        if number >= num_rounds - num_rows
    ]


class Pieces(NamedTuple):
    """The rows that a step has on all ranks, and where they have come."""

    counts: Sequence[int]
    """Of each rank."""
    slots: Sequence[tuple[int, int]]
    """(rank, number there) of each, in their order."""
    places: Sequence[int]
    """Where each is: among those that have travelled ahead, then the late ones, rank by rank."""
    num_ahead: int
    """Rows that have travelled ahead; 0 if no row of this step is among them."""
    late: Sequence[int]
    """Of each rank."""


def pieces_of(counts: Sequence[int], planned: Sequence[int], void: Sequence[int]) -> Pieces:
    """Find the rows of a step.

    Args:
        counts: of each rank, rows in this step.
        planned: of each rank, rows that have travelled ahead.
        void: of each rank, how many of these, the first ones, do not count.
    """
    come = [
        min(num_rows, max(0, num_planned - num_void))
        for num_rows, num_planned, num_void in zip(counts, planned, void, strict=True)
    ]
    ahead = {slot: place for place, slot in enumerate(slots_of(planned))} if any(come) else {}
    late = [num_rows - num_come for num_rows, num_come in zip(counts, come, strict=True)]
    first_late = list(accumulate(late, initial=len(ahead)))
    last, last_planned = max(counts, default=0), max(planned, default=0)
    slots = [(rank, number - last + counts[rank]) for number, rank in slots_of(counts)]
    places = [
        ahead[last_planned - planned[rank] + void[rank] + piece, rank]
        if piece < come[rank]
        else first_late[rank] + piece - come[rank]
        for rank, piece in slots
    ]
    return Pieces(counts, slots, places, len(ahead), late)


class Rounds:
    """The rounds of the step under way.

    Args:
        company: the processes.
    """

    def __init__(self, company: Company) -> None:
        self._company = company
        self._group: ProcessGroup | None = None
        self._plan: Plan | None = None
        # Of the last step; the next one is guessed where two have had the same.
        self._layout: Layout | None = None
        self._num_begun = 0
        self._travelling: list[Work] = []
        self.received: list[Tensor] = []
        """[F, columns] of each bucket: rows of the rounds, in the order of their slots."""
        self.rows: list[int] = []
        """Of this rank's buffer, in the order in which they travel in this step."""
        self.num_void = 0
        """This rank's first rows in the rounds that do not count, since its step began anew."""

    def planned(self, dtypes: Sequence[torch.dtype | None]) -> tuple[int, ...]:
        """The rows of each rank that have travelled, if those of a step were of these dtypes."""
        if self._plan is None or self._plan.layout.dtypes != dtypes:
            return (0,) * self._company.num_ranks
        return self._plan.pieces

    def begin(self) -> None:
        """Let the others begin the rounds in which this rank has no row."""
        if self._plan is not None:
            self._reach(max(self._plan.pieces) - self._num_planned)

    def send(
        self, row: int, params: Sequence[Tensor], apart: Collection[int], buffer: FlatBuffer
    ) -> None:
        """A row is complete: begin its round, where it has one."""
        if row in self.rows:
            return
        self.rows.append(row)
        if self._plan is None or self.num_void + len(self.rows) > self._num_planned:
            return
        layout, buckets = self._plan.layout, []
        if len(params) == len(layout.dtypes):
            blocks = buffer.laid_out(params, layout.dtypes)
            dtypes = [dtype for dtype in layout.dtypes if dtype is not None]
            buckets = buckets_of(blocks, dtypes, self._company.num_ranks, apart)
        if list(map(_kind, buckets)) == layout.buckets:
            self.begin()
            self._begin_round(buckets, row)
        else:
            # The model has changed: what is left of the rounds carries zeros.
            self.num_void = self._num_planned

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Begin all rounds that are left, tell the others inside, and wait for what travels."""
        try:
            if self._plan is not None:
                self._reach(max(self._plan.pieces))
            yield
            with self._company.in_company():
                for work in self._travelling:
                    work.wait()
        except BaseException:
            # Nobody waits for what is still to come into this memory.
            self.received = []
            raise
        finally:
            self._travelling = []
            self._num_begun = self.num_void = 0
            self.rows = []

    def forget(self) -> None:
        """This rank's step begins anew, before all have agreed."""
        self.num_void = min(self._num_planned, self.num_void + len(self.rows))
        self.rows = []

    def plan_next(
        self,
        pieces: Sequence[int],
        dtypes: Sequence[torch.dtype | None],
        buckets: Sequence[Bucket],
    ) -> None:
        """Guess that the next step will be as this one; all ranks are here.

        Args:
            pieces: rows of each rank.
            dtypes: of each parameter's rows.
            buckets: in which they have travelled.
        """
        layout = Layout(dtypes, list(map(_kind, buckets)))
        is_steady, self._layout = layout == self._layout, layout
        self._plan = Plan(tuple(pieces), layout) if is_steady else None
        if is_steady and self._group is None:
            self._group = self._company.others_like_it()
            # NCCL connects at the first call, for which each host waits for the others.
            ones = [1] * self._company.num_ranks
            here = torch.zeros(len(ones), dtype=torch.uint8, device=layout.buckets[0][2])
            dist.all_to_all_single(torch.empty_like(here), here, ones, ones, group=self._group)

    def release(self) -> None:
        """Give the memory of what has travelled back."""
        if not self._num_begun:
            self.received = []

    @property
    def _num_planned(self) -> int:
        """Of this rank."""
        return 0 if self._plan is None else self._plan.pieces[self._company.rank]

    def _reach(self, number: int) -> None:
        """Begin the rounds before this one that have not begun, with nothing or zeros."""
        while self._num_begun < number:
            self._begin_round((), None)

    def _begin_round(self, buckets: Sequence[Bucket], row: int | None) -> None:
        """An all-to-all of each bucket, with this rank's row, or with zeros in its place."""
        assert self._plan is not None
        pieces, layout = self._plan
        company, number = self._company, self._num_begun
        slots = slots_of(pieces)
        first = [slot[0] for slot in slots].index(number)
        senders = [rank for each, rank in slots if each == number]
        is_sender = company.rank in senders
        self._fit(len(slots), layout)
        # What has come holds the memory that it was sent from.
        self._travelling = [work for work in self._travelling if not _is_over(work)]
        for index, (size, dtype, device) in enumerate(layout.buckets):
            if row is not None:
                sent = buckets[index].shards([row], company.num_ranks)
            else:
                # [n, pieces of mine, columns of a shard]
                sent = torch.zeros(company.num_ranks, is_sender, size, dtype=dtype, device=device)
            self._travelling.append(
                dist.all_to_all_single(
                    self.received[index][first : first + len(senders)].view(-1),
                    sent.view(-1),
                    [size * (rank in senders) for rank in range(company.num_ranks)],
                    [size * is_sender] * company.num_ranks,
                    group=self._group,
                    async_op=True,
                )
            )
        self._num_begun += 1

    def _fit(self, num_rows: int, layout: Layout) -> None:
        """Have memory for what comes; it lasts from step to step while its shape does."""
        kinds = [(len(each), each.shape[1], each.dtype, each.device) for each in self.received]
        if kinds != [(num_rows, *kind) for kind in layout.buckets]:
            self.received = [
                torch.empty(num_rows, size, dtype=dtype, device=device)
                for size, dtype, device in layout.buckets
            ]


def _kind(bucket: Bucket) -> tuple[int, torch.dtype, torch.device]:
    return bucket.num_columns, bucket.dtype, bucket.blocks[0].param.device


def _is_over(work: Work) -> bool:
    """Whether it has come; what has failed says so when all are waited for."""
    try:
        return work.is_completed() and bool(work.wait())
    except RuntimeError:
        return False
