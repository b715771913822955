"""Which part of a batch each rank gets: whole domains where it can be."""

from collections.abc import Mapping


def pieces(sizes: Mapping[str, int], rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """The piece of a batch sorted by domain that a rank trains on.

    The B examples are cut into `world_size` pieces, one after another and as equal as they can be,
    so a rank has few domains and a domain is on few ranks: of K equal domains over n ranks there
    are K + n - gcd(K, n) parts in all. What ranks send each other grows with that number.

    Args:
        sizes: examples of each domain, in the order of the batch.
        rank: in [0, world_size).
        world_size: number of ranks, n.

    Returns:
        {domain: (first, last)}, the examples of the domain from `first` up to `last`, counted
        within the domain; only domains of which the rank has any.

    Raises:
        ValueError: a size is negative, or there is no such rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}); got {rank}.")
    if any(size < 0 for size in sizes.values()):
        raise ValueError(f"sizes must be numbers of examples; got {dict(sizes)}.")
    total = sum(sizes.values())
    start, stop = (total * place // world_size for place in (rank, rank + 1))
    found, first = {}, 0
    for name, size in sizes.items():
        low, high = max(start - first, 0), min(stop - first, size)
        if low < high:
            found[name] = (low, high)
        first += size
    return found
