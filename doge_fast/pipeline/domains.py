"""Corpora: where text lies, how it becomes blocks of tokens, and which blocks a step sees.

Text is read once, tokenised, joined by the end-of-text token and cut into blocks of fixed
length, which stay in the cache as Arrow files that training maps into memory. The key of a
cache entry is everything its blocks depend on, so another tokenizer, block size or a changed
file packs again, and nothing else does.

Which blocks step t sees is a pure function of (seed, t), computed from counters: positions
pass through a keyed permutation with random access. So resuming at any step, or asking what
step 4711 saw, replays nothing.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import torch
from datasets.utils import tqdm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from doge_fast.pipeline import local_corpus
from doge_fast.pipeline.config import CorpusConfig

END_OF_TEXT = "<|endoftext|>"
UNIVERSAL = "universal"
MIX = "mix"

Ints = npt.NDArray[np.int64]
Batch = dict[str, Tensor]
# (domain, text) of one document after the other; called again to read again.
Documents = Callable[[], Iterator[tuple[str, str]]]

# Part of every cache key: changes when the same input would be packed to other blocks.
_FORMAT = 1
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
_TOKENIZER_CHARS_PER_DOMAIN = 1_000_000
# Documents whose hashes decide where the border of the held-out share lies.
_HOLDOUT_SAMPLE = 100_000
_BATCH_DOCUMENTS = 256
_BATCH_CHARS = 1_000_000
_ROWS_PER_READ = 128
# "mix" holds out this share of the training blocks, in runs, for neighbours share a document.
_MIX_SHARE = 0.05
_MIX_RUN = 8
_MIX_MIN_BLOCKS = 4


@dataclass(frozen=True)
class Corpus:
    """Domains of tokens, packed into blocks.

    Every `datasets.Dataset` here has one column, `input_ids`, of `block_size` int64 tokens in
    numpy format.
    """

    names: tuple[str, ...]
    """Training domains, in order."""
    targets: tuple[str, ...]
    """Domains that are measured and never trained on, in order; "mix" is not among them."""
    train: Mapping[str, datasets.Dataset]
    """Training blocks, of names and targets alike."""
    validation: Mapping[str, datasets.Dataset]
    """Held-out blocks, of names and targets alike."""
    train_tokens: Mapping[str, int]
    """Tokens in the training blocks."""
    documents: Mapping[str, int]
    """Training documents."""
    tokenizer: PreTrainedTokenizerFast
    tokenizer_sha256: str
    block_size: int
    vocab_size: int
    mix: Mapping[str, datasets.Dataset] | None = None
    """Where the target "mix" was asked for: blocks of every training domain that are not in
    `train`, from which mix batches are drawn."""

    def describe(self) -> dict[str, Any]:
        """The corpus as config.json records it."""
        return {
            "domains": {name: self._describe(name) for name in self.names},
            "targets": {name: self._describe(name) for name in self.targets},
            "tokenizer_sha256": self.tokenizer_sha256,
            "block_size": self.block_size,
            "vocab_size": self.vocab_size,
        }

    def _describe(self, name: str) -> dict[str, int]:
        return {
            "train_tokens": self.train_tokens[name],
            "train_blocks": len(self.train[name]),
            "validation_blocks": len(self.validation[name]),
            "documents": self.documents[name],
        }


def load_corpus(config: CorpusConfig, *, targets: Sequence[str] = ()) -> Corpus:
    """Read, tokenise and pack the corpus, or find it packed in the cache.

    `config.data` is one of

    - a directory with a folder per domain, `DIR/<domain>/train*.parquet` and
      `validation*.parquet`, or a file per domain, `DIR/<domain>.jsonl`; parquet, jsonl
      (also .gz, .zst) and txt. Files that name no split are training files;
    - a file, a directory or a Hub id, with `config.domain_column`;
    - a Hub id without it: the data set's configurations are the domains;
    - "installed": text found in this Python environment.

    A domain without a validation split holds out `config.validation_fraction` of its documents
    by a hash of the text: stable, and equal documents fall on one side.

    Args:
        config: where the text is and how it becomes blocks.
        targets: domains to measure. Those not in `config.domains` are held out of training.
            "mix" holds out a slice of every training domain; "universal" asks for nothing.

    Raises:
        ValueError: a path does not exist; the text column is missing; a domain is unknown,
            named twice, empty, or smaller than one block; a target is not in the data; the
            tokenizer does not open; a number in `config` is out of range. Nothing is written
            but finished cache entries.
    """
    _check_config(config)
    held_out = [name for name in dict.fromkeys(targets) if name not in (UNIVERSAL, MIX)]
    parts = _find_parts(config, held_out)
    names = _choose_names(config, held_out, sorted(parts))
    held_out = [name for name in held_out if name not in names]
    chosen = {name: parts[name] for name in (*names, *held_out)}
    _check_parts(chosen)
    tokenizer = _open_tokenizer(config, chosen)
    packed = _pack(config, chosen, tokenizer)
    return _assemble(config, packed, tokenizer, names, held_out, reserve_mix=MIX in targets)


def _assemble(
    config: CorpusConfig,
    packed: Mapping[str, "_Packed"],
    tokenizer: PreTrainedTokenizerFast,
    names: Sequence[str],
    targets: Sequence[str],
    *,
    reserve_mix: bool,
) -> Corpus:
    """Packed domains as a `Corpus`; where asked, "mix" takes its slice of the training blocks."""
    train = {name: domain.train for name, domain in packed.items()}
    mix = {}
    if reserve_mix:
        for name in names:
            train[name], mix[name] = _reserve(train[name], name)
    return Corpus(
        names=tuple(names),
        targets=tuple(targets),
        train=train,
        validation={name: domain.validation for name, domain in packed.items()},
        train_tokens={name: len(blocks) * config.block_size for name, blocks in train.items()},
        documents={name: domain.documents for name, domain in packed.items()},
        tokenizer=tokenizer,
        tokenizer_sha256=_tokenizer_sha256(tokenizer),
        block_size=config.block_size,
        vocab_size=len(tokenizer),
        mix=mix if reserve_mix else None,
    )


def _reserve(blocks: datasets.Dataset, name: str) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Training blocks and the slice of them held out for "mix": runs spread over the domain."""
    count = max(_MIX_MIN_BLOCKS, int(len(blocks) * _MIX_SHARE))
    if len(blocks) < 2 * count:
        raise ValueError(
            f"The target mix holds out {count} training blocks of every domain; {name} has only "
            f"{len(blocks)}. Give it more text, a smaller block_size, or another target."
        )
    is_held = np.zeros(len(blocks), dtype=bool)
    num_runs = -(-count // _MIX_RUN)
    for run in range(num_runs):
        end = (run + 1) * len(blocks) // num_runs
        length = count // num_runs + (run < count % num_runs)
        is_held[end - length : end] = True
    return blocks.select(np.flatnonzero(~is_held)), blocks.select(np.flatnonzero(is_held))


def _check_config(config: CorpusConfig) -> None:
    if config.block_size < 2:
        raise ValueError(
            f"block_size must be at least 2, a token and the next; it is {config.block_size}."
        )
    if not 0 < config.validation_fraction < 1:
        raise ValueError(
            f"validation_fraction must lie between 0 and 1; it is {config.validation_fraction}."
        )
    limit = config.max_tokens_per_domain
    if limit is not None and limit < config.block_size:
        raise ValueError(
            f"max_tokens_per_domain must hold a block of {config.block_size}; it is {limit}."
        )
    if config.tokenizer == "train" and config.vocab_size < 257:
        raise ValueError(
            "A trained tokenizer needs vocab_size >= 257, every byte and the end of text; "
            f"it is {config.vocab_size}."
        )


def _choose_names(
    config: CorpusConfig, targets: Sequence[str], found: Sequence[str]
) -> tuple[str, ...]:
    """Training domains in order: those asked for, or all found less the targets."""
    _check_names("domains", config.domains, found, config.data)
    _check_names("target", targets, found, config.data)
    names = config.domains or tuple(name for name in found if name not in targets)
    if not names:
        raise ValueError(
            f"Training needs a domain; {config.data} holds {', '.join(found) or 'none'} and the "
            f"targets are {', '.join(targets)}."
        )
    for word in (UNIVERSAL, MIX):
        if word in names:
            raise ValueError(
                f'No domain may be named "{word}", a word of the target; {config.data} has one. '
                "Rename it, or name the others with domains."
            )
    return tuple(names)


def _check_names(what: str, names: Sequence[str], found: Sequence[str], data: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"A domain is named once; {what} names {', '.join(twice)} twice.")
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ValueError(
            f"{what} must name domains of {data}, which are {', '.join(found)}; "
            f"{', '.join(unknown)} is not among them."
        )


@dataclass(frozen=True)
class _Part:
    """Documents that are read together: one domain's or, with a domain column, all domains'."""

    train: Documents
    validation: Documents | None
    fingerprint: str


def _find_parts(config: CorpusConfig, targets: Sequence[str]) -> dict[str, _Part]:
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
            f"{path} is one file: name the column that holds a row's domain with domain_column, "
            "or give a directory with one folder or file per domain."
        )
    return _directory_parts(path, config)


def _check_parts(parts: Mapping[str, _Part]) -> None:
    """Every split opens and begins with a document, before anything is made of any."""
    for part, names in _by_part(parts):
        for split, documents in (("train", part.train), ("validation", part.validation)):
            if documents is not None and next(documents(), None) is None:
                raise ValueError(
                    f"A domain needs text; the {split} split of {', '.join(names)} is empty."
                )


def _by_part(parts: Mapping[str, _Part]) -> list[tuple[_Part, list[str]]]:
    """Each part once, with the domains that are read from it."""
    grouped: dict[int, tuple[_Part, list[str]]] = {}
    for name, part in parts.items():
        grouped.setdefault(id(part), (part, []))[1].append(name)
    return list(grouped.values())


def _directory_parts(directory: Path, config: CorpusConfig) -> dict[str, _Part]:
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
                "row's domain with domain_column, or give every domain a folder."
            )
        files_of[name] = files
    if not files_of:
        raise ValueError(
            f"{directory} must hold a folder or file per domain, of {', '.join(_SUFFIXES)}; "
            f"it holds {', '.join(sorted(e.name for e in directory.iterdir())) or 'nothing'}."
        )
    return {name: _files_part(name, directory, files, config) for name, files in files_of.items()}


def _files_part(name: str, directory: Path, files: Sequence[Path], config: CorpusConfig) -> _Part:
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
    read = functools.partial(_file_documents, name, text_column=config.text_column)
    return _Part(
        train=functools.partial(read, splits["train"]),
        validation=functools.partial(read, held_out) if held_out else None,
        fingerprint=_stamp(files),
    )


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
    return _digest(facts)


def _digest(value: Any) -> str:
    """SHA-256 of a value that JSON can hold, shortened to what names a folder."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _file_documents(
    name: str, files: Sequence[Path], *, text_column: str
) -> Iterator[tuple[str, str]]:
    """The documents of one domain's files, kind after kind."""
    filled = [file for file in files if not _is_empty(file)]
    for kind, group in itertools.groupby(sorted(filled, key=_kind), key=_kind):
        paths = list(group)
        if kind == "text":
            yield from ((name, text) for text in _text_documents(paths))
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
        raise ValueError(f"{where} cannot be read: {_one_line(error)}.") from error


def _text_documents(files: Iterable[Path]) -> Iterator[str]:
    """Text files cut at blank lines into documents of about `_TEXT_DOCUMENT_CHARS`."""
    for file in files:
        lines: list[str] = []
        size = 0
        for line in _lines(file):
            lines.append(line)
            size += len(line)
            is_blank = not line.strip()
            if size >= (1 if is_blank else 16) * _TEXT_DOCUMENT_CHARS:
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
                f"Name the right one with {option}."
            )
    text = row[columns[0]]
    if text is not None and not isinstance(text, str):
        raise ValueError(
            f'The column "{columns[0]}" of {where} must hold text; it holds '
            f"{type(text).__name__}. Name the right one with text_column."
        )
    return True


def _column(batch: Mapping[str, Sequence[Any]], dotted: str) -> Iterator[Any]:
    """The values of a column; dots reach into structs."""
    root, *path = dotted.split(".")
    for value in batch[root]:
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        yield value


def _one_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


Splits = Mapping[str, datasets.IterableDataset]


def _column_parts(
    config: CorpusConfig, splits: Splits, fingerprint: str, targets: Sequence[str]
) -> dict[str, _Part]:
    """One set of rows whose `domain_column` says which domain each belongs to."""
    train, held_out = _two_splits(splits, config.data)
    read = functools.partial(
        _row_documents,
        text_column=config.text_column,
        where=config.data,
        domain_column=config.domain_column,
    )
    part = _Part(
        train=functools.partial(read, train),
        validation=functools.partial(read, held_out) if held_out is not None else None,
        fingerprint=_digest([fingerprint, config.domain_column]),
    )
    if config.domains:
        return dict.fromkeys((*config.domains, *targets), part)
    return dict.fromkeys(_names_in_rows(config, part), part)


def _names_in_rows(config: CorpusConfig, part: _Part) -> list[str]:
    """The domains that occur, remembered in the cache: finding them reads every row."""
    file = _cache(config) / "names" / f"{_digest([part.fingerprint, config.text_column])}.json"
    if file.exists():
        return list(json.loads(file.read_text(encoding="utf-8")))
    names = {name for name, _ in _progress(part.train(), "finding domains")}
    with _scratch(file.parent) as scratch:
        (scratch / file.name).write_text(json.dumps(sorted(names)), encoding="utf-8")
        _keep(scratch / file.name, file)
    return sorted(names)


def _path_splits(path: Path) -> Splits:
    """A file, or a directory as `datasets` reads a Hub repository."""
    if path.is_file():
        if _kind(path) == "text":
            raise ValueError(f"A text file has no columns, so no domain_column; this is {path}.")
        return {"train": _open_files(_kind(path), [path])}
    return _load_splits(str(path), None)


def _hub_parts(config: CorpusConfig, targets: Sequence[str]) -> dict[str, _Part]:
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


def _hub_part(config: CorpusConfig, name: str) -> _Part:
    """One configuration of a Hub data set as a domain."""
    train, held_out = _two_splits(_load_splits(config.data, name), f"{config.data}, {name}")
    read = functools.partial(
        _row_documents,
        text_column=config.text_column,
        where=f"{config.data}, {name}",
        domain=name,
    )
    return _Part(
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
            f"{_one_line(error)}."
        ) from error


def _hub_names(data: str) -> list[str]:
    return list(_from_hub(data, lambda: datasets.get_dataset_config_names(data)))


def _load_splits(data: str, name: str | None) -> Splits:
    splits: Splits = _from_hub(data, lambda: datasets.load_dataset(data, name, streaming=True))
    return splits


def _hub_stamp(data: str, name: str | None) -> str:
    """Changes with the data set's revision."""
    builder = _from_hub(data, lambda: datasets.load_dataset_builder(data, name))
    return _digest([data, builder.config.name, builder.hash])


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
    directory = _cache(config) / "installed" / local_corpus.fingerprint()
    if not directory.exists():
        with _scratch(directory.parent) as scratch:
            local_corpus.save(scratch / "text")
            _keep(scratch / "text", directory)
    return directory


def _cache(config: CorpusConfig) -> Path:
    """Where packed blocks are kept."""
    default = os.environ.get("DOGE_FAST_CACHE") or Path.home() / ".cache" / "doge_fast"
    return Path(config.cache_dir or default).expanduser()


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A folder to make things in, on the file system they are to be moved on; then deleted."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=".making-"))
    except OSError as error:
        raise ValueError(
            f"The cache must be writable; {parent} is not: {_one_line(error)}. "
            "Name another with cache_dir or $DOGE_FAST_CACHE."
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _keep(made: Path, path: Path) -> None:
    """Move what was made to its name in the cache, unless somebody else was first.

    The name is a digest of what the content depends on, so the first one's is as good.
    """
    try:
        made.rename(path)
    except OSError:
        if not path.exists():
            raise


def _progress(items: Iterable[Any], what: str) -> Iterator[Any]:
    """A bar on standard error once this takes more than two seconds; none off a terminal."""
    yield from tqdm(items, desc=what, unit=" documents", delay=2, disable=None)


def _open_tokenizer(config: CorpusConfig, parts: Mapping[str, _Part]) -> PreTrainedTokenizerFast:
    """The tokenizer that `config` names, or one trained on these domains."""
    if config.tokenizer == "train":
        return _load_tokenizer(str(_trained_tokenizer(config, parts)))
    return _load_tokenizer(str(Path(config.tokenizer).expanduser()))


def _load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"The tokenizer {name} does not open: {_one_line(error)}. Give a folder with a "
            'tokenizer.json, a Hub id, or "train".'
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"Packing needs a fast tokenizer, a tokenizer.json; {name} has none.")
    _end_of_text_id(tokenizer)
    return tokenizer


def _end_of_text_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token between documents: the tokenizer's eos_token, or <|endoftext|>."""
    if tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id)
    found = tokenizer.get_vocab().get(END_OF_TEXT)
    if found is None:
        raise ValueError(
            f"Documents are joined by an end-of-text token; the tokenizer "
            f"{tokenizer.name_or_path} has neither an eos_token nor {END_OF_TEXT}."
        )
    return int(found)


def _tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """Of the tokenizer's own serialisation: the same for every folder it is saved in."""
    return hashlib.sha256(_packing_tokenizer(tokenizer).to_str().encode()).hexdigest()


def _packing_tokenizer(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A copy without padding and truncation, to which special tokens inside text are text."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    # Else a document that mentions <|endoftext|> would end there.
    backend.encode_special_tokens = True
    return backend


def _trained_tokenizer(config: CorpusConfig, parts: Mapping[str, _Part]) -> Path:
    """The folder of a byte-level BPE trained on an equal share of every domain's text.

    Domains enter in the order of their names, held-out targets included, so choosing another
    target or order does not change the tokenizer.
    """
    ordered = {name: parts[name] for name in sorted(parts)}
    prints = {name: part.fingerprint for name, part in ordered.items()}
    key = _digest([_FORMAT, prints, config.text_column, config.vocab_size])
    folder = _cache(config) / "tokenizers" / key
    if not folder.exists():
        with _scratch(folder.parent) as scratch:
            _train_tokenizer(ordered, config.vocab_size).save_pretrained(scratch / "tokenizer")
            _keep(scratch / "tokenizer", folder)
    return folder


def _train_tokenizer(parts: Mapping[str, _Part], vocab_size: int) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    backend.train_from_iterator(_tokenizer_texts(parts), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _tokenizer_texts(parts: Mapping[str, _Part]) -> Iterator[str]:
    """The same number of characters from every domain that has them."""
    for part, names in _by_part(parts):
        left = dict.fromkeys(names, _TOKENIZER_CHARS_PER_DOMAIN)
        for name, text in _progress(part.train(), "reading for the tokenizer"):
            if left.get(name, 0) > 0:
                yield text[: left[name]]
                left[name] -= len(text)
                if all(chars <= 0 for chars in left.values()):
                    break


@dataclass(frozen=True)
class _Packed:
    """One domain's blocks, mapped from the cache."""

    train: datasets.Dataset
    validation: datasets.Dataset
    documents: int


def _pack(
    config: CorpusConfig, parts: Mapping[str, _Part], tokenizer: PreTrainedTokenizerFast
) -> dict[str, _Packed]:
    """{domain: blocks}, packing what the cache does not hold."""
    sha256 = _tokenizer_sha256(tokenizer)
    entries = {name: _entry(config, name, part, sha256) for name, part in parts.items()}
    for part, names in _by_part(parts):
        absent = {name: entries[name] for name in names if not entries[name].exists()}
        if absent:
            _pack_part(config, part, absent, tokenizer)
    return {name: _open_entry(entry) for name, entry in entries.items()}


def _entry(config: CorpusConfig, name: str, part: _Part, tokenizer_sha256: str) -> Path:
    """The cache folder of a domain; its name is a digest of all that its blocks depend on."""
    facts = [
        _FORMAT,
        name,
        part.fingerprint,
        config.text_column,
        tokenizer_sha256,
        config.block_size,
        config.max_tokens_per_domain,
        None if part.validation else config.validation_fraction,
    ]
    return _cache(config) / "blocks" / _digest(facts)


def _open_entry(entry: Path) -> _Packed:
    train, validation = (
        datasets.Dataset.from_file(str(entry / f"{split}.arrow")).with_format("numpy")
        for split in ("train", "validation")
    )
    facts = json.loads((entry / "packed.json").read_text(encoding="utf-8"))
    return _Packed(train, validation, facts["documents"])


def _pack_part(
    config: CorpusConfig,
    part: _Part,
    entries: Mapping[str, Path],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Pack the domains of `entries` in one pass over their documents."""
    encode = functools.partial(_encode, _packing_tokenizer(tokenizer), _end_of_text_id(tokenizer))
    borders = _holdout_borders(config, part, tuple(entries)) if part.validation is None else {}
    limits = _limits(config, part)
    with _scratch(_cache(config) / "blocks") as scratch, contextlib.ExitStack() as opened:
        writers = {
            name: opened.enter_context(
                _DomainWriter(scratch / str(index), config, len(tokenizer), limits)
            )
            for index, name in enumerate(entries)
        }
        documents = _progress(part.train(), f"packing {', '.join(entries)}")
        splits = ("train",) if part.validation else ("train", "validation")
        until_full = _until_full(_split_documents(documents, borders), writers, splits)
        _write_documents(until_full, writers, encode)
        if part.validation is not None:
            held_out = ((name, text, "validation") for name, text in part.validation())
            _write_documents(_until_full(held_out, writers, ("validation",)), writers, encode)
        for name, writer in writers.items():
            writer.finish(name)
        for name, writer in writers.items():
            _keep(writer.folder, entries[name])


def _limits(config: CorpusConfig, part: _Part) -> dict[str, int | None]:
    """Tokens where packing stops; of held-out documents, their share of that."""
    limit = config.max_tokens_per_domain
    if limit is None or part.validation is not None:
        return {"train": limit, "validation": limit}
    return {"train": limit, "validation": int(config.validation_fraction * limit)}


def _holdout_borders(config: CorpusConfig, part: _Part, names: Sequence[str]) -> dict[str, int]:
    """{domain: the largest hash of a held-out document}, without a validation split.

    The share is exact for domains within the first `_HOLDOUT_SAMPLE` documents, at least one
    document, and right up to sampling error beyond.
    """
    hashes: dict[str, set[int]] = {name: set() for name in names}
    sample = itertools.islice(part.train(), _HOLDOUT_SAMPLE)
    for name, text in _progress(sample, "choosing held-out documents"):
        if name in hashes:
            hashes[name].add(_text_hash(text))
    return {name: _border(name, found, config) for name, found in hashes.items() if found}


def _border(name: str, hashes: set[int], config: CorpusConfig) -> int:
    if len(hashes) < 2:
        raise ValueError(
            f"A domain without a validation split holds out documents; {name} has only one. "
            "Give it a validation file, or more documents."
        )
    count = max(1, round(config.validation_fraction * len(hashes)))
    # At least one document stays for training, whatever the fraction.
    return sorted(hashes)[min(count, len(hashes) - 1) - 1]


def _text_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _split_documents(
    documents: Iterable[tuple[str, str]], borders: Mapping[str, int]
) -> Iterator[tuple[str, str, str]]:
    """(domain, text, split); a domain without a border is all training."""
    for name, text in documents:
        is_held_out = name in borders and _text_hash(text) <= borders[name]
        yield name, text, "validation" if is_held_out else "train"


def _until_full(
    documents: Iterable[tuple[str, str, str]],
    writers: Mapping[str, "_DomainWriter"],
    splits: Sequence[str],
) -> Iterator[tuple[str, str, str]]:
    """The documents, until these splits of all domains are full."""
    for document in documents:
        if all(writer.is_full(split) for writer in writers.values() for split in splits):
            return
        yield document


Encode = Callable[[Sequence[str]], list[Ints]]


def _encode(backend: Tokenizer, end_of_text: int, texts: Sequence[str]) -> list[Ints]:
    """Tokens of each document, the end of text behind."""
    encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array([*encoding.ids, end_of_text], dtype=np.int64) for encoding in encodings]


def _write_documents(
    documents: Iterable[tuple[str, str, str]],
    writers: Mapping[str, "_DomainWriter"],
    encode: Encode,
) -> None:
    """Tokenise the documents and hand them out, until no split can use more."""
    # A token rarely has more than eight characters: no use in tokenising far past a limit.
    limits = [writer.splits["train"].limit for writer in writers.values()]
    chars = min(8 * (limit or _BATCH_CHARS) for limit in limits)
    wanted = (
        (name, text, split)
        for name, text, split in documents
        if name in writers and not writers[name].is_full(split)
    )
    for batch in _batches(wanted, min(chars, _BATCH_CHARS)):
        tokens = encode([text for _, text, _ in batch])
        for (name, _, split), ids in zip(batch, tokens, strict=True):
            writers[name].add(split, ids)


def _batches(
    documents: Iterable[tuple[str, str, str]], max_chars: int
) -> Iterator[list[tuple[str, str, str]]]:
    """As many documents as one call of the tokenizer takes."""
    batch: list[tuple[str, str, str]] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document[1])
        if len(batch) >= _BATCH_DOCUMENTS or chars >= max_chars:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


class _DomainWriter:
    """Writes one cache entry: the blocks of both splits, and how many documents they hold."""

    def __init__(
        self,
        folder: Path,
        config: CorpusConfig,
        vocab_size: int,
        limits: Mapping[str, int | None],
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.block_size = config.block_size
        self.documents = 0
        self.splits = {
            split: _BlockWriter(folder / f"{split}.arrow", config.block_size, vocab_size, limit)
            for split, limit in limits.items()
        }

    def __enter__(self) -> "_DomainWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.splits.values():
            writer.close()

    def add(self, split: str, ids: Ints) -> None:
        writer = self.splits[split]
        if not writer.is_full:
            writer.add(ids)
            self.documents += split == "train"

    def is_full(self, split: str) -> bool:
        return self.splits[split].is_full

    def finish(self, name: str) -> None:
        """Complete the files; a domain that cannot be trained or measured is refused."""
        for split, writer in self.splits.items():
            if writer.tokens < self.block_size:
                raise ValueError(
                    f"A domain needs a block of {self.block_size} tokens in every split; the "
                    f"{split} split of {name} has {writer.tokens} tokens. Give it more text, or "
                    "choose a smaller block_size or another validation_fraction."
                )
            writer.close()
        facts = json.dumps({"name": name, "documents": self.documents})
        (self.folder / "packed.json").write_text(facts, encoding="utf-8")


class _BlockWriter:
    """Cuts a stream of tokens into blocks of an Arrow file; the rest of the last block is lost."""

    _BLOCKS_PER_WRITE = 1000

    def __init__(self, path: Path, block_size: int, vocab_size: int, limit: int | None) -> None:
        self.block_size = block_size
        self.limit = None if limit is None else max(limit // block_size, 1) * block_size
        self.tokens = 0
        self.dtype = np.uint16 if vocab_size <= 2**16 else np.int32
        self.pending: list[Ints] = []
        self.num_pending = 0
        value = pa.from_numpy_dtype(self.dtype)
        self.schema = pa.schema([("input_ids", pa.list_(value, self.block_size))])
        self.writer = pa.ipc.new_stream(str(path), self.schema)
        self.is_open = True

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.tokens >= self.limit

    def add(self, ids: Ints) -> None:
        if self.limit is not None:
            ids = ids[: self.limit - self.tokens]
        self.tokens += len(ids)
        self.pending.append(ids)
        self.num_pending += len(ids)
        if self.num_pending >= self._BLOCKS_PER_WRITE * self.block_size:
            self._flush()

    def _flush(self) -> None:
        """Write the whole blocks among the pending tokens."""
        tokens = np.concatenate(self.pending) if self.pending else np.empty(0, np.int64)
        whole = len(tokens) // self.block_size * self.block_size
        if whole:
            values = pa.array(tokens[:whole].astype(self.dtype))
            blocks = pa.FixedSizeListArray.from_arrays(values, self.block_size)
            self.writer.write_batch(pa.record_batch([blocks], schema=self.schema))
        self.pending, self.num_pending = [tokens[whole:]], len(tokens) - whole

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._flush()
            self.writer.close()


def domain_blocks(seed: int, step: int, *, domain: str, num_blocks: int, size: int) -> Ints:
    """Which of a domain's blocks proxy batch `step` holds.

    Positions step * size, ..., step * size + size - 1 of an endless stream that shows every
    block once an epoch, in an order drawn anew each epoch. The order depends on the seed and
    the domain's name alone, so other domains come and go without changing it.

    Args:
        seed: of the run.
        step: >= 0; batches before this one.
        domain: its name.
        num_blocks: > 0; blocks of the domain.
        size: >= 0; blocks in the batch.

    Returns:
        [size] int64 in [0, num_blocks); distinct within an epoch.

    Raises:
        ValueError: `num_blocks` < 1, or `step` or `size` < 0.
    """
    if step < 0 or size < 0:
        raise ValueError(f"A batch needs step >= 0 and size >= 0; they are {step} and {size}.")
    first = step * size
    return _shuffled(seed, ("train", domain), np.arange(first, first + size), num_blocks)


def mixture_counts(seed: int, step: int, weights_K: npt.ArrayLike, batch_size: int) -> Ints:
    """How many blocks of each domain base batch `step` holds.

    Systematic sampling: with c_k the cumulated weights times B, domain k gets the points
    u, u + 1, ..., u + B - 1 that fall into [c_{k-1}, c_k). The offsets u of successive steps
    rotate by the golden ratio from one drawn from the seed, so what has been drawn after t
    steps stays within a few blocks of t * B * w, where independent offsets would stray by sqrt(t).

    Args:
        seed: of the run.
        step: >= 0; batches before this one.
        weights_K: [K], >= 0, sum 1 within 1e-5; normalised here.
        batch_size: B > 0; blocks in the batch.

    Returns:
        [K] int64; sums to B; each the floor or the ceiling of B * w_k, and B * w_k in
        expectation over seeds.

    Raises:
        ValueError: the weights are not on the simplex, or a number is out of range.
    """
    counts_K: Ints = _counts(seed, np.array([step]), _checked_weights(weights_K), batch_size)[0]
    return counts_K


@dataclass(frozen=True)
class Stage:
    """Weights that hold from a step on, until the next stage's."""

    first_step: int
    weights: Mapping[str, float]


def mixture_blocks(
    seed: int,
    step: int,
    weights: Mapping[str, float] | Sequence[Stage],
    batch_size: int,
    *,
    num_blocks: Mapping[str, int],
) -> dict[str, Ints]:
    """Which blocks of each domain base batch `step` holds.

    `mixture_counts` says how many. Which ones follows from how many blocks of the domain all
    earlier batches held, an arithmetic sum: no data is replayed.

    Args:
        seed: of the run.
        step: >= 0; batches before this one.
        weights: {domain: weight}, or a curriculum: stages in order, the first from step 0.
        batch_size: > 0; blocks in the batch, over all domains.
        num_blocks: {domain: blocks it has}, the same domains in the order of the batch.

    Returns:
        {domain: int64 indices}, in the order of `num_blocks`; empty arrays included.

    Raises:
        ValueError: the domains differ, weights are not on the simplex, stages are not in
            order, or a number is out of range.
    """
    return _Mixture(seed, weights, batch_size, num_blocks).blocks(step)


class _Mixture:
    """Counts and blocks of mixed batches."""

    # So a step anywhere costs the sum over at most this many, some tens of microseconds.
    _STEPS_A_SUM = 1024

    def __init__(
        self,
        seed: int,
        weights: Mapping[str, float] | Sequence[Stage],
        batch_size: int,
        num_blocks: Mapping[str, int],
        stream: str = "train",
    ) -> None:
        self.seed = seed
        self.stream = stream
        self.batch_size = batch_size
        self.num_blocks = dict(num_blocks)
        stages = [Stage(0, weights)] if isinstance(weights, Mapping) else list(weights)
        _check_stages(stages, list(num_blocks))
        self.first_steps = [stage.first_step for stage in stages]
        self.weights_SK = [
            _checked_weights([stage.weights[name] for name in num_blocks]) for stage in stages
        ]
        # What had been drawn at every `_STEPS_A_SUM`-th step, as far as anybody asked.
        self._sums: list[Ints] = [np.zeros(len(self.num_blocks), dtype=np.int64)]

    def counts(self, steps_T: Ints) -> Ints:
        """[T, K] blocks of each domain in each of these batches."""
        stage_T = np.searchsorted(self.first_steps, steps_T, side="right") - 1
        counts_TK = np.empty((len(steps_T), len(self.num_blocks)), dtype=np.int64)
        for stage in np.unique(stage_T):
            is_here = stage_T == stage
            weights_K = self.weights_SK[stage]
            counts_TK[is_here] = _counts(self.seed, steps_T[is_here], weights_K, self.batch_size)
        return counts_TK

    def drawn(self, step: int) -> Ints:
        """[K] blocks of each domain in all batches before this one."""
        whole = step // self._STEPS_A_SUM
        while len(self._sums) <= whole:
            first = (len(self._sums) - 1) * self._STEPS_A_SUM
            self._sums.append(
                self._sums[-1] + self._drawn_between(first, first + self._STEPS_A_SUM)
            )
        return self._sums[whole] + self._drawn_between(whole * self._STEPS_A_SUM, step)

    def _drawn_between(self, first: int, last: int) -> Ints:
        drawn_K: Ints = self.counts(np.arange(first, last)).sum(axis=0)
        return drawn_K

    def blocks(self, step: int) -> dict[str, Ints]:
        """{domain: indices} of this batch."""
        counts_K = self.counts(np.array([step]))[0]
        counted = zip(self.num_blocks.items(), self.drawn(step), counts_K, strict=True)
        return {
            name: _shuffled(self.seed, (self.stream, name), np.arange(first, first + count), size)
            for (name, size), first, count in counted
        }


def _check_stages(stages: Sequence[Stage], names: Sequence[str]) -> None:
    firsts = [stage.first_step for stage in stages]
    if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise ValueError(
            f"The stages of a mixture begin at step 0 and go up; they begin at {firsts}."
        )
    for stage in stages:
        if set(stage.weights) != set(names):
            raise ValueError(
                f"A mixture weighs exactly the domains {', '.join(names)}; from step "
                f"{stage.first_step} on it weighs {', '.join(stage.weights)}."
            )


def _checked_weights(weights_K: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """[K] float64 on the simplex, normalised."""
    array_K = np.asarray(weights_K, dtype=np.float64)
    total = float(array_K.sum())
    is_simplex = array_K.ndim == 1 and array_K.size and (array_K >= 0).all()
    if not is_simplex or not abs(total - 1) <= 1e-5:
        raise ValueError(
            f"Domain weights must be >= 0 and sum to 1; they are {array_K.tolist()}, "
            f"with the sum {total:.6g}."
        )
    normalised_K: npt.NDArray[np.float64] = array_K / total
    return normalised_K


def _counts(seed: int, steps_T: Ints, weights_K: npt.NDArray[np.float64], batch_size: int) -> Ints:
    """[T, K] counts of systematic sampling; see `mixture_counts`."""
    if batch_size < 1 or steps_T.min(initial=0) < 0:
        raise ValueError(
            f"A batch needs batch_size >= 1 and step >= 0; they are {batch_size} and "
            f"{steps_T.min(initial=0)}."
        )
    cumulated_K = np.cumsum(weights_K)
    # Divided by its own end, so that the last edge is B exactly, and trailing zeros stay empty.
    edges_K = batch_size * (cumulated_K / cumulated_K[-1])
    reached_TK = np.ceil(edges_K - _offsets(seed, steps_T)[:, None])
    counts_TK: Ints = np.diff(reached_TK, axis=1, prepend=0).astype(np.int64)
    return counts_TK


# 2**64 over the golden ratio: multiples of it, modulo 2**64, spread most evenly.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _offsets(seed: int, steps_T: Ints) -> npt.NDArray[np.float64]:
    """[T] in [0, 1): u_t = frac(u_0 + t / golden ratio), in exact integer arithmetic."""
    turned_T = _round_keys(seed, "mixture")[:1] + steps_T.astype(np.uint64) * _GOLDEN
    return (turned_T >> np.uint64(11)).astype(np.float64) / 2.0**53


def _shuffled(seed: int, stream: Sequence[str], positions: Ints, num_blocks: int) -> Ints:
    """Blocks at these positions of the endless stream: every epoch a permutation of its own."""
    if num_blocks < 1:
        raise ValueError(f"{stream[-1]} has no blocks to draw from.")
    epochs, offsets = np.divmod(positions, num_blocks)
    blocks = np.empty(len(positions), dtype=np.int64)
    for epoch in np.unique(epochs):
        is_here = epochs == epoch
        keys = _round_keys(seed, *stream, int(epoch))
        blocks[is_here] = _permute(offsets[is_here], num_blocks, keys)
    return blocks


def _round_keys(*name: object) -> npt.NDArray[np.uint64]:
    """Eight independent 64-bit keys of this name: BLAKE2b, the same on every machine."""
    digest = hashlib.blake2b(json.dumps(name).encode()).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _permute(positions: Ints, size: int, keys: npt.NDArray[np.uint64]) -> Ints:
    """Where a keyed permutation of range(size) sends the positions, without making it.

    A Feistel network permutes a power of four that is at least `size` and at most four times
    it; values past the end walk on along their cycle until they come back inside.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (is_outside := values >= size).any():
        values[is_outside] = _feistel(values[is_outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], half_bits: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """A keyed permutation of range(4 ** half_bits), one round a key."""
    bits = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_scramble(right ^ key) & mask)
    return (left << bits) | right


def _scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A 64-bit integer hash, every output bit depending on every input bit.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood; OOPSLA 2014), variant 13.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class _Steps:
    """The steps a data set yields: from `start_step` on, dealt out among loader workers."""

    def __init__(self, steps: int | None, start_step: int) -> None:
        if start_step < 0 or (steps is not None and steps < start_step):
            raise ValueError(
                f"Batches go from start_step >= 0 to steps; asked for {start_step} to {steps}."
            )
        self.start_step = start_step
        self.steps = steps

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        # A loader takes from its workers in turn, so the order is that without workers.
        skip, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        counter = itertools.count(self.start_step + skip, stride)
        if self.steps is None:
            return counter
        return iter(range(self.start_step + skip, self.steps, stride))


class ProxyBatches(IterableDataset[dict[str, Batch]]):
    """Batches of stage one: blocks of every domain, of every target, and of "mix".

    Yields {name: {"input_ids": [b, L] int64, "labels": the same}} for the corpus's names, then
    its targets, then "mix" where the corpus reserved it, b being `sequences_per_domain`. Each
    is a whole batch: use `DataLoader(..., batch_size=None)`.

    Args:
        corpus: the blocks.
        sequences_per_domain: > 0; blocks of every row in every batch.
        seed: decides the order of the blocks.
        steps: batches of the whole run; None: endless.
        start_step: batches that an earlier run has used; the first one yielded is that many
            steps in, bit for bit what an uninterrupted run would see.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequences_per_domain: int,
        seed: int,
        steps: int | None = None,
        start_step: int = 0,
    ) -> None:
        if sequences_per_domain < 1:
            raise ValueError(f"sequences_per_domain must be > 0; it is {sequences_per_domain}.")
        self.corpus = corpus
        self.size = sequences_per_domain
        self.seed = seed
        self.steps = _Steps(steps, start_step)
        self.mixture = self._uniform(corpus.mix) if corpus.mix is not None else None

    def _uniform(self, mix: Mapping[str, datasets.Dataset]) -> _Mixture:
        """What mix batches are drawn by."""
        num_blocks = {name: len(blocks) for name, blocks in mix.items()}
        uniform = dict.fromkeys(mix, 1 / len(mix))
        return _Mixture(self.seed, uniform, self.size, num_blocks, stream=MIX)

    def __iter__(self) -> Iterator[dict[str, Batch]]:
        """The batches from `start_step` on."""
        for step in self.steps:
            yield self.batch(step)

    def batch(self, step: int) -> dict[str, Batch]:
        """Batch `step`, whatever was asked for before."""
        corpus = self.corpus
        batches = {
            name: _mixed_batch(corpus.train, {name: self._rows(name, step)})
            for name in (*corpus.names, *corpus.targets)
        }
        if corpus.mix is not None and self.mixture is not None:
            batches[MIX] = _mixed_batch(corpus.mix, self.mixture.blocks(step))
        return batches

    def _rows(self, name: str, step: int) -> Ints:
        num_blocks = len(self.corpus.train[name])
        return domain_blocks(self.seed, step, domain=name, num_blocks=num_blocks, size=self.size)


class BaseBatches(IterableDataset[Batch]):
    """Batches of stage two: blocks drawn at given domain weights.

    Yields {"input_ids": [B, L] int64, "labels": the same}, rows in the order of the corpus's
    names; with `domain_ids`, also {"domain_ids": [B] int64}, positions in those names. Each is
    a whole batch: use `DataLoader(..., batch_size=None)`.

    Args:
        corpus: the blocks.
        weights: {domain: weight} of the corpus's names, or a curriculum of `Stage`s.
        batch_size: > 0; blocks in a batch.
        seed: decides the mixture's rounding and the order of the blocks.
        steps: batches of the whole run; None: endless.
        start_step: as for `ProxyBatches`.
        domain_ids: yield which domain each row is of.

    Raises:
        ValueError: weights of other domains or off the simplex, or a number out of range.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        weights: Mapping[str, float] | Sequence[Stage],
        batch_size: int,
        seed: int,
        steps: int | None = None,
        start_step: int = 0,
        domain_ids: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be > 0; it is {batch_size}.")
        self.corpus = corpus
        self.steps = _Steps(steps, start_step)
        self.domain_ids = domain_ids
        num_blocks = {name: len(corpus.train[name]) for name in corpus.names}
        self.mixture = _Mixture(seed, weights, batch_size, num_blocks)

    def __iter__(self) -> Iterator[Batch]:
        """The batches from `start_step` on."""
        for step in self.steps:
            yield self.batch(step)

    def batch(self, step: int) -> Batch:
        """Batch `step`, whatever was asked for before."""
        rows = self.mixture.blocks(step)
        batch = _mixed_batch(self.corpus.train, rows)
        if self.domain_ids:
            sizes = [len(indices) for indices in rows.values()]
            batch["domain_ids"] = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
        return batch

    def counts(self, step: int) -> dict[str, int]:
        """{domain: blocks of it in batch `step`}."""
        counts_K = self.mixture.counts(np.array([step]))[0]
        return dict(zip(self.corpus.names, counts_K.tolist(), strict=True))


def _mixed_batch(blocks: Mapping[str, datasets.Dataset], rows: Mapping[str, Ints]) -> Batch:
    """The rows of each domain, one below the other, as a causal model takes them."""
    parts = [
        np.asarray(blocks[name][indices.tolist()]["input_ids"], dtype=np.int64)
        for name, indices in rows.items()
        if len(indices)
    ]
    ids = torch.from_numpy(np.concatenate(parts))
    return {"input_ids": ids, "labels": ids}
