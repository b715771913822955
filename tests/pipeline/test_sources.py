"""Every layout and form of text is found and read; what cannot be read is told in a sentence."""

import bz2
import gzip
import lzma
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from doge_fast.pipeline import corpus_files, hub, packing, sources
from doge_fast.pipeline.corpus_files import CorpusFile
from doge_fast.pipeline.domains import load_corpus
from tests.pipeline.corpora import (
    answer_as_hub,
    check_refused,
    documents,
    name_configurations,
    saved_tokenizer,
    text_of,
    texts,
    tokens,
    write_jsonl,
    write_parquet,
    write_rows,
    write_text,
)


def cut(path: Path, chars: int = 16_384) -> list[str]:
    file = CorpusFile(path, "a", "train", "text")
    return [row["text"] for row in corpus_files.rows_of(file, ["text"], chars)]


def test_what_is_read_held_out_and_left_out_is_said(tmp_path, load, caplog):
    for name in ("code.jsonl", "prose/0.jsonl", "verse.JSONL", "table.csv"):
        write_jsonl(tmp_path / name, texts(name, 30))
    write_jsonl(tmp_path / "prose" / "1.json.gz", texts("more"))
    write_jsonl(tmp_path / "prose" / ".ipynb_checkpoints" / "0.jsonl", texts("old"))
    for name in ("prose/2.csv", "prose/README.txt", ".hidden.jsonl", "LICENSE"):
        (tmp_path / name).write_text("terms of use")
    (tmp_path / "prose" / "3.jsonl").write_text("")
    write_jsonl(tmp_path / "code2" / "train.jsonl", texts("code2"))
    write_jsonl(tmp_path / "code2" / "code2-validation.jsonl", texts("held-out", 9))
    write_jsonl(tmp_path / "code2" / "test.jsonl", texts("never read", 9))
    with caplog.at_level("INFO", logger="doge_fast"):
        loaded = load()
    assert loaded.documents == {"code": 27, "code2": 40, "prose": 63, "verse": 27}
    (held,) = [line for line in caplog.messages if ": held out, " in line]
    assert "code2 code2/code2-validation.jsonl" in held
    assert "code, prose, verse" in held
    left = "\n".join(line for line in caplog.messages if "not read" in line)
    not_read = ("table.csv", "prose/2.csv", "README.txt", ".hidden.jsonl", "LICENSE")
    for name in (*not_read, "test.jsonl", ".ipynb_checkpoints"):
        assert name in left
    # What is likely to be text that somebody misses is warned of.
    (warned,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "table.csv" in warned
    assert "prose/3.jsonl holds no row" in caplog.text
    assert "prose/1.json.gz" in caplog.text


def test_no_more_of_a_hub_data_set_is_read_than_fills_the_named_domains(
    tmp_path, config, corpus, monkeypatch
):
    for split, number in (("train", 9000), ("validation", 300)):
        names = ["book" if row % 20 == 0 else "web" if row % 2 else "code" for row in range(number)]
        documents = [text_of(f"{split} {name}", i) for i, name in enumerate(names)]
        meta = [{"set": name} for name in names]
        # As the Hub names them.
        file = tmp_path / "large" / f"{split}-00000-of-00001.parquet"
        write_parquet(file, text=documents, meta=meta)
    read = answer_as_hub(monkeypatch, "owner/large", tmp_path / "large")
    asked = {"data": "owner/large", "domain_column": "meta.set", "domains": ("book", "web")}
    asked |= {"tokenizer": saved_tokenizer(corpus), "max_tokens_per_domain": 800}
    loaded = load_corpus(replace(config, **asked))
    assert loaded.train_tokens == {"book": 800, "web": 800}
    # The rarest domain decides; what is beyond is a batch of the tokenizer.
    assert len(read) < 20 * loaded.documents["book"] + 2 * 300 + 2000 < 9000
    (warning,) = loaded.warnings
    assert warning.startswith("book, web: read as far as max_tokens_per_domain")


def test_choosing_what_is_held_out_reads_no_more_than_may_fill_the_domains(
    tmp_path, config, corpus, monkeypatch
):
    rows = [{"text": text_of("web", i), "set": "web"} for i in range(9000)]
    rows += [{"text": text_of("rare", i), "set": "rare"} for i in range(200)]
    write_rows(tmp_path / "large" / "train.jsonl", rows)
    read = answer_as_hub(monkeypatch, "owner/large", tmp_path / "large")
    asked = {"data": "owner/large", "domain_column": "set", "max_tokens_per_domain": 800}
    asked |= {"tokenizer": saved_tokenizer(corpus), "validation_fraction": 0.2}
    loaded = load_corpus(replace(config, **asked, domains=("web",)))
    assert loaded.train_tokens == {"web": 800}
    assert len(read) < 3000
    # Of a domain that lies behind the sample a share is held out all the same.
    monkeypatch.setattr(packing, "_HOLDOUT_SAMPLE", 1000)
    assert len(load_corpus(replace(config, **asked, domains=("rare",))).validation["rare"]) > 1


def test_a_hub_ids_configurations_are_domains(tmp_path, config, monkeypatch):
    for name in ("en", "ca"):
        write_jsonl(tmp_path / "wiki" / name / "train.jsonl", texts(name))
        write_jsonl(tmp_path / "wiki" / name / "test.jsonl", texts(f"held-out {name}", 20))
    name_configurations(tmp_path / "wiki", ["en", "ca"])
    answer_as_hub(monkeypatch, "owner/wiki", tmp_path / "wiki")
    loaded = load_corpus(replace(config, data="owner/wiki"), targets=["ca"])
    assert (loaded.names, loaded.targets) == (("en",), ("ca",))
    assert documents(loaded, "en", "train")[0] == text_of("en", 0)
    assert documents(loaded, "ca", "validation")[0] == text_of("held-out ca", 0)


@pytest.mark.parametrize("is_off", [True, False])
def test_a_hub_that_does_not_answer_is_asked_once(config, monkeypatch, is_off):
    """datasets would ask five times more, for half a minute and with thirty lines."""
    seen = []

    class Session:
        def head(self, *_: Any, **__: Any) -> None:
            if is_off:
                raise ConnectionError("no route")

    def look(_: str) -> list[str]:
        seen.append(constants.is_offline_mode() and datasets.config.HF_HUB_OFFLINE)
        raise ConnectionError("Couldn't reach the Hub\nwith a long trace")

    for switch in (constants, datasets.config):
        monkeypatch.setattr(switch, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "get_session", Session)
    monkeypatch.setattr(datasets, "get_dataset_config_names", look)
    with pytest.raises(ValueError, match="Couldn't reach the Hub"):
        load_corpus(replace(config, data="owner/nothing"))
    assert seen == [is_off]
    assert not constants.is_offline_mode()


def test_text_files_are_cut_at_blank_lines(tmp_path):
    paragraphs = [f"{text_of('p', index)}\n\n" for index in range(400)]
    (tmp_path / "book.txt").write_text("".join(paragraphs))
    found = cut(tmp_path / "book.txt")
    assert "".join(found) == "".join(paragraphs)
    assert len(found) > 4
    assert all(text.endswith("\n\n") for text in found)
    assert all(len(text) >= 16_384 for text in found[:-1])


def test_a_text_of_one_long_line_is_cut(tmp_path, load):
    """As text8 is: words between spaces, without an end of line."""
    line = " ".join(texts("a", 2000)).replace("\n", " ")
    (tmp_path / "a.txt").write_text(line)
    write_jsonl(tmp_path / "b.jsonl", texts("b"))
    pieces = cut(tmp_path / "a.txt", 500)
    assert "".join(pieces) == line
    # The end of the line too, which is shorter than 16 pieces.
    assert len(line) % (16 * 500) > 500
    assert max(map(len, pieces)) == 500
    loaded = load()
    num_held = len(loaded.validation["a"])
    assert 0.05 < num_held / (num_held + len(loaded.train["a"])) < 0.2
    # Pieces of our own say nothing of the length of a document.
    assert loaded.sizes("a").keys() == {"tokens"}
    assert loaded.sizes("b").keys() == {"tokens", "documents", "mean_doc_tokens"}


@pytest.mark.parametrize(("num_paragraphs", "words"), [(400, 5), (120, 24)], ids=str)
def test_a_small_text_file_has_documents_to_hold_out(tmp_path, load, num_paragraphs, words):
    # 14 kB were one document, which cannot be divided; 17 kB two, of which one was nearly all.
    paragraphs = [" ".join(text_of("p", i).split()[:words]) for i in range(num_paragraphs)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    loaded = load(validation_fraction=0.05)
    num_train, num_held = len(loaded.train["book"]), len(loaded.validation["book"])
    assert loaded.documents["book"] >= 10
    assert 0 < num_held / (num_train + num_held) < 0.15
    assert loaded.warnings == ()


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("Test.jsonl", "test"),
        ("c4-validation.00000-of-00001.jsonl", "validation"),
        # As the Hub names them.
        ("validation-00000-of-00001-913ba403f8a7a3ae.parquet", "validation"),
        ("web-heldout.jsonl", "validation"),
        ("held-out.jsonl", "validation"),
        ("web_hold_out_2.jsonl", "validation"),
        ("evaluation-of-bridges.jsonl", None),
        ("en_test_12.jsonl.gz", "test"),
        ("trains.txt", None),
    ],
)
def test_splits_are_told_by_name(name, split):
    assert corpus_files.split_of(name) == split


def test_a_test_split_is_held_out_only_where_there_is_no_validation(tmp_path, load):
    for split, count in (("train", 40), ("test", 20)):
        write_jsonl(tmp_path / "data" / "a" / f"{split}.jsonl", texts(f"a {split}", count))
        write_jsonl(tmp_path / "data" / "b" / split / "part.jsonl", texts(f"b {split}", count))
    write_jsonl(tmp_path / "data" / "b" / "valid" / "part.jsonl", texts("b valid", 20))
    loaded = load("data")
    assert documents(loaded, "a", "validation")[0] == text_of("a test", 0)
    assert documents(loaded, "b", "validation")[0] == text_of("b valid", 0)
    assert documents(loaded, "b", "train")[0] == text_of("b train", 0)
    # Where domains are named other folders are left out.
    write_jsonl(tmp_path / "data" / "c" / "test.jsonl", texts("c", 20))
    (tmp_path / "data" / "scripts").mkdir()
    assert load("data", domains=("a", "b")).names == ("a", "b")


@pytest.mark.parametrize(
    ("files", "place", "column", "word"),
    [
        (["notes.md"], "", None, "holds notes.md"),
        (["train.jsonl", "validation.jsonl"], "", None, "names a split where a domain"),
        (["a.jsonl", "web-heldout.jsonl"], "", None, "names a split where a domain"),
        (["a.jsonl"], "a.jsonl", None, "is one file: name the column"),
        (["a.txt"], "a.txt", "d", "is no .txt"),
        (["a/test.jsonl"], "", None, "needs files that no name holds out; .* only .*a/test.jsonl"),
        (["a.jsonl"], "a.jsonl", "meta.set", 'has no column "meta.set"; .*--domain-column'),
    ],
)
def test_what_is_no_directory_of_domains_is_refused(tmp_path, config, files, place, column, word):
    for file in files:
        write_jsonl(tmp_path / file, texts("a"))
    check_refused(replace(config, data=str(tmp_path / place), domain_column=column), word)


@pytest.mark.parametrize("column", ["text", "meta.text"])
@pytest.mark.parametrize(
    "other",
    [
        '"other": {"x": 1, "x": 2}',
        '"other": 1, "other": 2',
        '"other": NaN',
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_a_row_holds_beside_its_text_may_be_anything(tmp_path, config, column, other):
    pair = f'"text": "TEXT", {other}'
    row = pair if column == "text" else f'"meta": {{{pair}}}'
    lines = [f"{{{row}}}\n".replace("TEXT", text) for text in texts("a", 20)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    asked = replace(config, data=str(tmp_path), text_column=column)
    assert load_corpus(asked).documents == {"a": 18}


def test_a_column_that_is_there_twice_is_refused(tmp_path, load):
    arrays = [pa.array(texts(name, 20)) for name in "ab"]
    pq.write_table(pa.Table.from_arrays(arrays, names=["text"] * 2), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="twice"):
        load()


def test_more_held_out_by_name_than_trained_on_is_told(tmp_path, config):
    write_jsonl(tmp_path / "blog" / "old.jsonl", texts("old", 10))
    write_jsonl(tmp_path / "blog" / "my-dev.jsonl", texts("dev", 40))
    asked = replace(config, data=str(tmp_path))
    (warning,) = load_corpus(asked).warnings
    assert "my-dev" in warning
    # Text that a model is measured on may be all validation.
    loaded = load_corpus(asked, is_measured=True)
    assert loaded.warnings == ()
    assert len(loaded.validation["blog"]) > 3 * len(loaded.train["blog"])


def test_a_name_with_the_word_of_a_split_is_trained_on_and_warned_of(tmp_path, load, caplog):
    odd = ("dev-blog", "wiki.test.raw", "val-d-isere/0", "testset")
    for name in (*odd, "wiki-training"):
        write_jsonl(tmp_path / "a" / f"{name}.jsonl", texts(name, 20))
    assert load().documents == {"a": 90}
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [name in warning for name in (*odd, "wiki-training")] == [True] * 4 + [False]


def test_pointers_of_git_lfs_are_told(tmp_path, load):
    for index in range(40):
        pointer = f"oid sha256:{index:064x}\nsize {400_000 + index}\n"
        file = tmp_path / "data" / "books" / f"{index}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"version https://git-lfs.github.com/spec/v1\n{pointer}")
    write_jsonl(tmp_path / "data" / "code.jsonl", texts("code"))
    for _ in ("packed", "found in the cache"):
        (warning,) = load("data").warnings
        assert "books/0.txt" in warning
        assert "git-lfs" in warning


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["train-00000-of-00004", "train-00001-of-00004", "train-00003-of-00004"], "3 of 4"),
        # As the Hub and torch name them; counted from 1; another split is another series.
        (["train-00001-of-00002-913ba403f8a7a3ae", "train-00000-of-00002-8a7a3ae913ba403f"], None),
        (["part_1_of_2", "part_2_of_2"], None),
        (["train-00000-of-00001", "validation-00000-of-00001"], None),
        (["web-1-of-a-kind"], None),
    ],
)
def test_a_shard_that_is_missing_is_told(tmp_path, load, names, said):
    for name in names:
        write_jsonl(tmp_path / "data" / "web" / f"{name}.jsonl", texts(name, 20))
    warnings = load("data", is_measured=True).warnings
    assert len(warnings) == (said is not None)
    assert all(f"web/train-*-of-00004: {said} shards are there" in each for each in warnings)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_shards_of_two_writings_are_told(tmp_path, load, ending):
    """As `save_to_disk` leaves them that ran twice, once its state.json is gone."""
    folder = tmp_path / "data" / "web"
    rows = datasets.Dataset.from_dict({"text": texts("web")})
    for total in (1, 2):
        for number in range(total):
            part = rows.shard(total, number)
            part.to_parquet(folder / f"data-0000{number}-of-0000{total}.parquet")
    if ending == "arrow":
        shutil.rmtree(folder)
        for total in (1, 2):
            rows.save_to_disk(folder, num_shards=total)
        assert load("data").warnings == ()
        (folder / "state.json").unlink()
    (warning,) = load("data").warnings
    assert "web/data-*: sets of 00001 and 00002 shards" in warning


@pytest.mark.parametrize(
    ("separator", "ending"),
    [
        ("\n<|endoftext|>\n", "txt"),
        ("<|endoftext|>\n\n", "txt.gz"),
        (" <|endoftext|> ", "txt"),
        ("\n<|eot_id|>\n", "txt"),
        ("\n</s>\n", "txt.zst"),
        ("\n[SEP]\n", "txt"),
        ("\n<EOD>\r\n", "txt"),
    ],
)
def test_an_end_of_text_that_is_spelled_between_documents_is_told(
    tmp_path, load, separator, ending
):
    stories = texts("story", 60)
    write_text(tmp_path / "data" / "tales" / f"train.{ending}", separator.join(stories))
    plain = "\n\n".join(stories) + "not <|endoftext|> here, <b>\nor </s> there\n<p>\n"
    write_text(tmp_path / "data" / "plain.txt", plain)
    loaded = load("data")
    (warning,) = (each for each in loaded.warnings if "spelled" in each)
    assert f"tales/train.{ending}: {separator.strip()} is spelled between documents" in warning
    # What is told of is read as it is.
    assert separator.strip() in loaded.tokenizer.decode(tokens(loaded.train["tales"]))


@pytest.mark.parametrize("name", ["corpus[2]", "x::y", "hf:"])
@pytest.mark.parametrize("has_column", [False, True], ids=["folders", "column"])
def test_a_path_is_no_pattern(tmp_path, config, name, has_column):
    """Beside it lie folders and files that it would match as one."""
    column = "source" if has_column else None
    for folder in (name, "corpus2", "code", "axb", "y", "a", "b"):
        rows = [{"text": f"{folder} {i} " + "word " * 30, "source": "own"} for i in range(40)]
        for file in ("[a]*.jsonl", "a.jsonl" if has_column else "b.jsonl"):
            write_rows(tmp_path / folder / file, rows)
    loaded = load_corpus(replace(config, data=str(tmp_path / name), domain_column=column))
    assert set(loaded.names) == ({"own"} if has_column else {"[a]*", "b"})
    for domain in loaded.names:
        assert all(t.startswith(name) for t in documents(loaded, domain, "train")[:-1])


def test_what_lies_in_a_folder_does_not_say_what_is_read(tmp_path, load):
    """README.md and .huggingface.yaml choose files for `datasets`, also outside and far away."""
    rows = [{"text": text, "source": "web"} for text in texts("inside")]
    write_rows(tmp_path / "in" / "a.jsonl", rows)
    write_rows(tmp_path / "out.jsonl", [{"text": "outside", "source": "other"}])
    told = "configs:\n- config_name: default\n  data_files: ../out.jsonl\n"
    (tmp_path / "in" / "README.md").write_text(f"---\n{told}---\n")
    (tmp_path / "in" / ".huggingface.yaml").write_text(told)
    loaded = load("in", domain_column="source")
    assert loaded.documents == {"web": 36}


@pytest.mark.parametrize(
    ("column", "files", "found"),
    [
        # What nobody needs may be anything.
        (None, {"a.jsonl": [{"n": 1}, {"n": "one"}, {"n": {"deep": [1, "x"]}}]}, {"a": 36}),
        (None, {"a/x.parquet": [{"url": "u"}], "a/y.parquet": [{"id": 1}]}, {"a": 72}),
        # Every kind of file is read.
        ("set", {"a.jsonl": [{"set": "web"}], "b.parquet": [{"set": "x"}]}, {"web": 36, "x": 36}),
        ("set", {"a.json": [{"set": "b"}], "d.JSON.zst": [{"set": "a"}]}, {"a": 36, "b": 36}),
        ("set", {"a.arrow": [{"set": "a"}]}, {"a": 36}),
        # A name may have a dot.
        ("a.set", {"a.jsonl": [{"a.set": "b"}], "b.parquet": [{"a.set": "b"}]}, {"b": 72}),
    ],
    ids=["kinds", "columns", "files", "suffixes", "arrow", "dot"],
)
def test_rows_are_text_and_a_domain_whatever_holds_them(tmp_path, load, column, files, found):
    for name, others in files.items():
        rows = [
            {"text": text, **others[i * len(others) // 40]} for i, text in enumerate(texts(name))
        ]
        write_rows(tmp_path / name, rows)
    assert load(domain_column=column).documents == found


def test_a_line_of_deep_lists_is_named(tmp_path, config):
    path = write_jsonl(tmp_path / "a.jsonl", texts("a"))
    with path.open("a") as file:
        file.write('{"text": "x", "n": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    check_refused(replace(config, data=str(tmp_path)), r"a.jsonl, (line|row) 41 .*cannot be read")


def test_rows_without_text_or_domain_are_counted(tmp_path, config):
    rows = [{"text": text, "source": "web"} for text in texts("web")]
    rows += [{"text": text, "source": None} for text in texts("null", 30)]
    rows += [{"text": text, "source": " "} for text in texts("empty", 5)]
    rows += [{"text": text} for text in texts("absent", 15)]
    rows += [{"body": "x", "source": "web"}] * 7 + [{"text": " \n", "source": "web"}] * 3
    # As pandas writes what is missing.
    rows += [{"text": math.nan, "source": math.nan}]
    rows[-13]["source"] = math.nan
    rows += [{"text": None, "source": "books"}] * 4
    path = write_rows(tmp_path / "all.jsonl", rows)
    for _ in ("packed", "found in the cache"):
        loaded = load_corpus(replace(config, data=str(path), domain_column="source"))
        assert loaded.documents == {"web": 36}
        no_text, no_domain = loaded.warnings
        assert "15 of 105 rows are without text" in no_text
        assert "50 of 105 rows are without a domain" in no_domain


@pytest.mark.parametrize("column", ["source", "meta.source"])
def test_class_labels_are_named(tmp_path, config, column):
    label = datasets.ClassLabel(names=["web", "code"])
    is_inside = column.startswith("meta")
    features = {"text": datasets.Value("string")}
    features |= {"meta": {"source": label}} if is_inside else {"source": label}
    values = [{"meta": {"source": i % 2}} if is_inside else {"source": i % 2} for i in range(80)]
    rows = [{"text": text, **value} for text, value in zip(texts("a", 80), values, strict=True)]
    made = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    made.to_parquet(str(tmp_path / "all.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    for data in ("all.parquet", "saved"):
        loaded = load_corpus(replace(config, data=str(tmp_path / data), domain_column=column))
        assert loaded.documents == {"code": 36, "web": 36}


def test_folders_of_save_to_disk_are_read(tmp_path, config, load):
    splits = {
        split: datasets.Dataset.from_dict({"text": texts(split, n), "source": ["web"] * n})
        for split, n in (("train", 40), ("validation", 15))
    }
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    splits["train"].save_to_disk(str(tmp_path / "domains" / "web"))
    loaded = load("both", domain_column="source")
    assert loaded.documents == {"web": 40}
    assert documents(loaded, "web", "validation")[0] == text_of("validation", 0)
    assert load("domains").documents == {"web": 36}
    check_refused(replace(config, data=str(tmp_path / "domains" / "web")), "as save_to_disk leaves")
    check_refused(replace(config, data=str(tmp_path / "both")), "names a split")


def test_a_saved_data_set_is_what_its_state_says(tmp_path, load):
    """Shards of an earlier and larger data set may lie beside its own."""
    folder = tmp_path / "data" / "web"
    for count, shards in ((60, 3), (40, 1)):
        rows = {"text": texts(f"{shards}", count)}
        datasets.Dataset.from_dict(rows).save_to_disk(str(folder), num_shards=shards)
    assert len(list(folder.glob("*.arrow"))) == 4
    assert load("data").documents == {"web": 36}


def test_shards_that_datasets_has_written_are_read(tmp_path, load):
    made = datasets.Dataset.from_dict({"text": texts("web")})
    for index in range(2):
        path = tmp_path / "data" / "web" / f"train-{index:05}-of-00002.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        made.shard(2, index, contiguous=True).to_parquet(str(path))
    again = datasets.load_dataset("parquet", data_dir=str(path.parent), cache_dir=tmp_path / "c")
    again["train"].save_to_disk(str(tmp_path / "data" / "saved"))
    loaded = load("data")
    assert documents(loaded, "web", "train") == documents(loaded, "saved", "train")
    assert loaded.documents == {"saved": 36, "web": 36}
    assert loaded.warnings == ()


@pytest.mark.parametrize("opener", [bz2, gzip, lzma])
def test_a_compressed_file_that_was_cut_off_is_refused(tmp_path, load, opener):
    ending = {bz2: "bz2", gzip: "gz", lzma: "xz"}[opener]
    path = tmp_path / "data" / f"a.jsonl.{ending}"
    path.parent.mkdir()
    lines = write_jsonl(tmp_path / "a.jsonl", texts("a")).read_bytes()
    path.write_bytes(opener.compress(lines))
    assert load("data").documents == {"a": 36}
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=str(path)):
        load("data")


@pytest.mark.parametrize(
    ("meta", "column", "word"),
    [
        ({"meta": {"set": "web"}}, "meta.sett", "columns are text, meta.set"),
        ({"meta": '{"set": "web"}'}, "meta.set", "columns are text, meta. "),
        ({"meta": {"set": "web"}}, "meta", "row 1 holds .*dots reach into structs"),
        ({"meta": {"set": None}}, "meta.set", "names no domain: of 40 rows"),
    ],
)
def test_a_domain_column_that_leads_nowhere_is_named(tmp_path, config, meta, column, word):
    write_rows(tmp_path / "a.jsonl", [{"text": text, **meta} for text in texts("a")])
    one = replace(config, data=str(tmp_path / "a.jsonl"), domain_column=column)
    check_refused(one, rf'"{column}".*{word}')


def test_a_mark_of_the_encoding_is_no_text(tmp_path, load):
    for name in ("a.jsonl", "b.txt"):
        write_jsonl(tmp_path / name, texts("a"))
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    # Of a file of two that were joined, and in a text that was read with it.
    (tmp_path / "a.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes() * 2)
    write_jsonl(tmp_path / "c.jsonl", ["\ufeff" + text for text in texts("a")])
    loaded = load()
    for name in loaded.names:
        assert not any("\ufeff" in text for text in documents(loaded, name, "train"))


@pytest.mark.parametrize(
    "names", [("caf\u00e9", "cafe\u0301"), ("web", "\u3164we\u200b\u034fb\ufe0f")]
)
def test_names_that_look_alike_are_refused(tmp_path, load, names):
    rows = [{"text": text, "source": name} for name in names for text in texts(name, 20)]
    write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match="look alike"):
        load("a.jsonl", domain_column="source")


def test_splits_with_a_common_beginning_are_all_read(config, monkeypatch):
    """As MNLI's validation_matched and validation_mismatched."""

    class Builder:
        config = datasets.BuilderConfig()
        hash = "x"

        def as_streaming_dataset(self) -> dict[str, datasets.IterableDataset]:
            sizes = {"train_a": 30, "train_b": 20, "dev_a": 5, "dev_b": 4, "test": 9, "extra": 9}
            return {
                split: datasets.Dataset.from_dict(
                    {"text": texts(split, n), "source": ["web"] * n}
                ).to_iterable_dataset()
                for split, n in sizes.items()
            }

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: Builder())
    parts = sources.find_parts(replace(config, data="owner/x", domain_column="source"), [])
    read = [text for _, text in parts["web"].documents()]
    assert read == texts("train_a", 30) + texts("train_b", 20)
    held_out = [text for _, text in parts["web"].documents(held_out=True)]
    assert held_out == texts("dev_a", 5) + texts("dev_b", 4)


def test_files_that_differ_in_their_endings_alone_are_told(tmp_path, load):
    for name in ("a/x.jsonl", "a/x.json", "a/y.jsonl", "b.jsonl"):
        write_jsonl(tmp_path / "data" / name, texts(name))
    (warning,) = load("data").warnings
    assert "a/x.json and" in warning
    assert "a/x.jsonl differ in their endings alone" in warning


def test_links_to_folders_are_followed(tmp_path, load):
    store = tmp_path / "store"
    write_jsonl(store / "a" / "one.jsonl", texts("a"))
    write_jsonl(store / "more" / "two.jsonl", texts("more"))
    (store / "a" / "more").symlink_to(store / "more")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").symlink_to(store / "a")
    loaded = load("data")
    # Of 80, a tenth is held out.
    assert loaded.documents == {"a": 72}
