"""What a rank has of a batch by domain: pieces of it, or a share of every domain."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from doge_fast.sampling import pieces

Batch = dict[str, Any]
"""What a model takes: `input_ids`, `labels` and so on."""


class Part(dict[str, Batch]):
    """What a rank has of a batch `{domain: batch}`: pieces of the domains, one after another.

    It has the domains of which there is any example here.
    """

    counts: dict[str, int]
    """{domain: examples here}, of these."""
    sizes: dict[str, int]
    """{domain: examples on all ranks}, of all domains of the batch."""

    @classmethod
    def of(
        cls,
        batches: Mapping[str, Batch],
        mine: Mapping[str, tuple[int, int]],
        sizes: Mapping[str, int],
    ) -> "Part":
        """The part that a `Deal` gives a rank."""
        part = cls(batches)
        part.counts = {name: last - first for name, (first, last) in mine.items()}
        part.sizes = dict(sizes)
        return part


@dataclass(frozen=True)
class Deal:
    """What a rank has of each domain of a step: `deal(sizes, rank, num_ranks)`."""

    of_every_domain: bool = False
    """All ranks run every domain (fsdp): an equal part of each, to one example."""

    def __call__(
        self, sizes: Mapping[str, int], rank: int, num_ranks: int
    ) -> dict[str, tuple[int, int]]:
        """{domain: (first, last)} as `doge_fast.sampling.pieces` says it.

        Raises:
            ValueError: of a domain there is less than one example for each rank that runs it.
        """
        if not self.of_every_domain:
            return pieces(sizes, rank, num_ranks)
        if few := {name: size for name, size in sizes.items() if size < num_ranks}:
            raise ValueError(
                f"with fsdp all {num_ranks} ranks run every domain of a step; got {few} "
                f"examples. Give each domain at least {num_ranks} in a step, and pass "
                "TrainingArguments(dataloader_drop_last=True) where only the last one has "
                "fewer."
            )
        return {
            name: (size * rank // num_ranks, size * (rank + 1) // num_ranks)
            for name, size in sizes.items()
        }


PIECES = Deal()
"""Pieces of the domains, one after another: a rank has few of them."""


def part_of(batch: Mapping[str, Batch], rank: int, num_ranks: int, deal: Deal = PIECES) -> Part:
    """A rank's part of a batch that all ranks have.

    A domain that one rank has as a whole is left as it is; of one that is cut, everything holds
    the examples along its first axis.

    Raises:
        ValueError: a domain is to be cut, and its tensors are not of one length.
    """
    sizes = {name: _num_examples(domain) for name, domain in batch.items()}
    mine = deal(sizes, rank, num_ranks)
    batches = {
        name: batch[name] if last - first == sizes[name] else _cut(name, batch[name], first, last)
        for name, (first, last) in mine.items()
    }
    return Part.of(batches, mine, sizes)


def _num_examples(batch: Batch) -> int:
    # What has no such axis is one example.
    return next(filter(None, _lengths(batch).values()), 1)


def _lengths(batch: Batch) -> dict[str, int | None]:
    """Of the first axes."""
    return {
        key: len(rows) if isinstance(rows, Tensor) and rows.dim() else None
        for key, rows in batch.items()
    }


def _cut(name: str, batch: Batch, first: int, last: int) -> Batch:
    lengths = _lengths(batch)
    if len(set(lengths.values())) > 1:
        raise ValueError(
            "a finished batch is cut along its first axis where several ranks share a domain; in "
            f"that of {name!r} the axes are {lengths}. Give every entry the examples as first axis."
        )
    return {key: rows[first:last] for key, rows in batch.items()}


def shares(parts: Sequence[Part]) -> dict[str, float]:
    """{domain: which share of its examples in these batches is here}, of those that are here."""
    here, everywhere = Counter[str](), Counter[str]()
    for part in parts:
        here.update(part.counts)
        everywhere.update(part.sizes)
    return {name: count / everywhere[name] for name, count in here.items()}
