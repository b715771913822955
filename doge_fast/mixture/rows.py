"""The rows of a domain as an endless sequence of shuffled epochs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from doge_fast.mixture.permutation import shuffled

Draw = tuple[int, int]
"""(index of the domain, position in the endless sequence of its rows)"""


class DomainRows:
    """The rows of all domains, read a batch at a time; each epoch is a new permutation of them.

    The domain's index is added to each row under `label_key`, if there is one.

    Raises:
        ValueError: a domain is not indexable.
    """

    def __init__(self, domains: Mapping[str, Any], label_key: str | None) -> None:
        for name, rows in domains.items():
            is_sequence = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
            if not is_sequence or isinstance(rows, Mapping | str | bytes):
                raise ValueError(
                    "A domain must be indexable, as a list or a Dataset is, and a stream is not; "
                    f"{name} is a {type(rows).__name__}."
                )
        self.label_key = label_key
        self.sizes = {name: len(rows) for name, rows in domains.items()}
        self._names = list(domains)
        self._datasets = list(domains.values())

    def read(self, draws: Sequence[Draw], seed: int) -> list[Any]:
        """The rows of these draws, with one read per domain."""
        batch: list[Any] = [None] * len(draws)
        places: dict[int, list[int]] = {}
        for place, (domain, _) in enumerate(draws):
            places.setdefault(domain, []).append(place)
        for domain, its_places in places.items():
            positions = [draws[place][1] for place in its_places]
            rows = self._rows(domain, positions, seed)
            for place, row in zip(its_places, rows, strict=True):
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

    def _rows(self, domain: int, positions: Sequence[int], seed: int) -> Iterator[Any]:
        name, dataset = self._names[domain], self._datasets[domain]
        # The name of the pipeline's stream: one seed gives both the same order.
        stream = ("train", name)
        numbers = shuffled(seed, stream, np.asarray(positions), self.sizes[name]).tolist()
        if hasattr(dataset, "__getitems__"):
            # One call for all rows.
            return iter(dataset.__getitems__(numbers))
        return (dataset[number] for number in numbers)

    def _labelled(self, row: Any, domain: int) -> Any:
        if self.label_key is None:
            return row
        if not isinstance(row, Mapping):
            raise ValueError(
                f"domain_key={self.label_key!r} needs rows that are dicts; "
                f"{self._names[domain]} has rows of type {type(row).__name__}."
            )
        return {**row, self.label_key: domain}
