"""The files of a corpus: which are read, whether they can be, text files cut into documents."""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq

from doge_fast.pipeline import cache
from doge_fast.pipeline.failures import FileFailure, reading

SUFFIXES = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".jsonl.gz": "json",
    ".jsonl.zst": "json",
    ".txt": "text",
}
# A text file is cut at the first blank line past this many characters, so that it has
# documents to hold out; and anywhere past sixteen times as many.
TEXT_DOCUMENT_CHARS = 16_384
# Of less than a megabyte it is cut past fewer: else few documents would be held out.
_TEXT_DOCUMENTS = 64
_MIN_TEXT_DOCUMENT_CHARS = 512
# Enough to see whether lines hold objects.
_START_BYTES = 65_536
MEND = "Restore the file, or take it out of the corpus."


def data_files(path: Path, around: Sequence[Path] = ()) -> list[Path]:
    """The file itself, or all below a directory, of a kind that is read; hidden ones are not.

    Args:
        path: of either; links are followed.
        around: the folders that it was reached through, without links.

    Raises:
        ValueError: a link leads nowhere, or to a folder around it; a folder has a file's name.
    """
    if existing(path).is_file():
        return [path] if suffix_of(path) else []
    here = path.resolve()
    if any(folder.is_relative_to(here) for folder in around):
        raise ValueError(f"{path} is a link to a folder around it. Remove it.")
    if around and suffix_of(path):
        raise ValueError(f"{path} has the name of a file and is a folder. Rename it.")
    shown = (each for each in path.iterdir() if not each.name.startswith("."))
    inside = [each for each in shown if suffix_of(each) or each.is_dir()]
    return sorted(file for each in inside for file in data_files(each, (*around, here)))


def existing(path: Path) -> Path:
    """The path, unless it is a link to nothing, or nothing that holds text."""
    if not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path} is a link to nothing, or no file. Mend it, or remove it.")
    return path


def suffix_of(path: Path) -> str | None:
    """The ending that says how the file is read; None for other files."""
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)


def kind_of(path: Path) -> str:
    """parquet, json or text."""
    suffix = suffix_of(path)
    if suffix is None:
        raise ValueError(f"A file of documents ends in {', '.join(SUFFIXES)}; this is {path}.")
    return SUFFIXES[suffix]


def stamp_of(files: Iterable[Path]) -> str:
    """Changes when a file does: paths, sizes, times of modification."""
    facts = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return cache.digest(facts)


def is_empty(file: Path) -> bool:
    """Whether there are no rows: `datasets` fails on files like that.

    Raises:
        FileFailure: it does not begin as a file of its kind.
    """
    kind = kind_of(file)
    if kind == "text" or (kind == "json" and file.stat().st_size == 0):
        return file.stat().st_size == 0
    if file.suffix == ".zst":
        # What it lacks is a package.
        import_module("zstandard")
    with reading(file, MEND):
        if kind == "parquet":
            return bool(pq.read_metadata(file).num_rows == 0)
        with fsspec.open(str(file), "rb", compression="infer") as opened:
            start = bytes(opened.read(_START_BYTES)).removeprefix(codecs.BOM_UTF8).lstrip()
    if start and start[0] not in b"{[":
        # pyarrow dies of a file of nothing but null.
        raise FileFailure(
            f"{file} cannot be read: it must hold a JSON object a line, and begins {start[:20]!r}. "
            f"{MEND}"
        )
    return not start


def guarded(rows: Iterable[Any], where: str) -> Iterator[Any]:
    """The rows; what goes wrong while they are read is said with their place."""
    iterator = iter(rows)
    while True:
        with reading(where, MEND):
            try:
                row = next(iterator)
            except StopIteration:
                return
        yield row


def text_document_chars(files: Iterable[Path]) -> int:
    """Characters past which a domain's text files are cut at a blank line; see the constants."""
    num_bytes = sum(file.stat().st_size for file in files if kind_of(file) == "text")
    chars = max(_MIN_TEXT_DOCUMENT_CHARS, num_bytes // _TEXT_DOCUMENTS)
    return min(chars, TEXT_DOCUMENT_CHARS) if num_bytes else TEXT_DOCUMENT_CHARS


def text_documents(files: Iterable[Path], chars: int) -> Iterator[str]:
    """Text files cut into documents; those of white space are left out."""
    for file in files:
        yield from filter(str.strip, _cut(file, chars))


def _cut(file: Path, chars: int) -> Iterator[str]:
    """The file, cut at blank lines past `chars`, anywhere past 16 times that."""
    lines: list[str] = []
    size = 0
    try:
        with file.open(encoding="utf-8") as handle:
            for line in handle:
                lines.append(line)
                size += len(line)
                is_blank = not line.strip()
                if size >= (1 if is_blank else 16) * chars:
                    yield "".join(lines)
                    lines, size = [], 0
    except UnicodeDecodeError as error:
        raise FileFailure(f"A text file must be UTF-8; {file} is not: {error}. {MEND}") from None
    yield "".join(lines)
