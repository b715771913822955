"""Exported shares are exact, complete and in the target's unit."""

import json
import random
import shlex
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from doge_fast import cli
from doge_fast.pipeline import records
from doge_fast.pipeline.exports import export, largest_remainder, listing, targets
from tests.pipeline.corpora import write_jsonl

NAMES = ("book", "code", "web")
WEIGHTS = {"web": 0.4321987, "code": 0.3, "book": 0.2678013}
LENGTHS = {"book": 100_000.0, "code": 4_000.0, "web": 800.0}
PATHS = {name: f"/data/{name}" for name in NAMES}
# What every target takes, so that one call serves all.
EVERYTHING: dict[str, Any] = {
    "valid_paths": {"web": "/valid/web"},
    "test_paths": {"web": "/test/web"},
    "mean_doc_tokens": LENGTHS,
    "seq_length": 2048,
    "batch_size": 64,
}


def record(weights: Mapping[str, float] = WEIGHTS, **fields: Any) -> dict[str, Any]:
    domains = [{"name": name, "weight": weight} for name, weight in weights.items()]
    return {"schema_version": 1, "method": "doge", "domains": domains, **fields}


def made(to: str, weights: Mapping[str, Any] = WEIGHTS, **changes: Any) -> str:
    """The text, with all that a target may ask for."""
    options = {"paths": PATHS} | EVERYTHING | changes
    if not targets()[to].takes:
        options["paths"] = None
    return export(weights, to=to, **options).text


@pytest.mark.parametrize(("count", "decimals"), [(1, 4), (40, 1), (512, 15)])
def test_rounded_shares_sum_to_one_and_stay_within_a_unit(count, decimals):
    draw = random.Random(count * 100 + decimals)
    # Of many scales, some of them zero.
    weights = {f"d{i}": draw.random() ** draw.choice((1, 8)) for i in range(count)}
    weights |= dict.fromkeys(draw.sample(sorted(weights), count // 8), 0.0)
    rounded = largest_remainder(weights, decimals)
    assert sum(rounded.values()) == 1
    total = sum(map(Fraction, weights.values()))
    for name, share in rounded.items():
        # No share is off by a whole unit of the last place.
        assert abs(Fraction(share) - Fraction(weights[name]) / total) < Fraction(1, 10**decimals)
        assert not share or weights[name]
    ordered = sorted(weights, key=weights.__getitem__)
    assert [rounded[name] for name in ordered] == sorted(rounded.values())
    names = draw.sample(sorted(weights), count)
    assert largest_remainder({name: weights[name] for name in names}, decimals) == rounded


def test_rounding_breaks_ties_by_name():
    third = {"a": Decimal("0.4"), "b": Decimal("0.3"), "c": Decimal("0.3")}
    assert largest_remainder({"b": 1.0, "c": 1.0, "a": 1.0}, 1) == third


@pytest.mark.parametrize("to", targets())
def test_a_target_does_not_depend_on_order_or_scale(to):
    turned = {name: 7 * weight for name, weight in reversed(WEIGHTS.items())}
    assert made(to) == made(to, turned)


@pytest.mark.parametrize("to", targets())
def test_zeros_are_left_out_aloud_and_nothing_else(to):
    weights = WEIGHTS | {"junk": 0.0, "dust": 1e-9}
    options = {**EVERYTHING, "mean_doc_tokens": LENGTHS | {"dust": 800.0}}
    paths = PATHS | {"junk": "/data/junk"} if targets()[to].takes else None
    result = export(weights, to=to, paths=paths, **options)
    told = " ".join(result.warnings)
    assert "junk" in told
    assert "dust" in told
    assert "junk" not in result.text
    assert "dust" not in result.text
    # Twelve decimals keep the small one; paths are then asked for.
    if targets()[to].takes:
        with pytest.raises(ValueError, match="dust"):
            export(weights, to=to, paths=PATHS, **options, decimals=12)


def test_every_target_is_listed():
    for to, target in targets().items():
        assert f"{to}: {target.title}" in listing()
        assert made(to).endswith("\n")


def test_a_target_of_documents_asks_for_their_length():
    with pytest.raises(ValueError, match="mean_doc_tokens"):
        made("datasets", mean_doc_tokens={})
    held = [
        {"name": name, "weight": weight, "tokens": 5 * LENGTHS[name], "documents": 5}
        for name, weight in WEIGHTS.items()
    ]
    assert made("datasets", {"domains": held}, mean_doc_tokens={}) == made("datasets")


def test_json_has_shares_of_tokens_or_of_documents():
    stages = [{"first_step": 0, "weights": WEIGHTS}, {"first_step": 9, "weights": WEIGHTS}]
    assert "2 stages" in export(record(stages=stages), to="json").warnings[0]
    assert json.loads(made("json")) == {"book": 0.267801, "code": 0.3, "web": 0.432199}
    documents = json.loads(made("json", rows="documents"))
    tokens = {name: share * LENGTHS[name] for name, share in documents.items()}
    for name, weight in WEIGHTS.items():
        # Half a unit of the sixth decimal of the rarest.
        assert tokens[name] / sum(tokens.values()) == pytest.approx(
            weight, rel=5e-7 / min(documents.values())
        )


def test_megatron_takes_weights_and_prefixes_in_turn():
    plain = export(WEIGHTS, to="megatron", paths=PATHS).text
    assert plain == ("--data-path 0.267801 /data/book 0.300000 /data/code 0.432199 /data/web\n")
    assert shlex.split(made("megatron").replace("\\\n", " ")) == [
        *("--train-data-path", "0.267801", "/data/book", "0.300000", "/data/code"),
        *("0.432199", "/data/web", "--valid-data-path", "1.000000", "/valid/web"),
        *("--test-data-path", "1.000000", "/test/web"),
    ]


@pytest.mark.parametrize("to", ["megatron", "megatron-bridge"])
def test_megatron_prefixes_are_cut(to):
    assert made(to) == made(to, paths=PATHS | {"web": "/data/web.bin", "code": "/data/code.idx"})


def test_several_paths_share_a_weight_by_their_bytes(tmp_path):
    for name, size in {"a": 300, "b": 100}.items():
        (tmp_path / f"{name}.bin").write_bytes(bytes(size))
    options: dict[str, Any] = {
        "to": "megatron",
        "paths": {"web": [f"{tmp_path}/a", f"{tmp_path}/b"]},
    }
    found = export({"web": 1.0}, decimals=3, **options).text.split()
    assert found == ["--data-path", "0.750", f"{tmp_path}/a", "0.250", f"{tmp_path}/b"]
    (tmp_path / "b.bin").write_bytes(b"1")
    with pytest.raises(ValueError, match="rounds to 0"):
        export({"web": 1.0}, decimals=2, **options)


SHARES = [0.267801, 0.3, 0.432199]
FORMS: dict[str, Any] = {
    "nanotron": {
        "data_stages": [
            {
                **{"name": "training", "start_training_step": 1},
                "data": {
                    **{"seed": 0, "num_loading_workers": 1},
                    "dataset": {"dataset_folder": [*PATHS.values()], "dataset_weights": SHARES},
                },
            }
        ]
    },
    "olmo-core": {
        "sources": [
            {
                **{"source_name": name, "target_ratio": share, "paths": [PATHS[name]]},
                # Four passes.
                **{"max_repetition_ratio": 4.0, "max_source_fraction": 1.0},
            }
            for name, share in zip(NAMES, SHARES, strict=True)
        ]
    },
}


@pytest.mark.parametrize("to", FORMS)
def test_what_a_framework_reads_from_yaml(to):
    assert yaml.safe_load(made(to)) == FORMS[to]


def test_yaml_quotes_what_begins_like_a_number():
    alone = export({"x": 1.0}, to="nanotron", paths={"x": "1e3"}).text
    assert "- '1e3'" in alone


def test_mosaic_draws_at_random():
    places = {"web": "s3://b/web", "code": "/c"}
    rare = {"web": 0.999, "code": 0.001}
    text = export(rare, to="mosaic-streaming", paths=places, batch_size=64).text
    assert 'batching_method="random"' in text
    assert 'Stream(remote="s3://b/web", proportion=0.999000)' in text
    assert 'Stream(local="/c", proportion=0.001000)' in text


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "given.json"
    records.write_weights(path, record(WEIGHTS | {"junk": 0.0}))
    return path


def test_the_verb_prints_writes_and_lists(file, capsys, caplog):
    words = [f"{name}={path}" for name, path in PATHS.items()]
    export_it = ["export", str(file), "--to", "megatron", "--paths", *words]
    with caplog.at_level("INFO", logger="doge_fast"):
        assert cli.main([*export_it, "--decimals", "3"]) == 0
    expected = "--data-path 0.268 /data/book 0.300 /data/code 0.432 /data/web\n"
    assert capsys.readouterr().out == expected
    assert any("junk" in line for line in caplog.messages)
    assert any("shares of tokens" in line for line in caplog.messages)
    out = file.with_name("blend.txt")
    assert cli.main([*export_it, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"written: {out}\n"
    assert out.read_text().startswith("--data-path 0.267801")
    assert cli.main(["export", "--list"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_a_target_that_is_no_domain_is_named():
    told = export(record(target={"wiki": 1.0, "web": 1.0}), to="json").notes
    assert "wiki" in told[0]
    assert "web" not in told[0]
    assert not any("wiki" in note for note in export(record(target="universal"), to="json").notes)


def test_nemo_means_what_it_trains_with():
    bridge = export(WEIGHTS, to="megatron-bridge", paths=PATHS)
    assert export(WEIGHTS, to="nemo", paths=PATHS) == bridge


def test_many_paths_come_from_the_verbs_own_file(file, capsys):
    fields = file.with_name("fields.yaml")
    words = ["web=/data/a=b", "code=/data/code", "book=/data/book"]
    fields.write_text(yaml.safe_dump({"to": "megatron", "paths": words}))
    assert cli.main(["export", str(file), "--config", str(fields)]) == 0
    assert capsys.readouterr().out.split()[-2:] == ["0.432199", "/data/a=b"]


FILES = ("a*.jsonl", "c[1].jsonl", "d?.jsonl", "{x}.jsonl", "plain.jsonl")


@pytest.mark.parametrize("name", FILES)
def test_a_snippet_reads_the_very_file(tmp_path, name):
    for each in (*FILES, "ab.jsonl", "c1.jsonl", "de.jsonl", "x.jsonl"):
        (tmp_path / each).write_text(json.dumps({"text": each}) + "\n")
    path = str(tmp_path / name)
    text = export({"a": 1.0}, to="datasets", paths={"a": path}, rows="blocks").text
    found: dict[str, Any] = {}
    exec(text, found)
    assert [row["text"] for row in found["domains"]["a"]] == [name]


def of_file(to: str, path: str, **options: Any) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(Path(path), ["x"])
    return export({"a": 1.0}, to=to, paths={"a": path}, **options).text


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: largest_remainder({"a": 0.0, "b": 0.0}, 3), "zero"),
        *((lambda many=many: made("json", decimals=many), "decimals") for many in (0, 16)),
        (lambda: made("datasets", mean_doc_tokens={"web": -1.0}), "mean_doc_tokens"),
        (lambda: made("json", seq_length=0), "seq_length"),
        (lambda: made("nanotron", paths=PATHS | {"web": "/data/./book"}), "path"),
        (lambda: made("nanotron", paths=PATHS | {"web": ["/data/web", "/data//web"]}), "twice"),
        (lambda: made("megatron", paths={"web": []}), "web"),
        (lambda: made("megatron", paths={"web": ["/a", "/a"]}), "web"),
        (lambda: made("megatron", paths={"web": {"/a": 1}}), "web"),
        (lambda: made("megatron", paths={"web": [3]}), "web"),
        # Readers that take no escaped name.
        (lambda: of_file("olmo-core", "c[1].jsonl"), "pattern"),
        (lambda: of_file("datasets", "s3://b.jsonl", rows="blocks"), "address"),
    ],
)
def test_misuse_of_exports_is_refused(call, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=word):
        call()
