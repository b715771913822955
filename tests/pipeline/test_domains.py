"""Text in, blocks out, once; and the batch of any step from the seed and the step alone."""

import dataclasses
import gzip
import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from doge_fast.pipeline import domains
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.domains import (
    BaseBatches,
    Corpus,
    ProxyBatches,
    Stage,
    domain_blocks,
    load_corpus,
    mixture_blocks,
    mixture_counts,
)

SHARED = Path(__file__).resolve().parents[2] / "../shared/data"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the corpora and tokenizers of shared/data are not here"
)

WORDS = ["the", "of", "a", "kernel", "gradient", "domain", "weight", "moves", "towards", "what"]


def text_of(name: str, index: int) -> str:
    """A document of its own, thirty to sixty words, each with a number that tells blocks apart."""
    draw = np.random.default_rng([index, *name.encode()])
    words = [f"{word} {draw.integers(100)}" for word in draw.choice(WORDS, draw.integers(30, 60))]
    return f"{name} {index}: " + " ".join(words)


def texts(name: str, count: int = 40) -> list[str]:
    return [text_of(name, index) for index in range(count)]


def write_jsonl(path: Path, documents: Iterable[str], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in documents))
    return path


def write_parquet(path: Path, **columns: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), path)
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three domains in three layouts: files that name splits, one parquet, text."""
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "code" / "train-0.jsonl", texts("code", 30))
    write_jsonl(folder / "code" / "train-1.jsonl", texts("more code", 30))
    write_jsonl(folder / "code" / "validation.jsonl", texts("held-out code", 9))
    write_parquet(folder / "prose.parquet", text=texts("prose", 50), source=["x"] * 50)
    write_jsonl(folder / "verse" / "anything.jsonl", texts("verse", 40))
    (folder / "README.md").write_text("not a domain")
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def config(data: Path, cache: Path) -> CorpusConfig:
    return CorpusConfig(
        data=str(data), vocab_size=300, block_size=16, validation_fraction=0.1, cache_dir=cache
    )


@pytest.fixture(scope="session")
def corpus(config: CorpusConfig) -> Corpus:
    return load_corpus(config)


@pytest.fixture(scope="session")
def mixed(config: CorpusConfig) -> Corpus:
    """One held-out target, and "mix"."""
    return load_corpus(config, targets=["verse", "mix"])


def tokens(blocks: datasets.Dataset) -> list[int]:
    return list(np.asarray(blocks[:]["input_ids"]).reshape(-1))


def documents(corpus: Corpus, name: str, split: str) -> list[str]:
    """The texts between ends of text, the last of them perhaps cut."""
    blocks = getattr(corpus, split)[name]
    end = corpus.tokenizer.eos_token_id
    found: list[list[int]] = [[]]
    for token in tokens(blocks):
        if token == end:
            found.append([])
        else:
            found[-1].append(token)
    return [corpus.tokenizer.decode(ids) for ids in found if ids]


def rename(config: CorpusConfig, **changes: Any) -> CorpusConfig:
    return dataclasses.replace(config, **changes)


def test_every_layout_is_found(corpus):
    assert corpus.names == ("code", "prose", "verse")
    assert corpus.targets == ()
    assert corpus.documents == {"code": 60, "prose": 45, "verse": 36}
    assert corpus.block_size == 16
    assert corpus.vocab_size == len(corpus.tokenizer) == 300
    assert corpus.mix is None


def test_blocks_are_the_documents_and_nothing_else(corpus):
    expected = {"train": texts("code", 30) + texts("more code", 30), "validation": None}
    expected["validation"] = texts("held-out code", 9)
    for split, originals in expected.items():
        found = documents(corpus, "code", split)
        assert found[:-1] == originals[: len(found) - 1]
        assert originals[len(found) - 1].startswith(found[-1])
        # Only the tokens that do not fill a block are lost.
        ids = corpus.tokenizer("\n".join(originals))["input_ids"]
        assert len(tokens(getattr(corpus, split)["code"])) > len(ids) - 2 * corpus.block_size


def test_blocks_are_what_a_model_takes(corpus):
    rows = corpus.train["prose"][[3, 0, 3]]["input_ids"]
    assert isinstance(rows, np.ndarray)
    assert rows.shape == (3, 16)
    assert rows.dtype == np.int64
    assert corpus.train["prose"].column_names == ["input_ids"]
    assert corpus.train_tokens["prose"] == len(corpus.train["prose"]) * 16


def test_held_out_documents_are_a_tenth_and_on_one_side(corpus):
    train = {text.split(":")[0] for text in documents(corpus, "prose", "train")}
    held_out = {text.split(":")[0] for text in documents(corpus, "prose", "validation")}
    assert len(held_out) == 5
    assert not train & held_out


def test_equal_documents_fall_on_one_side(tmp_path, config):
    copies = [text_of("a", index % 12) for index in range(96)]
    write_jsonl(tmp_path / "data" / "a.jsonl", copies)
    write_jsonl(tmp_path / "data" / "b.jsonl", texts("b"))
    loaded = load_corpus(rename(config, data=str(tmp_path / "data"), validation_fraction=0.3))
    train = {text.split(":")[0] for text in documents(loaded, "a", "train")}
    held_out = {text.split(":")[0] for text in documents(loaded, "a", "validation")}
    assert len(held_out) == 4
    assert not train & held_out


def test_holding_out_everything_keeps_a_document(config):
    loaded = load_corpus(rename(config, validation_fraction=0.999))
    assert loaded.documents["prose"] == 1


def test_describe_is_what_config_json_holds(mixed):
    description = mixed.describe()
    assert json.loads(json.dumps(description)) == description
    assert set(description["domains"]) == {"code", "prose"}
    assert set(description["targets"]) == {"verse"}
    assert description["domains"]["code"] == {
        "train_tokens": len(mixed.train["code"]) * 16,
        "train_blocks": len(mixed.train["code"]),
        "validation_blocks": len(mixed.validation["code"]),
        "documents": 60,
    }
    assert description["tokenizer_sha256"] == mixed.tokenizer_sha256
    assert len(mixed.tokenizer_sha256) == 64


def test_targets_are_held_out_unless_trained_on(config):
    assert load_corpus(config, targets=["universal"]).names == ("code", "prose", "verse")
    loaded = load_corpus(config, targets=["prose"])
    assert (loaded.names, loaded.targets) == (("code", "verse"), ("prose",))
    assert set(loaded.train) == set(loaded.validation) == {"code", "verse", "prose"}
    named = load_corpus(rename(config, domains=("verse", "code")), targets=["code", "prose"])
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


def test_mix_blocks_are_spread_over_a_domain(monkeypatch):
    blocks = datasets.Dataset.from_dict({"input_ids": [[i] for i in range(1000)]})
    kept, held = domains._reserve(blocks, "a")
    rows = np.array(held["input_ids"]).reshape(-1)
    assert len(rows) == 50
    assert len(kept) == 950
    # Seven runs of seven or eight, one at the end of each seventh.
    assert (np.bincount(rows * 7 // 1000) >= 7).all()
    assert (np.diff(rows) == 1).sum() == 43


def test_max_tokens_stops_there(config):
    loaded = load_corpus(rename(config, max_tokens_per_domain=100))
    assert loaded.train_tokens == {"code": 96, "prose": 96, "verse": 96}
    assert loaded.documents["prose"] < 10
    # A split that the data brings is measured as far as the limit; a share stays a share.
    blocks = {name: len(loaded.validation[name]) for name in loaded.names}
    assert blocks == {"code": 6, "prose": 1, "verse": 1}


def test_max_tokens_reads_no_further(tmp_path, config):
    rows, _ = rows_of_two()
    path = write_jsonl(tmp_path / "data" / "a.jsonl", rows * 400)
    with path.open("a") as file:
        file.write("this is not JSON\n" * 1000)
    write_jsonl(tmp_path / "data" / "b.jsonl", texts("b"))
    for name in "ab":
        write_jsonl(tmp_path / "data" / name / "validation.jsonl", texts(f"held-out {name}"))
        (tmp_path / "data" / f"{name}.jsonl").rename(tmp_path / "data" / name / "train.jsonl")
    limited = rename(config, data=str(tmp_path / "data"), max_tokens_per_domain=64)
    folder = domains._trained_tokenizer(config, domains._find_parts(config, []))
    assert load_corpus(rename(limited, tokenizer=str(folder))).train_tokens == {"a": 64, "b": 64}


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the domains packed from here on."""
    packed: list[str] = []
    real = domains._pack_part

    def remember(config: Any, part: Any, entries: Mapping[str, Path], tokenizer: Any) -> None:
        packed.extend(entries)
        real(config, part, entries, tokenizer)

    monkeypatch.setattr(domains, "_pack_part", remember)
    return packed


def test_packed_once(config, corpus, packings):
    again = load_corpus(config)
    assert packings == []
    assert again.describe() == corpus.describe()
    assert tokens(again.train["code"]) == tokens(corpus.train["code"])
    load_corpus(config, targets=["verse"])
    load_corpus(rename(config, domains=("verse", "prose", "code")))
    assert packings == []


@pytest.mark.parametrize(
    "change",
    [{"block_size": 12}, {"vocab_size": 310}, {"max_tokens_per_domain": 64}],
    ids=str,
)
def test_another_packing_is_packed_anew(config, packings, change):
    load_corpus(rename(config, **change))
    assert sorted(packings) == ["code", "prose", "verse"]


def test_another_validation_fraction_packs_what_it_concerns(config, corpus, packings):
    load_corpus(rename(config, validation_fraction=0.25))
    # code brings its own validation split.
    assert sorted(packings) == ["prose", "verse"]


def test_a_changed_file_is_packed_anew(tmp_path, config, packings):
    path = write_jsonl(tmp_path / "data" / "a.jsonl", texts("a"))
    write_jsonl(tmp_path / "data" / "b.jsonl", texts("b"))
    base = rename(config, data=str(tmp_path / "data"))
    folder = domains._trained_tokenizer(base, domains._find_parts(base, []))
    fixed = rename(base, tokenizer=str(folder))
    load_corpus(fixed)
    before = path.stat()
    path.write_text(path.read_text().replace("kernel", "k3rnel"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    packings.clear()
    changed = load_corpus(fixed)
    assert packings == ["a"]
    assert any("k3rnel" in text for text in documents(changed, "a", "train"))


def test_a_packing_that_fails_leaves_nothing(tmp_path, config):
    write_jsonl(tmp_path / "data" / "a.jsonl", texts("a"))
    write_jsonl(tmp_path / "data" / "b.jsonl", ["x y", "y z"])
    bad = rename(config, data=str(tmp_path / "data"), cache_dir=tmp_path / "cache")
    with pytest.raises(
        ValueError,
        match=r"needs a block of 16 tokens in every split; the \w+ split of b has \d+ tokens",
    ):
        load_corpus(bad)
    packed = list((tmp_path / "cache" / "blocks").iterdir())
    # The other domain's blocks are good.
    assert len(packed) == 1
    assert json.loads((packed[0] / "packed.json").read_text())["name"] == "a"


def test_two_at_once_both_find_it_packed(tmp_path):
    made, path = tmp_path / "made", tmp_path / "key"
    for folder in (made, path):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    domains._keep(made, path)
    assert (path / "file").read_text() == "key"


def test_a_trained_tokenizer_is_deterministic(tmp_path, config, corpus):
    other = load_corpus(rename(config, cache_dir=tmp_path), targets=["prose"])
    assert other.tokenizer_sha256 == corpus.tokenizer_sha256
    assert other.tokenizer.get_vocab() == corpus.tokenizer.get_vocab()


def test_a_trained_tokenizer_loses_nothing(corpus):
    text = "naïve — 東京\t\r\n  spaces  \x00 end <|endoftext|>"
    ids = corpus.tokenizer(text, split_special_tokens=True)["input_ids"]
    assert corpus.tokenizer.decode(ids) == text


def test_a_document_cannot_forge_its_end(tmp_path, config):
    forged = [f"before <|endoftext|> after {text}" for text in texts("a")]
    write_jsonl(tmp_path / "data" / "a.jsonl", forged)
    write_jsonl(tmp_path / "data" / "b.jsonl", texts("b"))
    loaded = load_corpus(rename(config, data=str(tmp_path / "data")))
    assert tokens(loaded.train["a"]).count(loaded.tokenizer.eos_token_id) <= loaded.documents["a"]


@needs_shared
@pytest.mark.parametrize("name", ["gpt2", "wiki40b-ca", "wiki40b-nl"])
def test_tokenizers_of_others_open(name, config):
    loaded = load_corpus(rename(config, tokenizer=str(SHARED / "tokenizers" / name)))
    assert loaded.vocab_size == {"gpt2": 50257}.get(name, 52000)
    assert documents(loaded, "code", "train")[:20] == texts("code", 20)


@needs_shared
def test_real_text_in_other_languages_survives(config):
    wiki = rename(
        config,
        data=str(SHARED / "mini_wiki40b"),
        domains=("en", "ru"),
        tokenizer=str(SHARED / "tokenizers" / "wiki40b-ca"),
        max_tokens_per_domain=4000,
    )
    loaded = load_corpus(wiki, targets=["ca"])
    assert (loaded.names, loaded.targets) == (("en", "ru"), ("ca",))
    first = pq.read_table(SHARED / "mini_wiki40b/ru/train.parquet")["text"][0].as_py()
    assert documents(loaded, "ru", "train")[0] == first
    held = pq.read_table(SHARED / "mini_wiki40b/ca/validation.parquet")["text"][0].as_py()
    assert documents(loaded, "ca", "validation")[0] == held


def rows_of_two() -> tuple[list[str], list[dict[str, str]]]:
    """Rows as SlimPajama has them, two domains mingled."""
    rows = [text_of("C4" if i % 3 else "Book", i) for i in range(90)]
    return rows, [{"redpajama_set_name": "C4" if i % 3 else "Book"} for i in range(90)]


@pytest.mark.parametrize("form", ["parquet", "jsonl", "jsonl.gz"])
def test_one_file_with_a_domain_column(tmp_path, config, form):
    rows, meta = rows_of_two()
    path = tmp_path / f"all.{form}"
    if form == "parquet":
        write_parquet(path, text=rows, meta=meta)
    else:
        lines = "".join(
            json.dumps({"text": text, "meta": m}) + "\n" for text, m in zip(rows, meta, strict=True)
        ).encode()
        path.write_bytes(gzip.compress(lines) if form == "jsonl.gz" else lines)
    one = rename(config, data=str(path), domain_column="meta.redpajama_set_name")
    loaded = load_corpus(one)
    assert loaded.names == ("Book", "C4")
    assert loaded.documents == {"Book": 27, "C4": 54}
    assert all(text.startswith("Book") for text in documents(loaded, "Book", "train"))
    chosen = load_corpus(rename(one, domains=("C4",)), targets=["Book"])
    assert (chosen.names, chosen.targets) == (("C4",), ("Book",))


def hub_folder(folder: Path) -> Path:
    """A repository as the Hub holds it, with a split of its own for validation."""
    rows, meta = rows_of_two()
    write_parquet(folder / "train-00000-of-00001.parquet", text=rows, meta=meta)
    held = [text_of(m["redpajama_set_name"], 1000 + i) for i, m in enumerate(meta)]
    write_parquet(folder / "validation-00000-of-00001.parquet", text=held, meta=meta)
    return folder


def test_a_directory_with_a_domain_column(tmp_path, config):
    folder = hub_folder(tmp_path / "pajama")
    loaded = load_corpus(rename(config, data=str(folder), domain_column="meta.redpajama_set_name"))
    assert loaded.documents == {"Book": 30, "C4": 60}
    assert documents(loaded, "Book", "validation")[0] == text_of("Book", 1000)


@pytest.fixture
def as_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], None]:
    """Answers a Hub id with a folder, through the very calls that would ask the Hub."""

    def register(name: str, folder: Path) -> None:
        for function in ("load_dataset", "load_dataset_builder", "get_dataset_config_names"):
            real = getattr(datasets, function)

            def answer(path: str, *args: Any, real: Any = real, **options: Any) -> Any:
                return real(str(folder) if path == name else path, *args, **options)

            monkeypatch.setattr(datasets, function, answer)

    return register


def test_a_hub_id_with_a_domain_column(tmp_path, config, as_hub):
    as_hub("owner/pajama", hub_folder(tmp_path / "pajama"))
    hub = rename(config, data="owner/pajama", domain_column="meta.redpajama_set_name")
    loaded = load_corpus(hub)
    assert loaded.documents == {"Book": 30, "C4": 60}


def test_a_hub_ids_configurations_are_domains(tmp_path, config, as_hub):
    for name in ("en", "ca"):
        write_jsonl(tmp_path / "wiki" / name / "train.jsonl", texts(name))
        write_jsonl(tmp_path / "wiki" / name / "test.jsonl", texts(f"held-out {name}"))
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("en", "ca"))
    (tmp_path / "wiki" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    as_hub("owner/wiki", tmp_path / "wiki")
    loaded = load_corpus(rename(config, data="owner/wiki"), targets=["ca"])
    assert (loaded.names, loaded.targets) == (("en",), ("ca",))
    assert documents(loaded, "en", "train")[0] == text_of("en", 0)
    assert documents(loaded, "ca", "validation")[0] == text_of("held-out ca", 0)


def test_a_hub_that_does_not_answer(config, monkeypatch):
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nwith a long trace")

    monkeypatch.setattr(datasets, "get_dataset_config_names", unreachable)
    with pytest.raises(
        ValueError,
        match=r"^owner/nothing is neither a path here nor a data set that could be opened: "
        r"Couldn't reach the Hub\.$",
    ):
        load_corpus(rename(config, data="owner/nothing"))


def test_text_files_are_cut_at_blank_lines(tmp_path, config):
    paragraphs = [f"{text_of('p', index)}\n\n" for index in range(400)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "book.txt").write_text("".join(paragraphs))
    write_jsonl(tmp_path / "data" / "b.jsonl", texts("b"))
    found = list(domains._text_documents([tmp_path / "data" / "book.txt"]))
    assert "".join(found) == "".join(paragraphs)
    assert len(found) > 4
    assert all(text.endswith("\n\n") for text in found)
    assert all(len(text) >= 16_384 for text in found[:-1])
    loaded = load_corpus(rename(config, data=str(tmp_path / "data")))
    assert loaded.documents["book"] == len(found) - 1


def test_text_without_blank_lines_is_cut_too(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789\n" * 100_000)
    found = list(domains._text_documents([tmp_path / "a.txt"]))
    assert "".join(found) == "0123456789\n" * 100_000
    assert max(map(len, found)) < 16 * 16_384 + 11


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.parquet", "train"),
        ("training_2.jsonl", "train"),
        ("validation-00000-of-00001.parquet", "validation"),
        ("valid.txt", "validation"),
        ("val_1.txt", "validation"),
        ("dev.jsonl", "validation"),
        ("Test.jsonl", "test"),
        ("testimony.txt", None),
        ("value.jsonl", None),
        ("trains.txt", None),
        ("part-0.jsonl", None),
    ],
)
def test_splits_are_told_by_name(name, split):
    assert domains._split_of(name) == split


def test_a_test_split_is_held_out_only_where_there_is_no_validation(tmp_path, config):
    for split in ("train", "test"):
        write_jsonl(tmp_path / "data" / "a" / f"{split}.jsonl", texts(f"a {split}"))
        write_jsonl(tmp_path / "data" / "b" / split / "part.jsonl", texts(f"b {split}"))
    write_jsonl(tmp_path / "data" / "b" / "valid" / "part.jsonl", texts("b valid"))
    loaded = load_corpus(rename(config, data=str(tmp_path / "data")))
    assert documents(loaded, "a", "validation")[0] == text_of("a test", 0)
    assert documents(loaded, "b", "validation")[0] == text_of("b valid", 0)
    assert documents(loaded, "b", "train")[0] == text_of("b train", 0)


def check_refused(config: CorpusConfig, message: str, **options: Any) -> None:
    """One sentence, and not a file written."""
    before = sorted(Path(config.cache_dir or "").rglob("*"))
    with pytest.raises(ValueError, match=message) as refusal:
        load_corpus(config, **options)
    assert "\n" not in str(refusal.value)
    assert sorted(Path(config.cache_dir or "").rglob("*")) == before


@pytest.mark.parametrize("path", ["/nowhere/at/all", "nowhere", "./a/b", "some/corpus.jsonl"])
def test_a_path_that_does_not_exist(config, path):
    check_refused(rename(config, data=path), rf"^{path} does not exist\. Give a directory")


def test_a_directory_without_domains(tmp_path, config):
    (tmp_path / "notes.md").write_text("x")
    check_refused(
        rename(config, data=str(tmp_path)),
        r"must hold a folder or file per domain, of .parquet, .* it holds notes.md\.",
    )


def test_a_directory_of_splits_is_not_one_of_domains(tmp_path, config):
    hub_folder(tmp_path)
    check_refused(
        rename(config, data=str(tmp_path)), "names a split where a domain is expected: name the"
    )


def test_a_file_needs_a_domain_column(tmp_path, config):
    path = write_jsonl(tmp_path / "a.jsonl", texts("a"))
    check_refused(rename(config, data=str(path)), "is one file: name the column")


def test_a_text_file_has_no_domain_column(tmp_path, config):
    (tmp_path / "a.txt").write_text("x")
    check_refused(
        rename(config, data=str(tmp_path / "a.txt"), domain_column="d"),
        "A text file has no columns",
    )


def test_a_domain_in_two_places(tmp_path, config):
    write_jsonl(tmp_path / "a.jsonl", texts("a"))
    write_jsonl(tmp_path / "a" / "x.jsonl", texts("a"))
    check_refused(rename(config, data=str(tmp_path)), "holds several named a")


def test_a_domain_of_held_out_files_alone(tmp_path, config):
    write_jsonl(tmp_path / "a" / "test.jsonl", texts("a"))
    check_refused(rename(config, data=str(tmp_path)), "a needs training files; .* only test.jsonl")


@pytest.mark.parametrize("suffix", ["jsonl", "txt", "parquet"])
def test_an_empty_domain(tmp_path, config, suffix):
    write_jsonl(tmp_path / "good.jsonl", texts("good"))
    empty = tmp_path / f"hollow.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), empty)
    else:
        empty.write_text("")
    check_refused(
        rename(config, data=str(tmp_path)), "needs text; the train split of hollow is empty"
    )


def test_a_domain_of_blanks(tmp_path, config):
    write_jsonl(tmp_path / "good.jsonl", texts("good"))
    write_jsonl(tmp_path / "hollow.jsonl", ["", "  \n"])
    check_refused(
        rename(config, data=str(tmp_path)), "needs text; the train split of hollow is empty"
    )


def test_a_parquet_without_the_text_column(tmp_path, config):
    write_parquet(tmp_path / "a.parquet", content=texts("a"), url=["x"] * 40)
    check_refused(
        rename(config, data=str(tmp_path)),
        r'a.parquet has no column "text"; its columns are content, url\. Name the right one with '
        "text_column",
    )
    loaded = load_corpus(rename(config, data=str(tmp_path), text_column="content"))
    assert documents(loaded, "a", "train")


def test_a_text_column_of_numbers(tmp_path, config):
    write_parquet(tmp_path / "a.parquet", text=list(range(40)))
    check_refused(rename(config, data=str(tmp_path)), 'column "text" of .* holds int')


def test_a_missing_domain_column(tmp_path, config):
    path = write_jsonl(tmp_path / "a.jsonl", texts("a"))
    check_refused(
        rename(config, data=str(path), domain_column="meta.set"),
        r'has no column "meta"; its columns are text\. Name the right one with domain_column',
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.txt"])
def test_a_file_that_cannot_be_read(tmp_path, config, name):
    (tmp_path / name).write_bytes(b'\xff\xfe{"text": "x" \n}}' * 50)
    check_refused(
        rename(config, data=str(tmp_path)), r"a\.\w+ cannot be read: |must be UTF-8; .*a.txt is not"
    )


def test_unknown_domains(config):
    check_refused(
        rename(config, domains=("code", "cobol")),
        r"domains must name domains of .*, which are code, prose, verse; cobol is not among them",
    )


def test_domains_named_twice(config):
    check_refused(
        rename(config, domains=("code", "prose", "code")),
        "A domain is named once; domains names code twice",
    )


def test_a_target_that_is_nowhere(config):
    check_refused(
        config,
        "target must name domains of .*, which are code, prose, verse; catalan is not among them",
        targets=["catalan"],
    )


def test_targets_that_leave_nothing(config):
    check_refused(config, "Training needs a domain", targets=["code", "prose", "verse"])


def test_a_domain_named_like_a_target_word(tmp_path, config):
    write_jsonl(tmp_path / "mix.jsonl", texts("mix"))
    check_refused(rename(config, data=str(tmp_path)), 'No domain may be named "mix"')


def test_a_domain_that_no_row_has(tmp_path, config):
    rows, meta = rows_of_two()
    path = write_parquet(tmp_path / "all.parquet", text=rows, meta=meta)
    column = "meta.redpajama_set_name"
    with pytest.raises(ValueError, match="train split of Arxiv has 0 tokens"):
        load_corpus(rename(config, data=str(path), domain_column=column, domains=("C4", "Arxiv")))


def test_one_document_cannot_be_split(tmp_path, config):
    write_jsonl(tmp_path / "a.jsonl", texts("a", 1))
    with pytest.raises(ValueError, match="holds out documents; a has only one"):
        load_corpus(rename(config, data=str(tmp_path)))


def test_a_domain_too_small_for_mix(tmp_path, config):
    write_jsonl(tmp_path / "a.jsonl", texts("a", 2))
    with pytest.raises(ValueError, match=r"mix holds out 4 training blocks .* a has only"):
        load_corpus(rename(config, data=str(tmp_path), block_size=64), targets=["mix"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 1}, "block_size must be at least 2, a token and the next; it is 1"),
        ({"validation_fraction": 0.0}, "must lie between 0 and 1; it is 0.0"),
        ({"max_tokens_per_domain": 15}, "must hold a block of 16; it is 15"),
        ({"vocab_size": 256}, "needs vocab_size >= 257"),
        ({"tokenizer": "/no/such/tokenizer"}, "The tokenizer /no/such/tokenizer does not open: "),
    ],
    ids=str,
)
def test_numbers_out_of_range(config, change, message):
    check_refused(rename(config, **change), message)


def test_a_cache_that_cannot_be_written(tmp_path, config):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"The cache must be writable; .* Name another with cache"):
        load_corpus(rename(config, cache_dir=tmp_path / "file" / "cache"))


def test_the_cache_is_found_through_the_environment(tmp_path, config, monkeypatch):
    monkeypatch.setenv("DOGE_FAST_CACHE", str(tmp_path / "elsewhere"))
    load_corpus(rename(config, cache_dir=None))
    assert len(list((tmp_path / "elsewhere" / "blocks").iterdir())) == 3


@pytest.mark.parametrize("size", [*range(1, 70), 127, 128, 129, 1000, 4096, 4097])
def test_the_permutation_is_one(size):
    keys = domains._round_keys("test", size)
    found = domains._permute(np.arange(size), size, keys)
    assert sorted(found) == list(range(size))


def test_the_permutation_mixes():
    size, trials = 50, 2000
    seen = np.zeros((size, size))
    for seed in range(trials):
        keys = domains._round_keys("test", seed)
        seen[np.arange(size), domains._permute(np.arange(size), size, keys)] += 1
    # Pearson's statistic of a doubly stochastic table: mean (n-1)^2, variance 2 (n-1)^2.
    statistic = ((seen - trials / size) ** 2 / (trials / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_every_epoch_shows_every_block_once_in_an_order_of_its_own():
    stream = np.concatenate(
        [domain_blocks(3, step, domain="a", num_blocks=30, size=4) for step in range(15)]
    )
    first, second = stream[:30], stream[30:]
    assert sorted(first) == sorted(second) == list(range(30))
    assert list(first) != list(second) != list(range(30))


def test_batches_larger_than_a_domain_repeat_it_evenly():
    rows = domain_blocks(0, 2, domain="a", num_blocks=3, size=10)
    assert np.bincount(rows, minlength=3).min() >= 3


def test_the_order_depends_on_seed_and_name():
    orders = {
        (seed, name): tuple(domain_blocks(seed, 0, domain=name, num_blocks=99, size=20))
        for seed in (0, 1)
        for name in ("a", "b")
    }
    assert len(set(orders.values())) == 4


def test_the_order_is_that_of_every_version():
    """Records name a seed and a step: what they stand for must not change."""
    assert domain_blocks(7, 4711, domain="arxiv", num_blocks=1000, size=6).tolist() == PINNED_BLOCKS
    assert mixture_counts(7, 4711, [0.5, 0.3, 0.2], 28).tolist() == PINNED_COUNTS


PINNED_BLOCKS = [797, 908, 728, 674, 492, 708]
PINNED_COUNTS = [14, 8, 6]

WEIGHTS = [
    [1.0],
    [0.25] * 4,
    [1 / 7] * 7,
    [0.0, 0.6, 0.0, 0.4, 0.0],
    [1e-4, 1 - 1e-4],
    [0.123456, 0.333333, 0.543211],
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("batch_size", [1, 2, 28, 1000])
def test_counts_are_within_one_of_their_share(weights, batch_size):
    for step in range(60):
        counts = mixture_counts(1, step, weights, batch_size)
        assert counts.sum() == batch_size
        share = batch_size * np.array(weights)
        # 1e-9: rounding of the sum of weights; a share of 7 may be 6.9999999.
        assert (counts >= np.floor(share - 1e-9)).all()
        assert (counts <= np.ceil(share + 1e-9)).all()


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_counts_are_exact_in_expectation_over_seeds(weights):
    seeds = 4000
    mean = np.mean([mixture_counts(seed, 5, weights, 9) for seed in range(seeds)], axis=0)
    # A count differs from its mean by less than one: five standard errors, at most.
    assert np.abs(mean - 9 * np.array(weights)).max() < 5 * 0.5 / np.sqrt(seeds)


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_what_was_drawn_stays_close_to_the_weights(weights):
    num_blocks = {str(k): 100 for k in range(len(weights))}
    named = dict(zip(num_blocks, weights, strict=True))
    mixture = domains._Mixture(2, named, 13, num_blocks)
    steps = np.arange(20_000)
    drawn = np.cumsum(mixture.counts(steps), axis=0)
    expected = 13.0 * (steps[:, None] + 1) * np.array(weights)
    # A rotation's discrepancy grows with the logarithm of the steps (Khinchin: at most
    # 3/2 + log t / log golden ratio / sqrt 5, twice for the two ends of an interval).
    bound = 2 * (1.5 + np.log(20_000) / (np.log(1.618) * np.sqrt(5)))
    assert np.abs(drawn - expected).max() < bound


def test_mixtures_go_on_where_they_stopped():
    num_blocks = {"a": 40, "b": 1000, "c": 7}
    weights = {"c": 0.1, "a": 0.2, "b": 0.7}
    streams: dict[str, list[int]] = {name: [] for name in num_blocks}
    for step in range(30):
        batch = mixture_blocks(5, step, weights, 10, num_blocks=num_blocks)
        assert list(batch) == ["a", "b", "c"]
        assert sum(map(len, batch.values())) == 10
        for name, rows in batch.items():
            streams[name].extend(rows)
    for name, stream in streams.items():
        as_proxy = domain_blocks(5, 0, domain=name, num_blocks=num_blocks[name], size=len(stream))
        assert stream == list(as_proxy)


def test_a_long_mixture_is_found_by_arithmetic():
    num_blocks = {"a": 50, "b": 60}
    mixture = domains._Mixture(0, {"a": 0.3, "b": 0.7}, 8, num_blocks)
    steps = 3000
    drawn = mixture.counts(np.arange(steps)).sum(axis=0)
    assert (mixture.drawn(steps) == drawn).all()
    # Asked for an earlier one, and for the boundary of a partial sum, it says the same.
    for step in (0, 1, 1023, 1024, 1025, 2048):
        assert (mixture.drawn(step) == mixture.counts(np.arange(step)).sum(axis=0)).all()


def test_a_curriculum_changes_weights_and_keeps_positions():
    num_blocks = {"a": 500, "b": 500}
    stages = [Stage(0, {"a": 1.0, "b": 0.0}), Stage(10, {"a": 0.25, "b": 0.75})]
    seen: dict[str, list[int]] = {"a": [], "b": []}
    for step in range(30):
        batch = mixture_blocks(1, step, stages, 4, num_blocks=num_blocks)
        assert len(batch["a"]) == (4 if step < 10 else 1)
        for name, rows in batch.items():
            seen[name].extend(rows)
    # Sixty blocks each: none came twice before all had come once.
    assert len(set(seen["a"])) == len(seen["a"]) == 60
    assert len(set(seen["b"])) == len(seen["b"]) == 60


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mixture_counts(0, 0, [0.5, 0.4], 8), "sum to 1; they are .*, with the sum 0.9"),
        (lambda: mixture_counts(0, 0, [1.5, -0.5], 8), "must be >= 0"),
        (lambda: mixture_counts(0, 0, [float("nan"), 1.0], 8), "must be >= 0"),
        (lambda: mixture_counts(0, 0, [], 8), "must be >= 0"),
        (lambda: mixture_counts(0, 0, [1.0], 0), "batch_size >= 1"),
        (lambda: mixture_counts(0, -1, [1.0], 1), "step >= 0"),
        (lambda: domain_blocks(0, -1, domain="a", num_blocks=1, size=1), "step >= 0"),
        (lambda: domain_blocks(0, 0, domain="a", num_blocks=0, size=1), "a has no blocks"),
        (
            lambda: mixture_blocks(0, 0, {"a": 1.0}, 1, num_blocks={"b": 1}),
            "weighs exactly the domains b; from step 0 on it weighs a",
        ),
        (
            lambda: mixture_blocks(0, 0, [Stage(1, {"a": 1.0})], 1, num_blocks={"a": 1}),
            "begin at step 0 and go up; they begin at \\[1\\]",
        ),
    ],
)
def test_samplers_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def proxy_batches(corpus: Corpus, **options: Any) -> ProxyBatches:
    return ProxyBatches(corpus, **{"sequences_per_domain": 3, "seed": 4, "steps": 12} | options)


def base_batches(corpus: Corpus, **options: Any) -> BaseBatches:
    weights = dict.fromkeys(corpus.names, 1 / len(corpus.names))
    return BaseBatches(
        corpus, **{"weights": weights, "batch_size": 7, "seed": 4, "steps": 12} | options
    )


def flat(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """{"a": {"x": t}} -> {"a.x": t}."""
    found = {}
    for key, value in batch.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        found |= {f"{key}.{name}": tensor for name, tensor in inner}
    return found


def assert_same_batches(ours: Iterable[Any], theirs: Iterable[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        left, right = flat(one), flat(other)
        assert list(left) == list(right)
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_proxy_batches_hold_every_row(mixed):
    batches = list(proxy_batches(mixed))
    assert len(batches) == 12
    for batch in batches:
        assert list(batch) == ["code", "prose", "verse", "mix"]
        for part in batch.values():
            assert part["input_ids"].shape == (3, 16)
            assert part["input_ids"].dtype == torch.int64
            assert torch.equal(part["labels"], part["input_ids"])


def test_proxy_batches_are_the_blocks_that_domain_blocks_names(mixed):
    batch = proxy_batches(mixed).batch(9)
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
    for batch in proxy_batches(mixed, steps=100):
        for row in batch["mix"]["input_ids"].tolist():
            (owner,) = [name for name, blocks in held.items() if tuple(row) in blocks]
            drawn[owner] += 1
    assert sum(drawn.values()) == 300
    assert abs(drawn["code"] - 150) <= 10


def test_another_domain_does_not_change_the_others(tmp_path, config, mixed):
    mixed.tokenizer.save_pretrained(tmp_path)
    fixed = rename(config, tokenizer=str(tmp_path))
    fewer = load_corpus(rename(fixed, domains=("prose",)), targets=["verse"])
    more = load_corpus(rename(fixed, domains=("code", "prose")), targets=["verse"])
    assert fewer.tokenizer_sha256 == mixed.tokenizer_sha256
    ours, theirs = proxy_batches(fewer).batch(5), proxy_batches(more).batch(5)
    for name in ("prose", "verse"):
        assert torch.equal(ours[name]["input_ids"], theirs[name]["input_ids"])


def test_base_batches_are_sorted_by_domain(corpus):
    weights = {"code": 0.5, "prose": 0.0, "verse": 0.5}
    batches = base_batches(corpus, weights=weights, domain_ids=True)
    blocks_of = [
        {tuple(row) for row in np.asarray(corpus.train[name][:]["input_ids"])}
        for name in corpus.names
    ]
    for step, batch in enumerate(batches):
        assert batch["input_ids"].shape == batch["labels"].shape == (7, 16)
        for row, index in zip(batch["input_ids"].tolist(), batch["domain_ids"], strict=True):
            assert tuple(row) in blocks_of[index]
        assert batch["domain_ids"].tolist() == sorted(batch["domain_ids"].tolist())
        counts = batches.counts(step)
        assert counts["prose"] == 0
        assert counts == {
            name: batch["domain_ids"].tolist().count(index)
            for index, name in enumerate(corpus.names)
        }


@pytest.mark.parametrize("make", [proxy_batches, base_batches])
@pytest.mark.parametrize("start_step", [0, 1, 5, 12])
def test_a_resumed_run_sees_what_the_uninterrupted_one_would(mixed, make, start_step):
    whole = list(make(mixed))
    assert_same_batches(make(mixed, start_step=start_step), whole[start_step:])
    assert_same_batches([make(mixed).batch(7)], [whole[7]])


@dataclasses.dataclass(frozen=True)
class Worker:
    """What a loader tells the copy of a data set in one of its workers."""

    id: int
    num_workers: int = 3


@pytest.mark.parametrize("make", [proxy_batches, base_batches])
def test_workers_deal_the_steps_out_in_turn(mixed, make, monkeypatch):
    whole = list(make(mixed))
    for worker in map(Worker, range(3)):
        monkeypatch.setattr(domains, "get_worker_info", lambda worker=worker: worker)
        copied = pickle.loads(pickle.dumps(make(mixed, start_step=2)))
        assert_same_batches(copied, whole[2 + worker.id :: 3])


def test_a_loader_hands_on_whole_batches(mixed):
    loader = DataLoader(base_batches(mixed, start_step=2), batch_size=None)
    assert_same_batches(loader, base_batches(mixed, start_step=2))


def test_endless_batches_go_on(corpus):
    batches = iter(base_batches(corpus, steps=None, start_step=100))
    assert torch.equal(next(batches)["input_ids"], base_batches(corpus).batch(100)["input_ids"])
    assert torch.equal(next(batches)["input_ids"], base_batches(corpus).batch(101)["input_ids"])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (proxy_batches, {"sequences_per_domain": 0}, "sequences_per_domain must be > 0; it is 0"),
        (base_batches, {"batch_size": 0}, "batch_size must be > 0; it is 0"),
        (base_batches, {"start_step": 13}, "asked for 13 to 12"),
        (proxy_batches, {"start_step": -1}, "asked for -1 to 12"),
        (base_batches, {"weights": {"code": 1.0}}, "weighs exactly the domains"),
    ],
)
def test_batches_refuse(corpus, make, options, message):
    with pytest.raises(ValueError, match=message):
        make(corpus, **options)
