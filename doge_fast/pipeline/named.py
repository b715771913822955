"""Names of domains: allowed characters, NAME=NUMBER options, and errors for unknown names."""

import difflib
import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from decimal import Decimal
from typing import Any

from doge_fast.pipeline.failures import UserError

# Control characters, line ends, direction marks and surrogates, which a terminal, a page or another
# framework's file would not show as text.
_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# Invisible characters whose Unicode category is not that of format characters (Cf).
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\ufe00-\ufe0f\U000e0100-\U000e01ef]"
)
_EXPONENTS = {"%": -2, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
_BREAKS = {"\n", "\t"}


def visible(text: str) -> str:
    """The text with control characters escaped as in Python: "a\\x1b[31mb"."""

    def escaped(found: re.Match[str]) -> str:
        character = found[0]
        return character if character in _BREAKS else character.encode("unicode_escape").decode()

    return _INVISIBLE.sub(escaped, text)


def _look(name: str) -> str:
    """The name as a reader sees it: normalised, without invisible characters."""
    # After NFKC, which turns U+3164 into U+1160.
    letters = _BLANK.sub("", unicodedata.normalize("NFKC", name))
    visible_ones = (each for each in letters if unicodedata.category(each) != "Cf")
    return " ".join("".join(visible_ones).split())


def check_visible(names: Iterable[str], where: str) -> None:
    """Raise UserError if a name is blank, has control characters, or looks like another name.

    Names look alike if they differ only by normalisation, invisible characters or spaces. `where`:
    the source of the names, for the message.
    """
    alike: dict[str, str] = {}
    for name in names:
        seen = _look(name)
        if not seen or _INVISIBLE.search(name):
            raise UserError(
                f"A domain's name must be of characters that are written; {where} has {name!a}. "
                "Rename it."
            )
        other = alike.setdefault(seen, name)
        if other != name:
            raise UserError(
                f"Domains need names that can be told apart; {where} has {other!a} and {name!a}, "
                "which look alike. Rename one."
            )


def check_known(what: str, names: Iterable[str], known: Collection[str], where: str) -> None:
    """Raise UserError if one of `names`, from the option `what`, is no domain of `where`."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(
            f"{what} must name domains of {where}, which are {', '.join(known)}; "
            f"{', '.join(apart(unknown, known))} is not among them."
        )


def apart(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """The names; those that look like a known one are escaped: 'web\\u200b'."""
    looks = set(map(_look, known))
    return [f"{name!a}" if _look(name) in looks else name for name in names]


def nearest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """A sentence that suggests known words close to `word`; `otherwise` if none is close.

    It suggests those that begin with `word`, or else the one with the most similar spelling. Case
    and the leading dashes of options do not count.
    """
    word, bare = word.casefold(), {each.lstrip("-").casefold(): each for each in known}
    near = [each for name, each in bare.items() if word and name.startswith(word)]
    near = near or [bare[name] for name in difflib.get_close_matches(word, bare, n=1)]
    return f"Did you mean {' or '.join(near[:3])}?" if near else otherwise


def numbers(words: Sequence[str], what: str) -> dict[str, float]:
    """{name: number} of the NAME=NUMBER words of an option; a name may hold "=".

    Raises:
        UserError: a word has another form, or repeats a name.
    """
    found: dict[str, float] = {}
    for word in words:
        name, _, text = (part.strip() for part in word.rpartition("="))
        if not name or name in found:
            raise UserError(f"{what} must be NAME=NUMBER, each name once; got {' '.join(words)}.")
        found[name] = number(text, word, what)
    return found


def float_of(text: str) -> float:
    """The text as a number, which may be "10k", "1.5B" or "30%"; ValueError for other text."""
    exponent = _EXPONENTS.get(text[-1:].lower())
    if exponent is None:
        return float(text)
    value = float(text[:-1]) * 10.0**exponent
    # 16.1 * 1e3 would be 16100.000000000002.
    return float(Decimal(text[:-1]).scaleb(exponent)) if math.isfinite(value) else value


def number_as(kind: type, text: str) -> Any:
    """As `float_of`, as an int or float; UserError if `kind` is int and the number is not whole."""
    try:
        # Exact beyond 2^53, where a float is not.
        return kind(int(text))
    except (ValueError, OverflowError):
        value = float_of(text)
    if kind is int and not value.is_integer():
        raise UserError(f"{text} is no whole number")
    return kind(value)


def number(text: str, word: str, what: str) -> float:
    """`text`, a part of `word`, as a number; UserError if it is no number, or NaN."""
    try:
        value = float_of(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise UserError(f"{what} must be a number, or NAME=NUMBER; got {word!r}.")
    return value
