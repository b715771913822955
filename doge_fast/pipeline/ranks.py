"""The processes that a launcher such as torchrun has started for one run; the first one writes.

A variable that is empty, as a script leaves one of a cluster that it is not on, says nothing.
"""

import os

from doge_fast.pipeline.failures import UserError


def number() -> int:
    """How many there are."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def place() -> tuple[int, int]:
    """(This one, counted from 0, and their number.)"""
    return int(os.environ.get("RANK") or 0), number()


def is_first() -> bool:
    """Whether this is the one that writes and prints."""
    return place()[0] == 0


def refuse_several(what: str) -> None:
    """Raise UserError if there are several and `what` is for one."""
    if number() > 1:
        raise UserError(
            f"{what} takes one process, and a launcher has started {number()}. Start it without "
            "torchrun; proxy, temperature, base, doremi, select and evaluate take several."
        )
