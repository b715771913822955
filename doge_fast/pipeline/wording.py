"""Numbers and lists as text, for tables, figures and sentences. Imports nothing heavy."""

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence

_ASCII = str.maketrans({"−": "-", "–": "-", "±": "+/-", "×": "x", "\N{NO-BREAK SPACE}": " "})


def wrapped(text: str, width: int = 88) -> str:
    """A paragraph in lines of a terminal's width."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def count_text(value: float) -> str:
    """1234567 -> 1.23 M."""
    for unit, word in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}\N{NO-BREAK SPACE}{word}"
    return f"{value:.0f}"


def plural(count: int, noun: str) -> str:
    """1 seed, 2 seeds."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(words: Iterable[str]) -> str:
    """a, b and c; empty without words."""
    *others, last = [*words] or [""]
    return f"{', '.join(others)} and {last}" if others else last


def first_few(names: Sequence[str], most: int = 5) -> str:
    """a, b and 3 more."""
    left = len(names) - most
    return listed([*names[:most], *([f"{left} more"] if left > 0 else [])])


def as_ascii(text: str) -> str:
    """Replace this package's own signs by ASCII; names may still hold other characters."""
    return text.translate(_ASCII)


def held_out_text(aim: Mapping[str, float], trained: Collection[str]) -> str:
    """The text of a mean loss: held-out text of ca, or of all 7 training domains.

    Args:
        aim: {name: share in the mean}.
        trained: the training domains.
    """
    if len(aim) > 1 and is_even(aim) and aim.keys() == set(trained):
        return f"held-out text of all {len(aim)} training domains"
    return f"held-out text of {first_few([*aim]) if is_even(aim) else shares_text(aim)}"


def is_even(aim: Mapping[str, float]) -> bool:
    """Whether all have the same share in a mean."""
    return max(aim.values()) - min(aim.values()) < 1e-9


def shares_text(aim: Mapping[str, float]) -> str:
    """ca (0.70) and nl (0.30), whatever the weights sum to."""
    total = sum(aim.values())
    return first_few([f"{name} ({value / total:.2f})" for name, value in aim.items()])
