"""NAME=VALUE words of the command line: paths, tokens, bounds, all by domain."""

import math
from collections.abc import Sequence


def texts(words: Sequence[str], what: str) -> dict[str, list[str]]:
    """{name: texts} of NAME=TEXT words, a name again for a further text; a text may hold "=".

    Args:
        words: of the command line.
        what: the option, for the error.

    Raises:
        ValueError: a word has no name or no text.
    """
    found: dict[str, list[str]] = {}
    for word in words:
        name, _, text = word.partition("=")
        if not (name and text):
            raise ValueError(f"{what} takes NAME=PATH ..., or one JSON or YAML file; got {word!r}.")
        found.setdefault(name, []).append(text)
    return found


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
    """The number that a text is.

    Args:
        text: of the number.
        word: what was typed, and `what` the option; for the error.

    Raises:
        ValueError: it is none, or NaN.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{what} must be a number, or NAME=NUMBER; got {word!r}.")
    return value
