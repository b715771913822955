"""Forms that several targets share: YAML, JSON, and calls in Python."""

import itertools
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import yaml

from doge_fast.pipeline.exports.blend import REMOTE

# The reader that a suffix asks for, by the name that `datasets` and Ray Data give it.
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


def from_yaml(text: str, where: str = "The text") -> Any:
    """What a YAML or JSON text holds.

    Raises:
        ValueError: it is neither, or has several documents.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
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


def reader_of(paths: Sequence[str]) -> str | None:
    """json, parquet, csv, text or arrow, as the suffixes of a domain's paths say; else None.

    Raises:
        ValueError: the paths are of different kinds.
    """
    suffixes = [PurePosixPath(path.split(REMOTE)[-1]).suffixes for path in paths]
    kept = [[suffix for suffix in found if suffix not in _PACKED] for found in suffixes]
    readers = {_READERS.get(found[-1]) if found else None for found in kept}
    if len(readers) > 1:
        raise ValueError(f"The files of a domain must be of one kind; {', '.join(paths)} are not.")
    return readers.pop() if readers else None


def load_dataset(paths: Sequence[str]) -> str:
    """The call that opens a domain's data as a stream, with the reader its suffix asks for.

    Raises:
        ValueError: paths of different kinds, or several of one that `load_dataset` takes alone.
    """
    reader = reader_of(paths)
    if reader is None and len(paths) > 1:
        raise ValueError(
            f"load_dataset takes one directory or Hub id; got {', '.join(paths)}. Name files "
            "(jsonl, parquet, csv, txt, arrow), or make each a domain."
        )
    call = f'"{reader}", data_files=[{strings(paths)}]' if reader else string(paths[0])
    return f'load_dataset({call}, split="train", streaming=True)'
