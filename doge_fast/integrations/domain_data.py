"""Datasets by domain for a trainer that takes a single dataset, and each rank's part of a batch.

They come from a mapping, a column or a stream. This module needs torch and numpy alone: it looks up
the methods of Hugging Face's datasets by name.
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
# Examples of a frequent domain wait for a rare one, at most those of this many steps; further ones
# are skipped.
WAITING_STEPS = 64
# A mixed stream must complete a batch of every domain within this many examples.
MOST_EXAMPLES_WITHOUT = 1_000_000


def by_domain(dataset: Any, column: str, names: Sequence[str]) -> Any:
    """`split_by_domain` of a dataset whose examples name a domain; any other one unchanged."""
    if isinstance(dataset, IterableDataset | Mapping):
        return dataset
    columns = getattr(dataset, "column_names", None)
    if columns is None:
        is_mixed = len(dataset) > 0 and _names_a_domain(dataset[0], column)
    else:
        is_mixed = column in columns
    return split_by_domain(dataset, column, names) if is_mixed else dataset


class DomainZip(Dataset[Mapping[str, Any]]):
    """Datasets by domain as one dataset whose examples are `{domain: example}`.

    Example i holds example i mod n_d of every domain d: the length is that of the longest domain,
    and shorter ones repeat. Examples are read on access, so a rank reads only its part.
    """

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self.datasets = dict(datasets)

    def __len__(self) -> int:
        return max(map(len, self.datasets.values()))

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return _Examples(self.datasets, index)


class _Examples(Mapping[str, Any]):
    """Example `index` of every domain, read on access."""

    def __init__(self, datasets: Mapping[str, Any], index: int) -> None:
        self._datasets = datasets
        self._index = index

    def __getitem__(self, name: str) -> Any:
        dataset = self._datasets[name]
        return dataset[self._index % len(dataset)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._datasets)

    def __len__(self) -> int:
        return len(self._datasets)


def split_by_domain(dataset: Any, column: str, names: Sequence[str]) -> dict[str, Any]:
    """The examples of a mixed dataset by domain, in the order of `names`; nothing is copied.

    The column holds text or class labels. A torch dataset, whose examples have the key, is read
    once in full.

    Raises:
        ValueError: the examples name other domains than `names`.
    """
    number_of: dict[str, int] = {}
    numbers_E = np.fromiter(
        (number_of.setdefault(name, len(number_of)) for name in _domains_of(dataset, column)),
        dtype=np.int32,
    )
    rule = f"column {column!r} must name exactly the domains and targets {list(names)}"
    if missing := sorted(set(names) - number_of.keys()):
        raise ValueError(f"{rule}; no example has {', '.join(missing)}.")
    if extra := sorted(number_of.keys() - set(names)):
        raise ValueError(
            f"{rule}; it also has {', '.join(extra)}. Name these in domains= or target=, or filter "
            "them out of the dataset."
        )
    indices = {name: np.flatnonzero(numbers_E == number_of[name]) for name in names}
    if hasattr(dataset, "select"):
        return {name: dataset.select(positions) for name, positions in indices.items()}
    return {name: Subset(dataset, positions.tolist()) for name, positions in indices.items()}


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
    """A number as such, where a format of datasets has made it an array or a tensor."""
    return value.item() if hasattr(value, "item") else value


class DomainStream(IterableDataset[dict[str, Batch]]):
    """Batches `{domain: batch}` from a stream of examples that name their domain under a key.

    The examples of a domain wait until every domain has `batch_size` of them. At most
    `WAITING_STEPS` batches of a domain wait; further examples are skipped. An incomplete batch at
    the end of the stream is dropped. Finished batches `{domain: batch}` pass unchanged.

    Raises:
        KeyError: an example names none of the domains.
        ValueError: a domain has too few examples.
    """

    def __init__(
        self,
        stream: IterableDataset[Any],
        column: str,
        names: Sequence[str],
        *,
        batch_size: int,
        collate: Collate,
    ) -> None:
        self.stream = stream
        self.column = column
        self.names = tuple(names)
        self.batch_size = batch_size
        self.collate = collate

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the stream, which may decide its order."""
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Batch]]:
        """One pass over the stream."""
        waiting: dict[str, deque[Any]] = {name: deque() for name in self.names}
        num_waited, num_batches = 0, 0
        # Examples hold the number of a class label.
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
                self._refuse_rare(waiting, num_waited)
        if num_waited and not num_batches:
            self._refuse_rare(waiting, num_waited)

    def _put(self, example: Mapping[str, Any], waiting: dict[str, deque[Any]]) -> None:
        name = str(_plain(example[self.column]))
        if len(waiting[name]) < WAITING_STEPS * self.batch_size:
            waiting[name].append(_without_domain(example, self.column))

    def _refuse_rare(self, waiting: Mapping[str, deque[Any]], count: int) -> None:
        rare = [name for name, examples in waiting.items() if len(examples) < self.batch_size]
        raise ValueError(
            f"a step needs {self.batch_size} examples of every domain; {count} examples of the "
            f"stream had too few of {rare}. Leave these domains out, or shuffle the stream."
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
    ranges = examples_of_rank(sizes, *(place or (0, 1)), all_domains=all_domains)
    batches = {
        name: collate([_without_domain(example[name], column) for example in examples[first:last]])
        for name, (first, last) in ranges.items()
    }
    return batches if place is None else RankBatch(batches, ranges, sizes)


def _without_domain(example: Any, column: str) -> Any:
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
    if not all(isinstance(part, Mapping) for part in batch.values()):
        raise ValueError(
            f"a batch must be by domain, {{domain: {{'input_ids': ..., ...}}}}; got {list(batch)}. "
            "Name the column of the dataset that names the domain, domain_column=."
        )
    return cast("dict[str, Any]", batch)


class RankBatch(dict[str, Batch]):
    """A rank's part of a batch `{domain: batch}`, without the domains it has no example of."""

    def __init__(
        self,
        batches: Mapping[str, Batch],
        ranges: Mapping[str, tuple[int, int]],
        sizes: Mapping[str, int],
    ) -> None:
        super().__init__(batches)
        self.counts = {name: last - first for name, (first, last) in ranges.items()}
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
            f"each domain at least {num_ranks}; for the last step pass dataloader_drop_last=True."
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
    be the examples; ValueError if these differ in number. A domain of a single rank is unchanged.
    """
    lengths = {
        name: {
            key: len(value) if isinstance(value, Tensor) and value.dim() else None
            for key, value in domain.items()
        }
        for name, domain in batch.items()
    }
    # A batch of scalars is one example.
    sizes = {name: next(filter(None, by_key.values()), 1) for name, by_key in lengths.items()}
    ranges = examples_of_rank(sizes, rank, num_ranks, all_domains=all_domains)
    batches = {}
    for name, (first, last) in ranges.items():
        batches[name] = batch[name]
        if last - first < sizes[name]:
            if len(set(lengths[name].values())) > 1:
                raise ValueError(
                    f"ranks divide the batch of {name!r} along the first axis, which must be the "
                    f"examples in every entry; its lengths are {lengths[name]}."
                )
            batches[name] = {key: value[first:last] for key, value in batch[name].items()}
    return RankBatch(batches, ranges, sizes)


def shares(parts: Sequence[RankBatch]) -> dict[str, float]:
    """{domain: this rank's share of its examples in these batches}, for the domains it has."""
    here, everywhere = Counter[str](), Counter[str]()
    for part in parts:
        here.update(part.counts)
        everywhere.update(part.sizes)
    return {name: count / everywhere[name] for name, count in here.items()}
