"""Where text lies: files, Hub data sets and this environment, read as (domain, text).

Everything above asks for documents and need not know their form. A part can be read again and
again, and has a fingerprint that changes when its text does, which makes keys for the cache.
"""

import collections
import contextlib
import functools
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from doge_fast.mixture.permutation import shuffled
from doge_fast.pipeline import cache, corpus_files, local_corpus, named, progress
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.corpus_files import MEND, SUFFIXES, is_empty, kind_of, suffix_of
from doge_fast.pipeline.failures import FileFailure, one_line, reading

_log = logging.getLogger("doge_fast")

# (domain, text) of one document after the other; called again to read again.
Documents = Callable[[], Iterator[tuple[str, str]]]
Splits = Mapping[str, datasets.IterableDataset]

_SPLIT = re.compile(
    r"(?:(?P<train>train(?:ing)?)|(?P<validation>validation|valid|val|dev)|(?P<test>test))(?![a-z])"
)

_ROWS_PER_READ = 128
# Of a streamed data set so many files are read in turn: one file is often all of a kind.
_FILES_IN_TURN = 10


@dataclass(frozen=True)
class Part:
    """Documents that are read together: one domain's or, with a domain column, all domains'."""

    train: Documents
    validation: Documents | None
    fingerprint: str


def find_parts(config: CorpusConfig, targets: Sequence[str]) -> dict[str, Part]:
    """{domain: where it is read}, for all that `config.data` holds."""
    path = Path(config.data).expanduser()
    if config.streaming:
        _check_streaming(config)
    if config.data == "installed":
        key = local_corpus.fingerprint()
        parts = _directory_parts(cache.made(config, "installed", key, local_corpus.save), config)
    elif not path.exists():
        parts = _hub_parts(config, targets)
    elif config.domain_column is not None:
        splits, files = _path_splits(path), corpus_files.data_files(path)
        parts = _column_parts(config, splits, corpus_files.stamp_of(files), targets)
    elif path.is_file():
        raise ValueError(
            f"{path} is one file: name the column that holds a row's domain with domain_column "
            "(--domain-column), or give a directory with one folder or file per domain."
        )
    else:
        parts = _directory_parts(path, config)
    by_column = f"the column {config.domain_column} of " if config.domain_column else ""
    named.check_visible(parts, f"{by_column}{config.data}")
    return parts


def _check_streaming(config: CorpusConfig) -> None:
    """A stream ends where its domains are full, so they must be known, and what full is."""
    has_rows = config.domain_column is not None or not Path(config.data).expanduser().exists()
    if config.data == "installed" or not has_rows:
        raise ValueError(
            "streaming (--streaming) reads a Hub data set, or files with a domain_column "
            f"(--domain-column); got {config.data}. Leave it out: packing a directory of domains "
            "stops at max_tokens_per_domain (--max-tokens-per-domain) without it."
        )
    if config.max_tokens_per_domain is None:
        raise ValueError(
            "streaming (--streaming) reads until every domain is full; say with "
            "max_tokens_per_domain (--max-tokens-per-domain) at how many tokens it is."
        )
    if config.domain_column is not None and not config.domains:
        raise ValueError(
            f"streaming (--streaming) would read all of {config.data} to find what domains its "
            f"{config.domain_column} names: name those to train on with domains (--domains)."
        )


def _directory_parts(directory: Path, config: CorpusConfig) -> dict[str, Part]:
    """A folder or file per domain."""
    files_of: dict[str, list[Path]] = {}
    unread: list[str] = []
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith("."):
            continue
        files = corpus_files.data_files(entry)
        if not files and (entry.is_file() or config.domains):
            unread.append(entry.name)
            continue
        if not files:
            raise ValueError(
                f"{entry} holds no file of {', '.join(SUFFIXES)}. Remove it, or name the domains "
                "to train on with domains (--domains)."
            )
        name = entry.name if entry.is_dir() else entry.name.removesuffix(suffix_of(entry) or "")
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
            f"{directory} must hold a folder or file per domain, of {', '.join(SUFFIXES)}; "
            f"it holds {', '.join(sorted(e.name for e in directory.iterdir())) or 'nothing'}."
        )
    if unread and not config.domains:
        _log.info(
            "%s: not read are %s, which do not end in %s",
            *(directory, ", ".join(unread[:5]) + ", ..." * (len(unread) > 5), ", ".join(SUFFIXES)),
        )
    return {name: _files_part(name, directory, files, config) for name, files in files_of.items()}


def _files_part(name: str, directory: Path, files: Sequence[Path], config: CorpusConfig) -> Part:
    """One domain's files, sorted into the two splits by what their names begin with."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        # The first folder or file name that begins with a split's name decides.
        told = filter(None, map(_split_of, file.relative_to(directory).parts[1:]))
        splits.setdefault(next(told, "train"), []).append(file)
    if "train" not in splits:
        raise ValueError(
            f"The domain {name} needs training files; {directory / name} holds only "
            f"{', '.join(file.name for file in files)}."
        )
    chars, stamp = corpus_files.TEXT_DOCUMENT_CHARS, corpus_files.stamp_of(files)
    if list(splits) == ["train"] and (own := corpus_files.text_document_chars(files)) < chars:
        # Another cut makes other documents of the same files.
        chars, stamp = own, cache.digest([stamp, own])
    return _part(splits, functools.partial(_file_documents, config, name, chars), stamp)


def _part(splits: Mapping[str, Any], read: Callable[..., Any], fingerprint: str) -> Part:
    """What `read` makes of the two splits; a test split is held out where there is no other."""
    held_out = splits.get("validation", splits.get("test"))
    validation = None if held_out is None else functools.partial(read, held_out)
    return Part(functools.partial(read, splits["train"]), validation, fingerprint)


def _split_of(name: str) -> str | None:
    """train, validation or test, where `name` begins with it or a usual short form."""
    found = _SPLIT.match(name.lower())
    return found.lastgroup if found else None


def _file_documents(
    config: CorpusConfig, name: str, text_chars: int, files: Sequence[Path]
) -> Iterator[tuple[str, str]]:
    """The documents of one domain's files, kind after kind."""
    filled = [file for file in files if not is_empty(file)]
    for kind, group in itertools.groupby(sorted(filled, key=kind_of), key=kind_of):
        paths = list(group)
        if kind == "text":
            yield from ((name, text) for text in corpus_files.text_documents(paths, text_chars))
        else:
            where = str(paths[0] if len(paths) == 1 else paths[0].parent)
            yield from _row_documents(config, where, name, _open_files(kind, paths, where))


def _open_files(kind: str, files: Sequence[Path], where: str) -> datasets.IterableDataset:
    """Rows of local files as they are read; nothing is copied."""
    data_files = {"train": [str(file) for file in files]}
    with _without_bars(), reading(where, MEND):
        return datasets.load_dataset(kind, data_files=data_files, split="train", streaming=True)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """`datasets` shows no bars: what takes a while is announced, or has one of ours."""
    had_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if had_bars:
            datasets.enable_progress_bars()


def _row_documents(
    config: CorpusConfig, where: str, domain: str | None, rows: datasets.IterableDataset
) -> Iterator[tuple[str, str]]:
    """(domain, text) of every row with text; without `domain`, the domain column names it."""
    columns = {"text_column": config.text_column}
    if domain is None:
        columns["domain_column"] = str(config.domain_column).split(".")[0]
    first = next(corpus_files.guarded(rows, where), None)
    if first is None:
        return
    for option, column in columns.items():
        if column not in first:
            raise ValueError(
                f'{where} has no column "{column}"; its columns are {", ".join(first)}. '
                f"Name the right one with {option} (--{option.replace('_', '-')})."
            )
    rows = rows.select_columns(list(columns.values()))
    for batch in corpus_files.guarded(_batches(rows, config), where):
        names = itertools.repeat(domain) if domain else _domains(batch, config)
        for name, text in zip(names, batch[config.text_column], strict=False):
            if not isinstance(text, str | None):
                raise ValueError(
                    f'The column "{config.text_column}" of {where} must hold text; it holds '
                    f"{type(text).__name__}. Name the right one with text_column "
                    "(--text-column)."
                )
            if name is not None and text and text.strip():
                yield str(name), text


def _batches(
    rows: datasets.IterableDataset, config: CorpusConfig
) -> Iterator[Mapping[str, Sequence[Any]]]:
    """All rows in their order; of a stream, files in an order drawn from its seed, some in turn."""
    if not config.streaming:
        yield from rows.iter(batch_size=_ROWS_PER_READ)
        return
    count = rows.num_shards
    order = shuffled(config.stream_seed, ("files",), np.arange(count), count)
    unopened = (rows.shard(count, int(index)).iter(_ROWS_PER_READ) for index in order)
    in_turn = collections.deque(itertools.islice(unopened, _FILES_IN_TURN))
    while in_turn:
        file = in_turn.popleft()
        batch = next(file, None)
        in_turn.extend(itertools.islice(unopened, 1) if batch is None else [file])
        if batch is not None:
            yield batch


def _domains(batch: Mapping[str, Sequence[Any]], config: CorpusConfig) -> Iterator[Any]:
    """What the domain column says of each row; dots reach into structs."""
    root, *path = str(config.domain_column).split(".")
    for value in batch[root]:
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        yield value


def _column_parts(
    config: CorpusConfig, splits: Splits, fingerprint: str, targets: Sequence[str]
) -> dict[str, Part]:
    """One set of rows whose `domain_column` says which domain each belongs to."""
    fingerprint = cache.digest([fingerprint, config.domain_column])
    part = _rows_part(config, splits, fingerprint, config.data)
    names = (*config.domains, *targets) if config.domains else _names_in_rows(config, part)
    return dict.fromkeys(names, part)


def _names_in_rows(config: CorpusConfig, part: Part) -> list[str]:
    """The domains that occur, remembered in the cache: finding them reads every row."""

    def find(file: Path) -> None:
        names = {name for name, _ in progress.over(part.train(), "finding domains")}
        file.write_text(json.dumps(sorted(names)), encoding="utf-8")

    key = cache.digest([part.fingerprint, config.text_column])
    file = cache.made(config, "names", f"{key}.json", find)
    return list(json.loads(file.read_text(encoding="utf-8")))


def _rows_part(
    config: CorpusConfig, splits: Splits, fingerprint: str, where: str, domain: str | None = None
) -> Part:
    """Rows of one domain or, without `domain`, of those that the domain column names."""
    found = {_split_of(name) or name: rows for name, rows in splits.items()}
    if "train" not in found:
        raise ValueError(f"{where} needs a train split; it has {', '.join(splits)}.")
    if config.streaming:
        fingerprint = cache.digest([fingerprint, "streaming", config.stream_seed])
    return _part(found, functools.partial(_row_documents, config, where, domain), fingerprint)


def _path_splits(path: Path) -> Splits:
    """A file, or a directory as `datasets` reads a Hub repository."""
    if path.is_dir():
        with _from_hub(str(path)):
            splits: Splits = datasets.load_dataset(str(path), streaming=True)
            return splits
    if kind_of(path) == "text":
        raise ValueError(
            f"A text file has no columns, so no domain_column (--domain-column); this is {path}."
        )
    if is_empty(path):
        raise ValueError(f"{path} is empty. Name a file with text.")
    return {"train": _open_files(kind_of(path), [path], str(path))}


def _hub_parts(config: CorpusConfig, targets: Sequence[str]) -> dict[str, Part]:
    """A Hub data set: its domain column's values or its configurations are the domains."""
    data = config.data
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", data) or suffix_of(Path(data)):
        raise ValueError(
            f"{data} does not exist. Give a directory with one folder or file per domain, "
            'a file, a Hub id (owner/name), or "installed".'
        )
    _log.info("Asking the Hub for the files of %s.", data)
    if config.domain_column is not None:
        return _column_parts(config, *_open_hub(data, None), targets)
    names: Sequence[str] = (*config.domains, *targets)
    if not config.domains:
        with _from_hub(data):
            names = datasets.get_dataset_config_names(data)
    return {
        name: _rows_part(config, *_open_hub(data, name), f"{data}, {name}", name)
        for name in dict.fromkeys(names)
    }


def _open_hub(data: str, name: str | None) -> tuple[Splits, str]:
    """The splits of a data set or of its configuration; a stamp that changes with its revision."""
    with _from_hub(data):
        builder = datasets.load_dataset_builder(data, name)
        stamp = cache.digest([data, builder.config.name, builder.hash])
        return builder.as_streaming_dataset(), stamp


@contextlib.contextmanager
def _from_hub(data: str) -> Iterator[None]:
    """What goes wrong while a data set is opened ends a sentence of ours."""
    try:
        with _without_bars():
            yield
    except Exception as error:
        kind = FileFailure if Path(data).exists() else ValueError
        raise kind(
            f"{data} is neither a path here nor a data set that could be opened: {one_line(error)}."
        ) from error
