"""Packs documents into blocks of tokens, once.

Text is tokenised, joined by the end-of-text token and cut into blocks of fixed length. The cache
keeps the blocks as a data set with the columns `input_ids`, `domain` and `held_out`, under a digest
of all that they depend on.
"""

import collections
import hashlib
import itertools
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerFast

from doge_fast.pipeline import cache, progress
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.failures import FileFailure, UserError, reading
from doge_fast.pipeline.records.schema import check_shape, read_json
from doge_fast.pipeline.sources import ROWS, WITHOUT_DOMAIN, WITHOUT_TEXT, Counts, Part
from doge_fast.pipeline.tokenizer import (
    end_of_text_id,
    lost_characters,
    packing_tokenizer,
    unknown_ids,
    vocabulary_size,
)
from doge_fast.weights.weights_file import write_json

_log = logging.getLogger("doge_fast")

# Part of every cache key; to be changed when the same input gives other blocks.
_BLOCKS_FORMAT = 9
# Characters of each domain that are tested for being known to the tokenizer.
_SAMPLE_CHARS = 100_000
# Most tokenizers lack some rare characters. One for other languages lacks nearly all.
_MAX_LOST = 0.05
# Documents whose hashes set the border of the held-out share.
_HOLDOUT_SAMPLE = 100_000
# Per domain: at a share of a twentieth its sampling error is a seventh.
_HOLDOUT_LEAST = 1000
# A token rarely has more characters.
_CHARS_PER_TOKEN = 8
_BATCH_DOCUMENTS = 256
_BATCH_CHARS = 1_000_000
# The `validation_fraction` where no document is used for training.
ALL = 1.0
_ROWS_PER_DIGEST = 10_000

# Domain, text, and whether it is held out.
Placed = tuple[str, str, bool]


@dataclass(frozen=True)
class Packed:
    """Counts and digests of a packed domain."""

    documents: int
    """Number of documents in the training blocks."""
    document_tokens: int
    """Tokens of these documents, with those that a limit cut off the last one."""
    sha256: tuple[str, str]
    """Of the training blocks, and of the held-out blocks."""


@dataclass(frozen=True)
class PackedRecord:
    """The file beside the blocks of a part."""

    domains: dict[str, Packed]
    warnings: list[str]


def pack(
    config: CorpusConfig,
    part: Part,
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    tokenizer_sha256: str,
) -> tuple[datasets.Dataset, dict[str, Packed], list[str]]:
    """The blocks of a part; packs them if the cache lacks them.

    Returns:
        (A data set with the columns `input_ids`, `domain` and `held_out`; {domain: its counts};
        warnings.)

    Raises:
        UserError: a domain has too little text.
        FileFailure: the cache no longer holds what was written.
    """
    fraction = None if part.is_divided else config.validation_fraction
    # All that blocks depend on.
    facts = [part.text_column, tokenizer_sha256, end_of_text_id(tokenizer)]
    facts += [config.block_size, config.max_tokens_per_domain, fraction]
    key = cache.digest([_BLOCKS_FORMAT, part.fingerprint, sorted(names), *facts])
    # Stored beside the blocks, and written before they are complete.
    file = cache.folder(config) / f"{key}.json"
    # uint16 holds most vocabularies, in half the space.
    token = "uint16" if vocabulary_size(tokenizer) <= 2**16 else "int32"

    def rows() -> Iterator[Mapping[str, Any]]:
        counts: Counts = collections.Counter()
        streams = {
            (name, held_out): _Stream(config, part, name, held_out, token)
            for name in names
            for held_out in (False, True)
        }
        yield from _blocks(config, part, tokenizer, streams, counts)
        _check_enough(config, streams)
        domains = {name: _packed(streams, name) for name in names}
        write_json(file, PackedRecord(domains, [*_warnings(config, part, streams, counts)]))

    blocks = cache.cached(
        config,
        key,
        rows,
        input_ids=datasets.List(datasets.Value(token), length=config.block_size),
        domain=datasets.Value("string"),
        held_out=datasets.Value("bool"),
    )
    record = check_shape(read_json(file), PackedRecord, file)
    digests = _digests(blocks)
    for name, each in record.domains.items():
        if tuple(digests[name, held].hexdigest() for held in (False, True)) != each.sha256:
            raise FileFailure(
                f"{blocks.cache_files[0]['filename']} does not hold the blocks of {name} that were "
                "written there. Remove its folder, to have it made again."
            )
    return blocks, record.domains, record.warnings


def select(blocks: datasets.Dataset, name: str, held_out: bool) -> datasets.Dataset:
    """A domain's blocks of a split."""
    domains, held = (blocks.data.column(column) for column in ("domain", "held_out"))
    is_own = pc.and_(pc.equal(domains, name), pc.equal(held, held_out))
    return blocks.select(np.flatnonzero(is_own.to_numpy()))


def _digests(blocks: datasets.Dataset) -> Mapping[tuple[str, bool], Any]:
    """{(domain, whether it is held out): SHA-256 of its tokens}, in one pass over the file.

    A split drawn by hash is scattered over the file; a pass for each split would read single rows.
    """
    digests: Mapping[tuple[str, bool], Any] = collections.defaultdict(hashlib.sha256)
    for batch in blocks.with_format("arrow").iter(_ROWS_PER_DIGEST):
        tokens = batch["input_ids"].combine_chunks().flatten().to_numpy().reshape(len(batch), -1)
        names, held = np.array(batch["domain"].to_pylist()), batch["held_out"].to_numpy()
        for name, is_held in set(zip(names.tolist(), held.tolist(), strict=True)):
            own = tokens[(names == name) & (held == is_held)]
            digests[name, is_held].update(own.tobytes())
    return digests


def _packed(streams: "Streams", name: str) -> Packed:
    train, held_out = streams[name, False], streams[name, True]
    digests = train.sha256.hexdigest(), held_out.sha256.hexdigest()
    return Packed(train.documents, train.document_tokens, digests)


def _warnings(
    config: CorpusConfig, part: Part, streams: "Streams", counts: Counts
) -> Iterator[str]:
    """About rows without text or domain, and about characters unknown to the tokenizer."""
    where = config.data if part.domain is None else part.domain
    for kind, column in ((WITHOUT_TEXT, part.text_column), (WITHOUT_DOMAIN, part.domain_column)):
        if count := counts[kind]:
            yield (
                f"{where}: {count} of {counts[ROWS]} rows are {kind}, that is with nothing in the "
                f'column "{column}", and are left out.'
            )
    for (name, held_out), stream in streams.items():
        share = stream.lost / max(1, stream.sampled)
        if share > _MAX_LOST and not held_out:
            yield (
                f"{name}: {share:.0%} of its characters are unknown to the tokenizer, which makes "
                "them unknown tokens or drops them, so losses and weights say little about its "
                "text."
            )


def _check_enough(config: CorpusConfig, streams: "Streams") -> None:
    """Raise UserError if a split that is needed has less than one block."""
    for (name, held_out), stream in streams.items():
        is_needed = held_out or config.validation_fraction < ALL
        if is_needed and stream.tokens < config.block_size:
            is_named = stream.documents or config.domain_column is None
            there = f"{stream.tokens} tokens" if is_named else f"no text in {config.data}"
            raise UserError(
                f"A domain needs a block of {config.block_size} tokens in every split; the "
                f"{'validation' if held_out else 'train'} split of {name} has {there}. Give it "
                "more text, a smaller block_size (--block-size) or another validation_fraction "
                "(--validation-fraction)."
            )


def _blocks(
    config: CorpusConfig,
    part: Part,
    tokenizer: PreTrainedTokenizerFast,
    streams: "Streams",
    counts: Counts,
) -> Iterator[Mapping[str, Any]]:
    """The rows of the data set, in one pass over the documents of each split."""
    names = list(dict.fromkeys(name for name, _ in streams))
    train = progress.over(part.documents(counts=counts), f"packing {', '.join(names)}")
    if not part.is_divided:
        placed = _divided(train, _holdout_borders(config, part, names))
        yield from _fill(streams, placed, tokenizer)
        return
    held_out = progress.over(part.documents(held_out=True), f"packing held-out {', '.join(names)}")
    for is_held, documents in ((False, train), (True, held_out)):
        own = {key: stream for key, stream in streams.items() if key[1] == is_held}
        yield from _fill(own, ((*each, is_held) for each in documents), tokenizer)


def _divided(documents: Iterable[tuple[str, str]], borders: Mapping[str, int]) -> Iterator[Placed]:
    """Assign the documents to splits; a domain without a border is all training."""
    for name, text in documents:
        yield name, text, name in borders and cache.text_hash(text) <= borders[name]


def _holdout_borders(config: CorpusConfig, part: Part, names: Sequence[str]) -> dict[str, int]:
    """{domain: the largest hash of a held-out document}, for data without a validation split.

    The sample is the first `_HOLDOUT_SAMPLE` documents. A domain that is all in the sample has the
    exact share, and at least one document, held out. Other domains have a sampling error: with n
    documents in the sample, about 1 / (n + 1) or more is held out. With `max_tokens_per_domain` the
    sample ends once it may fill every domain and has `_HOLDOUT_LEAST` documents of each.
    """
    if config.validation_fraction == ALL:
        return dict.fromkeys(names, 2**64)
    hashes: dict[str, set[int]] = {name: set() for name in names}
    limit, count = config.max_tokens_per_domain, 0
    unread = dict.fromkeys(names, math.inf if limit is None else _CHARS_PER_TOKEN * limit)
    sample = itertools.islice(part.documents(), _HOLDOUT_SAMPLE)
    for name, text in progress.over(sample, "choosing held-out documents"):
        count += 1
        # A full domain takes no more: its border must not depend on the other domains.
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
            # The domain is rare, or begins after the sample.
            borders[name] = int(config.validation_fraction * 2**64)
            continue
        if len(found) == 1:
            raise UserError(
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
    streams: "Streams", documents: Iterable[Placed], tokenizer: PreTrainedTokenizerFast
) -> Iterator[Mapping[str, Any]]:
    """Tokenise the documents and cut them into blocks, until all streams are full."""
    backend, end_of_text = packing_tokenizer(tokenizer), end_of_text_id(tokenizer)
    unknown = unknown_ids(tokenizer)
    # Small batches, so that little is tokenised past a limit.
    chars = min(_BATCH_CHARS, _CHARS_PER_TOKEN * max(each.limit for each in streams.values()))
    wanted = _wanted(streams, documents)
    while batch := _batch(wanted, chars):
        texts = [text for _, text, _ in batch]
        # Only the slower one returns the characters of each token.
        is_sampled = any(streams[name, held].is_sampled for name, _, held in batch)
        encode = backend.encode_batch if is_sampled else backend.encode_batch_fast
        with reading(tokenizer.name_or_path):
            encodings = encode(texts, add_special_tokens=False)
        for (name, text, is_held), encoding in zip(batch, encodings, strict=True):
            stream = streams[name, is_held]
            if is_sampled and stream.is_sampled:
                lost, sampled = lost_characters(text, encoding, unknown)
                stream.lost += lost
                stream.sampled += sampled
            yield from stream.add([*encoding.ids, end_of_text])


def _wanted(streams: "Streams", documents: Iterable[Placed]) -> Iterator[Placed]:
    """The documents of streams that are not full, until all streams are."""
    names = {name for name, _ in streams}
    for count, (name, text, is_held) in enumerate(documents):
        unfilled = {name for (name, _), stream in streams.items() if not stream.is_full}
        if not unfilled:
            return
        # Logged, since a domain that no row names makes this read to the end of the data.
        if unfilled < names:
            full, left = (", ".join(sorted(found)) for found in (names - unfilled, unfilled))
            _log.info("Enough of %s after %d documents; reading on for %s.", full, count, left)
            names = unfilled
        if (name, is_held) in streams and not streams[name, is_held].is_full:
            yield name, text, is_held


def _batch(documents: Iterator[Placed], max_chars: int) -> list[Placed]:
    """As many documents as one call of the tokenizer takes."""
    batch: list[Placed] = []
    for document in itertools.islice(documents, _BATCH_DOCUMENTS):
        batch.append(document)
        max_chars -= len(document[1])
        if max_chars <= 0:
            break
    return batch


class _Stream:
    """The tokens of a domain's split, cut into blocks; an incomplete last block is dropped."""

    def __init__(
        self, config: CorpusConfig, part: Part, name: str, held_out: bool, dtype: str
    ) -> None:
        self.name, self.held_out, self.dtype = name, held_out, dtype
        self.block_size = config.block_size
        limit = config.max_tokens_per_domain
        if limit is not None and held_out and not part.is_divided:
            limit = int(config.validation_fraction * limit)
        size = self.block_size
        self.limit = sys.maxsize if limit is None else max(limit // size, 1) * size
        self.documents = self.document_tokens = self.tokens = 0
        # Characters that were tested, and those of them that the tokenizer does not know.
        self.sampled = self.lost = 0
        self.sha256 = hashlib.sha256()
        self.pending: list[int] = []

    @property
    def is_full(self) -> bool:
        return self.tokens >= self.limit

    @property
    def is_sampled(self) -> bool:
        """Whether further text is tested for characters unknown to the tokenizer."""
        return self.sampled < _SAMPLE_CHARS

    def add(self, ids: Sequence[int]) -> Iterator[Mapping[str, Any]]:
        """The blocks that a document fills, up to the limit."""
        if self.is_full:
            return
        self.documents += 1
        self.document_tokens += len(ids)
        ids = ids[: self.limit - self.tokens]
        self.tokens += len(ids)
        self.pending += ids
        size = self.block_size
        whole = self.pending[: len(self.pending) // size * size]
        del self.pending[: len(whole)]
        self.sha256.update(np.array(whole, self.dtype).tobytes())
        for start in range(0, len(whole), size):
            # Lists, which datasets encodes faster than arrays.
            ids = whole[start : start + size]
            yield {"input_ids": ids, "domain": self.name, "held_out": self.held_out}


# {(domain, whether it is held out): its tokens}.
Streams = dict[tuple[str, bool], _Stream]
