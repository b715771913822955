"""Domain weights in words and digits, and what a record says of where they come from."""

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from doge_fast.pipeline import tables
from doge_fast.pipeline.reporting.wording import as_ascii, count_text, plural

# Lines longer than this are hard to read, however wide the window is.
_LONGEST_LINE = 100


def weight_text(value: float | None) -> str:
    """Four decimals, or a power of ten where these would all be zero; nothing for None."""
    if value is None:
        return ""
    return f"{value:.0e}" if 0 < value < 5e-5 else f"{value:.4f}"


def change_text(change: float) -> str:
    """As a weight, with its sign."""
    return f"{change:+.0e}" if 0 < abs(change) < 5e-5 else f"{change:+.4f}"


def figure_text(value: float | None) -> str:
    """Three digits, and those of a whole number; nothing for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if 100 <= value < 1e7 else f"{value:#.3g}"


def tokens_text(value: float | None) -> str:
    """3000000 -> 3 M; nothing for None."""
    return "" if value is None else as_ascii(count_text(value))


def setting_text(value: Any) -> str:
    """A setting in a sentence: a target by names, a long hash by its beginning."""
    if value is None:
        return "not said"
    if isinstance(value, Mapping):
        return " + ".join(name if tau == 1 else f"{tau:g} {name}" for name, tau in value.items())
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}..."


def story(record: Mapping[str, Any]) -> str:
    """doge, target universal, 300 steps, seed 0."""
    parts = [str(record.get("method") or "method not known")]
    if record.get("score") not in (None, "paper"):
        parts.append(f"score {record['score']}")
    if record.get("target") is not None:
        parts.append(f"target {setting_text(record['target'])}")
    if record.get("steps") is not None:
        parts.append(plural(record["steps"], "step"))
    if record.get("seed") is not None:
        parts.append(f"seed {record['seed']}")
    if record.get("average"):
        parts.append(f"mean of {plural(record['average'].get('count', 0), 'file')}")
    if record.get("constraints"):
        parts.append("constrained")
    return ", ".join(parts)


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines that fit the terminal; `indent` is of those after the first."""
    return textwrap.fill(
        text,
        min(tables.terminal_width(), _LONGEST_LINE),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def all_wrapped(texts: Iterable[str]) -> list[str]:
    """Each of them."""
    return [wrapped(text) for text in texts]
