"""Forms that several targets share: YAML, JSON, command lines, and literals of Python."""

import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes a share as the float that a framework reads."""


_Dumper.add_representer(Decimal, lambda dumper, share: dumper.represent_float(float(share)))


def to_yaml(value: Any) -> str:
    """Block YAML in the order given, each path on one line; a decimal is written as a float."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000))


def to_json(value: Any) -> str:
    """Indented JSON; a decimal is written as a float."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=float) + "\n"


def plain(value: Decimal | str) -> str:
    """A decimal without an exponent; source text as it is."""
    return f"{value:f}" if isinstance(value, Decimal) else value


def string(value: str) -> str:
    """A Python literal, quoted as this project quotes."""
    return json.dumps(value, ensure_ascii=False)


def strings(values: Iterable[str]) -> str:
    """Python literals between commas."""
    return ", ".join(map(string, values))


def mapping(items: Mapping[str, Decimal | str]) -> str:
    """A dict of decimals or source texts, an item a line."""
    pairs = (f"{string(key)}: {plain(value)}" for key, value in items.items())
    return sequence(pairs, brackets="{}")


def sequence(items: Iterable[Decimal | str], indent: str = "", brackets: str = "[]") -> str:
    """A list (or tuple, or dict) of decimals or source texts, an item a line."""
    lines = [f"{indent}    {plain(item)},\n" for item in items]
    return f"{brackets[0]}\n{''.join(lines)}{indent}{brackets[1]}"
