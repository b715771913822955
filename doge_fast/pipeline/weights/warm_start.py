"""Domain weights carried to the domains of another corpus, for a proxy to begin with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from doge_fast.pipeline import records


@dataclass(frozen=True)
class WarmStart:
    """Weights that a run may begin with, made of those of other domains."""

    weights: Mapping[str, float]
    """Of exactly the new domains, in their order; sums to one."""
    kept: tuple[str, ...]
    added: Mapping[str, float]
    """Domains that the file does not have, and their share."""
    dropped: Mapping[str, float]
    """Domains of the file that are gone, and the weight they had."""

    @property
    def zeros(self) -> tuple[str, ...]:
        """Domains that begin with weight zero, and which the mirror step leaves there."""
        return tuple(name for name, weight in self.weights.items() if weight == 0)


def warm_start(record: Mapping[str, Any], names: Sequence[str]) -> WarmStart:
    """Weights of a file, carried by name to the domains of another corpus.

    A domain of the same name keeps its weight relative to the others. The weight of one that is
    gone is renormalised away. A new one, of which the file knows nothing, gets 1/K, with which
    Algorithm 1 would begin it, and the others what is left.

    Args:
        record: as `records.read_weights` returns it.
        names: the K new domains, in order.

    Raises:
        ValueError: nothing that the file gives weight to is left.
    """
    old = records.weights_by_name(record)
    kept = tuple(name for name in names if name in old)
    total = math.fsum(old[name] for name in kept)
    if not total > 0:
        raise ValueError(
            "A start needs a domain of the corpus that has a weight in the file; the file has "
            f"{', '.join(old)}, the corpus {', '.join(names)}. Use the same names in both."
        )
    added = {name: 1 / len(names) for name in names if name not in old}
    rest = 1 - math.fsum(added.values())
    weights = {name: added[name] if name in added else rest * old[name] / total for name in names}
    gone = {name: weight for name, weight in old.items() if name not in kept}
    return WarmStart(weights, kept, added, gone)
