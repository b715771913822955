"""Divide a batch over ranks so that each rank gets few domains."""

from collections.abc import Mapping


def pieces(sizes: Mapping[str, int], rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """The piece of a batch sorted by domain that a rank trains on, of `world_size` = n ranks.

    The B examples are divided into n consecutive pieces, as equal as possible, so a rank has few
    domains and a domain is on few ranks. K equal domains over n ranks give K + n - gcd(K, n) parts
    in all; the traffic between ranks grows with that number.

    Returns:
        {domain: (first, last)} for the rank's domains: examples `first` up to `last` (excluded),
        counted within the domain.

    Raises:
        ValueError: a size is negative, or there is no such rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}); got {rank}.")
    if any(size < 0 for size in sizes.values()):
        raise ValueError(f"sizes must be numbers of examples; got {dict(sizes)}.")
    total = sum(sizes.values())
    start, stop = (total * place // world_size for place in (rank, rank + 1))
    parts, first = {}, 0
    for name, size in sizes.items():
        low, high = max(start - first, 0), min(stop - first, size)
        if low < high:
            parts[name] = (low, high)
        first += size
    return parts
