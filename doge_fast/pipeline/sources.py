"""Sources of text (files, Hub data sets and this environment), read as (domain, text).

Other modules see documents and not their format. A part can be read repeatedly. Its fingerprint
changes when its text does, and enters the cache keys.
"""

import contextlib
import functools
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np

from doge_fast.pipeline import cache, corpus_files, hub, local_corpus, named, progress
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.corpus_files import (
    ABSENT,
    CorpusFile,
    Row,
    named_rows,
    roots_of,
    value_of,
)
from doge_fast.pipeline.failures import UserError, one_line, reading
from doge_fast.pipeline.wording import first_few

_log = logging.getLogger("doge_fast")

ROWS, WITHOUT_TEXT, WITHOUT_DOMAIN = "rows", "without text", "without a domain"
Counts = Counter[str]
"""Number of rows that were read, and of those without text or without a domain."""


class Shard(NamedTuple):
    """Rows of a file or of a Hub data set's split, read in order."""

    where: str
    """The file or data set, for error messages."""
    rows: Callable[[], Iterable[Row]]


@dataclass(frozen=True, eq=False)
class Part:
    """Documents that are read together: one domain's or, with a domain column, all domains'."""

    domain: str | None
    """None: the domain column names it."""
    text_column: str
    domain_column: str | None
    shards: Mapping[str, Sequence[Shard]]
    """By split: "train", "validation", "test"; test is held out if there is no validation."""
    fingerprint: str
    """Changes when the text does."""
    held_out: str = ""
    """The files, or splits of a Hub data set, that are held out."""
    is_cut: bool = False
    """Whether documents are pieces of text files, cut by this package's own rule."""
    oddities: tuple[str, ...] = ()
    """Warnings about its files."""

    @property
    def is_divided(self) -> bool:
        """Whether the data has a held-out split of its own."""
        return len(self.shards) > 1

    def documents(
        self, *, held_out: bool = False, counts: Counts | None = None
    ) -> Iterator[tuple[str, str]]:
        """(domain, text) of every row with both; `counts` grows while rows are read."""
        counts = Counter() if counts is None else counts
        held = self.shards.get("validation", self.shards.get("test", ()))
        for shard in held if held_out else self.shards["train"]:
            for name, text in self._pairs(shard):
                counts[ROWS] += 1
                if text is None:
                    counts[WITHOUT_TEXT] += 1
                elif name is None:
                    counts[WITHOUT_DOMAIN] += 1
                else:
                    yield name, text

    def _pairs(self, shard: Shard) -> Iterator[tuple[str | None, str | None]]:
        """(domain, text) of every row, None where it has none.

        Raises:
            UserError: no row has a needed column, or a value is no text or no name.
        """
        # {option: column} for columns that no row has had so far.
        unseen = {"text_column": self.text_column}
        if self.domain is None:
            unseen["domain_column"] = str(self.domain_column)
        row: Row | None = None
        for number, row in enumerate(shard.rows(), start=1):
            for option, column in tuple(unseen.items()):
                if value_of(row, column) is not ABSENT:
                    del unseen[option]
            where = f"{shard.where}, row {number}"
            name = self.domain or _name_of(row, str(self.domain_column), where)
            yield name, _text_of(row, self.text_column, where)
        if row is None:
            progress.tell_once(f"{shard.where} holds no row.")
            return
        for option, column in unseen.items():
            raise UserError(
                f'{shard.where} has no column "{column}"; its columns are {_columns_of(row)}. Name '
                f"the right one with {option} (--{option.replace('_', '-')})."
            )


def find_parts(config: CorpusConfig, targets: Sequence[str]) -> dict[str, Part]:
    """{domain: the part it is read from}, for the domains of `config.data`."""
    path = Path(config.data)
    chosen = {*config.domains, *targets} if config.domains else set()
    if config.data == "installed":
        parts = _installed_parts(config)
    elif not path.exists():
        parts = _hub_parts(config, chosen)
    elif config.domain_column is not None:
        parts = _column_parts(config, _files_part(config, None, _files_of_rows(path)), chosen)
    elif path.is_file():
        raise UserError(
            f"{path} is one file: name the column that holds a row's domain (--domain-column), or "
            "give a directory with one folder or file per domain."
        )
    else:
        parts = {
            name: _files_part(config, name, files)
            for name, files in corpus_files.list_files(path, chosen).items()
            # A domain that was not chosen may lack training files.
            if name in chosen or not chosen or any(file.split == "train" for file in files)
        }
    by_column = f"the column {config.domain_column} of " if config.domain_column else ""
    named.check_visible(parts, f"{by_column}{config.data}")
    return parts


def _installed_parts(config: CorpusConfig) -> dict[str, Part]:
    """The domains of this environment; the cache keeps their text."""
    key, text = local_corpus.fingerprint(), datasets.Value("string")
    collected = cache.cached(config, key, local_corpus.rows, text=text, domain=text)
    domains = np.array(collected[:]["domain"])
    parts = {}
    for name in map(str, np.unique(domains)):
        own = collected.select(np.flatnonzero(domains == name))
        shards = {"train": [Shard("installed", functools.partial(iter, own))]}
        parts[name] = Part(name, "text", None, shards, cache.digest([key, name]))
    return parts


def _files_of_rows(path: Path) -> Sequence[CorpusFile]:
    """The files of a path whose rows have a domain column."""
    if path.is_dir():
        found = corpus_files.list_files(path, None)
        if not found:
            raise UserError(f"{path} holds no file of rows, of {corpus_files.KINDS_TOLD}.")
        return found[""]
    kind = corpus_files.kind_of(path)
    if kind is None or kind == "text":
        raise UserError(
            f"A file with a column of domains (--domain-column) ends in {corpus_files.KINDS_TOLD} "
            f"and is no .txt; this is {path}."
        )
    return [CorpusFile(path, "", "train", kind)]


def _files_part(config: CorpusConfig, domain: str | None, files: Sequence[CorpusFile]) -> Part:
    """The part of one domain's files or, without `domain`, of files with a domain column."""
    splits: dict[str, list[CorpusFile]] = {}
    for file in files:
        splits.setdefault(file.split, []).append(file)
    if "train" not in splits:
        paths = first_few([str(file.path) for file in files])
        raise UserError(f"Training needs files that no name holds out; there are only {paths}.")
    chars, stamp = corpus_files.TEXT_DOCUMENT_CHARS, corpus_files.stamp_of(files)
    if list(splits) == ["train"]:
        chars = corpus_files.text_document_chars(files)
    columns = _columns(config, domain)
    shards = {
        split: [
            Shard(str(file.path), functools.partial(corpus_files.rows_of, file, columns, chars))
            for file in own
        ]
        for split, own in splits.items()
    }
    held = splits.get("validation", splits.get("test", []))
    return Part(
        domain,
        config.text_column,
        config.domain_column,
        shards,
        # The same files give other documents if cut elsewhere.
        cache.digest([stamp, chars, domain, config.domain_column]),
        held_out=first_few([f"{file.path.parent.name}/{file.path.name}" for file in held]),
        is_cut=any(file.kind == "text" for file in splits["train"]),
        oddities=tuple(corpus_files.oddities(Path(config.data), files)),
    )


def _columns(config: CorpusConfig, domain: str | None) -> list[str]:
    """The columns that are read."""
    column = config.domain_column if domain is None else None
    return [config.text_column, *([] if column is None else [column])]


def _columns_of(row: Row) -> str:
    """The columns of a row, and the fields of its structs, as text."""
    names = []
    for name, value in row.items():
        inside = value if isinstance(value, Mapping) else {}
        names += [f"{name}.{key}" for key in inside] or [str(name)]
    return ", ".join(names) or "none"


def _name_of(row: Row, column: str, where: str) -> str | None:
    value = value_of(row, column)
    # CSV has an empty string for a missing value.
    if _is_nothing(value) or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, Mapping | list | bytes):
        raise UserError(
            f'The column "{column}" must hold a name; {where} holds {value!r:.60}. Name another '
            "with domain_column (--domain-column); dots reach into structs."
        )
    return str(value)


def _text_of(row: Row, column: str, where: str) -> str | None:
    value = value_of(row, column)
    if _is_nothing(value):
        return None
    if not isinstance(value, str):
        raise UserError(
            f'The column "{column}" must hold text; {where} holds {value!r:.60}. Name the right '
            "one with text_column (--text-column)."
        )
    if not value.isascii():
        with reading(where):
            # JSON can escape a lone surrogate, which UTF-8 cannot encode.
            value.encode()
    # The byte order mark of the file that it came from.
    value = value.removeprefix("\ufeff")
    return value if value.strip() else None


def _is_nothing(value: Any) -> bool:
    """Whether a value is missing; pandas has NaN for a missing text."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return is_nan or value is None or value is ABSENT


def _column_parts(config: CorpusConfig, part: Part, chosen: Collection[str]) -> dict[str, Part]:
    """{domain: the one part}, which has the rows of all domains."""
    return dict.fromkeys(sorted(chosen) or _names_in_rows(config, part), part)


def _names_in_rows(config: CorpusConfig, part: Part) -> list[str]:
    """The domains in the rows; kept in the cache, since finding them reads every row."""

    def find() -> Iterator[Mapping[str, str]]:
        counts: Counts = Counter()
        documents = progress.over(part.documents(counts=counts), "finding domains")
        names = {name for name, _ in documents}
        if not names:
            raise UserError(
                f'The column "{config.domain_column}" of {config.data} names no domain: of '
                f"{counts[ROWS]} rows {counts[WITHOUT_TEXT]} have no text, and "
                f"{counts[WITHOUT_DOMAIN]} others have nothing in it. Name the right one with "
                "domain_column (--domain-column)."
            )
        yield from ({"domain": name} for name in sorted(names))

    key = cache.digest(["names", part.fingerprint, config.text_column])
    return list(cache.cached(config, key, find, domain=datasets.Value("string"))[:]["domain"])


def _hub_parts(config: CorpusConfig, chosen: Collection[str]) -> dict[str, Part]:
    """Parts of a Hub data set; its domains are its configurations or a column's values."""
    data = config.data
    _log.info("Asking the Hub for the files of %s.", data)
    if config.domain_column is not None:
        return _column_parts(config, _hub_part(config, None), chosen)
    names = sorted(chosen)
    if not names:
        with _from_hub(data):
            names = datasets.get_dataset_config_names(data)
    return {name: _hub_part(config, name) for name in names}


def _hub_part(config: CorpusConfig, name: str | None) -> Part:
    """The part of a data set or its configuration `name`; its fingerprint follows the revision."""
    data = config.data
    where = data if name is None else f"{data}, {name}"
    with _from_hub(data):
        builder = datasets.load_dataset_builder(data, name)
        found = builder.as_streaming_dataset()
    shards: dict[str, list[Shard]] = {}
    # A split may have several names, as validation_matched and validation_mismatched.
    splits = {split: _hub_split(split) for split in found}
    for split, kind in splits.items():
        read = functools.partial(_hub_rows, where, found[split], _columns(config, name))
        shards.setdefault(kind, []).append(Shard(where, read))
    if "train" not in shards:
        raise UserError(f"{where} needs a train split; it has {', '.join(found)}.")
    held = "validation" if "validation" in shards else "test"
    if others := [split for split, kind in splits.items() if kind not in ("train", held)]:
        _log.info("%s: not read are the splits %s.", where, ", ".join(others))
    return Part(
        name,
        config.text_column,
        config.domain_column,
        {kind: own for kind, own in shards.items() if kind in ("train", held)},
        cache.digest([data, builder.config.name, builder.hash, config.domain_column]),
        held_out=", ".join(split for split, kind in splits.items() if kind == held),
    )


def _hub_split(name: str) -> str:
    """train, validation or test if `name` begins with it or a short form, else `name`."""
    return corpus_files.split_of(re.split("[^a-z]", name.lower())[0]) or name


def _hub_rows(where: str, rows: datasets.IterableDataset, columns: Sequence[str]) -> Iterator[Row]:
    with reading(where):
        names = rows.column_names or list(next(iter(rows), {}))
        kept = roots_of(names, columns)
        found = rows.select_columns(kept) if kept else rows
        yield from named_rows(found, names, rows.features or {}, columns)


@contextlib.contextmanager
def _from_hub(data: str) -> Iterator[None]:
    """Turn any error while a data set is opened into a UserError."""
    try:
        with hub.asked_once():
            yield
    except Exception as error:
        raise UserError(
            f"{data} is neither a path here nor a data set that could be opened: {one_line(error)}."
        ) from error
