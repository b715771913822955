"""The corpus: domains as blocks of tokens, held-out blocks, and the batches of both stages.

`sources` finds the text and `packing` turns it into blocks; a stage calls this module alone. The
blocks of a step are a pure function of the seed and the step.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast

from doge_fast.mixture.counts import MixtureCounts, Phase
from doge_fast.mixture.permutation import Ints, shuffled
from doge_fast.pipeline import baselines, cache, named
from doge_fast.pipeline.config import MIX, UNIVERSAL, CorpusConfig
from doge_fast.pipeline.config.ranges import check_paths
from doge_fast.pipeline.failures import UserError
from doge_fast.pipeline.packing import ALL, Packed, pack, select
from doge_fast.pipeline.progress import tell_once
from doge_fast.pipeline.records.schema import CorpusRecord, DomainSizes
from doge_fast.pipeline.sizes import Settings
from doge_fast.pipeline.sources import Part, find_parts
from doge_fast.pipeline.tokenizer import open_tokenizer, tokenizer_sha256, vocabulary_size
from doge_fast.sampling import pieces

Batch = dict[str, Tensor]

# "mix" holds out this share of the training blocks, in runs of neighbours, which often share a
# document.
_MIX_SHARE = 0.05
_MIX_RUN = 8
_MIX_MIN_BLOCKS = 4

# Whole documents are held out, so with few documents the share varies. A share this far above
# `validation_fraction` gets a warning.
_MAX_EXCESS = 0.2


@dataclass(frozen=True)
class Corpus:
    """Domains of tokens, packed into blocks."""

    blocks: datasets.Dataset
    """Blocks of all domains, in numpy format; columns `input_ids`, `domain` and `held_out`."""
    names: tuple[str, ...]
    """Training domains, in order."""
    targets: tuple[str, ...]
    """Domains that are measured and never trained on, in order; without "mix"."""
    train: Mapping[str, datasets.Dataset]
    """{training or target domain: blocks that are not held out}."""
    validation: Mapping[str, datasets.Dataset]
    """{training or target domain: held-out blocks}."""
    packed: Mapping[str, Packed]
    cut: tuple[str, ...]
    """Domains whose documents are pieces cut from text files; their lengths mean nothing."""
    tokenizer: PreTrainedTokenizerFast
    tokenizer_sha256: str
    block_size: int
    mix: Mapping[str, datasets.Dataset] | None = None
    """{training domain: blocks for "mix" batches, not in `train`}; None: no target "mix"."""
    warnings: tuple[str, ...] = ()
    """Oddities of the corpus that affect the results."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return vocabulary_size(self.tokenizer)

    @property
    def documents(self) -> dict[str, int]:
        """{domain: number of training documents}."""
        return {name: packed.documents for name, packed in self.packed.items()}

    @property
    def document_tokens(self) -> dict[str, int]:
        """{domain: tokens of these documents}; the last one counts whole, even beyond a limit."""
        return {name: packed.document_tokens for name, packed in self.packed.items()}

    @property
    def digests(self) -> dict[str, str]:
        """{domain: digest of all its blocks}."""
        return {name: cache.digest(packed.sha256) for name, packed in self.packed.items()}

    @property
    def train_tokens(self) -> dict[str, int]:
        """{training or target domain: tokens in its blocks in `train`}."""
        return {name: len(blocks) * self.block_size for name, blocks in self.train.items()}

    @property
    def tokens(self) -> dict[str, int]:
        """`train_tokens` of the training domains alone."""
        return {name: self.train_tokens[name] for name in self.names}

    def describe(self) -> CorpusRecord:
        """The record that a resumed run compares its corpus with."""
        return CorpusRecord(
            {name: self._describe(name) for name in self.names},
            {name: self._describe(name) for name in self.targets},
            self.tokenizer_sha256,
            self.block_size,
            self.vocab_size,
        )

    def sizes(self, name: str) -> dict[str, float]:
        """Sizes of a domain, as fields of its entry in weights.json."""
        tokens: dict[str, float] = {"tokens": self.train_tokens[name]}
        if name in self.cut:
            return tokens
        mean = self.document_tokens[name] / self.documents[name]
        return {**tokens, "documents": self.documents[name], "mean_doc_tokens": mean}

    def _describe(self, name: str) -> DomainSizes:
        return DomainSizes(
            train_tokens=self.train_tokens[name],
            train_blocks=len(self.train[name]),
            validation_blocks=len(self.validation[name]),
            documents=self.documents[name],
            digest=self.digests[name],
        )


def load_corpus(
    config: CorpusConfig,
    *,
    targets: Sequence[str] = (),
    followed: Sequence[str] = (),
    is_measured: bool = False,
    before_packing: Callable[[tuple[str, ...], PreTrainedTokenizerFast], None] | None = None,
) -> Corpus:
    """Read, tokenise and pack the corpus, or load it from the cache.

    `config.data` is a directory with a folder or file per domain; a file, a directory or a Hub id
    with a `config.domain_column`; a Hub id whose configurations are the domains; or "installed",
    text files of this Python environment.

    A domain without a validation split holds out `config.validation_fraction` of its documents by
    a hash of the text: the split is stable and never separates equal documents of a domain. If
    much more of the text is held out, the corpus has a warning.
    With `config.max_tokens_per_domain` reading stops once every domain is full.

    Args:
        config: where the text is and how it becomes blocks.
        targets: domains to measure. Those not in `config.domains` are held out of training.
            "mix" holds out a slice of every training domain; "universal" adds no domain.
        followed: further domains to measure, if the corpus has them.
        is_measured: nothing is trained on, so a domain without a validation split is held out
            whole, and there are no warnings about held-out shares.
        before_packing: called with the training domains and the tokenizer; may raise.

    Raises:
        UserError: the text, a domain, a target or the tokenizer is missing or unusable, or a
            number in `config` is out of range. Nothing is written but finished cache entries.
    """
    check_paths(config)
    # Without a model there is no size to have it from.
    config = replace(config, block_size=config.block_size or Settings().block_size)
    held_out = [name for name in dict.fromkeys(targets) if name not in (UNIVERSAL, MIX)]
    parts = find_parts(config, held_out)
    held_out += [name for name in followed if name in parts and name not in held_out]
    names = _choose_names(config, held_out, sorted(parts))
    held_out = [name for name in held_out if name not in names]
    chosen = {name: parts[name] for name in (*names, *held_out)}
    groups: dict[Part, list[str]] = {}
    for name, part in chosen.items():
        groups.setdefault(part, []).append(name)
    warnings = [line for part in groups for line in part.oddities]
    for warning in warnings:
        # Logged first: reading a file that holds no text may raise.
        tell_once(warning, logging.WARNING)
    tokenizer = open_tokenizer(config, groups)
    if before_packing is not None:
        before_packing(names, tokenizer)
    if is_measured:
        config = replace(config, validation_fraction=ALL)
    sha256 = tokenizer_sha256(tokenizer)
    together = [pack(config, part, own, tokenizer, sha256) for part, own in groups.items()]
    blocks = datasets.concatenate_datasets([each for each, _, _ in together]).with_format("numpy")
    # Batches read no other column.
    tokens = blocks.with_format("numpy", columns=["input_ids"])
    train, validation = (
        {name: select(tokens, name, held) for name in chosen} for held in (False, True)
    )
    if not is_measured:
        _tell_held_out(chosen, config)
        sizes = {name: (len(train[name]), len(validation[name])) for name in chosen}
        warnings += _held_out_warnings(chosen, sizes, config)
    warnings += _limit_warnings(train, config)
    warnings += [line for _, _, lines in together for line in lines]
    for warning in warnings:
        tell_once(warning, logging.WARNING)
    mix = {}
    if MIX in targets:
        for name in names:
            train[name], mix[name] = _reserve(train[name], name)
    return Corpus(
        blocks=blocks,
        names=names,
        targets=tuple(held_out),
        train=train,
        validation=validation,
        packed={name: each for _, packed, _ in together for name, each in packed.items()},
        cut=tuple(name for name, part in chosen.items() if part.is_cut),
        tokenizer=tokenizer,
        tokenizer_sha256=sha256,
        block_size=config.block_size,
        mix=mix or None,
        warnings=tuple(warnings),
    )


def _tell_held_out(parts: Mapping[str, Part], config: CorpusConfig) -> None:
    """Log what is held out of every domain, and how it was chosen."""
    by_name = [f"{name} {part.held_out}" for name, part in parts.items() if part.held_out]
    by_hash = [name for name, part in parts.items() if not part.is_divided]
    told = [f"by their names: {'; '.join(by_name)}"] if by_name else []
    if by_hash:
        share = f"{config.validation_fraction:.3g} of the documents of {', '.join(by_hash)}"
        told.append(f"by a hash of their text: {share}")
    tell_once(f"{config.data}: held out, {'; and, '.join(told)}.")


def _held_out_warnings(
    parts: Mapping[str, Part], sizes: Mapping[str, tuple[int, int]], config: CorpusConfig
) -> Iterator[str]:
    """Warn of domains with far more held out than `validation_fraction`, or by name over a half.

    Args:
        parts: {domain: its source}.
        sizes: {domain: (training blocks, held-out blocks)}.
        config: settings of the corpus.
    """
    for name, part in parts.items():
        num_train, num_held = sizes[name]
        share = num_held / (num_train + num_held)
        most, why = 0.5, f"by name: {part.held_out}"
        if not part.is_divided:
            asked = config.validation_fraction
            most = asked + _MAX_EXCESS
            why = (
                f"where validation_fraction (--validation-fraction) asks for {asked:.0%}, for "
                "whole documents are held out"
            )
        if share > most:
            yield (
                f"{name}: {share:.0%} of its tokens are held out, {why}. Natural weights, epochs "
                "and perplexities follow from that."
            )


def _limit_warnings(train: Mapping[str, datasets.Dataset], config: CorpusConfig) -> Iterator[str]:
    """Warn of domains that fill `max_tokens_per_domain`: their full size is unknown."""
    limit = config.max_tokens_per_domain
    if limit is None:
        return
    most = limit // config.block_size
    if full := [name for name, blocks in train.items() if len(blocks) >= most]:
        yield (
            f"{', '.join(full)}: read as far as max_tokens_per_domain (--max-tokens-per-domain), "
            f"{limit}. The tokens and documents counted of them are what was read and not their "
            "size, and natural weights and epochs follow from that."
        )


def _reserve(blocks: datasets.Dataset, name: str) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split training blocks into (blocks to train on, blocks for "mix", in evenly spaced runs)."""
    count = max(_MIX_MIN_BLOCKS, int(len(blocks) * _MIX_SHARE))
    if len(blocks) < 2 * count:
        raise UserError(
            f"The target mix holds out {count} training blocks of every domain; {name} has only "
            f"{len(blocks)}. Give it more text, a smaller block_size (--block-size), or another "
            "target."
        )
    is_held = np.zeros(len(blocks), dtype=bool)
    num_runs = -(-count // _MIX_RUN)
    for run in range(num_runs):
        end = (run + 1) * len(blocks) // num_runs
        length = count // num_runs + (run < count % num_runs)
        is_held[end - length : end] = True
    return blocks.select(np.flatnonzero(~is_held)), blocks.select(np.flatnonzero(is_held))


def _choose_names(
    config: CorpusConfig, targets: Sequence[str], found: Sequence[str]
) -> tuple[str, ...]:
    """Training domains in order: `config.domains`, or all domains of the corpus but the targets."""
    if twice := sorted({name for name in config.domains if config.domains.count(name) > 1}):
        raise UserError(f"A domain is named once; domains names {', '.join(twice)} twice.")
    named.check_known("domains", config.domains, found, config.data)
    named.check_known("target", targets, found, config.data)
    names = config.domains or tuple(name for name in found if name not in targets)
    if not names:
        raise UserError(
            f"Training needs a domain; {config.data} holds {', '.join(found) or 'none'} and the "
            f"targets are {', '.join(targets)}."
        )
    for word in (UNIVERSAL, MIX):
        if word in names:
            raise UserError(
                f'No domain may be named "{word}", a word of the target; {config.data} has one. '
                "Rename it, or name the others with domains."
            )
    return names


def domain_blocks(seed: int, step: int, *, domain: str, num_blocks: int, size: int) -> Ints:
    """[size] int64: indices of a domain's blocks in proxy batch `step`.

    They are positions step * size to (step + 1) * size - 1 of an endless stream. An epoch of the
    stream holds every block once, in a new order. The order depends on the seed and the domain's
    name alone, so adding or removing other domains does not change it.
    """
    first = step * size
    return shuffled(seed, ("train", domain), np.arange(first, first + size), num_blocks)


class BlockSampler(MixtureCounts):
    """Draws the blocks of each domain for the batches of stage two.

    `MixtureCounts` gives the number of blocks per domain. Their indices follow from the number
    drawn in all earlier batches, which has a closed form, so no data is replayed.

    Args:
        seed: seed of the run.
        phases: weights in order, the first from step 0; two or more form a curriculum.
        batch_size: > 0; blocks in a batch, over all domains.
        num_blocks: {domain: number of its blocks}, in the order of the batch.
        stream: name of the random stream; equal seeds and names draw the same order.
    """

    def __init__(
        self,
        seed: int,
        phases: Sequence[Phase],
        batch_size: int,
        num_blocks: Mapping[str, int],
        stream: str = "train",
    ) -> None:
        super().__init__(seed, phases, batch_size, list(num_blocks))
        self.stream = stream
        self.num_blocks = dict(num_blocks)

    def blocks(self, step: int) -> dict[str, Ints]:
        """{domain: int64 indices} of batch `step`, in the order of `num_blocks`; some empty."""
        counts_K = self.counts(np.array([step]))[0]
        counted = zip(self.num_blocks.items(), self.drawn(step), counts_K, strict=True)
        return {
            name: shuffled(self.seed, (self.stream, name), np.arange(first, first + count), size)
            for (name, size), first, count in counted
        }


class Batches(IterableDataset[Any]):
    """The batches of a run from `start_step` on; `batch` maps a step to its whole batch."""

    def __init__(self, batch: Callable[[int], Any], start_step: int = 0) -> None:
        self.batch, self.start_step = batch, start_step

    def __iter__(self) -> Iterator[Any]:
        """Yield batches without end."""
        return map(self.batch, itertools.count(self.start_step))


def mix_sampler(corpus: Corpus, *, size: int, seed: int) -> BlockSampler | None:
    """A sampler of "mix" blocks, uniform over domains; None: the corpus has reserved none."""
    if corpus.mix is None:
        return None
    num_blocks = {name: len(blocks) for name, blocks in corpus.mix.items()}
    uniform = Phase(0, baselines.uniform(num_blocks))
    return BlockSampler(seed, [uniform], size, num_blocks, stream=MIX)


def proxy_batch(
    corpus: Corpus, step: int, *, size: int, seed: int, mix: BlockSampler | None
) -> dict[str, Batch]:
    """Blocks of every training domain and target, and of "mix" if it has a sampler.

    {name: {"input_ids": [size, L] int64, "labels": the same}}; `seed` determines their order.
    """
    batches = {}
    for name in (*corpus.names, *corpus.targets):
        num_blocks = len(corpus.train[name])
        rows = domain_blocks(seed, step, domain=name, num_blocks=num_blocks, size=size)
        batches[name] = _mixed_batch(corpus.train, {name: rows})
    if mix is not None and corpus.mix is not None:
        batches[MIX] = _mixed_batch(corpus.mix, mix.blocks(step))
    return batches


def mixed_batch(
    corpus: Corpus, drawn: Mapping[str, Ints], place: tuple[int, int] = (0, 1)
) -> Batch:
    """This rank's rows of the blocks that a `BlockSampler` has drawn, in the order of `drawn`.

    {"input_ids": [B, L] int64, "labels": the same, "domain_ids": [B] int64}; `place` is (rank,
    number of ranks).
    """
    mine = pieces({name: len(rows) for name, rows in drawn.items()}, *place)
    rows = {name: drawn[name][slice(*mine.get(name, (0, 0)))] for name in drawn}
    sizes = [len(indices) for indices in rows.values()]
    ids = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
    return _mixed_batch(corpus.train, rows) | {"domain_ids": ids}


def _mixed_batch(blocks: Mapping[str, datasets.Dataset], rows: Mapping[str, Ints]) -> Batch:
    """Concatenate the rows of the domains, with labels for a causal model."""
    parts = [
        np.asarray(blocks[name][indices.tolist()]["input_ids"], dtype=np.int64)
        for name, indices in rows.items()
        if len(indices)
    ]
    ids = torch.from_numpy(np.concatenate(parts))
    return {"input_ids": ids, "labels": ids}
