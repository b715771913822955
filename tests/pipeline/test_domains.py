"""What is trained on and what is held out; and batches that any run, resumed or not, agrees on."""

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from doge_fast.mixture.counts import Phase
from doge_fast.pipeline.domains import (
    Batches,
    BlockSampler,
    Corpus,
    domain_blocks,
    load_corpus,
    mix_sampler,
    mixed_batch,
    proxy_batch,
)
from tests.pipeline.corpora import check_refused, saved_tokenizer, texts, write_jsonl


def test_targets_are_held_out_unless_trained_on(config):
    assert load_corpus(config, targets=["universal"]).names == ("code", "prose", "verse")
    loaded = load_corpus(config, targets=["prose"])
    assert (loaded.names, loaded.targets) == (("code", "verse"), ("prose",))
    assert set(loaded.train) == set(loaded.validation) == {"code", "verse", "prose"}
    named = load_corpus(replace(config, domains=("verse", "code")), targets=["code", "prose"])
    assert (named.names, named.targets) == (("verse", "code"), ("prose",))


def test_mix_is_never_trained_on(corpus, mixed):
    assert set(mixed.mix) == {"code", "prose"}
    for name in mixed.mix:
        whole = np.asarray(corpus.train[name][:]["input_ids"])
        kept = np.asarray(mixed.train[name][:]["input_ids"])
        held = np.asarray(mixed.mix[name][:]["input_ids"])
        assert len(held) == max(4, int(0.05 * len(whole)))
        both = np.concatenate([kept, held])
        assert sorted(map(bytes, both)) == sorted(map(bytes, whole))
    assert len(mixed.train["verse"]) == len(corpus.train["verse"])


def test_a_domain_named_like_a_target_word(tmp_path, config):
    write_jsonl(tmp_path / "mix.jsonl", texts("mix"))
    check_refused(replace(config, data=str(tmp_path)), 'No domain may be named "mix"')


def test_a_domain_too_small_for_mix(tmp_path, config):
    write_jsonl(tmp_path / "a.jsonl", texts("a", 2))
    with pytest.raises(ValueError, match="mix"):
        load_corpus(replace(config, data=str(tmp_path), block_size=64), targets=["mix"])


def proxy_batches(corpus: Corpus, start_step: int = 0) -> Batches:
    options = {"size": 3, "seed": 4}
    mix = mix_sampler(corpus, **options)
    return Batches(functools.partial(proxy_batch, corpus, mix=mix, **options), start_step)


def mixture_of(corpus: Corpus, weights: Mapping[str, float] | None = None) -> BlockSampler:
    num_blocks = {name: len(corpus.train[name]) for name in corpus.names}
    weights = weights or dict.fromkeys(corpus.names, 1 / len(corpus.names))
    return BlockSampler(4, [Phase(0, weights)], 7, num_blocks)


def base_batches(corpus: Corpus, start_step: int = 0) -> Batches:
    mixture = mixture_of(corpus)
    return Batches(lambda step: mixed_batch(corpus, mixture.blocks(step)), start_step)


def first(batches: Iterable[Any], count: int = 12) -> list[Any]:
    return list(itertools.islice(batches, count))


def test_batches_larger_than_a_domain_repeat_it_evenly():
    rows = domain_blocks(0, 2, domain="a", num_blocks=3, size=10)
    assert np.bincount(rows, minlength=3).min() >= 3
    with pytest.raises(ValueError, match="a has no blocks"):
        domain_blocks(0, 0, domain="a", num_blocks=0, size=1)


def test_the_order_is_that_of_every_version():
    """Records name a seed and a step: what they stand for must not change."""
    rows = domain_blocks(7, 4711, domain="arxiv", num_blocks=1000, size=6)
    assert rows.tolist() == [797, 908, 728, 674, 492, 708]


def test_proxy_batches_are_the_blocks_that_domain_blocks_names(mixed):
    batch = proxy_batches(mixed).batch(9)
    assert list(batch) == ["code", "prose", "verse", "mix"]
    for part in batch.values():
        assert part["input_ids"].shape == (3, 16)
        assert part["input_ids"].dtype == torch.int64
        assert torch.equal(part["labels"], part["input_ids"])
    rows = domain_blocks(4, 9, domain="prose", num_blocks=len(mixed.train["prose"]), size=3)
    assert batch["prose"]["input_ids"].tolist() == [
        mixed.train["prose"][int(row)]["input_ids"].tolist() for row in rows
    ]


def test_mix_batches_hold_out_blocks_of_every_domain(mixed):
    held = {
        name: {tuple(row) for row in np.asarray(blocks[:]["input_ids"])}
        for name, blocks in mixed.mix.items()
    }
    drawn: dict[str, int] = dict.fromkeys(held, 0)
    for batch in first(proxy_batches(mixed), 100):
        for row in batch["mix"]["input_ids"].tolist():
            (owner,) = [name for name, blocks in held.items() if tuple(row) in blocks]
            drawn[owner] += 1
    assert sum(drawn.values()) == 300
    assert abs(drawn["code"] - 150) <= 10


def test_another_domain_does_not_change_the_others(config, mixed):
    fixed = replace(config, tokenizer=saved_tokenizer(mixed))
    fewer = load_corpus(replace(fixed, domains=("prose",)), targets=["verse"])
    more = load_corpus(replace(fixed, domains=("code", "prose")), targets=["verse"])
    assert fewer.tokenizer_sha256 == mixed.tokenizer_sha256
    ours, theirs = proxy_batches(fewer).batch(5), proxy_batches(more).batch(5)
    for name in ("prose", "verse"):
        assert torch.equal(ours[name]["input_ids"], theirs[name]["input_ids"])


def test_base_batches_are_sorted_by_domain(corpus):
    weights = {"code": 0.5, "prose": 0.0, "verse": 0.5}
    mixture = mixture_of(corpus, weights)
    blocks_of = [
        {tuple(row) for row in np.asarray(corpus.train[name][:]["input_ids"])}
        for name in corpus.names
    ]
    for step in range(12):
        batch = mixed_batch(corpus, mixture.blocks(step))
        assert batch["input_ids"].shape == batch["labels"].shape == (7, 16)
        for row, index in zip(batch["input_ids"].tolist(), batch["domain_ids"], strict=True):
            assert tuple(row) in blocks_of[index]
        assert batch["domain_ids"].tolist() == sorted(batch["domain_ids"].tolist())
        counts_K = mixture.counts(np.array([step]))[0]
        counts = dict(zip(corpus.names, counts_K.tolist(), strict=True))
        assert counts["prose"] == 0
        assert counts == {
            name: batch["domain_ids"].tolist().count(index)
            for index, name in enumerate(corpus.names)
        }


@pytest.mark.parametrize("make", [proxy_batches, base_batches])
@pytest.mark.parametrize("start_step", [1, 12])
def test_a_resumed_run_sees_what_the_uninterrupted_one_would(mixed, make, start_step):
    whole = first(make(mixed))
    rest = first(make(mixed, start_step=start_step), 12 - start_step)
    for found, expected in (
        *zip(rest, whole[start_step:], strict=True),
        (make(mixed).batch(7), whole[7]),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
