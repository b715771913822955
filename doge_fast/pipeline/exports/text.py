"""Forms that several targets share: YAML, JSON, and calls in Python."""

import itertools
import json
import shlex
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import yaml


def to_yaml(value: Any) -> str:
    """Block YAML in the order given, each path on one line."""
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100_000))


def from_yaml(text: str, where: str = "The text") -> Any:
    """What a YAML or JSON text holds; ValueError where it is neither, or several documents."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where} must be YAML or JSON and is not: {reason}.") from None


def arguments(text: str, flag: str) -> list[str]:
    """The words after a flag, up to the next one; empty where a command line has not the flag."""
    # A line that goes on is one for the shell.
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    rest = words[words.index(flag) + 1 :] if flag in words else []
    return list(itertools.takewhile(lambda word: not word.startswith("--"), rest))


def to_json(value: Any) -> str:
    """Indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def plain(share: Decimal) -> str:
    """A decimal without an exponent."""
    return f"{share:f}"


def string(value: str) -> str:
    """A Python literal, quoted as this project quotes."""
    return json.dumps(value, ensure_ascii=False)


def strings(values: Iterable[str]) -> str:
    """Python literals between commas."""
    return ", ".join(map(string, values))


def mapping(items: Mapping[str, Any]) -> str:
    """A dict, an item a line; values are source text, a decimal its number."""
    lines = [f"    {string(key)}: {_source(value)},\n" for key, value in items.items()]
    return "{\n" + "".join(lines) + "}"


def _source(value: Any) -> str:
    return plain(value) if isinstance(value, Decimal) else str(value)


def sequence(items: Iterable[Any], indent: str = "", brackets: str = "[]") -> str:
    """A list or tuple, an item a line; items are source text, a decimal its number."""
    lines = [f"{indent}    {_source(item)},\n" for item in items]
    return f"{brackets[0]}\n{''.join(lines)}{indent}{brackets[1]}"
