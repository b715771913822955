"""Documents become blocks of tokens, once.

Text is read once, tokenised, joined by the end-of-text token and cut into blocks of fixed
length, which stay in the cache as Arrow files that training maps into memory. The key of a
cache entry is everything its blocks depend on, so another tokenizer, block size or a changed
file packs again, and nothing else does.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from doge_fast.mixture.permutation import Ints
from doge_fast.pipeline import cache, progress
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.sources import Part, by_part

END_OF_TEXT = "<|endoftext|>"

# Part of every cache key: changes when the same input would be packed to other blocks.
_FORMAT = 1
_TOKENIZER_CHARS_PER_DOMAIN = 1_000_000
# Documents whose hashes decide where the border of the held-out share lies.
_HOLDOUT_SAMPLE = 100_000
_BATCH_DOCUMENTS = 256
_BATCH_CHARS = 1_000_000


def open_tokenizer(config: CorpusConfig, parts: Mapping[str, Part]) -> PreTrainedTokenizerFast:
    """The tokenizer that `config` names, or one trained on these domains."""
    if config.tokenizer == "train":
        return _load_tokenizer(str(_trained_tokenizer(config, parts)))
    return _load_tokenizer(str(Path(config.tokenizer).expanduser()))


def _load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"The tokenizer {name} does not open: {cache.one_line(error)}. Give a folder with a "
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


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
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


def _trained_tokenizer(config: CorpusConfig, parts: Mapping[str, Part]) -> Path:
    """The folder of a byte-level BPE trained on an equal share of every domain's text.

    Domains enter in the order of their names, held-out targets included, so choosing another
    target or order does not change the tokenizer.
    """
    ordered = {name: parts[name] for name in sorted(parts)}
    prints = {name: part.fingerprint for name, part in ordered.items()}
    key = cache.digest([_FORMAT, prints, config.text_column, config.vocab_size])
    folder = cache.directory(config) / "tokenizers" / key
    if not folder.exists():
        with cache.scratch(folder.parent) as scratch:
            _train_tokenizer(ordered, config.vocab_size).save_pretrained(scratch / "tokenizer")
            cache.keep(scratch / "tokenizer", folder)
    return folder


def _train_tokenizer(parts: Mapping[str, Part], vocab_size: int) -> PreTrainedTokenizerFast:
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


def _tokenizer_texts(parts: Mapping[str, Part]) -> Iterator[str]:
    """The same number of characters from every domain that has them."""
    for part, names in by_part(parts):
        left = dict.fromkeys(names, _TOKENIZER_CHARS_PER_DOMAIN)
        for name, text in progress.over(part.train(), "reading for the tokenizer", "document"):
            if left.get(name, 0) > 0:
                yield text[: left[name]]
                left[name] -= len(text)
                if all(chars <= 0 for chars in left.values()):
                    break


@dataclass(frozen=True)
class Packed:
    """One domain's blocks, mapped from the cache."""

    train: datasets.Dataset
    validation: datasets.Dataset
    documents: int


def pack(
    config: CorpusConfig, parts: Mapping[str, Part], tokenizer: PreTrainedTokenizerFast
) -> dict[str, Packed]:
    """{domain: blocks}, packing what the cache does not hold."""
    sha256 = tokenizer_sha256(tokenizer)
    entries = {name: _entry(config, name, part, sha256) for name, part in parts.items()}
    for part, names in by_part(parts):
        absent = {name: entries[name] for name in names if not entries[name].exists()}
        if absent:
            _pack_part(config, part, absent, tokenizer)
    return {name: _open_entry(entry) for name, entry in entries.items()}


def _entry(config: CorpusConfig, name: str, part: Part, tokenizer_sha256: str) -> Path:
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
    return cache.directory(config) / "blocks" / cache.digest(facts)


def _open_entry(entry: Path) -> Packed:
    train, validation = (
        datasets.Dataset.from_file(str(entry / f"{split}.arrow")).with_format("numpy")
        for split in ("train", "validation")
    )
    facts = json.loads((entry / "packed.json").read_text(encoding="utf-8"))
    return Packed(train, validation, facts["documents"])


def _pack_part(
    config: CorpusConfig,
    part: Part,
    entries: Mapping[str, Path],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Pack the domains of `entries` in one pass over their documents."""
    encode = functools.partial(_encode, _packing_tokenizer(tokenizer), _end_of_text_id(tokenizer))
    borders = _holdout_borders(config, part, tuple(entries)) if part.validation is None else {}
    limits = _limits(config, part)
    folder = cache.directory(config) / "blocks"
    with cache.scratch(folder) as scratch, contextlib.ExitStack() as opened:
        writers = {
            name: opened.enter_context(
                _DomainWriter(scratch / str(index), config, len(tokenizer), limits)
            )
            for index, name in enumerate(entries)
        }
        documents = progress.over(part.train(), f"packing {', '.join(entries)}", "document")
        splits = ("train",) if part.validation else ("train", "validation")
        until_full = _until_full(_split_documents(documents, borders), writers, splits)
        _write_documents(until_full, writers, encode)
        if part.validation is not None:
            held_out = ((name, text, "validation") for name, text in part.validation())
            _write_documents(_until_full(held_out, writers, ("validation",)), writers, encode)
        for name, writer in writers.items():
            writer.finish(name)
        for name, writer in writers.items():
            cache.keep(writer.folder, entries[name])


def _limits(config: CorpusConfig, part: Part) -> dict[str, int | None]:
    """Tokens where packing stops; of held-out documents, their share of that."""
    limit = config.max_tokens_per_domain
    if limit is None or part.validation is not None:
        return {"train": limit, "validation": limit}
    return {"train": limit, "validation": int(config.validation_fraction * limit)}


def _holdout_borders(config: CorpusConfig, part: Part, names: Sequence[str]) -> dict[str, int]:
    """{domain: the largest hash of a held-out document}, without a validation split.

    The share is exact for domains within the first `_HOLDOUT_SAMPLE` documents, at least one
    document, and right up to sampling error beyond.
    """
    hashes: dict[str, set[int]] = {name: set() for name in names}
    sample = itertools.islice(part.train(), _HOLDOUT_SAMPLE)
    for name, text in progress.over(sample, "choosing held-out documents", "document"):
        if name in hashes:
            hashes[name].add(_text_hash(text))
    return {name: _border(name, found, config) for name, found in hashes.items() if found}


def _border(name: str, hashes: set[int], config: CorpusConfig) -> int:
    if len(hashes) < 2:
        raise ValueError(
            f"A domain without a validation split holds out documents; {name} has only one. "
            "Give it a validation file, or more documents (a text file is cut at blank lines)."
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
                    "choose a smaller block_size (--block-size) or another validation_fraction "
                    "(--validation-fraction)."
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
