"""What a step asks of the ranks that share it: a few verbs, and what one process answers.

Each of n ranks has the gradients of its own domains, over all columns. The Gram matrix needs all
rows of a column side by side, and is a sum over columns. So an all-to-all turns the rows round:
afterwards a rank has every row of its own columns. It multiplies them there; the K x K partial
results are gathered and added in the order of the ranks; each rank sums its own columns with the
new weights; an all-gather delivers the sums. With P pieces of rows over all ranks a rank sends
(1 + P / n) (n - 1) / n N elements, where plain data parallelism sends 2 (n - 1) / n N.

A domain that several ranks have entered has its gradient in pieces: it is their mean, weighted by
their counts. All that follows is linear in the rows. So pieces stay rows of their own, and with
A [R, P], the share of each piece in its row, the Gram matrix is A G_P A^T and the coefficients of
the pieces are A^T c.

`doge_fast.distributed` has the ranks; nothing here talks.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from doge_fast.flat_buffer import Block, weighted_gradients
from doge_fast.kernels import gram

# Shards begin on as many elements as rows of the flat buffer do.
ALIGNMENT = 64
# Columns that travel in one call; they exist twice while they do.
BUCKET_COLUMNS = 1 << 24


class Report(NamedTuple):
    """What a rank tells the others of its step."""

    counts: Mapping[str, float]
    """{row: count}; 0 for one that was begun and not left."""
    order: Sequence[str]
    """Names of rows in the order of entry here; once for each entry."""
    params: Sequence[Tensor]
    """That are trained."""
    dtypes: Sequence[torch.dtype | None]
    """Of each parameter's rows; None where no domain here gave it a gradient."""
    settings: Mapping[str, object]
    """What must be the same on all ranks, by the name that a message gives it; as JSON has it.

    What is called with whether the ranks have not agreed before gives it, if it is costly to read.
    """


class Agreement(NamedTuple):
    """What all ranks together have."""

    seen: frozenset[str]
    """Domains that have a gradient somewhere."""
    dtypes: Sequence[torch.dtype | None]
    """Of each parameter's rows; None where it has no gradient anywhere."""


class Bucket(NamedTuple):
    """Blocks that travel together, their columns one after another, padded to n equal shards."""

    blocks: tuple[Block, ...]
    dtype: torch.dtype
    """Of the rows."""
    num_columns: int
    """Of a shard."""

    def shards(self, rows: Sequence[int], num_ranks: int) -> Tensor:
        """[n, rows, columns of a shard]: a copy of rows, zeros where they are not written."""
        shape = (num_ranks, len(rows), self.num_columns)
        sent = torch.zeros(shape, dtype=self.dtype, device=self.blocks[0].param.device)
        for shard, block, there, here in self.cuts(num_ranks):
            for piece, row in enumerate(rows):
                if block.written >> row & 1:
                    sent[shard, piece, there] = block.rows_RN[row, here]
        return sent

    def cuts(self, num_ranks: int) -> Iterator[tuple[int, Block, slice, slice]]:
        """(shard, block, columns of the shard, columns of the block) of all that overlap."""
        first = 0
        for block in self.blocks:
            last = first + block.num_columns
            for shard in range(first // self.num_columns, num_ranks):
                start, stop = shard * self.num_columns, (shard + 1) * self.num_columns
                low, high = max(first, start), min(last, stop)
                if low >= high:
                    break
                there = slice(low - start, high - start)
                yield shard, block, there, slice(low - first, high - first)
            first = last


class Columns(NamedTuple):
    """All rows of the columns that a rank computes with."""

    buckets: Sequence[Bucket]
    """Whose columns they are part of."""
    rows: Sequence[Tensor]
    """[P, columns] of each bucket: pieces of rows, those of rank 0 first."""

    @property
    def blocks(self) -> list[Block]:
        """All of them, in the order of the buckets."""
        return [block for bucket in self.buckets for block in bucket.blocks]

    def split(self, selected: Collection[int]) -> tuple[list[Tensor], list[Tensor]]:
        """The rows of the parameters with these ids, and those of the others."""
        inside: list[Tensor] = []
        outside: list[Tensor] = []
        for bucket, rows_FC in zip(self.buckets, self.rows, strict=True):
            is_inside = id(bucket.blocks[0].param) in selected
            (inside if is_inside else outside).append(rows_FC)
        return inside, outside


class Exchange(Protocol):
    """What `combining.combine` asks of the ranks."""

    num_ranks: int
    has_shards: bool
    """Whether parameters and gradients are DTensors."""
    has_own_rows: bool
    """Whether a rank has rows of its own domains alone, in the order in which it enters them."""

    def agree(self, rows: Sequence[str], report: Report) -> Agreement:
        """Tell the others, and hear of them.

        Args:
            rows: names of the rows of this step, in their order.
            report: of this rank.

        Raises:
            RuntimeError: ranks differ in what must be the same, or one has dropped its step; the
                same sentence on all of them.
        """

    def complete(self, blocks: Sequence[Block], apart: Collection[int]) -> Columns:
        """All rows of this rank's columns of the blocks.

        Args:
            blocks: of all parameters that have a gradient on any rank.
            apart: ids of parameters that share no bucket with others.
        """

    def summed(self, rows: Sequence[Tensor]) -> Tensor:
        """[R, R] float64: the Gram matrix over all ranks.

        Args:
            rows: at least one, of the columns that `complete` gave this rank.
        """

    def deliver(self, columns: Columns, coefficients_R: Tensor, state_S: Tensor) -> list[Tensor]:
        """sum_r c_r g_r for every block, on all ranks; in the order of the buckets' blocks.

        Args:
            columns: as `complete` gave them.
            coefficients_R: [R] float64, of the rows.
            state_S: the domain weights, which become those of rank 0 to the bit.
        """

    def give(self, columns: Columns, gradients: Sequence[Tensor]) -> None:
        """Put what `deliver` gave into `p.grad`."""

    def fail(self, rows: Sequence[str], num_params: int) -> str:
        """Tell the others that this rank has dropped its step; then they raise in `agree`.

        Returns:
            Who cannot be told, in a sentence; empty where all have heard.
        """

    def release(self) -> None:
        """Give the memory of what was exchanged back."""


class Alone:
    """One process: it has all rows."""

    num_ranks = 1
    has_shards = False
    has_own_rows = False

    def agree(self, rows: Sequence[str], report: Report) -> Agreement:
        """What this process has."""
        seen = frozenset(name for name, count in report.counts.items() if count)
        return Agreement(seen, report.dtypes)

    def complete(self, blocks: Sequence[Block], apart: Collection[int]) -> Columns:
        """The blocks as they are."""
        buckets = [Bucket((block,), block.rows_RN.dtype, block.num_columns) for block in blocks]
        return Columns(buckets, [block.rows_RN for block in blocks])

    def summed(self, rows: Sequence[Tensor]) -> Tensor:
        """The Gram matrix of the rows."""
        gram_RR: Tensor = gram(rows)
        return gram_RR

    def deliver(self, columns: Columns, coefficients_R: Tensor, state_S: Tensor) -> list[Tensor]:
        """The weighted sums."""
        return weighted_gradients(columns.blocks, coefficients_R)

    def give(self, columns: Columns, gradients: Sequence[Tensor]) -> None:
        """Into `p.grad`."""
        give(columns, gradients)

    def fail(self, rows: Sequence[str], num_params: int) -> str:
        """There is nobody to tell."""
        return ""

    def release(self) -> None:
        """Nothing was exchanged."""


def give(columns: Columns, gradients: Sequence[Tensor]) -> None:
    """Put gradients into `p.grad`, in the order of the buckets' blocks."""
    for block, gradient in zip(columns.blocks, gradients, strict=True):
        block.give(gradient)


def buckets_of(
    blocks: Sequence[Block],
    dtypes: Sequence[torch.dtype],
    num_ranks: int,
    apart: Collection[int] = (),
) -> list[Bucket]:
    """The blocks in groups of one device and dtypes, of about `BUCKET_COLUMNS` columns each.

    Args:
        blocks: in the same order on all ranks.
        dtypes: in which the rows of each travel.
        num_ranks: over which the columns are dealt.
        apart: ids of parameters that share no bucket with others.
    """
    groups: dict[tuple[bool, torch.device, torch.dtype, torch.dtype], list[list[Block]]] = {}
    for block, dtype in zip(blocks, dtypes, strict=True):
        is_apart = id(block.param) in apart
        kind = (is_apart, block.param.device, dtype, block.param.dtype)
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
