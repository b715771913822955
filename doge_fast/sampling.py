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


def rounds(sizes: Mapping[str, int], rank: int, world_size: int) -> list[tuple[str, int, int]]:
    """The pieces of a rank, cut further so that every rank has equally many.

    Ranks of a sharded model wait for each other in every layer, so they must run equally many
    backward passes. The larger ones come first, so that they run side by side.

    Args:
        sizes: examples of each domain, in the order of the batch.
        rank: in [0, world_size).
        world_size: number of ranks, n.

    Returns:
        [(domain, first, last)], examples counted within the domain.

    Raises:
        ValueError: as `pieces`; or a rank has fewer examples than another has domains.
    """
    every = [pieces(sizes, each, world_size) for each in range(world_size)]
    most = max(map(len, every))
    fewest = min(sum(last - first for first, last in mine.values()) for mine in every)
    if fewest < most:
        raise ValueError(
            f"a rank has {fewest} examples and another {most} domains, so they cannot run equally "
            f"many backward passes; sizes are {dict(sizes)} for {world_size} ranks. Take a larger "
            "batch, or a multiple of the number of ranks."
        )
    mine = [(name, first, last) for name, (first, last) in pieces(sizes, rank, world_size).items()]
    while len(mine) < most:
        name, first, last = max(mine, key=_size)
        mine.remove((name, first, last))
        middle = (first + last) // 2
        mine += [(name, first, middle), (name, middle, last)]
    return sorted(mine, key=_size, reverse=True)


def _size(piece: tuple[str, int, int]) -> int:
    return piece[2] - piece[1]
