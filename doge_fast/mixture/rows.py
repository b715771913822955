"""The rows of a domain as an endless sequence: shuffled epochs, or a stream in order."""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from doge_fast.mixture.permutation import shuffled

Draw = tuple[int, int]
"""(index of the domain, position in the endless sequence of its rows)"""


class DomainRows:
    """The rows of all domains, read a batch at a time.

    Args:
        domains: {name: rows}.
        label_key: add the domain's index to each row under this key; rows must then be dicts.
            None: rows are unchanged.

    Raises:
        ValueError: a domain is neither indexable nor an iterable that restarts.
    """

    def __init__(self, domains: Mapping[str, Any], label_key: str | None) -> None:
        self.label_key = label_key
        self._domains = [_rows_of(name, rows) for name, rows in domains.items()]

    @property
    def sizes(self) -> dict[str, int | None]:
        """Rows of each domain; None where it is a stream."""
        return {rows.name: rows.size for rows in self._domains}

    def read(self, draws: Sequence[Draw], seed: int) -> list[Any]:
        """The rows of these draws; each domain is read once, by ascending positions.

        Raises:
            ValueError: there is a `label_key` and a row is no dict, or a stream has no rows.
        """
        batch: list[Any] = [None] * len(draws)
        groups: dict[int, list[tuple[int, int]]] = {}
        for place, (domain, position) in enumerate(draws):
            groups.setdefault(domain, []).append((position, place))
        for domain, group in groups.items():
            positions, places = zip(*sorted(group), strict=True)
            rows = self._domains[domain].at(positions, seed)
            for place, row in zip(places, rows, strict=True):
                batch[place] = self._labelled(row, domain)
        return batch

    def check_weights(self, weights_K: Sequence[float]) -> None:
        """Raise ValueError where a domain without rows has a weight."""
        weighted = zip(self.sizes.items(), weights_K, strict=True)
        if empty := [name for (name, size), weight in weighted if size == 0 and weight > 0]:
            raise ValueError(
                f"A domain with a weight needs rows; {', '.join(empty)} has none. "
                "Give it the weight 0 or leave it out."
            )

    def _labelled(self, row: Any, domain: int) -> Any:
        if self.label_key is None:
            return row
        if not isinstance(row, Mapping):
            raise ValueError(
                f"domain_key={self.label_key!r} needs rows that are dicts; "
                f"{self._domains[domain].name} has rows of type {type(row).__name__}."
            )
        return {**row, self.label_key: domain}


def _rows_of(name: str, domain: Any) -> "SizedRows | StreamRows":
    is_other = isinstance(domain, Mapping | str | bytes)
    is_sequence = hasattr(domain, "__len__") and hasattr(domain, "__getitem__")
    if is_sequence and not is_other and not isinstance(domain, IterableDataset):
        return SizedRows(name, domain)
    if hasattr(domain, "__iter__") and not is_other and not isinstance(domain, Iterator):
        return StreamRows(name, domain)
    raise ValueError(
        "A domain must be indexable (a list, a Dataset) or be an iterable that restarts from its "
        f"beginning (an IterableDataset, not an iterator); {name} is a {type(domain).__name__}."
    )


class SizedRows:
    """Rows of an indexable dataset; each epoch is a new permutation of all rows."""

    def __init__(self, name: str, dataset: Any) -> None:
        self.name = name
        self.dataset = dataset
        self.size: int | None = len(dataset)

    def at(self, positions: Sequence[int], seed: int) -> list[Any]:
        """The rows at these positions of the endless sequence."""
        assert self.size is not None
        # The name of the pipeline's stream: one seed gives both the same order.
        numbers = shuffled(seed, ("train", self.name), np.asarray(positions), self.size).tolist()
        if hasattr(self.dataset, "__getitems__"):
            # One call for all rows.
            return list(self.dataset.__getitems__(numbers))
        return [self.dataset[number] for number in numbers]


class StreamRows:
    """Rows of an iterable, which restarts at its end.

    Every process reads the whole stream and skips the rows of other processes. So the row at a
    position does not depend on the number of processes. A process that starts at a later position
    reads all rows before it.
    """

    size: int | None = None

    def __init__(self, name: str, stream: Iterable[Any]) -> None:
        self.name = name
        self.stream = stream
        self._rewind()

    def _rewind(self) -> None:
        self._rows = self._endless()
        self._next_position = 0
        self._process = os.getpid()

    def at(self, positions: Sequence[int], seed: int) -> list[Any]:
        """The rows at these ascending positions of the endless sequence."""
        # A forked process shares its parent's open files and their offsets.
        if self._process != os.getpid():
            self._rewind()
        try:
            return [self._row(position) for position in positions]
        except Exception:
            # A generator that raised is exhausted; the next call reads the stream anew.
            self._rewind()
            raise

    def _row(self, position: int) -> Any:
        if position < self._next_position:
            self._rewind()
        num_skipped = position - self._next_position
        self._next_position = position + 1
        return next(itertools.islice(self._rows, num_skipped, None))

    def _endless(self) -> Iterator[Any]:
        for epoch in itertools.count():
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)
            is_empty = True
            for row in self._all_rows():
                is_empty = False
                yield row
            if is_empty:
                raise ValueError(
                    f"A stream must yield rows in every epoch; {self.name} yields none in epoch "
                    f"{epoch}. Pass an iterable that restarts from its beginning."
                )

    def _all_rows(self) -> Iterable[Any]:
        """One pass over all rows of the stream, also in a worker."""
        if get_worker_info() is None or not isinstance(self.stream, IterableDataset):
            return self.stream
        if hasattr(self.stream, "iter"):
            # Hugging Face's: its __iter__ divides the rows among workers, its iter() does not.
            batches = self.stream.iter(batch_size=1)
            return ({key: values[0] for key, values in batch.items()} for batch in batches)
        raise ValueError(
            f"Every worker must read all rows of a stream; {self.name} is an IterableDataset of "
            f"torch ({type(self.stream).__name__}), which may divide its rows among the workers. "
            "Use num_workers=0, or pass an object of another class whose __iter__ yields all rows "
            "in every process."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the open iterator, which cannot be pickled."""
        return StreamRows, (self.name, self.stream)
