"""Where text lies: files, Hub data sets and this environment, read as (domain, text).

Everything above asks for documents and need not know their form. A part can be read again and
again, and has a fingerprint that changes when its text does, which makes keys for the cache.
"""

import contextlib
import functools
import itertools
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from doge_fast.pipeline import cache, corpus_files, file_rows, hub, local_corpus, named, progress
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.corpus_files import CorpusFile
from doge_fast.pipeline.failures import FileFailure, one_line, reading
from doge_fast.pipeline.file_rows import MEND, Absent, DocumentRow, kind_told, needed, picked, reach
from doge_fast.pipeline.wording import first_few

_log = logging.getLogger("doge_fast")

ROWS, WITHOUT_TEXT, WITHOUT_DOMAIN = "rows", "without text", "without a domain"
TEXTLESS = "without text: "
Counts = Counter[str]
"""How many rows were read, and how many of them are no documents; with a domain column also
{TEXTLESS + domain: its rows without text}."""

_NAMES = "names.json"
_SPLIT = re.compile(r"(train(?:ing)?|validation|valid|val|dev|test)(?![a-z])")

# Reads (domain, text) of one document after the other; called again to read again. The counts that
# it may be given are added to while rows are read.
Documents = Callable[..., Iterator[tuple[str, str]]]


@dataclass(frozen=True)
class Shard:
    """Rows that are read in their order."""

    where: str
    """For refusals: the file or data set."""
    read: Callable[[], Iterator[DocumentRow]]


@dataclass(frozen=True)
class Part:
    """Documents that are read together: one domain's or, with a domain column, all domains'."""

    train: Documents
    validation: Documents | None
    fingerprint: str
    held_out: str = ""
    """What is `validation`: the names of files, or of splits of a Hub data set."""
    is_held_by_name: bool = False
    """Whether it is held out because of the names of files, which may mean something else."""
    is_cut: bool = False
    """Whether documents are pieces of text files, which nobody but this package cuts so."""


def find_parts(config: CorpusConfig, targets: Sequence[str]) -> dict[str, Part]:
    """{domain: where it is read}, for all that `config.data` holds."""
    path = Path(config.data).expanduser()
    if config.data == "installed":
        key = local_corpus.fingerprint()
        path = cache.made(config, "installed", key, local_corpus.save) / local_corpus.FOLDER
    if not path.exists():
        parts = _hub_parts(config, targets)
    elif config.domain_column is not None and config.data != "installed":
        parts = _column_parts(config, _files_part(config, None, _files_of_rows(path)), targets)
    elif path.is_file():
        raise ValueError(
            f"{path} is one file: name the column that holds a row's domain with domain_column "
            "(--domain-column), or give a directory with one folder or file per domain."
        )
    else:
        chosen = {*config.domains, *targets} if config.domains else set()
        found = corpus_files.list_files(path, chosen)
        parts = {
            name: _files_part(config, name, files)
            for name, files in found.items()
            # Those without are not asked for: `list_files` refuses one that is.
            if any(file.split == "train" for file in files)
        }
    by_column = f"the column {config.domain_column} of " if config.domain_column else ""
    named.check_visible(parts, f"{by_column}{config.data}")
    return parts


def _files_of_rows(path: Path) -> Sequence[CorpusFile]:
    """The files of a path whose rows say their domain."""
    if path.is_dir():
        found = corpus_files.list_files(path, None)
        if not found:
            raise ValueError(f"{path} holds no file of rows, of {corpus_files.KINDS_TOLD}.")
        return found[""]
    kind = corpus_files.kind_of(path)
    if kind == "text":
        raise ValueError(
            f"A text file has no columns, so no domain_column (--domain-column); this is {path}."
        )
    return [CorpusFile(path, "", "train", kind)]


def _files_part(config: CorpusConfig, domain: str | None, files: Sequence[CorpusFile]) -> Part:
    """The files of one domain or, without `domain`, of those that the domain column names."""
    splits: dict[str, list[CorpusFile]] = {}
    for file in files:
        splits.setdefault(file.split, []).append(file)
    if "train" not in splits:
        told = first_few([str(file.path) for file in files])
        raise ValueError(f"Training needs files that no name holds out; there are only {told}.")
    chars, stamp = file_rows.TEXT_DOCUMENT_CHARS, corpus_files.stamp_of(files)
    if list(splits) == ["train"]:
        chars = file_rows.text_document_chars(files)
    shards = {
        split: [_file_shard(config, domain, file, chars) for file in own]
        for split, own in splits.items()
    }
    # Another cut makes other documents of the same files.
    facts = [stamp, chars, domain, config.domain_column]
    held = splits.get("validation", splits.get("test", []))
    return _part(
        config,
        domain,
        shards,
        cache.digest(facts),
        held_out=first_few([f"{file.path.parent.name}/{file.path.name}" for file in held]),
        is_held_by_name=bool(held),
        is_cut=any(file.kind == "text" for file in splits["train"]),
    )


def _file_shard(config: CorpusConfig, domain: str | None, file: CorpusFile, chars: int) -> Shard:
    if file.kind == "text":
        read = functools.partial(file_rows.text_documents, file, chars)
    else:
        column = None if domain else config.domain_column
        read = functools.partial(file_rows.rows_of, file, config.text_column, column)
    return Shard(str(file.path), read)


def _part(
    config: CorpusConfig,
    domain: str | None,
    shards: Mapping[str, Sequence[Shard]],
    fingerprint: str,
    **facts: Any,
) -> Part:
    """The shards of the two splits; a test split is held out where there is no other."""
    held_out = shards.get("validation", shards.get("test"))
    read = functools.partial(_documents, config, domain)
    validation = None if held_out is None else functools.partial(read, held_out)
    return Part(functools.partial(read, shards["train"]), validation, fingerprint, **facts)


def _documents(
    config: CorpusConfig,
    domain: str | None,
    shards: Sequence[Shard],
    counts: Counts | None = None,
) -> Iterator[tuple[str, str]]:
    """(domain, text) of every row with text; without `domain`, the domain column names it."""
    counts = Counter() if counts is None else counts
    # {kind of the values in the domain column: the first of it, and its row}.
    kinds: dict[type, tuple[Any, str]] = {}
    pairs = (_pairs(config, domain, shard, kinds) for shard in shards)
    for name, text in itertools.chain.from_iterable(pairs):
        counts[ROWS] += 1
        if text is None:
            counts[WITHOUT_TEXT] += 1
            if domain is None and name is not None:
                counts[TEXTLESS + name] += 1
        elif name is None:
            counts[WITHOUT_DOMAIN] += 1
        else:
            yield name, text


def _pairs(
    config: CorpusConfig, domain: str | None, shard: Shard, kinds: dict[type, tuple[Any, str]]
) -> Iterator[tuple[str | None, str | None]]:
    """(domain, text) of every row, None where it has none.

    Raises:
        ValueError: no row has a column, one holds something else, or names are of two kinds.
    """
    # {option: what is there instead of the column, of which no row has had a value so far}.
    unseen: dict[str, Absent | None] = {"text_column": None}
    if domain is None:
        unseen["domain_column"] = None
    row = None
    for row in shard.read():
        for option in tuple(unseen):
            value = row.text if option == "text_column" else row.domain
            if isinstance(value, Absent):
                unseen[option] = value
            else:
                del unseen[option]
        where = f"{shard.where}, row {row.number}"
        name = domain or _name_of(row.domain, where, config)
        if domain is None and name is not None and type(row.domain) not in kinds:
            kinds[type(row.domain)] = row.domain, where
            _refuse_two_kinds(kinds, config)
        yield name, _text_of(row.text, where, config)
    if row is None:
        corpus_files.tell_once(f"{shard.where} holds no row.")
    for option, absent in unseen.items():
        if absent is not None:
            raise ValueError(
                f'{shard.where} has no column "{getattr(config, option)}"; {absent.found}. '
                f"Name the right one with {option} (--{option.replace('_', '-')})."
            )


def _refuse_two_kinds(kinds: Mapping[type, tuple[Any, str]], config: CorpusConfig) -> None:
    """1, 1.0 and true would be three domains, and "1" the first of them."""
    if len(kinds) > 1:
        told = " and ".join(f"{value!r} in {where}" for value, where in kinds.values())
        raise ValueError(
            f'The column "{config.domain_column}" must hold names of one kind; it has {told}. '
            "Write all as text, or name another column with domain_column (--domain-column)."
        )


def _name_of(value: Any, where: str, config: CorpusConfig) -> str | None:
    # As csv writes what is missing.
    if _is_nothing(value) or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, Mapping | list | bytes):
        what = "another column"
        if isinstance(value, Mapping):
            what = f"what is inside, as {config.domain_column}.{next(iter(value), '')},"
        raise ValueError(
            f'The column "{config.domain_column}" must hold a name; that of {where} holds '
            f"{kind_told(value)}. Name {what} with domain_column (--domain-column)."
        )
    return str(value)


def _is_nothing(value: Any) -> bool:
    """NaN is what pandas has in the place of a text that is missing."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return is_nan or value is None or isinstance(value, Absent)


def _text_of(value: Any, where: str, config: CorpusConfig) -> str | None:
    if _is_nothing(value):
        return None
    if not isinstance(value, str):
        raise ValueError(
            f'The column "{config.text_column}" must hold text; that of {where} holds '
            f"{kind_told(value)}. Name the right one with text_column (--text-column)."
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise FileFailure(f"{where} cannot be read: {one_line(error)}. {MEND}") from None
    # A mark of the encoding of the file that it came from.
    value = value.removeprefix("\ufeff")
    return value if value.strip() else None


def _column_parts(config: CorpusConfig, part: Part, targets: Sequence[str]) -> dict[str, Part]:
    """One set of rows whose `domain_column` says which domain each belongs to."""
    names = (*config.domains, *targets) if config.domains else _names_in_rows(config, part)
    return dict.fromkeys(names, part)


def _names_in_rows(config: CorpusConfig, part: Part) -> list[str]:
    """The domains that occur, remembered in the cache: finding them reads every row."""

    def find(folder: Path) -> None:
        counts: Counts = Counter()
        names = {name for name, _ in progress.over(part.train(counts), "finding domains")}
        if not names:
            raise ValueError(
                f'The column "{config.domain_column}" of {config.data} names no domain: of '
                f"{counts[ROWS]} rows {counts[WITHOUT_TEXT]} have no text, and "
                f"{counts[WITHOUT_DOMAIN]} others have nothing in it. Name the right one with "
                "domain_column (--domain-column)."
            )
        folder.mkdir()
        (folder / _NAMES).write_text(json.dumps(sorted(names)), encoding="utf-8")

    key = cache.digest([part.fingerprint, config.text_column])
    file = cache.made(config, "names", key, find) / _NAMES
    return list(json.loads(file.read_text(encoding="utf-8")))


def _hub_parts(config: CorpusConfig, targets: Sequence[str]) -> dict[str, Part]:
    """A Hub data set: its domain column's values or its configurations are the domains."""
    data = config.data
    _log.info("Asking the Hub for the files of %s.", data)
    if config.domain_column is not None:
        return _column_parts(config, _hub_part(config, None), targets)
    names: Sequence[str] = (*config.domains, *targets)
    if not config.domains:
        with _from_hub(data):
            names = datasets.get_dataset_config_names(data)
    return {name: _hub_part(config, name) for name in dict.fromkeys(names)}


def _hub_part(config: CorpusConfig, name: str | None) -> Part:
    """A data set or, with `name`, its configuration; the stamp changes with its revision."""
    data = config.data
    where = data if name is None else f"{data}, {name}"
    asked = None if name else config.domain_column
    with _from_hub(data):
        builder = datasets.load_dataset_builder(data, name)
        found = builder.as_streaming_dataset()
    shards: dict[str, list[Shard]] = {}
    # A split may come in several, as validation_matched and validation_mismatched.
    splits = {split: _hub_split(split) for split in found}
    for split, kind in splits.items():
        read = functools.partial(_hub_rows, config, where, found[split], asked)
        shards.setdefault(kind, []).append(Shard(where, read))
    if "train" not in shards:
        raise ValueError(f"{where} needs a train split; it has {', '.join(found)}.")
    held = "validation" if "validation" in shards else "test"
    if others := [split for split, kind in splits.items() if kind not in ("train", held)]:
        _log.info("%s: not read are the splits %s.", where, ", ".join(others))
    return _part(
        config,
        name,
        shards,
        cache.digest([data, builder.config.name, builder.hash, config.domain_column]),
        held_out=", ".join(split for split, kind in splits.items() if kind == held),
    )


def _hub_split(name: str) -> str:
    """train, validation or test where `name` begins with it or a short form; else itself."""
    found = _SPLIT.match(name.lower())
    return corpus_files.split_of(found[0]) or name if found else name


def _hub_rows(
    config: CorpusConfig,
    where: str,
    rows: datasets.IterableDataset,
    domain_column: str | None,
) -> Iterator[DocumentRow]:
    with reading(where):
        names = rows.column_names or list(next(iter(rows), {}))
        others = dict.fromkeys(names)
        kept = needed(names, filter(None, (config.text_column, domain_column)))
        found = rows.select_columns(kept) if kept else rows
        label = reach(rows.features or {}, domain_column or "")
        yield from picked(
            enumerate((others | row for row in found), start=1),
            config.text_column,
            domain_column,
            label.names if isinstance(label, datasets.ClassLabel) else None,
        )


@contextlib.contextmanager
def _from_hub(data: str) -> Iterator[None]:
    """What goes wrong while a data set is opened ends a sentence of ours."""
    try:
        with hub.asked_once():
            yield
    except Exception as error:
        raise ValueError(
            f"{data} is neither a path here nor a data set that could be opened: {one_line(error)}."
        ) from error
