"""Numbers as text: what tables, figures and sentences share. Imports nothing heavy."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Stat(NamedTuple):
    """A mean over seeds and its standard error; no error for one seed."""

    mean: float
    error: float | None = None


_ASCII = str.maketrans({"−": "-", "–": "-", "±": "+/-", "×": "x", "\N{NO-BREAK SPACE}": " "})


def wrapped(text: str, width: int = 88, *, indent: str = "") -> str:
    """A paragraph in lines of a terminal's width; `indent` is of those after the first."""
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def as_ascii(text: str) -> str:
    """A terminal may know no more than ASCII; names stay as they are."""
    return text.translate(_ASCII)


def to_float(value: Any) -> float:
    """JSON has no word for what is not finite; records hold null."""
    return math.nan if value is None else float(value)


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Recorded numbers by name; see `to_float`."""
    return {name: to_float(value) for name, value in values.items()}


def perplexity_text(value: float) -> str:
    """Four digits, or words where it is not finite."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 10_000 else f"{value:.2e}"


def _with_error(stat: Stat, *, most: int) -> str:
    """0.2760 ± 0.0002: the error to two significant digits, the mean to the same place.

    There are never more than `most` decimals; an error below the last is rounded up to it.
    """
    assert stat.error is not None
    error = max(stat.error, 10.0**-most) if stat.error > 0 else 0.0
    decimals = min(max(1 - math.floor(math.log10(error)), 0), most) if error > 0 else most
    return f"{stat.mean:.{decimals}f} ± {error:.{decimals}f}"


def perplexity_stat(stat: Stat) -> str:
    """Perplexity, with its standard error where there is one."""
    if stat.error is None or not math.isfinite(stat.mean):
        return perplexity_text(stat.mean)
    return _with_error(stat, most=3)


def weight_text(stat: Stat) -> str:
    """A domain weight, with its standard error where there is one."""
    return f"{stat.mean:.3f}" if stat.error is None else _with_error(stat, most=4)


def percent_text(change: float) -> str:
    """+1.2 %, with a typographic minus."""
    if not math.isfinite(change):
        return "not finite"
    return f"{100 * change:+.1f}".replace("-", "−") + "\N{NO-BREAK SPACE}%"


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
    """a, b and c."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def domains_told(names: Sequence[str], most: int = 5) -> str:
    """a, b and 3 more."""
    left = len(names) - most
    return listed([*names[:most], *([f"{left} more"] if left > 0 else [])])
