"""Datasets by domain for a trainer that takes a single dataset, and each rank's part of a batch.

The source is a mapping, a column or a stream. This module needs torch and numpy alone: it calls the
methods of Hugging Face's datasets by name.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from doge_fast.sampling import pieces

Batch = dict[str, Any]
"""A model's inputs: `input_ids`, `labels` and so on."""
Collate = Callable[[list[Any]], Batch]
"""Makes a batch of examples."""

# Rows of the domain column that are read at a time.
ROWS_AT_ONCE = 100_000
# A domain of a mixed stream keeps examples for at most this many steps while another domain lacks
# some; further examples are skipped.
WAITING_STEPS = 64
# A mixed stream must complete a batch of every domain within this many examples.
MOST_EXAMPLES_WITHOUT = 1_000_000


def by_domain(dataset: Any, column: str, rows: Sequence[str]) -> Any:
    """`split_by_domain` of a dataset whose examples name a domain; any other one unchanged."""
    if isinstance(dataset, IterableDataset | Mapping):
        return dataset
    columns = getattr(dataset, "column_names", None)
    if columns is None:
        is_mixed = len(dataset) > 0 and _names_a_domain(dataset[0], column)
    else:
        is_mixed = column in columns
    return split_by_domain(dataset, column, rows) if is_mixed else dataset


class DomainZip(Dataset[Mapping[str, Any]]):
    """Datasets by domain as one dataset whose examples are `{domain: example}`.

    Example i holds example i mod n_d of every domain d: the length is that of the longest domain,
    and shorter ones repeat. Examples are read lazily, so a rank reads its own part alone.

    Raises:
        ValueError: there is no domain, or a domain is empty or a stream.
    """

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        if streams := [n for n, rows in datasets.items() if isinstance(rows, IterableDataset)]:
            raise ValueError(
                f"a mapping of training datasets needs their lengths; {streams} are streams. Give "
                "their examples the column of the domain, and make them one stream: "
                'datasets.interleave_datasets([...], stopping_strategy="all_exhausted").'
            )
        empty = [name for name, rows in datasets.items() if len(rows) == 0]
        if empty or not datasets:
            raise ValueError(
                "A mapping of training datasets needs at least one example for every domain; of "
                f"{list(datasets)} these have none: {empty}. Leave them out of train_dataset and "
                "domains."
            )
        self.datasets = dict(datasets)

    def __len__(self) -> int:
        return max(len(rows) for rows in self.datasets.values())

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return _Examples(self.datasets, index)


class _Examples(Mapping[str, Any]):
    """Example `index` of every domain, read on access."""

    def __init__(self, datasets: Mapping[str, Any], index: int) -> None:
        self._datasets = datasets
        self._index = index

    def __getitem__(self, name: str) -> Any:
        rows = self._datasets[name]
        return rows[self._index % len(rows)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._datasets)

    def __len__(self) -> int:
        return len(self._datasets)


def split_by_domain(dataset: Any, column: str, rows: Sequence[str]) -> dict[str, Any]:
    """The examples of a mixed dataset by domain, in the order of `rows`; nothing is copied.

    The column holds text or class labels. A torch dataset, whose examples have the key, is read
    once in full.

    Raises:
        ValueError: a name in `rows` has no example, or an example names none of `rows`.
    """
    number_of: dict[str, int] = {}
    numbers_E = np.fromiter(
        (number_of.setdefault(name, len(number_of)) for name in _domains_of(dataset, column)),
        dtype=np.int32,
    )
    if number_of.keys() != set(rows):
        raise ValueError(
            f"column {column!r} must name exactly the domains and targets {list(rows)}; it lacks "
            f"{sorted(set(rows) - number_of.keys())} and also names "
            f"{sorted(number_of.keys() - set(rows))}. Name the latter in domains= (trained on) or "
            "target= (measured only), or filter them out of the dataset."
        )
    indices = {name: np.flatnonzero(numbers_E == number_of[name]) for name in rows}
    if hasattr(dataset, "select"):
        return {name: dataset.select(chosen) for name, chosen in indices.items()}
    return {name: Subset(dataset, chosen.tolist()) for name, chosen in indices.items()}


def _domains_of(dataset: Any, column: str) -> Iterator[str]:
    """The domain of every example."""
    if not hasattr(dataset, "select_columns"):
        yield from (str(_plain(dataset[index][column])) for index in range(len(dataset)))
        return
    # Without the other columns, whose tokens may be large.
    narrow = dataset.select_columns([column]).with_format(None)
    to_text = getattr(dataset.features[column], "int2str", str)
    for first in range(0, len(narrow), ROWS_AT_ONCE):
        yield from map(to_text, narrow[first : first + ROWS_AT_ONCE][column])


def _plain(value: Any) -> Any:
    """A number that a format of datasets has made an array or tensor of."""
    return value.item() if hasattr(value, "item") else value


class DomainStream(IterableDataset[dict[str, Batch]]):
    """Batches `{domain: batch}` from a stream of examples that name their domain under a key.

    The examples of a domain wait until every domain has `batch_size` of them. At most
    `WAITING_STEPS` batches of a domain wait; further examples are skipped. An incomplete batch at
    the end of the stream is dropped. Finished batches `{domain: batch}` pass unchanged.

    Raises:
        ValueError: an example names none of the domains, or a domain has too few examples.
    """

    def __init__(
        self,
        stream: IterableDataset[Any],
        column: str,
        rows: Sequence[str],
        *,
        batch_size: int,
        collate: Collate,
    ) -> None:
        self.stream = stream
        self.column = column
        self.rows = tuple(rows)
        self.batch_size = batch_size
        self.collate = collate

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the stream, which may decide its order."""
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Batch]]:
        """One pass over the stream."""
        waiting: dict[str, deque[Any]] = {name: deque() for name in self.rows}
        num_waited, num_batches = 0, 0
        # Of a class label examples hold the number.
        label = (getattr(self.stream, "features", None) or {}).get(self.column)
        name_of = getattr(label, "int2str", None)
        for example in self.stream:
            if name_of is not None:
                example = {**example, self.column: name_of(_plain(example[self.column]))}
            if not _names_a_domain(example, self.column):
                yield example
                num_batches += 1
                continue
            self._put(example, waiting)
            num_waited += 1
            if all(len(examples) >= self.batch_size for examples in waiting.values()):
                yield {
                    name: self.collate([examples.popleft() for _ in range(self.batch_size)])
                    for name, examples in waiting.items()
                }
                num_waited, num_batches = 0, num_batches + 1
            elif num_waited >= MOST_EXAMPLES_WITHOUT:
                self._refuse(waiting, num_waited)
        if num_waited and not num_batches:
            self._refuse(waiting, num_waited)

    def _put(self, example: Mapping[str, Any], waiting: dict[str, deque[Any]]) -> None:
        name = str(_plain(example[self.column]))
        if name not in waiting:
            raise ValueError(
                f"an example's {self.column!r} must be one of {list(self.rows)}; got {name!r}. "
                "Name it in domains= (trained on) or target= (measured only), or filter it out of "
                "the stream."
            )
        if len(waiting[name]) < WAITING_STEPS * self.batch_size:
            waiting[name].append(_unnamed(example, self.column))

    def _refuse(self, waiting: Mapping[str, deque[Any]], count: int) -> None:
        lacking = [name for name, rows in waiting.items() if len(rows) < self.batch_size]
        raise ValueError(
            f"a step needs {self.batch_size} examples of every domain; {count} examples of the "
            f"stream had too few of {lacking}. Leave these domains out, shuffle the stream, or "
            "pass train_dataset as a mapping from domains to datasets."
        )


def collate_by_domain(
    examples: list[Mapping[str, Any]],
    collate: Collate,
    column: str,
    place: tuple[int, int] | None = None,
    *,
    all_domains: bool = False,
) -> dict[str, Batch]:
    """Collate examples `{domain: example}` into `{domain: batch}`, without the key `column`.

    `place` is (rank, number of ranks), for the `RankBatch` of this rank; None: everything.
    `all_domains` is that of `examples_of_rank`.
    """
    sizes = dict.fromkeys(checked_batch(examples[0]), len(examples))
    mine = examples_of_rank(sizes, *(place or (0, 1)), all_domains=all_domains)
    batches = {
        name: collate([_unnamed(each[name], column) for each in examples[first:last]])
        for name, (first, last) in mine.items()
    }
    return batches if place is None else RankBatch(batches, mine, sizes)


def _unnamed(example: Any, column: str) -> Any:
    """The example without the name of its domain."""
    if not _names_a_domain(example, column):
        return example
    return {key: example[key] for key in example if key != column}


def _names_a_domain(example: Any, column: str) -> bool:
    """Whether this is an example that names its domain."""
    # In {domain: example} a domain may be named like the column, but its value is a mapping.
    is_plain = isinstance(example, Mapping) and column in example
    return is_plain and not isinstance(example[column], Mapping)


def checked_batch(batch: Any) -> dict[str, Any]:
    """The batch itself; ValueError if it is not `{domain: batch}`."""
    if isinstance(batch, Mapping) and all(isinstance(rows, Mapping) for rows in batch.values()):
        return cast("dict[str, Any]", batch)
    got = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
    raise ValueError(
        'DoGETrainer takes batches by domain, {"arxiv": {"input_ids": ..., "labels": ...}, ...}; '
        f"got {got}. Pass a train_dataset with a column that names the domain "
        "(domain_column=), a mapping from domains to datasets, or an iterable dataset of such "
        "batches."
    )


class RankBatch(dict[str, Batch]):
    """A rank's part of a batch `{domain: batch}`, without the domains it has no example of."""

    def __init__(
        self,
        batches: Mapping[str, Batch],
        mine: Mapping[str, tuple[int, int]],
        sizes: Mapping[str, int],
    ) -> None:
        super().__init__(batches)
        self.counts = {name: last - first for name, (first, last) in mine.items()}
        """{domain: examples on this rank}."""
        self.sizes = dict(sizes)
        """{domain: examples on all ranks}, for all domains of the batch."""


def examples_of_rank(
    sizes: Mapping[str, int], rank: int, num_ranks: int, *, all_domains: bool
) -> dict[str, tuple[int, int]]:
    """{domain: (first, last)}: a rank's examples of each domain, counted within the domain.

    With `all_domains` every rank gets examples of every domain, equally many to within one, as FSDP
    needs; ValueError if a domain has fewer examples than there are ranks. Otherwise ranks get few
    domains each, by `doge_fast.sampling.pieces`.
    """
    if not all_domains:
        return pieces(sizes, rank, num_ranks)
    if few := {name: size for name, size in sizes.items() if size < num_ranks}:
        raise ValueError(
            f"with fsdp all {num_ranks} ranks run every domain of a step; got {few} examples. Give "
            f"each domain at least {num_ranks} in a step; if only the last step has fewer, pass "
            "TrainingArguments(dataloader_drop_last=True)."
        )
    return {
        name: (size * rank // num_ranks, size * (rank + 1) // num_ranks)
        for name, size in sizes.items()
    }


def part_of(
    batch: Mapping[str, Batch], rank: int, num_ranks: int, *, all_domains: bool = False
) -> RankBatch:
    """A rank's part of a batch that all ranks have; `all_domains` is that of `examples_of_rank`.

    A domain that is divided among ranks is sliced along the first axis of its tensors, which must
    be the examples; ValueError if these differ in length. A domain of a single rank is unchanged.
    """
    lengths = {
        name: {
            key: len(rows) if isinstance(rows, Tensor) and rows.dim() else None
            for key, rows in domain.items()
        }
        for name, domain in batch.items()
    }
    # A batch of scalars is one example.
    sizes = {name: next(filter(None, each.values()), 1) for name, each in lengths.items()}
    mine = examples_of_rank(sizes, rank, num_ranks, all_domains=all_domains)
    batches = {}
    for name, (first, last) in mine.items():
        batches[name] = batch[name]
        if last - first < sizes[name]:
            if len(set(lengths[name].values())) > 1:
                raise ValueError(
                    "several ranks share a domain, whose finished batch is divided along the first "
                    f"axis; that of {name!r} has the lengths {lengths[name]}. Make the examples "
                    "the first axis of every entry."
                )
            batches[name] = {key: rows[first:last] for key, rows in batch[name].items()}
    return RankBatch(batches, mine, sizes)


def shares(parts: Sequence[RankBatch]) -> dict[str, float]:
    """{domain: this rank's share of its examples in these batches}, for the domains it has."""
    here, everywhere = Counter[str](), Counter[str]()
    for part in parts:
        here.update(part.counts)
        everywhere.update(part.sizes)
    return {name: count / everywhere[name] for name, count in here.items()}
