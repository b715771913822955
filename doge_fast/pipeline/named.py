"""Domains that are named: NAME=NUMBER words of the command line, and whether they are known."""

import math
from collections.abc import Collection, Iterable, Sequence


def check(what: str, names: Iterable[str], known: Collection[str], where: str) -> None:
    """Raise ValueError where `names`, which `what` gives, has one that is no domain of `where`."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"{what} must name domains of {where}, which are {', '.join(known)}; "
            f"{', '.join(unknown)} is not among them."
        )


def numbers(words: Sequence[str], what: str) -> dict[str, float]:
    """{name: number} of NAME=NUMBER words; a name may hold "=".

    Args:
        words: of the command line.
        what: the option, for the error.

    Raises:
        ValueError: a word is not such, or names a domain twice.
    """
    found: dict[str, float] = {}
    for word in words:
        name, _, text = word.rpartition("=")
        if not name or name in found:
            raise ValueError(f"{what} must be NAME=NUMBER, each name once; got {' '.join(words)}.")
        found[name] = number(text, word, what)
    return found


def number(text: str, word: str, what: str) -> float:
    """The number that the text of a word is; ValueError where it is none, or NaN."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{what} must be a number, or NAME=NUMBER; got {word!r}.")
    return value
