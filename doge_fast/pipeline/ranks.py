"""Ranks: the processes that a launcher such as torchrun starts for one run; the first one writes.

An empty environment variable counts as unset: off the cluster, a script may leave it empty.
"""

import os

from doge_fast.pipeline.failures import UserError


def size() -> int:
    """Number of ranks."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def place() -> tuple[int, int]:
    """(Rank of this process, number of ranks)."""
    return int(os.environ.get("RANK") or 0), size()


def is_first() -> bool:
    """Whether this is rank 0, which writes and prints."""
    return place()[0] == 0


def refuse_several(what: str) -> None:
    """Raise UserError if there are several ranks; `what` names a command that takes one."""
    if size() > 1:
        raise UserError(
            f"{what} takes one process, and a launcher has started {size()}. Start it without "
            "torchrun; proxy, temperature, base, doremi, select and evaluate take several."
        )
