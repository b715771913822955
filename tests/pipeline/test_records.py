"""A run directory is complete, survives a kill at any byte, and says so when it is not believed."""

import contextlib
import json
import math
import resource
import sys
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from transformers import GPT2Config

from doge_fast.pipeline import records
from doge_fast.pipeline.config import BaseConfig, CorpusConfig, ModelConfig, ProxyConfig
from doge_fast.pipeline.records.schema import DomainEntry, WeightsRecord
from tests.pipeline import written_runs

CORPUS = written_runs.corpus("ab", tokens={"a": 640, "b": 256})


def proxy_config(out: Path) -> ProxyConfig:
    return ProxyConfig(out=out, corpus=CorpusConfig(domains=("a", "b"), cache_dir=out / "cache"))


def weights(**changes: object) -> dict[str, object]:
    record: dict[str, object] = {
        "schema_version": 1,
        "method": "doge",
        "domains": [{"name": "a", "weight": 0.25}, {"name": "b", "weight": 0.75}],
    }
    return record | changes


def test_a_new_run_records_what_was_asked(tmp_path):
    out = tmp_path / "runs" / "proxy"
    assert records.check_run(proxy_config(out)) is None
    records.open_run(proxy_config(out), corpus=CORPUS)
    record, config = records.load_config(out)
    assert record.stage == "proxy"
    assert config == proxy_config(out)
    assert record.corpus == CORPUS
    assert record.versions["torch"] == metadata.version("torch")
    assert record.versions["python"].startswith(f"{sys.version_info.major}.")
    assert record.created.endswith("+00:00")


def test_the_same_run_resumes_wherever_it_lies_now(tmp_path):
    config = proxy_config(tmp_path / "run")
    records.open_run(config, corpus=CORPUS)
    created = records.load(config.out, records.ConfigRecord).created
    config.out.rename(tmp_path / "moved")
    moved = replace(
        config, out=tmp_path / "moved", corpus=replace(config.corpus, cache_dir=tmp_path)
    )
    found = records.check_run(moved)
    assert found == records.load(moved.out, records.ConfigRecord)
    assert found.created == created


def test_a_path_is_the_same_however_it_is_said_and_no_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/proxy", "runs/other", "corpus", "tiny"):
        (tmp_path / folder).mkdir(parents=True)
    config = BaseConfig(out=tmp_path / "run", corpus=CorpusConfig("corpus"), weights="runs/proxy")
    records.open_run(config, corpus=CORPUS)
    _, begun = records.load_config(config.out)
    assert begun.corpus.data == str(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path / "corpus")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path / "corpus")
    there = replace(config, weights="../runs/proxy")
    for data in ("../corpus/", str(tmp_path / "corpus"), "~/corpus", "../link"):
        assert records.check_run(replace(there, corpus=CorpusConfig(data)))
    with pytest.raises(ValueError, match=r"corpus\.data"):
        records.check_run(replace(there, corpus=CorpusConfig("..")))
    there = replace(there, corpus=CorpusConfig(begun.corpus.data))
    for other in ("../runs/other", "proxy"):
        with pytest.raises(ValueError, match="weights"):
            records.check_run(replace(there, weights=other))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"model\.model"):
        records.check_run(replace(config, model=ModelConfig("./tiny")))


def test_a_run_is_not_gone_on_with_when_its_model_has_changed(tmp_path):
    shape = GPT2Config(n_layer=1, n_head=2, n_embd=16, activation_function="relu")
    shape.save_pretrained(tmp_path / "shape")
    config = BaseConfig(out=tmp_path / "run", model=ModelConfig(str(tmp_path / "shape")))
    records.open_run(config, corpus=CORPUS)
    assert records.check_run(config)
    shape.activation_function = "silu"
    shape.save_pretrained(tmp_path / "shape")
    with pytest.raises(ValueError, match=r"begun with another model: the config.json of .*shape"):
        records.check_run(config)


def test_a_setting_that_came_later_counts_as_its_default(tmp_path):
    config = proxy_config(tmp_path)
    records.open_run(config, corpus=CORPUS)
    record = records.read_json(config.out / records.CONFIG)
    del record["config"]["mu"], record["config"]["training"]["dtype"]
    records.write_json(tmp_path / "config.json", record)
    assert records.check_run(config)
    with pytest.raises(ValueError, match="mu"):
        records.check_run(replace(config, mu=0.5))


def test_no_flipped_bit_of_weights_gives_other_weights(tmp_path):
    path = tmp_path / "weights.json"
    records.write_weights(path, weights())
    whole, expected = path.read_bytes(), {"a": 0.25, "b": 0.75}
    for bit in range(0, 8 * len(whole), 7):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with contextlib.suppress(ValueError):
            found = records.read_weights(path)
            # The name of the field that holds the digest may be lost: then no other bit is.
            assert records.weights_by_name(found) == expected


def test_edited_weights_are_read_without_their_digest(tmp_path):
    path = tmp_path / "weights.json"
    records.write_weights(path, weights())
    record = json.loads(path.read_text())
    record["domains"][0]["name"] = "news"
    del record["sha256"]
    path.write_text(json.dumps(record))
    assert records.weights_by_name(records.read_weights(path)) == {"news": 0.25, "b": 0.75}


def test_another_tokenizer_or_text_is_refused(tmp_path):
    config = proxy_config(tmp_path)

    def corpus(digest: str) -> records.CorpusRecord:
        domains = {name: replace(sizes, digest=digest) for name, sizes in CORPUS.domains.items()}
        return replace(CORPUS, domains=domains)

    records.open_run(config, corpus=corpus("a"))
    recorded = records.load(config.out, records.ConfigRecord).corpus
    records.check_corpus(config.out, recorded, corpus("a"))
    other = replace(recorded, tokenizer_sha256="1" * 64)
    with pytest.raises(ValueError, match="tokenizer_sha256"):
        records.check_corpus(config.out, recorded, other)
    with pytest.raises(ValueError, match="digest"):
        records.check_corpus(config.out, recorded, corpus("b"))


def test_a_run_killed_while_it_began_can_begin_again(tmp_path):
    (tmp_path / ".config.json.x1y2").write_text('{"schema')
    assert records.check_run(proxy_config(tmp_path)) is None
    records.open_run(proxy_config(tmp_path), corpus=CORPUS)


def test_a_name_of_other_bytes_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UnicodeEncodeError, match="surrogates"):
        records.write_json(tmp_path / "x.json", {"a": 1, "out": Path("r\udcff")})
    assert not list(tmp_path.iterdir())
    out = tmp_path / "r\udcff"
    with pytest.raises(UnicodeEncodeError, match="surrogates"):
        records.open_run(proxy_config(out), corpus=CORPUS)


def train_line(step: int) -> dict[str, object]:
    return {"step": step, "kind": "train", "lr": 0.1, "loss": {"a": 1 / (step + 1), "b": 2.0}}


def test_metrics_come_back_as_they_were_written(tmp_path):
    for step in range(3):
        records.append_metrics(tmp_path, train_line(step))
    records.append_metrics(tmp_path, {"step": 2, "kind": "eval", "loss": {"a": math.nan}})
    lines = records.read_metrics(tmp_path)
    assert lines[:3] == [train_line(step) for step in range(3)]
    assert lines[3] == {"step": 2, "kind": "eval", "loss": {"a": None}}
    assert records.read_metrics(tmp_path, kind="eval") == lines[3:]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_run_killed_at_any_byte_resumes_to_the_uninterrupted_record(tmp_path):
    for step in range(4):
        records.append_metrics(tmp_path, train_line(step))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    at_checkpoint = records.keep_metrics(tmp_path)
    after_checkpoint = at_checkpoint["bytes"]
    for length in range(after_checkpoint, len(whole) + 1):
        path.write_bytes(whole[:length])
        complete = whole[:length].count(b"\n")
        assert records.read_metrics(tmp_path) == [train_line(step) for step in range(complete)]
        records.resume_metrics(tmp_path, at_checkpoint)
        for step in range(2, 4):
            records.append_metrics(tmp_path, train_line(step))
        assert path.read_bytes() == whole


def test_a_line_that_finds_no_room_is_an_error(tmp_path):
    """The system then writes a part of it and says how much; the next line would follow that."""
    records.append_metrics(tmp_path, train_line(0))
    room = (tmp_path / "metrics.jsonl").stat().st_size + 10
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            records.append_metrics(tmp_path, train_line(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert records.read_metrics(tmp_path) == [train_line(0)]


def test_a_line_that_something_else_has_cut_makes_way_for_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for left in (0, 1, 10, None):
        for step in range(3):
            records.append_metrics(tmp_path, train_line(step))
        content = path.read_bytes()
        cut = content.splitlines(keepends=True)[1]
        path.write_bytes(content[: len(content) // 3 + (len(cut) if left is None else left)])
        kept = records.read_metrics(tmp_path)
        records.append_metrics(tmp_path, train_line(9))
        assert records.read_metrics(tmp_path) == [*kept, train_line(9)]
        path.unlink()


def test_records_of_another_schema_are_refused(tmp_path):
    records.open_run(proxy_config(tmp_path), corpus=CORPUS)
    records.write_weights(tmp_path, weights())
    for file, read in (
        (records.CONFIG, records.load_config),
        ("weights.json", records.read_weights),
    ):
        record = records.read_json(tmp_path / file)
        records.write_json(tmp_path / file, record | {"schema_version": 2})
        with pytest.raises(ValueError, match=f"{file} follows schema 2; this release reads"):
            read(tmp_path)


def test_weights_go_around_by_name(tmp_path):
    records.write_weights(tmp_path, weights())
    assert records.weights_by_name(records.read_weights(tmp_path)) == {"a": 0.25, "b": 0.75}
    ordered = records.read_weights(tmp_path / "weights.json", domains=["b", "a"])
    assert list(records.weights_by_name(ordered).items()) == [("b", 0.75), ("a", 0.25)]
    assert ordered["method"] == "doge"


def test_float32_weights_and_printed_ones_sum_to_one(tmp_path):
    many = np.full(100, 1 / 100, dtype=np.float32)
    entries = [{"name": f"d{k}", "weight": float(weight)} for k, weight in enumerate(many)]
    records.write_weights(tmp_path, weights(domains=entries))
    thirds = [{"name": name, "weight": 0.333333} for name in "abc"]
    records.write_weights(tmp_path, weights(domains=thirds))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"domains": [{"name": "a", "weight": 0.5}] * 2}, "a occurs twice"),
        *(
            ({"domains": [{"name": "a", "weight": weight}]}, "weight")
            for weight in (math.nan, 0.9, 10**400)
        ),
    ],
)
def test_weights_that_cannot_be_believed_are_not_written(tmp_path, changes, word):
    with pytest.raises(ValueError, match=word):
        records.write_weights(tmp_path, weights(**changes))
    assert list(tmp_path.iterdir()) == []


def test_what_is_unknown_or_not_known_is_kept(tmp_path):
    known = {field.name for kind in (DomainEntry, WeightsRecord) for field in fields(kind)}
    nothing = dict.fromkeys(known - {"domains", "name", "weight"})
    entry = {"name": "a", "weight": 1.0, "tokens": 1e9, "colour": "blue"}
    record = weights(**nothing) | {"domains": [entry | nothing], "mood": [1, None]}
    records.write_weights(tmp_path, record)
    assert records.read_weights(tmp_path) == record


def test_the_average_perplexity_is_the_papers(tmp_path):
    loss = {"a": math.log(10.0), "b": math.log(40.0)}
    record = records.evaluation(step=7, blocks={"a": 3, "b": 2}, loss=loss, block_size=128)
    assert record["average_perplexity"] == pytest.approx(20.0, rel=1e-12)
    assert record["worst"] == pytest.approx(40.0, rel=1e-12)
    assert record["tokens"] == {"a": 3 * 127, "b": 2 * 127}
    records.write_json(tmp_path / records.EVALUATION, record)
    assert records.load_evaluation(tmp_path).perplexity == record["perplexity"]
