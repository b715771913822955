"""Domain weights carried to the domains of another corpus, for a proxy to begin with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from doge_fast.pipeline import baselines, records


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
    split: Mapping[str, Mapping[str, float]]
    """{old name: {new name: its share of the old weight}}."""

    @property
    def zeros(self) -> tuple[str, ...]:
        """Domains that begin with weight zero, and which the mirror step leaves there."""
        return tuple(name for name, weight in self.weights.items() if weight == 0)


def warm_start(
    record: Mapping[str, Any],
    tokens: Mapping[str, int],
    *,
    split: Mapping[str, Sequence[str]] | None = None,
    added_share: str | float = "uniform",
) -> WarmStart:
    """Weights of a file, carried by name to the domains of another corpus.

    A domain of the same name keeps its weight relative to the others. The weight of one that is
    gone is renormalised away; that of one that was split goes to its parts by their tokens. A new
    one, of which the file knows nothing, gets a share of its own, and the others what is left:
    1/K, with which Algorithm 1 would begin it, by default.

    Args:
        record: as `records.read_weights` returns it.
        tokens: {domain: training tokens, each > 0} of the K new domains, in order.
        split: {old domain: the new ones made of it}; one of them may have the old name.
        added_share: of each new domain: "uniform", 1/K; "natural", its share of the tokens; or a
            number in (0, 1).

    Raises:
        ValueError: a split of a domain that the file lacks, into domains that the corpus lacks, or
            that have a weight of their own; an added share that leaves nothing to the others; or
            nothing that the file gives weight to is left.
    """
    old = records.weights_by_name(record)
    parts = {name: tuple(new) for name, new in (split or {}).items()}
    _check_split(parts, old, tokens)
    shares = {
        name: {part: tokens[part] / sum(tokens[each] for each in new) for part in new}
        for name, new in parts.items()
    }
    kept = tuple(name for name in tokens if name in old and name not in parts)
    carried = {name: old[name] for name in kept}
    for name, by_part in shares.items():
        carried |= {part: old[name] * share for part, share in by_part.items()}
    added = _added([name for name in tokens if name not in carried], tokens, added_share)
    total = math.fsum(carried.values())
    if not total > 0:
        raise ValueError(
            "A start needs a domain of the corpus that has a weight in the file; the file has "
            f"{', '.join(old)}, the corpus {', '.join(tokens)}. Use the same names in both, or "
            "pass split for domains that were divided."
        )
    rest = 1 - math.fsum(added.values())
    weights = {
        name: added[name] if name in added else rest * carried[name] / total for name in tokens
    }
    gone = {name: old[name] for name in old if name not in kept and name not in parts}
    return WarmStart(weights, kept, added, gone, shares)


def _check_split(
    parts: Mapping[str, Sequence[str]], old: Mapping[str, float], new: Mapping[str, int]
) -> None:
    taken: set[str] = set()
    for name, into in parts.items():
        if name not in old:
            raise ValueError(
                f"split must name a domain of the file, which are {', '.join(old)}; {name} is not "
                "among them."
            )
        unknown = [part for part in into if not new.get(part)]
        if unknown or not into:
            raise ValueError(
                f"split must divide {name} into domains of the corpus, which are {', '.join(new)}; "
                f"{', '.join(unknown) or 'nothing'} is not among them."
            )
        own = [part for part in into if part in taken or (part in old and part != name)]
        if own or len(set(into)) < len(into):
            raise ValueError(
                f"A part of a split domain must be a new domain; {', '.join(own) or into[0]}, "
                f"named as a part of {name}, has a weight already. Name every new domain once."
            )
        taken |= set(into)


def _added(
    names: Sequence[str], tokens: Mapping[str, int], added_share: str | float
) -> dict[str, float]:
    if added_share == "uniform":
        return dict.fromkeys(names, 1 / len(tokens))
    if added_share == "natural":
        priors = baselines.natural(tokens)
        return {name: priors[name] for name in names}
    try:
        share = float(added_share)
    except ValueError:
        share = math.nan
    if not 0 < share < 1 or share * len(names) >= 1:
        raise ValueError(
            "added_share must be uniform, natural, or a number greater than zero that leaves "
            f"something to the others; got {added_share} for {len(names)} added domains."
        )
    return dict.fromkeys(names, share)
