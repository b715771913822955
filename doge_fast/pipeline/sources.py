"""Where text lies: files, Hub data sets and this environment, read as (domain, text).

Everything above asks for documents and need not know their form. A part can be read again and
again, and has a fingerprint that changes when its text does, which makes keys for the cache.
"""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from doge_fast.pipeline import cache, local_corpus, progress
from doge_fast.pipeline.config import CorpusConfig

# (domain, text) of one document after the other; called again to read again.
Documents = Callable[[], Iterator[tuple[str, str]]]

_SUFFIXES = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".jsonl.gz": "json",
    ".jsonl.zst": "json",
    ".txt": "text",
}
_SPLIT = re.compile(r"(?:(train(?:ing)?)|(validation|valid|val|dev)|(test))(?![a-z])")

# A text file is cut at the first blank line past this many characters, so that it has
# documents to hold out; and anywhere past sixteen times as many.
_TEXT_DOCUMENT_CHARS = 16_384
# Where documents have to be held out of less than a megabyte, it is cut past a smaller number:
# else few documents would be held out, one of them perhaps most of the text.
_TEXT_DOCUMENTS = 64
_MIN_TEXT_DOCUMENT_CHARS = 512
_ROWS_PER_READ = 128


@dataclass(frozen=True)
class Part:
    """Documents that are read together: one domain's or, with a domain column, all domains'."""

    train: Documents
    validation: Documents | None
    fingerprint: str


def find_parts(config: CorpusConfig, targets: Sequence[str]) -> dict[str, Part]:
    """{domain: where it is read}, for all that `config.data` holds."""
    if config.data == "installed":
        return _directory_parts(_installed_directory(config), config)
    path = Path(config.data).expanduser()
    if not path.exists():
        return _hub_parts(config, targets)
    if config.domain_column is not None:
        return _column_parts(config, _path_splits(path), _stamp(_data_files(path)), targets)
    if path.is_file():
        raise ValueError(
            f"{path} is one file: name the column that holds a row's domain with domain_column "
            "(--domain-column), or give a directory with one folder or file per domain."
        )
    return _directory_parts(path, config)


def check_parts(parts: Mapping[str, Part]) -> None:
    """Every split opens and begins with a document, before anything is made of any."""
    for part, names in by_part(parts):
        for split, documents in (("train", part.train), ("validation", part.validation)):
            if documents is not None and next(documents(), None) is None:
                raise ValueError(
                    f"A domain needs text; the {split} split of {', '.join(names)} is empty."
                )


def by_part(parts: Mapping[str, Part]) -> list[tuple[Part, list[str]]]:
    """Each part once, with the domains that are read from it."""
    grouped: dict[int, tuple[Part, list[str]]] = {}
    for name, part in parts.items():
        grouped.setdefault(id(part), (part, []))[1].append(name)
    return list(grouped.values())


def _directory_parts(directory: Path, config: CorpusConfig) -> dict[str, Part]:
    """A folder or file per domain."""
    files_of: dict[str, list[Path]] = {}
    for entry in sorted(directory.iterdir()):
        files = [] if entry.name.startswith(".") else _data_files(entry)
        if not files:
            continue
        name = entry.name if entry.is_dir() else entry.name.removesuffix(_suffix(entry) or "")
        if name in files_of:
            raise ValueError(
                f"A domain is one folder or one file; {directory} holds several named {name}."
            )
        if entry.is_file() and _split_of(name):
            raise ValueError(
                f"{entry} names a split where a domain is expected: name the column that holds a "
                "row's domain with domain_column (--domain-column), or give every domain a folder."
            )
        files_of[name] = files
    if not files_of:
        raise ValueError(
            f"{directory} must hold a folder or file per domain, of {', '.join(_SUFFIXES)}; "
            f"it holds {', '.join(sorted(e.name for e in directory.iterdir())) or 'nothing'}."
        )
    return {name: _files_part(name, directory, files, config) for name, files in files_of.items()}


def _files_part(name: str, directory: Path, files: Sequence[Path], config: CorpusConfig) -> Part:
    """One domain's files, sorted into the two splits by what their names begin with."""
    split_of = {file: _path_split(file.relative_to(directory).parts[1:]) for file in files}
    splits: dict[str, list[Path]] = {}
    for file, split in split_of.items():
        splits.setdefault(split, []).append(file)
    held_out = splits.get("validation") or splits.get("test")
    if "train" not in splits:
        raise ValueError(
            f"The domain {name} needs training files; {directory / name} holds only "
            f"{', '.join(file.name for file in files)}."
        )
    chars = _TEXT_DOCUMENT_CHARS if held_out else _text_document_chars(splits["train"])
    read = functools.partial(
        _file_documents, name, text_column=config.text_column, text_chars=chars
    )
    stamp = _stamp(files)
    return Part(
        train=functools.partial(read, splits["train"]),
        validation=functools.partial(read, held_out) if held_out else None,
        # Another cut makes other documents of the same files.
        fingerprint=stamp if chars == _TEXT_DOCUMENT_CHARS else cache.digest([stamp, chars]),
    )


def _text_document_chars(files: Iterable[Path]) -> int:
    """Characters past which a domain's text files are cut at a blank line; see the constants."""
    num_bytes = sum(file.stat().st_size for file in files if _kind(file) == "text")
    chars = max(_MIN_TEXT_DOCUMENT_CHARS, num_bytes // _TEXT_DOCUMENTS)
    return min(chars, _TEXT_DOCUMENT_CHARS) if num_bytes else _TEXT_DOCUMENT_CHARS


def _path_split(parts: Sequence[str]) -> str:
    """The first folder or file name that begins with a split's name decides; else train."""
    return next(filter(None, map(_split_of, parts)), "train")


def _split_of(name: str) -> str | None:
    """train, validation or test, where `name` begins with it or a usual short form."""
    found = _SPLIT.match(name.lower())
    if found is None:
        return None
    return ("train", "validation", "test")[(found.lastindex or 1) - 1]


def _data_files(path: Path) -> list[Path]:
    """The file itself, or all below a directory, of a kind that is read; hidden ones are not."""
    if path.is_file():
        return [path] if _suffix(path) else []
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and _suffix(file)
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def _suffix(path: Path) -> str | None:
    """The ending that says how the file is read; None for other files."""
    return next((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), None)


def _kind(path: Path) -> str:
    """parquet, json or text."""
    suffix = _suffix(path)
    if suffix is None:
        raise ValueError(f"A file of documents ends in {', '.join(_SUFFIXES)}; this is {path}.")
    return _SUFFIXES[suffix]


def _stamp(files: Iterable[Path]) -> str:
    """Changes when a file does: paths, sizes, times of modification."""
    facts = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return cache.digest(facts)


def _file_documents(
    name: str, files: Sequence[Path], *, text_column: str, text_chars: int
) -> Iterator[tuple[str, str]]:
    """The documents of one domain's files, kind after kind."""
    filled = [file for file in files if not _is_empty(file)]
    for kind, group in itertools.groupby(sorted(filled, key=_kind), key=_kind):
        paths = list(group)
        if kind == "text":
            yield from ((name, text) for text in _text_documents(paths, text_chars))
        else:
            rows = _open_files(kind, paths)
            yield from _row_documents(rows, text_column, where=str(paths[0]), domain=name)


def _is_empty(file: Path) -> bool:
    """Whether there are no rows: `datasets` fails on files like that."""
    if _kind(file) != "parquet":
        return file.stat().st_size == 0
    with _readable(str(file)):
        return bool(pq.read_metadata(file).num_rows == 0)


@contextlib.contextmanager
def _readable(where: str) -> Iterator[None]:
    """Tells what went wrong inside the readers of files in a sentence about the file."""
    try:
        yield
    except (datasets.exceptions.DatasetsError, pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{where} cannot be read: {cache.one_line(error)}.") from error


def _text_documents(files: Iterable[Path], chars: int) -> Iterator[str]:
    """Text files cut into documents: at blank lines past `chars`, anywhere past 16 times that."""
    for file in files:
        lines: list[str] = []
        size = 0
        for line in _lines(file):
            lines.append(line)
            size += len(line)
            is_blank = not line.strip()
            if size >= (1 if is_blank else 16) * chars:
                yield from _unless_blank("".join(lines))
                lines, size = [], 0
        yield from _unless_blank("".join(lines))


def _unless_blank(text: str) -> Iterator[str]:
    if text.strip():
        yield text


def _lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as handle:
            yield from handle
    except UnicodeDecodeError as error:
        raise ValueError(f"A text file must be UTF-8; {file} is not: {error}.") from None


def _open_files(kind: str, files: Sequence[Path]) -> datasets.IterableDataset:
    """Rows of local files as they are read; nothing is copied."""
    return datasets.load_dataset(
        kind, data_files={"train": [str(file) for file in files]}, split="train", streaming=True
    )


def _row_documents(
    rows: datasets.IterableDataset,
    text_column: str,
    *,
    where: str,
    domain: str | None = None,
    domain_column: str | None = None,
) -> Iterator[tuple[str, str]]:
    """(domain, text) of every row with text: `domain`, or what `domain_column` says."""
    columns = [text_column]
    if domain_column is not None:
        columns.append(domain_column.split(".")[0])
    with _readable(where):
        if not _check_columns(next(iter(rows), None), columns, where):
            return
        for batch in rows.select_columns(columns).iter(batch_size=_ROWS_PER_READ):
            texts = batch[text_column]
            of = _column(batch, domain_column) if domain_column else itertools.repeat(domain)
            for name, text in zip(of, texts, strict=False):
                _check_text(text, text_column, where)
                if name is not None and text is not None and text.strip():
                    yield str(name), text


def _check_columns(row: Mapping[str, Any] | None, columns: Sequence[str], where: str) -> bool:
    """Whether there is a row at all; it must have the columns, the first of them text."""
    if row is None:
        return False
    for column, option in zip(columns, ("text_column", "domain_column"), strict=False):
        if column not in row:
            raise ValueError(
                f'{where} has no column "{column}"; its columns are {", ".join(row)}. '
                f"Name the right one with {option} (--{option.replace('_', '-')})."
            )
    _check_text(row[columns[0]], columns[0], where)
    return True


def _check_text(text: Any, column: str, where: str) -> None:
    """A row of the text column holds text, or nothing."""
    if text is not None and not isinstance(text, str):
        raise ValueError(
            f'The column "{column}" of {where} must hold text; it holds {type(text).__name__}. '
            "Name the right one with text_column (--text-column)."
        )


def _column(batch: Mapping[str, Sequence[Any]], dotted: str) -> Iterator[Any]:
    """The values of a column; dots reach into structs."""
    root, *path = dotted.split(".")
    for value in batch[root]:
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        yield value


Splits = Mapping[str, datasets.IterableDataset]


def _column_parts(
    config: CorpusConfig, splits: Splits, fingerprint: str, targets: Sequence[str]
) -> dict[str, Part]:
    """One set of rows whose `domain_column` says which domain each belongs to."""
    train, held_out = _two_splits(splits, config.data)
    read = functools.partial(
        _row_documents,
        text_column=config.text_column,
        where=config.data,
        domain_column=config.domain_column,
    )
    part = Part(
        train=functools.partial(read, train),
        validation=functools.partial(read, held_out) if held_out is not None else None,
        fingerprint=cache.digest([fingerprint, config.domain_column]),
    )
    if config.domains:
        return dict.fromkeys((*config.domains, *targets), part)
    return dict.fromkeys(_names_in_rows(config, part), part)


def _names_in_rows(config: CorpusConfig, part: Part) -> list[str]:
    """The domains that occur, remembered in the cache: finding them reads every row."""
    key = cache.digest([part.fingerprint, config.text_column])
    file = cache.directory(config) / "names" / f"{key}.json"
    if file.exists():
        return list(json.loads(file.read_text(encoding="utf-8")))
    names = {name for name, _ in progress.over(part.train(), "finding domains", "document")}
    with cache.scratch(file.parent) as scratch:
        (scratch / file.name).write_text(json.dumps(sorted(names)), encoding="utf-8")
        cache.keep(scratch / file.name, file)
    return sorted(names)


def _path_splits(path: Path) -> Splits:
    """A file, or a directory as `datasets` reads a Hub repository."""
    if path.is_file():
        if _kind(path) == "text":
            raise ValueError(
                "A text file has no columns, so no domain_column (--domain-column); this is "
                f"{path}."
            )
        return {"train": _open_files(_kind(path), [path])}
    return _load_splits(str(path), None)


def _hub_parts(config: CorpusConfig, targets: Sequence[str]) -> dict[str, Part]:
    """A Hub data set: its domain column's values or its configurations are the domains."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", config.data) or _suffix(Path(config.data)):
        raise ValueError(
            f"{config.data} does not exist. Give a directory with one folder or file per domain, "
            'a file, a Hub id (owner/name), or "installed".'
        )
    if config.domain_column is not None:
        splits = _load_splits(config.data, None)
        return _column_parts(config, splits, _hub_stamp(config.data, None), targets)
    names = (*config.domains, *targets) if config.domains else _hub_names(config.data)
    return {name: _hub_part(config, name) for name in dict.fromkeys(names)}


def _hub_part(config: CorpusConfig, name: str) -> Part:
    """One configuration of a Hub data set as a domain."""
    train, held_out = _two_splits(_load_splits(config.data, name), f"{config.data}, {name}")
    read = functools.partial(
        _row_documents,
        text_column=config.text_column,
        where=f"{config.data}, {name}",
        domain=name,
    )
    return Part(
        train=functools.partial(read, train),
        validation=functools.partial(read, held_out) if held_out is not None else None,
        fingerprint=_hub_stamp(config.data, name),
    )


def _from_hub(data: str, call: Callable[[], Any]) -> Any:
    """`call()`, its failure told in a sentence."""
    try:
        return call()
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{data} is neither a path here nor a data set that could be opened: "
            f"{cache.one_line(error)}."
        ) from error


def _hub_names(data: str) -> list[str]:
    return list(_from_hub(data, lambda: datasets.get_dataset_config_names(data)))


def _load_splits(data: str, name: str | None) -> Splits:
    splits: Splits = _from_hub(data, lambda: datasets.load_dataset(data, name, streaming=True))
    return splits


def _hub_stamp(data: str, name: str | None) -> str:
    """Changes with the data set's revision."""
    builder = _from_hub(data, lambda: datasets.load_dataset_builder(data, name))
    return cache.digest([data, builder.config.name, builder.hash])


def _two_splits(
    splits: Splits, where: str
) -> tuple[datasets.IterableDataset, datasets.IterableDataset | None]:
    """Training and held-out rows, by the names of the splits."""
    found = {_split_of(name) or name: rows for name, rows in splits.items()}
    if "train" not in found:
        raise ValueError(f"{where} needs a train split; it has {', '.join(splits)}.")
    return found["train"], found.get("validation", found.get("test"))


def _installed_directory(config: CorpusConfig) -> Path:
    """The text of this Python environment as a directory of domains, made where absent."""
    directory = cache.directory(config) / "installed" / local_corpus.fingerprint()
    if not directory.exists():
        with cache.scratch(directory.parent) as scratch:
            local_corpus.save(scratch / "text")
            cache.keep(scratch / "text", directory)
    return directory
