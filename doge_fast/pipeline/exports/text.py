"""Forms that several targets share: YAML, JSON, and calls in Python."""

import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import yaml

from doge_fast.pipeline.exports.mixture import REMOTE

# The reader of `datasets` that a suffix asks for.
_READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
    ".arrow": "arrow",
}
_PACKED = (".gz", ".zst", ".xz", ".bz2")


def to_yaml(value: Any) -> str:
    """Block YAML in the order given, each path on one line."""
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100_000))


def parsed_yaml(text: str, where: str) -> Any:
    """What a YAML or JSON text holds.

    Raises:
        ValueError: it is neither, or has several documents.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where} must be YAML or JSON and is not: {reason}.") from None


def from_yaml(text: str, where: str) -> Any:
    """The mapping in a YAML or JSON text.

    Raises:
        ValueError: it is neither, or not a mapping.
    """
    value = parsed_yaml(text, where)
    if not isinstance(value, dict):
        raise ValueError(f"{where} must hold a mapping; it holds a {type(value).__name__}.")
    return value


def to_json(value: Any) -> str:
    """Indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def plain(share: Decimal) -> str:
    """A decimal without an exponent."""
    return f"{share:f}"


def string(value: str) -> str:
    """A Python literal, quoted as this project quotes."""
    return json.dumps(value, ensure_ascii=False)


def mapping(items: Mapping[str, Any], indent: str = "") -> str:
    """A dict, an item a line; values are source text."""
    lines = [f"{indent}    {string(key)}: {value},\n" for key, value in items.items()]
    return "{\n" + "".join(lines) + indent + "}"


def sequence(items: Iterable[str], indent: str = "", brackets: str = "[]") -> str:
    """A list or tuple, an item a line; items are source text."""
    lines = [f"{indent}    {item},\n" for item in items]
    return f"{brackets[0]}\n{''.join(lines)}{indent}{brackets[1]}"


def load_dataset(paths: Iterable[str]) -> str:
    """The call that opens a domain's data as a stream, with the reader its suffix asks for.

    Raises:
        ValueError: paths of different kinds, or several of one that `load_dataset` takes alone.
    """
    files = list(paths)
    readers = sorted({_reader(path) or "" for path in files})
    if len(readers) > 1:
        raise ValueError(f"The files of a domain must be of one kind; {', '.join(files)} are not.")
    if readers[0]:
        names = ", ".join(string(path) for path in files)
        call = f'"{readers[0]}", data_files=[{names}]'
    elif len(files) == 1:
        call = string(files[0])
    else:
        raise ValueError(
            f"load_dataset takes one directory or Hub id; got {', '.join(files)}. Name files "
            "(jsonl, parquet, csv, txt, arrow), or make each a domain."
        )
    return f'load_dataset({call}, split="train", streaming=True)'


def _reader(path: str) -> str | None:
    suffixes = PurePosixPath(path.split(REMOTE)[-1]).suffixes
    kept = [suffix for suffix in suffixes if suffix not in _PACKED]
    return _READERS.get(kept[-1]) if kept else None
