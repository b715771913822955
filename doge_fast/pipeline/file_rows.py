"""Reads rows of files, and of these only the needed columns.

Other columns may hold anything and change from row to row. Files are opened such that no library
takes their paths for patterns or addresses.
"""

import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from doge_fast.pipeline.corpus_files import CorpusFile, opened
from doge_fast.pipeline.failures import FileFailure, UserError, reading

Row = Mapping[str, Any]
ABSENT = object()
"""The value of a column that the row lacks."""

# A text file is cut into documents, so that some can be held out: at the first blank line past
# this many characters, and anywhere past sixteen times as many.
TEXT_DOCUMENT_CHARS = 16_384
# Less than a megabyte is cut into about this many, or too few documents would be held out.
_TEXT_DOCUMENTS = 64
_MIN_TEXT_DOCUMENT_CHARS = 512
_ROWS_PER_READ = 128


def rows_of(file: CorpusFile, columns: Sequence[str], text_chars: int) -> Iterator[Row]:
    """The rows of a file.

    Args:
        file: of any kind; a text file is cut into rows.
        columns: the needed ones; dots reach into structs. In a text file the first is the text.
        text_chars: number of characters past which a text file is cut at a blank line.

    Raises:
        FileFailure: the file is damaged; the message is the reading library's.
    """
    with reading(file.path):
        if file.kind == "text":
            yield from ({columns[0]: text} for text in _texts(file.path, text_chars))
        elif file.kind == "json":
            yield from _json_rows(file.path)
        elif file.kind == "parquet":
            opened = pq.ParquetFile(file.path, page_checksum_verification=True)
            schema = opened.schema_arrow
            kept = roots_of(schema.names, columns)
            batches = opened.iter_batches(batch_size=_ROWS_PER_READ, columns=kept)
            found = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            is_typed = b"huggingface" in (schema.metadata or {})
            features = datasets.Features.from_arrow_schema(schema) if is_typed else {}
            yield from named_rows(found, schema.names, features, columns)
        else:
            saved = _saved(file).with_format(None)
            kept = saved.select_columns(roots_of(saved.column_names, columns))
            yield from named_rows(kept, saved.column_names, saved.features, columns)


def _saved(file: CorpusFile) -> datasets.Dataset:
    if file.kind == "saved":
        return datasets.Dataset.load_from_disk(str(file.path))
    mapped = pa.memory_map(str(file.path))
    # An Arrow file, with an index at its end, as pandas writes it; else an Arrow stream.
    is_indexed = mapped.read(6) == b"ARROW1"
    mapped.seek(0)
    opened = pa.ipc.open_file(mapped) if is_indexed else pa.ipc.open_stream(mapped)
    return datasets.Dataset(opened.read_all())


def named_rows(
    rows: Iterable[Row], names: Sequence[str], features: Mapping[str, Any], columns: Iterable[str]
) -> Iterator[Row]:
    """Rows with every column of `names`; numbers of a ClassLabel become its names."""
    others = dict.fromkeys(names)
    labels = {column: value_of(features, column) for column in columns}
    for row in rows:
        whole = {**others, **row}
        for column, label in labels.items():
            value = value_of(row, column)
            if isinstance(label, datasets.ClassLabel) and isinstance(value, int):
                # -1 is a row without a label.
                whole[column] = label.int2str(value) if value >= 0 else None
        yield whole


def value_of(row: Row, column: str) -> Any:
    """The value of a column, or `ABSENT`; dots reach into structs.

    A column whose own name has the dots takes precedence.
    """
    if column in row:
        return row[column]
    root, dot, rest = column.partition(".")
    if not dot or root not in row:
        return ABSENT
    struct = row[root]
    if isinstance(struct, Mapping):
        return value_of(struct, rest)
    return None if struct is None else ABSENT


def roots_of(names: Sequence[str], columns: Iterable[str]) -> list[str]:
    """Those of `names` to read: the columns themselves, or the structs that hold them."""
    roots = (column if column in names else column.partition(".")[0] for column in columns)
    kept = [name for name in dict.fromkeys(roots) if name in names]
    if twice := [name for name in kept if names.count(name) > 1]:
        raise UserError(f"the column {twice[0]!r} is there twice")
    return kept


def _json_rows(path: Path) -> Iterator[Row]:
    """The objects of a file that has one on each line, or one array of them."""
    with opened(path) as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        first = next(lines, None)
        if first is None:
            return
        if first[1].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            rows: Iterable[tuple[int, Any]] = enumerate(json.loads(first[1] + file.read()), 1)
        else:
            rows = ((n, _loaded(path, n, line)) for n, line in itertools.chain([first], lines))
        for number, row in rows:
            if not isinstance(row, dict):
                raise FileFailure(
                    f"{path}, line {number}: a row is a JSON object; this is {row!r:.20}."
                )
            yield row


def _loaded(path: Path, number: int, line: bytes) -> Any:
    with reading(f"{path}, line {number}"):
        # Some editors write a byte order mark, and joined files have it on any line.
        return json.loads(line.decode("utf-8-sig"))


def text_document_chars(files: Iterable[CorpusFile]) -> int:
    """`text_chars` of `rows_of` for a domain's text files."""
    num_bytes = sum(file.path.stat().st_size for file in files if file.kind == "text")
    chars = max(_MIN_TEXT_DOCUMENT_CHARS, num_bytes // _TEXT_DOCUMENTS)
    return min(chars, TEXT_DOCUMENT_CHARS) if num_bytes else TEXT_DOCUMENT_CHARS


def _texts(path: Path, chars: int) -> Iterator[str]:
    """A text file cut at blank lines past `chars`, and anywhere past 16 times that."""
    with io.TextIOWrapper(opened(path), "utf-8-sig") as file:
        for text in filter(str.strip, _cut(file, chars)):
            if text.count("\0") > len(text) / 10:
                raise FileFailure(
                    f"{path} holds zeros, as UTF-16 has them and a disk that was full leaves them; "
                    "a text file must be UTF-8."
                )
            yield text


def _cut(file: io.TextIOWrapper, chars: int) -> Iterator[str]:
    lines: list[str] = []
    size, is_rest = 0, False
    # Reads are bounded, since one line may be the whole file.
    for line in iter(lambda: file.readline(16 * chars), ""):
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
