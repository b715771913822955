"""Rows of files: the text, the domain where a column says it, and nothing else of a row.

Other columns may hold anything and change from row to row, for they are not looked at. Files are
opened by their paths, which no library takes for patterns or addresses.
"""

import codecs
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from doge_fast.pipeline.corpus_files import COMPRESSIONS, CorpusFile
from doge_fast.pipeline.failures import FileFailure, reading

MEND = "Restore the file, or take it out of the corpus."
_ENCODE = "Write it in UTF-8, or take it out of the corpus."
# A text file is cut at the first blank line past this many characters, so that it has
# documents to hold out; and anywhere past sixteen times as many.
TEXT_DOCUMENT_CHARS = 16_384
# Of less than a megabyte it is cut past fewer: else few documents would be held out.
_TEXT_DOCUMENTS = 64
_MIN_TEXT_DOCUMENT_CHARS = 512
_ROWS_PER_READ = 128


class DocumentRow(NamedTuple):
    """What is read of a row."""

    number: int
    """1 is the first of its file."""
    domain: Any
    text: Any


@dataclass(frozen=True)
class Absent:
    """In the place of a value: a row without the column."""

    found: str
    """What there is instead, as a clause."""


def rows_of(file: CorpusFile, text_column: str, domain_column: str | None) -> Iterator[DocumentRow]:
    """The rows of a parquet, arrow or json file, each with its text and, if asked for, its domain.

    Dots in the name of a column reach into structs. FileFailure where the file is damaged.
    """
    columns = [text_column] if domain_column is None else [text_column, domain_column]
    with reading(file.path):
        if file.kind == "json":
            yield from picked(_json_rows(file, columns), text_column, domain_column)
            return
        schema, batches = _arrow_batches(file, columns)
        # Where a column is not there, a refusal names those that are.
        others = dict.fromkeys(schema.names)
        found = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        rows = enumerate((others | row for row in found), start=1)
        label = class_label(schema, domain_column) if domain_column else None
        yield from picked(rows, text_column, domain_column, label)


def picked(
    rows: Iterable[tuple[int, Mapping[str, Any]]],
    text_column: str,
    domain_column: str | None,
    label: Sequence[str] | None = None,
) -> Iterator[DocumentRow]:
    """Of numbered rows what is read; `label` are the names of domains that rows have numbers of."""
    for number, row in rows:
        domain = None if domain_column is None else reach(row, domain_column)
        if label is not None and isinstance(domain, int):
            # -1 is a row without a label.
            domain = label[domain] if domain >= 0 else None
        yield DocumentRow(number, domain, reach(row, text_column))


def reach(row: Mapping[str, Any], column: str, inside: str = "") -> Any:
    """The value of a column, or `Absent`; dots reach into structs.

    A column whose name holds the dots goes first.
    """
    if column in row:
        return row[column]
    root, dot, rest = column.partition(".")
    if not dot or root not in row:
        known = f"the keys of {inside} are" if inside else "its columns are"
        return Absent(f"{known} {', '.join(map(str, row)) or 'none'}")
    struct = row[root]
    if isinstance(struct, Mapping):
        return reach(struct, rest, f"{inside}.{root}" if inside else root)
    return struct if struct is None else Absent(f"{root} holds no struct but {kind_told(struct)}")


def kind_told(value: Any) -> str:
    """What a value is, in words."""
    told = {str: "text", list: "a list", bool: "true or false", dict: "a struct", bytes: "bytes"}
    return told.get(type(value), "a number")


def _arrow_batches(
    file: CorpusFile, columns: list[str]
) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
    """The schema, and batches of the columns that are needed."""
    if file.kind == "arrow":
        mapped = pa.memory_map(str(file.path))
        if mapped.read(6) == b"ARROW1":
            # The form with an index at the end, which pandas and others write.
            indexed = pa.ipc.open_file(mapped)
            schema = indexed.schema
            read = map(indexed.get_batch, range(indexed.num_record_batches))
        else:
            mapped.seek(0)
            stream = pa.ipc.open_stream(mapped)
            schema, read = stream.schema, iter(stream)
        kept = needed(schema.names, columns)
        parts = (
            batch.select(kept).slice(start, _ROWS_PER_READ)
            for batch in read
            for start in range(0, batch.num_rows, _ROWS_PER_READ)
        )
        return schema, parts
    opened = pq.ParquetFile(file.path, page_checksum_verification=True)
    kept = needed(opened.schema_arrow.names, columns)
    return opened.schema_arrow, opened.iter_batches(batch_size=_ROWS_PER_READ, columns=kept)


def needed(names: Sequence[str], columns: Iterable[str]) -> list[str]:
    """The columns themselves, or the structs that they are in."""
    roots = (column if column in names else column.partition(".")[0] for column in columns)
    found = [name for name in dict.fromkeys(roots) if name in names]
    if twice := [name for name in found if names.count(name) > 1]:
        raise ValueError(f"the column {twice[0]!r} is there twice")
    return found


def class_label(schema: pa.Schema, column: str) -> list[str] | None:
    """The names of a ClassLabel, whose rows hold numbers; None for another column."""
    text = (schema.metadata or {}).get(b"huggingface")
    features = json.loads(text).get("info", {}).get("features", {}) if text else {}
    found = reach(features, column)
    is_label = isinstance(found, Mapping) and found.get("_type") == "ClassLabel"
    return list(found["names"]) if is_label else None


def _json_rows(file: CorpusFile, columns: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """An object a line, or one array of objects."""
    with opened(file.path) as handle:
        lines = enumerate(handle, start=1)
        filled = ((number, line) for number, line in lines if line.strip())
        first = next(filled, None)
        if first is None:
            return
        if first[1].removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            array = _loaded(first[1] + handle.read(), file.path, 1)
            for n, row in enumerate(array, start=1):
                yield n, _checked(row, columns, file.path, n)
            return
        for number, line in itertools.chain([first], filled):
            yield number, _checked(_loaded(line, file.path, number), columns, file.path, number)


def _loaded(text: bytes, path: Path, number: int) -> Any:
    try:
        # Some editors begin a file with a mark of its encoding, and files are joined.
        decoded = text.decode("utf-8-sig")
        try:
            return json.loads(decoded)
        except json.JSONDecodeError:
            raise
        except ValueError:
            # A number of more digits than Python makes one of, perhaps where nobody looks.
            return json.loads(decoded, parse_int=str)
    except RecursionError:
        raise FileFailure(
            f"{path}, line {number} cannot be read: it is nested too deep. {MEND}"
        ) from None
    except ValueError as error:
        way_out = _ENCODE if isinstance(error, UnicodeDecodeError) else MEND
        if number == 1 and way_out == MEND:
            # Any other layout ends so, too.
            way_out = "Write one object a line, or one array of objects; or restore the file."
        raise FileFailure(f"{path}, line {number} cannot be read: {error}. {way_out}") from None


def _checked(row: Any, columns: Iterable[str], path: Path, number: int) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise FileFailure(
            f"{path}, line {number} cannot be read: a row is a JSON object, and this is "
            f"{json.dumps(row)[:20]}. {MEND}"
        )
    for column in columns:
        # Down to the struct that holds it; other keys may be anything.
        inside, name = row, column
        while name not in inside and isinstance(inside.get(name.partition(".")[0]), dict):
            root, _, name = name.partition(".")
            inside = inside[root]
    return row


def opened(path: Path) -> BinaryIO:
    """The bytes of a file as they were before they were compressed."""
    suffix = path.suffix.lower()
    if suffix not in COMPRESSIONS:
        return path.open("rb")
    # Arrow's reader notices a file that was cut off.
    stream = pa.input_stream(str(path), compression=COMPRESSIONS[suffix])
    return cast(BinaryIO, io.BufferedReader(stream))


def text_document_chars(files: Iterable[CorpusFile]) -> int:
    """Characters past which a domain's text files are cut at a blank line; see the constants."""
    num_bytes = sum(file.path.stat().st_size for file in files if file.kind == "text")
    chars = max(_MIN_TEXT_DOCUMENT_CHARS, num_bytes // _TEXT_DOCUMENTS)
    return min(chars, TEXT_DOCUMENT_CHARS) if num_bytes else TEXT_DOCUMENT_CHARS


def text_documents(file: CorpusFile, chars: int) -> Iterator[DocumentRow]:
    """A text file cut into documents: at blank lines past `chars`, anywhere past 16 times that."""
    with reading(file.path), io.TextIOWrapper(opened(file.path), "utf-8-sig") as handle:
        try:
            for number, text in enumerate(filter(str.strip, _cut(handle, chars)), start=1):
                if text.count("\0") > len(text) / 10:
                    raise FileFailure(
                        f"A text file must be UTF-8; {file.path} holds zeros, as UTF-16 has them "
                        f"and a disk that was full leaves them. {_ENCODE}"
                    )
                yield DocumentRow(number, None, text)
        except UnicodeDecodeError as error:
            raise FileFailure(
                f"A text file must be UTF-8; {file.path} is not: {error}. {_ENCODE}"
            ) from None


def _cut(handle: io.TextIOWrapper, chars: int) -> Iterator[str]:
    lines: list[str] = []
    size, is_rest = 0, False
    # A line may be all of the file.
    for line in iter(lambda: handle.readline(16 * chars), ""):
        is_long = is_rest or len(line) == 16 * chars
        is_rest = is_long and not line.endswith("\n")
        if is_long:
            yield "".join(lines)
            yield from (line[start : start + chars] for start in range(0, len(line), chars))
            lines, size = [], 0
            continue
        lines.append(line)
        size += len(line)
        is_blank = not line.strip()
        if size >= (1 if is_blank else 16) * chars:
            yield "".join(lines)
            lines, size = [], 0
    yield "".join(lines)
