"""The files of a corpus, and their rows.

Names alone decide a file's domain, split and kind. No file in a folder configures what is read, and
no library takes a path for a pattern or an address. What looks wrong in a folder but may be
intended becomes a warning. Of a row only the needed columns are read; others may hold anything.
"""

import bz2
import gzip
import io
import itertools
import json
import logging
import lzma
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from doge_fast.pipeline import cache
from doge_fast.pipeline.failures import FileFailure, UserError, reading
from doge_fast.pipeline.progress import tell_once
from doge_fast.pipeline.wording import first_few, listed

Kind = Literal["parquet", "arrow", "json", "text", "saved"]
"""How a file is read; "saved" is a folder of `save_to_disk`."""
Split = Literal["train", "validation", "test"]

KINDS: Mapping[str, Kind] = {
    "parquet": "parquet",
    "arrow": "arrow",
    "jsonl": "json",
    "json": "json",
    "txt": "text",
}
KINDS_TOLD = ".parquet, .arrow, .jsonl, .json, .txt (.gz, .zst, .bz2, .xz of the last three)"
_ENDING = re.compile(r"\.(parquet|arrow|(jsonl|json|txt)(\.(gz|zst|bz2|xz))?)$", re.IGNORECASE)
# Hidden files, and files about a data set: they hold no rows.
_NO_ROWS = re.compile(
    r"\..*|(readme|licen[cs]e)(\..*)?|dataset_infos?\.json|dataset_dict\.json|state\.json"
    r"|cache-[0-9a-f]+\.arrow",
    re.IGNORECASE,
)
# Likely data, in a format that is not read; logged as a warning.
_DATA = re.compile(r"(?!\.).*\.(csv|tsv|zip|tar|tgz)", re.IGNORECASE)
_WORDS: Mapping[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "heldout", "holdout"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# "00002-of-00004", and the hash that the Hub puts after it.
_SHARD = re.compile(r"(\d+)[-_ ]of[-_ ](\d+)(-[0-9a-f]{8,})?")
_POINTER = b"version https://git-lfs.github.com/spec/"
# A separator alone on its line; or <|endoftext|> twice, which a text about it hardly has.
_SEPARATOR = re.compile(
    rb"^[ \t]*(<\|[\w-]+\|>|</?s>|<(?:eo[sdt]|sep)>|\[(?:EO[SDT]|SEP)\])[ \t\r]*$", re.M | re.I
)
_END_OF_TEXT = re.compile(rb"<\|end_?of_?text\|>")
_HEAD_BYTES = 65_536

# A text file is cut into documents, so that some can be held out: at the first blank line past
# this many characters, and anywhere past sixteen times as many.
TEXT_DOCUMENT_CHARS = 16_384
# Less than a megabyte is cut into about this many, or too few documents would be held out.
_TEXT_DOCUMENTS = 64
_MIN_TEXT_DOCUMENT_CHARS = 512
_ROWS_PER_READ = 128

Row = Mapping[str, Any]
ABSENT = object()
"""The value of a column that the row lacks."""


@dataclass(frozen=True)
class CorpusFile:
    """A file that is read, or a folder of `save_to_disk`."""

    path: Path
    domain: str
    """From its name or folder; empty if a column names the domain."""
    split: Split
    kind: Kind


def list_files(data: Path, chosen: Collection[str] | None) -> dict[str, list[CorpusFile]]:
    """{domain: its files, in the order of their paths}; logs the files that are read and not read.

    Args:
        data: a folder that has a file or a folder of files for each domain.
        chosen: the requested domains; other entries may then be anything. Empty: all domains.
            None: a column names the domain.

    Raises:
        UserError: the folder holds no domain, or an entry that is no domain.
    """
    if is_saved(data):
        if chosen is not None:
            raise UserError(
                f"{data} is one data set as save_to_disk leaves it: name the column that holds a "
                "row's domain (--domain-column), or give every domain a folder."
            )
        return {"": [CorpusFile(data, "", "train", "saved")]}
    not_read: list[Path] = []
    files: dict[str, list[CorpusFile]] = {}
    for path in _walk(data):
        kind = None if _NO_ROWS.fullmatch(path.name) else kind_of(path)
        # A text file has no domain column.
        if kind is None or (kind == "text" and chosen is None):
            not_read.append(path)
            continue
        domain, named = _domain_and_rest(data, path, has_column=chosen is None)
        # The first folder or file name that states a split decides.
        split: Split = next(filter(None, map(split_of, named)), "train")
        files.setdefault(domain, []).append(CorpusFile(path, domain, split, kind))
    if chosen is not None:
        _check_domains(data, files, chosen)
    for name, own in files.items():
        if {"validation", "test"} <= {file.split for file in own}:
            not_read += [file.path for file in own if file.split == "test"]
            files[name] = [file for file in own if file.split != "test"]
    read = [
        f"{name}{name and ' of '}{_few([file.path.relative_to(data) for file in own])}"
        for name, own in files.items()
    ]
    tell_once(f"{data}: read are {'; '.join(read)}.")
    if not_read:
        left = [path.relative_to(data) for path in not_read]
        level = (
            logging.WARNING if any(_DATA.fullmatch(path.name) for path in left) else logging.INFO
        )
        tell_once(f"{data}: not read are {_few(left, 20)}.", level)
    return files


def _domain_and_rest(data: Path, path: Path, *, has_column: bool) -> tuple[str, Sequence[str]]:
    """The file's domain, and the names in its path that may state a split."""
    first, *others = inside = path.relative_to(data).parts or ("",)
    if has_column:
        return "", inside
    return first if others else stem_of(first), others


def oddities(data: Path, files: Sequence[CorpusFile]) -> Iterator[str]:
    """Warnings about files of `data`; they do not change what is read."""
    if doubtful := [file.path for file in files if _is_doubtful(data, file)]:
        yield (
            f"{_few(doubtful)}: the name has the word of a held-out split, and the text is trained "
            "on. Have it end with that word, as c4-validation, to hold it out."
        )
    # {path without ending: files}, which may be one text in several formats.
    forms: dict[Path, list[Path]] = {}
    for file in files:
        forms.setdefault(file.path.with_name(stem_of(file.path.name)), []).append(file.path)
    for paths in forms.values():
        if len(paths) > 1:
            yield f"{_few(paths)} differ in their endings alone, and are all read."
    # {path up to the shard numbers: {total in the name: shard numbers that are there}}.
    shards: dict[str, dict[str, set[int]]] = {}
    for file in files:
        if found := _SHARD.search(file.path.name):
            series = shards.setdefault(str(file.path.parent / file.path.name[: found.start()]), {})
            series.setdefault(found[2], set()).add(int(found[1]))
    for name, series in shards.items():
        for total, numbers in series.items():
            if len(numbers) < int(total):
                yield f"{name}*-of-{total}: {len(numbers)} of {int(total)} shards are there."
        if len(series) > 1:
            yield (
                f"{name}*: sets of {listed(series)} shards are all read, and one text written "
                "twice, in other shards, counts twice."
            )
    plain = [file for file in files if file.kind != "saved"]
    if pointers := [file.path for file in plain if _head(file.path).startswith(_POINTER)]:
        yield f"{_few(pointers)}: a pointer of git-lfs, in the place of the text (git lfs pull)."
    texts = {file.path: _separator(file.path) for file in plain if file.kind == "text"}
    if spelled := {path: found for path, found in texts.items() if found}:
        yield (
            f"{_few([*spelled])}: {next(iter(spelled.values()))} is spelled between documents, and "
            "read as text like any other; a text file is cut at blank lines."
        )


def kind_of(path: Path) -> Kind | None:
    """How a file is read; None if its ending is not known."""
    if is_saved(path):
        return "saved"
    found = _ENDING.search(path.name)
    return KINDS[(found[2] or found[1]).lower()] if found else None


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of datasets wrote the folder."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def stem_of(name: str) -> str:
    """The name without the ending that says how the file is read."""
    return _ENDING.sub("", name)


def split_of(name: str) -> Split | None:
    """The split that the name of a file or folder states, or None.

    Its last word counts, without numbers: "validation", "c4-train.00000-of-00001.jsonl" and
    "wiki.valid.txt" state a split; "dev-blog.jsonl" and "test_bench.jsonl" only begin with one.
    """
    words = _words_of_name(name)
    return _WORDS.get(words[-1]) if words else None


def stamp_of(files: Iterable[CorpusFile]) -> str:
    """Digest of every file's path, split, size, modification time and change time.

    The system sets the change time, so it shows a file that was overwritten with its size and
    modification time kept.
    """
    stats = [
        (path, file.split, path.stat())
        for file in files
        for path in (sorted(file.path.iterdir()) if file.kind == "saved" else [file.path])
    ]
    return cache.digest(
        [
            (str(path.resolve()), split, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            for path, split, stat in stats
        ]
    )


def _walk(folder: Path, around: Sequence[Path] = ()) -> Iterator[Path]:
    """All files below a folder, in the order of their paths; links are followed."""
    here = folder.resolve()
    if any(outer.is_relative_to(here) for outer in around):
        raise UserError(f"{folder} is a link to a folder around it.")
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.is_file() or is_saved(path):
            yield path
        elif not path.is_dir():
            raise UserError(f"{path} is neither a file nor a folder.")
        else:
            yield from _walk(path, (*around, here))


def _words_of_name(name: str) -> list[str]:
    """The words of a name in lower case, without numbers, "of" between them and the Hub's hash."""
    plain = _SHARD.sub(" ", stem_of(name).lower())
    plain = re.sub("(held|hold)[-_. ]out", r"\1out", plain)
    return [word for word in re.split(r"[-._ \d]+", plain) if word]


def _is_doubtful(data: Path, file: CorpusFile) -> bool:
    """Whether a training file has the word of a held-out split in its name."""
    _, named = _domain_and_rest(data, file.path, has_column=not file.domain)
    words = (word.removesuffix("set") for name in named for word in _words_of_name(name))
    is_named = any(_WORDS.get(word) in ("validation", "test") for word in words)
    return is_named and file.split == "train"


def opened(path: Path) -> BinaryIO:
    """The file, opened to read its decompressed bytes."""
    match path.suffix.lower():
        case ".gz":
            return cast(BinaryIO, gzip.open(path))
        case ".bz2":
            return cast(BinaryIO, bz2.open(path))
        case ".xz":
            return cast(BinaryIO, lzma.open(path))
        case ".zst":
            # Arrow's reader refuses a truncated file; zstandard's own does not.
            return cast(BinaryIO, io.BufferedReader(pa.input_stream(str(path), compression="zstd")))
        case _:
            return path.open("rb")


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_POINTER))


def _separator(path: Path) -> str:
    """The separator between the documents of a text file; empty if there is none."""
    with reading(path), opened(path) as file:
        head = file.read(_HEAD_BYTES)
    found = _SEPARATOR.findall(head) or _END_OF_TEXT.findall(head)[1:]
    return found[0].decode() if found else ""


def _few(paths: Iterable[Path], most: int = 5) -> str:
    return first_few(list(map(str, paths)), most)


def _check_domains(
    data: Path, files: Mapping[str, Sequence[CorpusFile]], chosen: Collection[str]
) -> None:
    """Raise UserError if an entry of the folder, or a chosen one, is no domain."""
    shown = [entry for entry in sorted(data.iterdir()) if not entry.name.startswith(".")]
    if not files:
        raise UserError(
            f"{data} must hold a folder or file per domain, of {KINDS_TOLD}; it holds "
            f"{', '.join(entry.name for entry in shown) or 'nothing'}."
        )
    empty = [entry for entry in shown if entry.is_dir() and entry.name not in files]
    if empty and not chosen:
        raise UserError(
            f"{empty[0]} holds no file of {KINDS_TOLD}. Name the domains to train on (--domains) "
            "if it is none."
        )
    for name, own in files.items():
        if chosen and name not in chosen:
            continue
        entry = data / own[0].path.relative_to(data).parts[0]
        if split_of(name) if entry.is_file() else name.lower() in _WORDS:
            raise UserError(
                f"{entry} names a split where a domain is expected: name the column that holds a "
                "row's domain (--domain-column), or give every domain a folder."
            )


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
            parquet = pq.ParquetFile(file.path, page_checksum_verification=True)
            schema = parquet.schema_arrow
            kept = roots_of(schema.names, columns)
            batches = parquet.iter_batches(batch_size=_ROWS_PER_READ, columns=kept)
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
    stream = pa.ipc.open_file(mapped) if is_indexed else pa.ipc.open_stream(mapped)
    return datasets.Dataset(stream.read_all())


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
