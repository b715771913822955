"""Of a large Hub data set no more is read than the blocks need, and which documents is known."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from doge_fast.pipeline import packing, sources
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.domains import Corpus, load_corpus
from tests.pipeline.corpora import (
    answer_as_hub,
    check_refused,
    documents,
    name_configurations,
    rename,
    text_of,
    texts,
    write_jsonl,
)

FILES = 40
ROWS = 250


def write_rows(path: Path, rows: Sequence[tuple[str, str]]) -> None:
    """Rows of a domain's name and a text, as SlimPajama has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": text, "meta": {"set": name}}) + "\n" for name, text in rows)
    path.write_text("".join(lines))


def domain_of(index: int) -> str:
    """Half of the rows are of the web, a twentieth are books."""
    if index % 20 == 0:
        return "book"
    return "web" if index % 2 else "code"


def rows_of(prefix: str, start: int, count: int) -> list[tuple[str, str]]:
    names = [domain_of(index) for index in range(start, start + count)]
    return [(name, text_of(f"{prefix}{name}", start + i)) for i, name in enumerate(names)]


@pytest.fixture(scope="session")
def mingled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of forty files in which rows of three domains alternate."""
    folder = tmp_path_factory.mktemp("mingled")
    for index in range(FILES):
        rows = rows_of("", index * ROWS, ROWS)
        write_rows(folder / f"train-{index:05}-of-{FILES:05}.jsonl", rows)
    return folder


@pytest.fixture
def stream(corpus: Corpus, tmp_path: Path) -> Callable[..., CorpusConfig]:
    """Makes the settings of a stream, with a tokenizer that is not trained on it."""
    corpus.tokenizer.save_pretrained(tmp_path / "tokenizer")

    def make(**changes: Any) -> CorpusConfig:
        settings: dict[str, Any] = {
            "data": "owner/large",
            "tokenizer": str(tmp_path / "tokenizer"),
            "block_size": 16,
            "max_tokens_per_domain": 1600,
            "validation_fraction": 0.1,
            "streaming": True,
            "cache_dir": tmp_path / "cache",
        }
        return CorpusConfig(**settings | changes)

    return make


@pytest.fixture
def columned(stream: Callable[..., CorpusConfig]) -> Callable[..., CorpusConfig]:
    """The same of a data set with a domain column."""

    def make(**changes: Any) -> CorpusConfig:
        return stream(**{"domain_column": "meta.set", "domains": ("book", "web")} | changes)

    return make


def starts(corpus: Corpus, name: str, split: str = "train") -> list[str]:
    """Domain and number of each document."""
    return [text.split(":")[0] for text in documents(corpus, name, split)]


def test_a_column_is_read_until_every_named_domain_is_full(mingled, columned, monkeypatch, caplog):
    read = answer_as_hub(monkeypatch, "owner/large", mingled)
    loaded = load_corpus(columned())
    assert loaded.train_tokens == {"book": 1600, "web": 1600}
    assert {name: len(loaded.validation[name]) for name in loaded.names} == {"book": 10, "web": 10}
    # The rarest domain decides: what is left over is one batch of the reader and the tokenizer.
    needed = 20 * (loaded.documents["book"] + 10)
    assert len(read) < needed + 12 * 128 < FILES * ROWS / 2
    assert not any(text.startswith("code") for text in starts(loaded, "web"))


def test_held_out_documents_of_a_stream_are_told_by_their_hash(mingled, columned, monkeypatch):
    answer_as_hub(monkeypatch, "owner/large", mingled)
    loaded = load_corpus(columned())
    whole = {text.split(":")[0]: text for _, text in rows_of("", 0, FILES * ROWS)}
    for name in loaded.names:
        for split, is_held_out in (("train", False), ("validation", True)):
            for start in starts(loaded, name, split):
                share = packing._text_hash(whole[start]) / 2**64
                assert (share <= 0.1) == is_held_out


def test_several_files_are_read_in_turn(mingled, columned, monkeypatch):
    answer_as_hub(monkeypatch, "owner/large", mingled)
    orders = {}
    for seed in (0, 1):
        loaded = load_corpus(columned(stream_seed=seed, max_tokens_per_domain=15_000))
        # The last document is cut, perhaps before its number.
        files = [int(start.split()[1]) // ROWS for start in starts(loaded, "book")[:-1]]
        assert len(set(files)) == 10
        orders[seed] = files
    assert orders[0] != orders[1]


def test_every_row_is_read_once(mingled, columned):
    config = columned(data=str(mingled), domains=("book", "code", "web"))
    (part, _), *others = packing.by_part(sources.find_parts(config, [])).items()
    assert not others
    assert sorted(part.train()) == sorted(rows_of("", 0, FILES * ROWS))


def test_configurations_are_streams_of_their_own(stream, monkeypatch, tmp_path):
    for name in ("en", "ca"):
        for index in range(20):
            rows = [text_of(name, 50 * index + i) for i in range(50)]
            write_jsonl(tmp_path / "wiki" / name / f"train-{index:02}.jsonl", rows)
        write_jsonl(tmp_path / "wiki" / name / "validation.jsonl", texts(f"held-out {name}", 300))
    name_configurations(tmp_path / "wiki", ["en", "ca"])
    read = answer_as_hub(monkeypatch, "owner/large", tmp_path / "wiki")
    loaded = load_corpus(stream(), targets=["ca"])
    assert (loaded.names, loaded.targets) == (("en",), ("ca",))
    assert loaded.train_tokens == {"en": 1600, "ca": 1600}
    # A share of the limit, of a split that the data brings too.
    assert len(loaded.validation["ca"]) == 10
    assert starts(loaded, "ca", "validation")[0] == "held-out ca 0"
    # A row to look at its columns and one read of 128 rows, twice for either split of both.
    assert len(read) <= 2 * 2 * 2 * 129
    more = load_corpus(stream(validation_fraction=0.2), targets=["ca"])
    assert len(more.validation["ca"]) == 20


def test_a_stream_is_packed_once_and_apart_from_the_whole(mingled, columned, monkeypatch):
    read = answer_as_hub(monkeypatch, "owner/large", mingled)
    first = load_corpus(columned())
    read.clear()
    again = load_corpus(columned())
    # That it opens is looked at; nothing is packed.
    assert len(read) <= 129
    assert again.describe() == first.describe()
    assert again.warnings == first.warnings
    more = load_corpus(columned(domains=("web", "book", "code")))
    assert documents(more, "web", "train") == documents(first, "web", "train")
    whole = load_corpus(columned(streaming=False))
    assert documents(whole, "web", "train") != documents(first, "web", "train")


def test_a_domain_that_ends_before_the_limit_is_counted(mingled, columned, monkeypatch):
    answer_as_hub(monkeypatch, "owner/large", mingled)
    config = columned(max_tokens_per_domain=100_000, validation_fraction=0.02)
    loaded = load_corpus(config)
    (warning,) = loaded.warnings
    assert loaded.train_tokens["book"] < 99_000
    assert warning.startswith("web: read as a stream")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens_per_domain": None}, r"full; say with max_tokens_per_domain \(--max-tokens"),
        ({"domains": ()}, r"would read all of owner/large to find .* with domains \(--domains\)"),
    ],
    ids=["limit", "domains"],
)
def test_a_stream_without_an_end_is_refused(columned, change, message):
    check_refused(columned(**change), message)


def test_a_directory_of_domains_is_no_stream(config):
    there = rename(config, streaming=True, max_tokens_per_domain=160)
    check_refused(there, r"streaming \(--streaming\) reads a Hub data set, or files with a domain")
