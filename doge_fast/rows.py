"""Where the rows of a domain come from: a sized data set in shuffled epochs, or a stream in order.

Both are asked for positions of an endless sequence, so that a mixture need not know which it has.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker

from doge_fast.sampling import shuffled

_END = object()


def rows_of(name: str, domain: Any) -> "SizedRows | StreamRows":
    """The rows of one domain, by what it can do.

    Raises:
        ValueError: it is neither a sequence nor something that can be read again and again.
    """
    is_sequence = hasattr(domain, "__len__") and hasattr(domain, "__getitem__")
    if is_sequence and not isinstance(domain, IterableDataset | Mapping | str | bytes):
        return SizedRows(name, domain)
    is_stream = hasattr(domain, "__iter__") and not isinstance(domain, Mapping | str | bytes)
    if is_stream and not isinstance(domain, Iterator):
        return StreamRows(name, domain)
    raise ValueError(
        f"A domain must have rows by number (a list, a Dataset) or be readable from its beginning "
        f"again and again (an IterableDataset, not an iterator); {name} is a "
        f"{type(domain).__name__}."
    )


class SizedRows:
    """Rows that can be had by number; every epoch shows each once, in an order of its own."""

    def __init__(self, name: str, dataset: Any) -> None:
        self.name = name
        self.dataset = dataset
        self.size: int | None = len(dataset)

    def at(self, positions: Sequence[int], seed: int) -> list[Any]:
        """The rows at these positions of the endless sequence."""
        assert self.size is not None
        # The stream's name is the pipeline's, so that one seed shows both the same order.
        numbers = shuffled(seed, ("train", self.name), np.asarray(positions), self.size)
        return self.numbered(numbers.tolist())

    def numbered(self, numbers: list[int]) -> list[Any]:
        """The rows of these numbers, at once where the data set can do that."""
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(numbers))
        return [self.dataset[number] for number in numbers]


class StreamRows:
    """Rows that can only be read one after another; begun again at the end.

    Every process reads the stream from its beginning and skips what is not its own. So what a
    position means does not depend on how many processes there are, and a process that starts at a
    later position reads up to it first.
    """

    def __init__(self, name: str, stream: Iterable[Any]) -> None:
        self.name = name
        self.stream = stream
        self.size: int | None = None
        self._forget()

    def _forget(self) -> None:
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._epoch = 0
        self._process = os.getpid()

    def at(self, positions: Sequence[int], seed: int) -> list[Any]:
        """The rows at these ascending positions of the endless sequence."""
        # A forked process shares open files with its parent, and their place in them.
        if self._process != os.getpid():
            self._forget()
        with _as_if_alone():
            return [self._row(position) for position in positions]

    def _row(self, position: int) -> Any:
        if self._iterator is None or position < self._next:
            self._forget()
            self._iterator = self._opened()
        while True:
            row = self._read()
            self._next += 1
            if self._next > position:
                return row

    def _read(self) -> Any:
        """The next row, of the next epoch where this one is over."""
        assert self._iterator is not None
        row = next(self._iterator, _END)
        if row is _END:
            self._epoch += 1
            self._iterator = self._opened()
            row = next(self._iterator, _END)
        if row is _END:
            raise ValueError(
                f"A stream must have rows; {self.name} has none in epoch {self._epoch}. It must be "
                "readable from its beginning again and again."
            )
        return row

    def _opened(self) -> Iterator[Any]:
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(self._epoch)
        return iter(self.stream)

    def __getstate__(self) -> dict[str, Any]:
        """Without the open stream, which cannot be sent to another process."""
        return {"name": self.name, "stream": self.stream}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["name"], state["stream"])  # type: ignore[misc]


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """A stream that shares itself out among a loader's workers must not: the mixture does."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
