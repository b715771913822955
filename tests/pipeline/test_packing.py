"""Text in, blocks out, once: nothing is lost, nor packed again without need; and their cache."""

import itertools
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from doge_fast.pipeline import cache, hub, packing
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.domains import load_corpus
from tests.pipeline.corpora import (
    documents,
    saved_tokenizer,
    text_of,
    texts,
    tokens,
    write_jsonl,
    write_rows,
)
from tests.ranks import FORKSERVER


def test_blocks_are_the_documents_and_nothing_else(corpus):
    train = texts("code", 30) + texts("more code", 30)
    expected = {"train": train, "validation": texts("held-out code", 9)}
    for split, originals in expected.items():
        found = documents(corpus, "code", split)
        assert found[:-1] == originals[: len(found) - 1]
        assert originals[len(found) - 1].startswith(found[-1])
        # Only the tokens that do not fill a block are lost.
        ids = corpus.tokenizer("\n".join(originals))["input_ids"]
        assert len(tokens(getattr(corpus, split)["code"])) > len(ids) - 2 * corpus.block_size


def test_a_document_that_is_most_of_a_domain_is_held_out_aloud(tmp_path, load):
    short, *_ = texts("a", 1)
    salted = (" ".join(texts(f"a {salt}", 20)) for salt in itertools.count())
    # The hash holds out what is nearly all of it.
    long = next(text for text in salted if cache.text_hash(text) < cache.text_hash(short))
    write_jsonl(tmp_path / "a.jsonl", [long, short])
    (warning,) = load(validation_fraction=0.05).warnings
    assert "held out, where validation_fraction" in warning


def test_equal_documents_fall_on_one_side(tmp_path, load):
    copies = [text_of("a", index % 12) for index in range(96)]
    write_jsonl(tmp_path / "a.jsonl", copies)
    loaded = load(validation_fraction=0.3)
    train = {text.split(":")[0] for text in documents(loaded, "a", "train")}
    held_out = {text.split(":")[0] for text in documents(loaded, "a", "validation")}
    assert len(held_out) == 4
    assert not train & held_out


def test_what_is_held_out_of_a_domain_does_not_depend_on_the_others(
    tmp_path, config, corpus, monkeypatch
):
    monkeypatch.setattr(packing, "_HOLDOUT_LEAST", 10)
    rows = [{"text": text_of("a", i), "set": "a"} for i in range(200)]
    rows += [{"text": text_of(name, i), "set": name} for i in range(200) for name in "ab"]
    asked = {"data": str(write_rows(tmp_path / "all.jsonl", rows)), "domain_column": "set"}
    asked |= {"max_tokens_per_domain": 800, "tokenizer": saved_tokenizer(corpus)}
    held = []
    for names in (("a",), ("a", "b")):
        fresh = replace(config, **asked, domains=names, cache_dir=tmp_path / names[-1])
        held.append(documents(load_corpus(fresh), "a", "validation"))
    assert held[0] == held[1]


def test_max_tokens_stops_there(config):
    loaded = load_corpus(replace(config, max_tokens_per_domain=100))
    assert loaded.train_tokens == {"code": 96, "prose": 96, "verse": 96}
    assert loaded.documents["prose"] < 10
    # The last document is longer than what the limit leaves of it.
    whole = load_corpus(config)
    for name in loaded.names:
        read = documents(loaded, name, "train")
        found = documents(whole, name, "train")[: loaded.documents[name]]
        assert read[:-1] == found[:-1]
        ids = loaded.tokenizer(found)["input_ids"]
        mean = sum(len(each) + 1 for each in ids) / len(ids)
        assert loaded.sizes(name)["mean_doc_tokens"] == pytest.approx(mean)
    # A split that the data brings is measured as far as the limit; a share stays a share.
    blocks = {name: len(loaded.validation[name]) for name in loaded.names}
    assert blocks == {"code": 6, "prose": 1, "verse": 1}


def test_max_tokens_reads_no_further(tmp_path, config, load):
    path = write_jsonl(tmp_path / "a" / "train.jsonl", texts("a", 90) * 400)
    with path.open("a") as file:
        file.write("this is not JSON\n" * 1000)
    write_jsonl(tmp_path / "a" / "validation.jsonl", texts("held-out a"))
    folder = saved_tokenizer(load_corpus(config))
    assert load(max_tokens_per_domain=64, tokenizer=folder).train_tokens == {"a": 64}


@pytest.fixture
def packings(blocks_cache: Path) -> Callable[[], list[str]]:
    """Gives the names of the domains that have been packed since it was last called."""
    known = set(blocks_cache.glob("corpora/*.json"))

    def packings() -> list[str]:
        made = set(blocks_cache.glob("corpora/*.json")) - known
        known.update(made)
        return sorted(name for file in made for name in json.loads(file.read_text())["domains"])

    return packings


def test_packed_once(config, corpus, packings):
    again = load_corpus(config)
    assert packings() == []
    assert again.describe() == corpus.describe()
    assert tokens(again.train["code"]) == tokens(corpus.train["code"])
    load_corpus(config, targets=["verse"])
    load_corpus(replace(config, domains=("verse", "prose", "code")))
    assert packings() == []


@pytest.mark.parametrize(
    ("change", "packed"),
    [
        ({"block_size": 12}, ["code", "prose", "verse"]),
        ({"vocab_size": 310}, ["code", "prose", "verse"]),
        ({"max_tokens_per_domain": 64}, ["code", "prose", "verse"]),
        # code brings its own validation split.
        ({"validation_fraction": 0.25}, ["prose", "verse"]),
    ],
    ids=str,
)
def test_another_packing_packs_what_it_concerns(config, corpus, packings, change, packed):
    load_corpus(replace(config, **change))
    assert packings() == packed


def test_a_text_written_over_with_its_size_and_time_kept_is_seen(tmp_path, load, packings):
    path = write_jsonl(tmp_path / "data" / "a.jsonl", texts("a"))
    write_jsonl(tmp_path / "data" / "b.jsonl", texts("b"))
    before = path.stat()
    first = load("data")
    path.write_text(path.read_text().replace("kernel", "k3rnel"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    packings()
    second = load("data", tokenizer=saved_tokenizer(first))
    assert packings() == ["a"]
    assert any("k3rnel" in text for text in documents(second, "a", "train"))
    assert first.digests != second.digests


def test_the_digest_is_of_the_blocks_in_their_order(tmp_path, config, corpus):
    """The same text elsewhere has the same one, other order has another."""
    fixed = replace(config, tokenizer=saved_tokenizer(corpus))
    found = []
    for name, rows in (("x", texts("a")), ("y", texts("a")), ("z", texts("a")[::-1])):
        write_jsonl(tmp_path / name / "a.jsonl", rows)
        found.append(load_corpus(replace(fixed, data=str(tmp_path / name))).digests["a"])
    assert found[0] == found[1] != found[2]


def save_words(folder: Path, entries: Mapping[str, int], unknown: str | None = "<unk>") -> str:
    """A tokenizer of words."""
    backend = Tokenizer(models.WordLevel(dict(entries), unk_token=unknown or ""))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token=unknown
    ).save_pretrained(folder)
    return str(folder)


def test_a_domain_of_unknown_tokens_is_warned_of(tmp_path, load):
    words = [f"w{i}" for i in range(90)]
    entries = {"</s>": 0, "<unk>": 1} | {word: i + 2 for i, word in enumerate(words)}
    known = [" ".join(words[(i + k) % 90] for k in range(40)) for i in range(40)]
    mixed = [" ".join(words[:36] + ["xy"] * 4) + f" w{i}" for i in range(40)]
    write_jsonl(tmp_path / "data" / "en.jsonl", known)
    write_jsonl(tmp_path / "data" / "zh.jsonl", [chr(0x4E00 + i) * 200 for i in range(40)])
    write_jsonl(tmp_path / "data" / "mixed.jsonl", mixed)
    tokenizer = save_words(tmp_path / "tokenizer", entries)
    for _ in ("packed", "found in the cache"):
        loaded = load("data", tokenizer=tokenizer, block_size=2)
        share = {warning.split(":")[0]: warning.split()[1] for warning in loaded.warnings}
        # Of 36 words of two or three letters and 4 of two, 8 letters are in unknown ones.
        letters = sum(map(len, words[:36])) + 8 + 3
        assert share == {"zh": "100%", "mixed": f"{8 / letters:.0%}"}


def test_letters_that_a_tokenizer_drops_are_warned_of(tmp_path, load):
    """A BPE without an unknown token leaves out what is not in its alphabet."""
    backend = Tokenizer(models.BPE({"</s>": 0, "a": 1, "b": 2}, []))
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    write_jsonl(tmp_path / "data" / "x.jsonl", ["abc" * (100 + i) for i in range(20)])
    (warning,) = load("data", tokenizer=str(folder)).warnings
    assert warning.startswith("x: 33% of its characters are unknown")


def test_numbers_of_tokens_may_have_gaps(tmp_path, load):
    entries = {"</s>": 0, "<unk>": 1, "word": 70_000}
    tokenizer = save_words(tmp_path / "tokenizer", entries)
    write_jsonl(tmp_path / "data" / "a.jsonl", ["word " * (20 + i) for i in range(40)])
    loaded = load("data", tokenizer=tokenizer)
    assert set(tokens(loaded.train["a"])) == {0, 70_000}
    assert loaded.vocab_size == 70_001


def test_tokens_do_not_depend_on_chance(tmp_path, config, corpus):
    """A tokenizer.json may ask for BPE dropout, which leaves merges out at random."""
    corpus.tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer.json"
    told = json.loads(file.read_text())
    told["model"]["dropout"] = 0.5
    file.write_text(json.dumps(told))
    loaded = load_corpus(replace(config, tokenizer=str(tmp_path / "tokenizer")))
    assert loaded.digests == corpus.digests


def test_a_tokenizer_of_the_hub_is_asked_for_once(config, monkeypatch):
    """transformers tries for minutes."""
    asked = []

    class Session:
        def head(self, address: str, **_: Any) -> None:
            asked.append(address)
            raise ConnectionError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "get_session", Session)
    with pytest.raises(ValueError, match="The tokenizer gpt-none does not open"):
        load_corpus(replace(config, tokenizer="gpt-none"))
    assert asked == [constants.ENDPOINT]


def test_a_packing_that_fails_leaves_nothing(tmp_path, load):
    write_jsonl(tmp_path / "data" / "a.jsonl", texts("a"))
    write_jsonl(tmp_path / "data" / "b.jsonl", ["x y", "y z"])
    with pytest.raises(ValueError, match="split of b"):
        load("data", cache_dir=tmp_path / "cache")
    # The other domain's blocks are good.
    (packed,) = (tmp_path / "cache").glob("corpora/*.json")
    assert json.loads(packed.read_text())["domains"].keys() == {"a"}
    assert not list((tmp_path / "cache").rglob("*.incomplete"))


def test_a_trained_tokenizer_is_deterministic(tmp_path, config, corpus):
    other = load_corpus(replace(config, cache_dir=tmp_path), targets=["prose"])
    assert other.tokenizer_sha256 == corpus.tokenizer_sha256
    assert other.tokenizer.get_vocab() == corpus.tokenizer.get_vocab()


def test_a_trained_tokenizer_loses_nothing(corpus):
    text = "naïve — 東京\t\r\n  spaces  \x00 end <|endoftext|>"
    ids = corpus.tokenizer(text, split_special_tokens=True)["input_ids"]
    assert corpus.tokenizer.decode(ids) == text


def test_a_document_cannot_forge_its_end(tmp_path, load):
    forged = [f"before <|endoftext|> after {text}" for text in texts("a")]
    write_jsonl(tmp_path / "a.jsonl", forged)
    loaded = load()
    assert tokens(loaded.train["a"]).count(loaded.tokenizer.eos_token_id) <= loaded.documents["a"]


def digests_in(told: Any, config: CorpusConfig, kill_at: int | None) -> None:
    """In a process of its own: tell a corpus's digests, or die at so many documents."""
    if kill_at is not None:
        calls, real = itertools.count(), packing.lost_characters

        def count(*arguments: Any) -> Any:
            if next(calls) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        packing.lost_characters = count
    told.send(load_corpus(config).digests)


def started(config: CorpusConfig, kill_at: int | None = None) -> tuple[Any, Any]:
    here, there = FORKSERVER.Pipe()
    process = FORKSERVER.Process(target=digests_in, args=(there, config, kill_at))
    process.start()
    return process, here


@pytest.mark.exhaustive
def test_two_at_once_agree(tmp_path, config, corpus):
    fresh = replace(config, cache_dir=tmp_path)
    both = [started(fresh) for _ in range(2)]
    assert [here.recv() for _, here in both] == [corpus.digests] * 2
    for process, _ in both:
        process.join()
    assert len(list(tmp_path.glob("corpora/*.json"))) == 3


def test_what_a_killed_process_left_is_not_taken_for_complete(tmp_path, config, corpus):
    fresh = replace(config, cache_dir=tmp_path)
    process, _ = started(fresh, kill_at=80)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(tmp_path.rglob("*.incomplete"))
    loaded = load_corpus(fresh)
    assert loaded.digests == corpus.digests
    assert tokens(loaded.train["code"]) == tokens(corpus.train["code"])


def test_the_corpus_is_a_data_set(corpus):
    assert corpus.blocks.column_names == ["input_ids", "domain", "held_out"]
    for split, held_out in (("train", False), ("validation", True)):
        for name, blocks in getattr(corpus, split).items():
            rows = blocks.with_format(None)[:]
            assert set(rows["domain"]) == {name}
            assert set(rows["held_out"]) == {held_out}
    total = sum(len(each) for split in (corpus.train, corpus.validation) for each in split.values())
    assert total == len(corpus.blocks)


def test_the_cache_is_found_through_the_environment(tmp_path, config, monkeypatch):
    monkeypatch.setenv("DOGE_FAST_CACHE", str(tmp_path / "elsewhere"))
    load_corpus(replace(config, cache_dir=None))
    assert len(list((tmp_path / "elsewhere").glob("corpora/*.json"))) == 3


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_blocks_that_are_not_those_that_were_written_are_refused(tmp_path, config, damage):
    fresh = replace(config, cache_dir=tmp_path)
    load_corpus(fresh)
    file = max(tmp_path.rglob("*.arrow"), key=lambda each: each.stat().st_size)
    held = bytearray(file.read_bytes())
    if damage == "flip":
        # In the tokens, which are most of the file.
        held[len(held) // 2] ^= 1
        file.write_bytes(held)
    else:
        os.truncate(file, len(held) // 2)
    with pytest.raises(ValueError, match=str(file.parent.parent)):
        load_corpus(fresh)
