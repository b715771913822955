"""Documents become blocks of tokens, once.

Text is read once, tokenised, joined by the end-of-text token and cut into blocks of fixed
length, which stay in the cache as Arrow files that training maps into memory. The key of a
cache entry is everything its blocks depend on, so another tokenizer, block size or a changed
file packs again, and nothing else does.
"""

import collections
import functools
import hashlib
import itertools
import json
import logging
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from doge_fast.pipeline import cache, progress
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.failures import reading
from doge_fast.pipeline.sources import Counts, Part
from doge_fast.pipeline.tokenizer import (
    Groups,
    end_of_text_id,
    lost_characters,
    packing_tokenizer,
    tokenizer_sha256,
    unknown_ids,
    vocabulary_size,
)

_log = logging.getLogger("doge_fast")

# Part of every cache key: changes when the same input would be packed to other blocks.
_FORMAT = 7
# Characters of a domain that show how much of its text the tokenizer knows.
_SAMPLE_CHARS = 100_000
# Documents whose hashes decide where the border of the held-out share lies.
_HOLDOUT_SAMPLE = 100_000
# Of a domain, for a share of a twentieth that is right to a seventh.
_HOLDOUT_LEAST = 1000
# A token rarely has more.
_CHARS_PER_TOKEN = 8
_BATCH_DOCUMENTS = 256
# The share that is held out where nothing is trained on.
ALL = 1.0
_BATCH_CHARS = 1_000_000

# Domain, text and split of a document.
Placed = tuple[str, str, str]


def by_part(parts: Mapping[str, Part]) -> Groups:
    """The parts of {domain: part}, every split of which begins with a document."""
    grouped: dict[Part, list[str]] = {}
    for name, part in parts.items():
        grouped.setdefault(part, []).append(name)
    for part, names in grouped.items():
        for split, documents in (("train", part.train), ("validation", part.validation)):
            if documents is not None and next(documents(), None) is None:
                raise ValueError(
                    f"A domain needs text; no row of the {split} split of {', '.join(names)} has "
                    "any."
                )
    return grouped


@dataclass(frozen=True)
class Packed:
    """One domain's blocks, mapped from the cache."""

    train: datasets.Dataset
    validation: datasets.Dataset
    documents: int
    document_tokens: int
    """Of these documents, with what a limit left of the last one."""
    digest: str
    """SHA-256 of the blocks of both splits."""
    rows: Mapping[str, int]
    """Counts of the rows that were read for it, and for the domains that it was packed with."""
    lost_share: float
    """Share of its first characters that the tokenizer does not know."""


def pack(
    config: CorpusConfig,
    parts: Groups,
    tokenizer: PreTrainedTokenizerFast,
) -> dict[str, Packed]:
    """{domain: blocks}, packing what the cache does not hold."""
    sha256 = tokenizer_sha256(tokenizer)
    packed: dict[str, Packed] = {}
    for part, names in parts.items():
        fraction = config.validation_fraction if part.validation is None else None
        # All that a domain's blocks depend on.
        facts = [config.text_column, sha256, config.block_size, config.max_tokens_per_domain]
        facts = [part.fingerprint, *facts, fraction]
        keys = {name: cache.digest([_FORMAT, name, *facts]) for name in names}
        make = functools.partial(_pack_part, config, part, tokenizer)
        entries = cache.made_together(config, "blocks", keys, make)
        packed |= {name: _open_entry(entry) for name, entry in entries.items()}
    return packed


def _open_entry(entry: Path) -> Packed:
    train, validation = (
        datasets.Dataset.from_file(str(entry / f"{split}.arrow")).with_format("numpy")
        for split in ("train", "validation")
    )
    facts = json.loads((entry / "packed.json").read_text(encoding="utf-8"))
    return Packed(train, validation, **facts)


def _pack_part(
    config: CorpusConfig,
    part: Part,
    tokenizer: PreTrainedTokenizerFast,
    folders: Mapping[str, Path],
) -> None:
    """Pack the domains of `folders` in one pass over their documents."""
    counts: Counts = collections.Counter()
    limits = dict.fromkeys(("train", "validation"), config.max_tokens_per_domain)
    if config.max_tokens_per_domain is not None and part.validation is None:
        limits["validation"] = int(config.validation_fraction * config.max_tokens_per_domain)
    writers: Writers = {}
    for name, folder in folders.items():
        folder.mkdir()
        for split, limit in limits.items():
            file = folder / f"{split}.arrow"
            size = vocabulary_size(tokenizer)
            writers[name, split] = _BlockWriter(file, config.block_size, size, limit)
    train = progress.over(part.train(counts), f"packing {', '.join(folders)}")
    if part.validation is None:
        placed = _divided(train, _holdout_borders(config, part, tuple(folders)))
        _fill(writers, placed, tokenizer)
    else:
        held_out = progress.over(part.validation(), f"packing held-out {', '.join(folders)}")
        for split, documents in (("train", train), ("validation", held_out)):
            own = {key: writer for key, writer in writers.items() if key[1] == split}
            placed = ((name, text, split) for name, text in documents)
            _fill(own, placed, tokenizer)
    for (name, split), writer in writers.items():
        writer.close()
        is_needed = split != "train" or config.validation_fraction < ALL
        # Else it cannot be trained on or measured.
        if is_needed and writer.tokens < writer.block_size:
            is_named = writer.documents or config.domain_column is None
            told = f"{writer.tokens} tokens" if is_named else f"no text in {config.data}"
            raise ValueError(
                f"A domain needs a block of {writer.block_size} tokens in every split; the "
                f"{split} split of {name} has {told}. Give it more text, or "
                "choose a smaller block_size (--block-size) or another validation_fraction "
                "(--validation-fraction)."
            )
    for name, folder in folders.items():
        train_writer, validation_writer = (writers[name, split] for split in limits)
        facts = {
            "documents": train_writer.documents,
            "document_tokens": train_writer.document_tokens,
            "digest": cache.digest([train_writer.digest, validation_writer.digest]),
            "rows": counts,
            "lost_share": train_writer.lost_share,
        }
        (folder / "packed.json").write_text(json.dumps(facts), encoding="utf-8")


def _divided(documents: Iterable[tuple[str, str]], borders: Mapping[str, int]) -> Iterator[Placed]:
    """Each document in its split; a domain without a border is all training."""
    for name, text in documents:
        is_held_out = name in borders and cache.text_hash(text) <= borders[name]
        yield name, text, "validation" if is_held_out else "train"


def _holdout_borders(config: CorpusConfig, part: Part, names: Sequence[str]) -> dict[str, int]:
    """{domain: the largest hash of a held-out document}, without a validation split.

    The share is exact for domains within the first `_HOLDOUT_SAMPLE` documents, at least one
    document, and right up to sampling error beyond. If only n of a domain's documents are among
    them, a share of about 1 / (n + 1) or more is held out. With `max_tokens_per_domain` the
    documents that may fill every domain are enough, if they are `_HOLDOUT_LEAST` of each.
    """
    if config.validation_fraction == ALL:
        return dict.fromkeys(names, 2**64)
    hashes: dict[str, set[int]] = {name: set() for name in names}
    limit, count = config.max_tokens_per_domain, 0
    unread = dict.fromkeys(names, math.inf if limit is None else _CHARS_PER_TOKEN * limit)
    sample = itertools.islice(part.train(), _HOLDOUT_SAMPLE)
    for name, text in progress.over(sample, "choosing held-out documents"):
        count += 1
        # Of a domain that is full no more: the others must not decide how many.
        if name in unread:
            hashes[name].add(cache.text_hash(text))
            unread[name] -= len(text)
            if unread[name] <= 0 and len(hashes[name]) >= _HOLDOUT_LEAST:
                del unread[name]
        if not unread:
            break
    borders = {}
    for name, found in hashes.items():
        if len(found) < 2 and count == _HOLDOUT_SAMPLE:
            # Rare, or only further on.
            borders[name] = int(config.validation_fraction * 2**64)
            continue
        if len(found) == 1:
            raise ValueError(
                f"A domain without a validation split holds out documents; {name} has only one. "
                "Give it a validation file, more documents (a text file is cut at blank lines), or "
                "leave it out (--domains)."
            )
        if found:
            held = max(1, round(config.validation_fraction * len(found)))
            # At least one document stays for training, whatever the fraction.
            borders[name] = sorted(found)[min(held, len(found) - 1) - 1]
    return borders


def _fill(
    writers: "Writers", documents: Iterable[Placed], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Tokenise the documents and hand them to the writers, until all of these are full."""
    backend, end_of_text = packing_tokenizer(tokenizer), end_of_text_id(tokenizer)
    unknown = unknown_ids(tokenizer)
    # No use in tokenising far past a limit.
    limit = max(writer.limit for writer in writers.values())
    chars = min(_BATCH_CHARS, _CHARS_PER_TOKEN * limit)
    wanted = _wanted(writers, documents)
    while batch := _batch(wanted, chars):
        texts = [text for _, text, _ in batch]
        # Only the slower one says which characters a token stands for.
        is_sampled = any(writers[name, split].is_sampled for name, _, split in batch)
        encode = backend.encode_batch if is_sampled else backend.encode_batch_fast
        with reading(tokenizer.name_or_path):
            encodings = encode(texts, add_special_tokens=False)
        for (name, text, split), encoding in zip(batch, encodings, strict=True):
            writer = writers[name, split]
            if is_sampled and writer.is_sampled:
                writer.sample(*lost_characters(text, encoding, unknown))
            writer.add([*encoding.ids, end_of_text])


def _wanted(writers: "Writers", documents: Iterable[Placed]) -> Iterator[Placed]:
    """The documents for which there is a writer that is not full, until there is no such writer."""
    names = {name for name, _ in writers}
    for count, (name, text, split) in enumerate(documents):
        unfilled = {name for (name, _), writer in writers.items() if not writer.is_full}
        if not unfilled:
            return
        # A name that no row has would be looked for to the end of the data.
        if unfilled < names:
            full, left = (", ".join(sorted(found)) for found in (names - unfilled, unfilled))
            _log.info("Enough of %s after %d documents; reading on for %s.", full, count, left)
            names = unfilled
        if (name, split) in writers and not writers[name, split].is_full:
            yield name, text, split


def _batch(documents: Iterator[Placed], max_chars: int) -> list[Placed]:
    """As many documents as one call of the tokenizer takes."""
    batch: list[Placed] = []
    for document in itertools.islice(documents, _BATCH_DOCUMENTS):
        batch.append(document)
        max_chars -= len(document[1])
        if max_chars <= 0:
            break
    return batch


class _BlockWriter:
    """Cuts a stream of tokens into blocks of an Arrow file; the rest of the last block is lost."""

    _BLOCKS_PER_WRITE = 1000

    def __init__(self, path: Path, block_size: int, vocab_size: int, limit: int | None) -> None:
        self.block_size = block_size
        self.limit = sys.maxsize if limit is None else max(limit // block_size, 1) * block_size
        self.documents = self.document_tokens = 0
        self.tokens = 0
        self.lost = self.sampled = 0
        self.sha256 = hashlib.sha256()
        self.pending = array("H" if vocab_size <= 2**16 else "i")
        value = pa.from_numpy_dtype(self.pending.typecode)
        self.schema = pa.schema([("input_ids", pa.list_(value, block_size))])
        self.writer = pa.ipc.new_stream(str(path), self.schema)

    @property
    def is_full(self) -> bool:
        return self.tokens >= self.limit

    @property
    def is_sampled(self) -> bool:
        """Whether the tokenizer's knowledge of the text is still looked at."""
        return self.sampled < _SAMPLE_CHARS

    @property
    def lost_share(self) -> float:
        return self.lost / max(1, self.sampled)

    def sample(self, lost: int, chars: int) -> None:
        """Count characters of a document, and those of them that the tokenizer does not know."""
        self.lost += lost
        self.sampled += chars

    @property
    def digest(self) -> str:
        """Of all blocks that were written."""
        return self.sha256.hexdigest()

    def add(self, ids: Sequence[int]) -> None:
        """The tokens of a document, up to the limit."""
        if self.is_full:
            return
        self.documents += 1
        self.document_tokens += len(ids)
        ids = ids[: self.limit - self.tokens]
        self.tokens += len(ids)
        self.pending.extend(ids)
        if len(self.pending) >= self._BLOCKS_PER_WRITE * self.block_size:
            self._flush()

    def close(self) -> None:
        self._flush()
        self.writer.close()

    def _flush(self) -> None:
        """Write the whole blocks among the pending tokens."""
        if whole := len(self.pending) // self.block_size * self.block_size:
            values = np.array(self.pending[:whole])
            # The same for both widths of a number.
            self.sha256.update(values.astype("<i4").tobytes())
            blocks = pa.FixedSizeListArray.from_arrays(pa.array(values), self.block_size)
            self.writer.write_batch(pa.record_batch([blocks], schema=self.schema))
            del self.pending[:whole]


# {(domain, split): where its tokens go}.
Writers = dict[tuple[str, str], _BlockWriter]
