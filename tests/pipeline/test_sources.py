"""Every layout and form of text is found and read; what cannot be read is told in a sentence."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from doge_fast.pipeline import corpus_files, sources
from doge_fast.pipeline.domains import load_corpus
from tests.pipeline.corpora import (
    answer_as_hub,
    check_refused,
    documents,
    name_configurations,
    rename,
    rows_of_two,
    text_of,
    texts,
    write_jsonl,
    write_parquet,
)


def test_every_layout_is_found(corpus):
    assert corpus.names == ("code", "prose", "verse")
    assert corpus.targets == ()
    assert corpus.documents == {"code": 60, "prose": 45, "verse": 36}
    assert corpus.block_size == 16
    assert corpus.vocab_size == len(corpus.tokenizer) == 300
    assert corpus.mix is None


def test_what_is_not_read_is_said(tmp_path, config, caplog):
    for name in ("code.jsonl", "prose.jsonl", "verse.JSONL", "table.csv"):
        write_jsonl(tmp_path / name, texts(name, 30))
    with caplog.at_level("INFO", logger="doge_fast"):
        assert load_corpus(rename(config, data=str(tmp_path))).names == ("code", "prose")
    told = "not read are table.csv, verse.JSONL, which do not end in .parquet, .jsonl,"
    assert f"{tmp_path}: {told}" in caplog.text


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


def test_a_hub_id_with_a_domain_column(tmp_path, config, monkeypatch):
    answer_as_hub(monkeypatch, "owner/pajama", hub_folder(tmp_path / "pajama"))
    hub = rename(config, data="owner/pajama", domain_column="meta.redpajama_set_name")
    loaded = load_corpus(hub)
    assert loaded.documents == {"Book": 30, "C4": 60}


def test_a_hub_ids_configurations_are_domains(tmp_path, config, monkeypatch):
    for name in ("en", "ca"):
        write_jsonl(tmp_path / "wiki" / name / "train.jsonl", texts(name))
        write_jsonl(tmp_path / "wiki" / name / "test.jsonl", texts(f"held-out {name}"))
    name_configurations(tmp_path / "wiki", ["en", "ca"])
    answer_as_hub(monkeypatch, "owner/wiki", tmp_path / "wiki")
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
    found = list(corpus_files.text_documents([tmp_path / "data" / "book.txt"], 16_384))
    assert "".join(found) == "".join(paragraphs)
    assert len(found) > 4
    assert all(text.endswith("\n\n") for text in found)
    assert all(len(text) >= 16_384 for text in found[:-1])
    loaded = load_corpus(rename(config, data=str(tmp_path / "data")))
    # About 64 documents of text of this size, a tenth of them held out.
    chars = sum(map(len, paragraphs)) // 64
    cut = list(corpus_files.text_documents([tmp_path / "data" / "book.txt"], chars))
    assert 48 <= len(cut) <= 64
    assert loaded.documents["book"] == len(cut) - round(0.1 * len(cut))


def test_text_without_blank_lines_is_cut_too(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789\n" * 100_000)
    found = list(corpus_files.text_documents([tmp_path / "a.txt"], 16_384))
    assert "".join(found) == "0123456789\n" * 100_000
    assert max(map(len, found)) < 16 * 16_384 + 11


@pytest.mark.parametrize(("num_paragraphs", "words"), [(400, 5), (120, 24)], ids=str)
def test_a_small_text_file_has_documents_to_hold_out(tmp_path, config, num_paragraphs, words):
    # 14 kB were one document, which cannot be divided; 17 kB two, of which one was nearly all.
    paragraphs = [" ".join(text_of("p", i).split()[:words]) for i in range(num_paragraphs)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "book.txt").write_text("\n\n".join(paragraphs))
    write_jsonl(tmp_path / "data" / "b.jsonl", texts("b"))
    small = rename(config, data=str(tmp_path / "data"), validation_fraction=0.05)
    loaded = load_corpus(small)
    num_train, num_held = len(loaded.train["book"]), len(loaded.validation["book"])
    assert loaded.documents["book"] >= 10
    assert 0 < num_held / (num_train + num_held) < 0.15
    assert loaded.warnings == ()


def test_the_cut_of_text_follows_what_there_is_of_a_domain(tmp_path):
    def cut(*sizes: int) -> int:
        files = [tmp_path / f"{index}.txt" for index in range(len(sizes))]
        for file, size in zip(files, sizes, strict=True):
            file.write_bytes(b"x" * size)
        return corpus_files.text_document_chars(files)

    assert cut(100) == cut(512 * 64) == 512
    assert cut(640_000) == 10_000
    assert cut(2**20) == cut(2**24) == 16_384
    # Files of which each is a document stay whole where there are many.
    assert cut(*[2**14] * 64) == 16_384
    assert corpus_files.text_document_chars([tmp_path / "rows.jsonl"]) == 16_384


def test_text_with_a_validation_file_is_cut_as_ever(tmp_path, config):
    (tmp_path / "a").mkdir()
    for split, count in (("train", 60), ("validation", 9)):
        text = "\n\n".join(texts(f"a {split}", count))
        (tmp_path / "a" / f"{split}.txt").write_text(text)
    assert load_corpus(rename(config, data=str(tmp_path))).documents == {"a": 2}


def test_another_cut_is_another_cache_entry(tmp_path, config):
    (tmp_path / "long.txt").write_bytes(b"x\n\n" * 2**19)
    (tmp_path / "short.txt").write_bytes(b"x\n\n" * 2**9)
    parts = sources.find_parts(rename(config, data=str(tmp_path)), [])
    # What was packed of a megabyte or more is found again.
    assert parts["long"].fingerprint == corpus_files.stamp_of([tmp_path / "long.txt"])
    assert parts["short"].fingerprint != corpus_files.stamp_of([tmp_path / "short.txt"])


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
    assert sources._split_of(name) == split


def test_a_test_split_is_held_out_only_where_there_is_no_validation(tmp_path, config):
    for split in ("train", "test"):
        write_jsonl(tmp_path / "data" / "a" / f"{split}.jsonl", texts(f"a {split}"))
        write_jsonl(tmp_path / "data" / "b" / split / "part.jsonl", texts(f"b {split}"))
    write_jsonl(tmp_path / "data" / "b" / "valid" / "part.jsonl", texts("b valid"))
    loaded = load_corpus(rename(config, data=str(tmp_path / "data")))
    assert documents(loaded, "a", "validation")[0] == text_of("a test", 0)
    assert documents(loaded, "b", "validation")[0] == text_of("b valid", 0)
    assert documents(loaded, "b", "train")[0] == text_of("b train", 0)


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


def make_hollow(folder: Path, form: str) -> Path:
    """Something that looks like a domain and holds no text."""
    path = folder / (
        "gone.jsonl" if form in ("dangling file", "folder", "pipe", "self") else "gone"
    )
    if form == "dangling file":
        path.symlink_to(folder / "nowhere.jsonl")
    elif form == "self":
        path.symlink_to(path)
    elif form == "pipe":
        os.mkfifo(path)
    elif form == "dangling folder":
        path.symlink_to(folder / "nowhere")
    else:
        path.mkdir()
    if form == "loop":
        write_jsonl(path / "train.jsonl", texts("gone"))
        path = path / "again"
        path.symlink_to(folder)
    elif form == "dangling inside":
        write_jsonl(path / "train.jsonl", texts("gone"))
        path = path / "more.jsonl"
        path.symlink_to(folder / "nowhere.jsonl")
    elif form == "folder inside":
        path = path / "train.jsonl"
        path.mkdir()
    return path


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ("dangling file", "is a link to nothing"),
        ("dangling folder", "is a link to nothing"),
        ("dangling inside", "is a link to nothing"),
        ("self", "is a link to nothing"),
        ("pipe", "or no file"),
        ("loop", "is a link to a folder around it"),
        ("folder inside", "has the name of a file and is a folder"),
        ("folder", "holds no file of"),
        ("empty folder", "holds no file of"),
    ],
)
def test_no_domain_vanishes(tmp_path, config, form, sentence):
    write_jsonl(tmp_path / "good.jsonl", texts("good"))
    path = make_hollow(tmp_path, form)
    check_refused(rename(config, data=str(tmp_path)), f"{path} .*{sentence}")


def test_links_that_lead_to_each_other_are_refused(tmp_path, config):
    for name, other in ("ab", "ba"):
        write_jsonl(tmp_path / name / "train.jsonl", texts(name))
        (tmp_path / name / "more").symlink_to(tmp_path / other)
    check_refused(rename(config, data=str(tmp_path)), "a/more/more is a link to a folder around it")


def test_a_folder_without_text_is_left_out_where_domains_are_named(tmp_path, config):
    write_jsonl(tmp_path / "good.jsonl", texts("good"))
    (tmp_path / "scripts").mkdir()
    loaded = load_corpus(rename(config, data=str(tmp_path), domains=("good",)))
    assert loaded.names == ("good",)


def test_links_to_folders_are_followed(tmp_path, config):
    store = tmp_path / "store"
    write_jsonl(store / "a" / "one.jsonl", texts("a"))
    write_jsonl(store / "more" / "two.jsonl", texts("more"))
    (store / "a" / "more").symlink_to(store / "more")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").symlink_to(store / "a")
    loaded = load_corpus(rename(config, data=str(tmp_path / "data")))
    # Of 80, a tenth is held out.
    assert loaded.documents == {"a": 72}


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
        r"text_column \(--text-column\)",
    )
    loaded = load_corpus(rename(config, data=str(tmp_path), text_column="content"))
    assert documents(loaded, "a", "train")


def test_a_text_column_of_numbers(tmp_path, config):
    write_parquet(tmp_path / "a.parquet", text=list(range(40)))
    check_refused(rename(config, data=str(tmp_path)), 'column "text" of .* holds int')


def test_a_text_column_that_turns_into_numbers(tmp_path, config):
    path = write_jsonl(tmp_path / "a.jsonl", texts("a", 200))
    with path.open("a") as file:
        file.write('{"text": 5}\n')
    with pytest.raises(
        ValueError, match=r'column "text" of .*a.jsonl must hold text; it holds int'
    ):
        load_corpus(rename(config, data=str(tmp_path)))


def test_a_missing_domain_column(tmp_path, config):
    path = write_jsonl(tmp_path / "a.jsonl", texts("a"))
    check_refused(
        rename(config, data=str(path), domain_column="meta.set"),
        r'has no column "meta"; its columns are text\. Name the right one with domain_column '
        r"\(--domain-column\)",
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.txt"])
def test_a_file_that_cannot_be_read(tmp_path, config, name):
    (tmp_path / name).write_bytes(b'\xff\xfe{"text": "x" \n}}' * 50)
    check_refused(
        rename(config, data=str(tmp_path)), r"a\.\w+ cannot be read: |must be UTF-8; .*a.txt is not"
    )
