"""NAME=NUMBER words of the command line: tokens and bounds, by domain."""

import math
from collections.abc import Sequence


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
