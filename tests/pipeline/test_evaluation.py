"""Perplexities are those of the run's model on its held-out blocks, and of nothing else."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from doge_fast.pipeline import records
from doge_fast.pipeline.base import held_out_perplexity, train_base
from doge_fast.pipeline.config import BaseConfig, EvaluateConfig
from doge_fast.pipeline.domains import load_corpus
from doge_fast.pipeline.evaluation import evaluate, perplexity_on, perplexity_table
from doge_fast.pipeline.model import open_model
from doge_fast.pipeline.trainer import held_out_losses
from tests.pipeline.corpora import texts, write_jsonl

NAMES = ["code", "prose", "table"]


@pytest.fixture(scope="module")
def trained(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> BaseConfig:
    out = tmp_path_factory.mktemp("trained") / "base"
    config = BaseConfig(out=out, targets=("verse",), batch_size=8, **settings)
    train_base(config)
    return config


@pytest.fixture
def run(trained: BaseConfig, tmp_path: Path) -> BaseConfig:
    """A copy, to be measured and changed."""
    return replace(trained, out=shutil.copytree(trained.out, tmp_path / "base"))


@pytest.mark.parametrize("most", [None, 7, 1000])
def test_the_loss_is_the_mean_over_predicted_tokens_of_blocks_evenly_apart(run, most):
    result = evaluate(EvaluateConfig(run=run.out, batch_size=5, blocks=most, device="cpu"))
    corpus = load_corpus(run.corpus, targets=("verse",))
    model = open_model(run.out / "model").double().eval()
    for name in (*NAMES, "verse"):
        whole_BL = torch.tensor(np.stack(corpus.validation[name]["input_ids"]))
        count = min(most or len(whole_BL), len(whole_BL))
        tokens_BL = whole_BL[[i * len(whole_BL) // count for i in range(count)]]
        with torch.no_grad():
            logits = model(tokens_BL).logits[:, :-1]
        exact = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BL[:, 1:].flatten())
        # float32 forward passes against float64 ones.
        assert result["loss"][name] == pytest.approx(float(exact), rel=1e-5)
        assert result["blocks"][name] == count
        assert result["perplexity"][name] == math.exp(result["loss"][name])


def test_a_model_is_measured_in_the_mode_it_keeps(run):
    """Dropout is off while it is measured, and on again."""
    blocks = load_corpus(run.corpus).validation["verse"]
    model = open_model(run.out / "model").train()
    held_out_losses(model, {"verse": blocks})
    assert model.training
    with pytest.raises(ValueError, match="at least one block"):
        held_out_losses(model, {"verse": blocks.select([])})


def test_a_corpus_that_has_grown_is_not_measured(run, base, small_corpus, tmp_path):
    """With a tokenizer of its own the tokenizer tells nothing of the text."""
    data = shutil.copytree(small_corpus, tmp_path / "data")
    grown = base(out="grown", data=str(data), tokenizer=str(run.out / "model"), targets=("verse",))
    train_base(grown)
    ask = EvaluateConfig(run=grown.out, device="cpu")
    before = evaluate(ask)
    # As many documents and blocks, in another order.
    lines = (data / "code.jsonl").read_text().splitlines(keepends=True)
    (data / "code.jsonl").write_text("".join(reversed(lines)))
    with pytest.raises(ValueError, match=r"domains\.code\.digest"):
        evaluate(ask)
    (data / "code.jsonl").write_text("".join(lines))
    # A domain that the run does not know changes nothing.
    write_jsonl(data / "news.jsonl", ["one day", "another day"] * 40)
    assert evaluate(ask) == before
    with (data / "prose.jsonl").open("a") as file:
        file.write('{"text": "the and of a range"}\n' * 3)
    with pytest.raises(ValueError, match=r"domains\.prose"):
        evaluate(ask)
    assert records.read_json(grown.out / records.EVALUATION) == before


def test_what_mix_reserves_is_known_again(base):
    config = base(targets=("mix", "verse"))
    train_base(config)
    found = evaluate(EvaluateConfig(run=config.out, device="cpu"))
    assert set(found["loss"]) == set(NAMES) | {"verse"}


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Text of three domains, of which one brings a validation split."""
    monkeypatch.setenv("DOGE_FAST_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "their text"
    write_jsonl(folder / "poetry.jsonl", texts("poetry", 6))
    write_jsonl(folder / "novels" / "train.jsonl", texts("novels", 30))
    write_jsonl(folder / "novels" / "validation.jsonl", texts("held-out", 6))
    write_jsonl(folder / "numbers.jsonl", texts("numbers", 6))
    return folder


def test_other_text_is_measured_whole_or_by_its_validation_split(run, other, tmp_path):
    own = evaluate(EvaluateConfig(run=run.out, device="cpu"))
    # Nothing is asked of the run's own text.
    record = records.read_json(run.out / "config.json")
    record["config"]["corpus"]["data"] = "/gone"
    records.write_json(run.out / "config.json", record)
    ask = EvaluateConfig(run=run.out, data=str(other), device="cpu", out=tmp_path / "theirs.json")
    result = evaluate(ask)
    assert list(result["loss"]) == ["novels", "numbers", "poetry"]
    assert result == records.read_json(tmp_path / "theirs.json")
    assert records.read_json(run.out / records.EVALUATION) == own
    tokenizer = AutoTokenizer.from_pretrained(run.out / "model")
    for name, file in (("poetry", "poetry.jsonl"), ("novels", "novels/validation.jsonl")):
        documents = [json.loads(line)["text"] for line in (other / file).read_text().splitlines()]
        tokens = sum(len(tokenizer(text)["input_ids"]) + 1 for text in documents)
        # The last, incomplete block is left out.
        assert result["blocks"][name] == tokens // 16
    # Nothing is held out of it, so one document is enough.
    for file in (other / "poetry.jsonl", other / "numbers.jsonl"):
        file.write_text(file.read_text().splitlines(keepends=True)[0] * 2)
    # And what is not measured may be shorter than a block.
    (other / "novels" / "train.jsonl").write_text('{"text": "a"}\n')
    again = evaluate(replace(ask, out=tmp_path / "short.json"))
    assert again["loss"]["novels"] == result["loss"]["novels"]
    assert 0 < again["blocks"]["poetry"] < result["blocks"]["poetry"]


def test_some_domains_of_other_text_go_where_they_are_told(run, other, tmp_path, monkeypatch):
    ask = EvaluateConfig(run=run.out, data=str(other), device="cpu", out=tmp_path / "poetry.json")
    result = evaluate(replace(ask, domains=("numbers", "poetry")))
    assert list(result["loss"]) == ["numbers", "poetry"]
    assert records.read_json(tmp_path / "poetry.json") == result
    assert sorted(run.out.glob("evaluation*")) == []
    (tmp_path / "link").symlink_to(run.corpus.data)
    monkeypatch.chdir(tmp_path)
    for own in (run.corpus.data, "link"):
        with pytest.raises(ValueError, match="--data"):
            evaluate(replace(ask, data=own))
    assert "code" in evaluate(EvaluateConfig(run.out, blocks=1, device="cpu"))["loss"]


def test_targets_and_training_domains_have_averages_of_their_own(run):
    """Which name their text: on the terminal, and in the last line of the run itself."""
    ask = EvaluateConfig(run=run.out, device="cpu", blocks=3, domains=("verse", "code", "table"))
    result = evaluate(ask)
    assert list(result["loss"]) == ["verse", "code", "table"]
    assert result["blocks"] == {"verse": 3, "code": 3, "table": 3}
    mean = math.exp((result["loss"]["table"] + result["loss"]["code"]) / 2)
    assert (result["targets"], result["average_perplexity"]) == ({"verse": 1}, pytest.approx(mean))
    assert result["worst"] == max(result["perplexity"][name] for name in ("code", "table"))
    aim = f"{result['perplexity']['verse']:.2f}"
    *_, first, second = perplexity_table(result).splitlines()
    assert first.split() == ["the", "target", "verse", aim]
    assert second.split() == ["the", "2", "training", "domains", f"{mean:.2f}"]
    losses = records.read_metrics(run.out, kind="eval")[-1]["loss"]
    found = [math.exp(losses["verse"]), math.exp(sum(losses[name] for name in NAMES) / 3)]
    (line,) = held_out_perplexity(run.out)
    told = f"{found[0]:.2f} on the target verse, {found[1]:.2f} on the 3 training domains"
    assert line == f"held-out perplexity: {told}"


@pytest.mark.parametrize(
    ("target", "aims"),
    [
        # Of the held-out mixture and of training domains nothing is asked here.
        ({"verse": 1.4, "table": 0.6, "mix": 1.0}, {"verse": 0.7, "table": 0.3}),
        # "table" was named to the base run alone.
        ({"verse": 1.0}, {"verse": 0.5, "table": 0.5}),
        (None, {"verse": 0.5, "table": 0.5}),
    ],
    ids=["weighted", "one without a weight", "names alone"],
)
def test_targets_count_as_the_weights_were_learned_for_them(settings, tmp_path, target, aims):
    weights = tmp_path / "weights.json"
    entries = [{"name": "code", "weight": 0.5}, {"name": "prose", "weight": 0.5}]
    records.write_weights(weights, {"domains": entries, "target": target})
    out = tmp_path / "base"
    config = BaseConfig(
        out=out, weights=str(weights), targets=("verse", "table"), batch_size=8, **settings
    )
    train_base(config)

    def told(loss):
        return f"{math.exp(sum(share * loss[name] for name, share in aims.items())):.2f}"

    (line,) = held_out_perplexity(out)
    assert line.split()[2] == told(records.read_metrics(out, kind="eval")[-1]["loss"])
    assert ("verse (0.70) and table (0.30)" in line) == (aims["verse"] != 0.5)
    result = evaluate(EvaluateConfig(run=out, device="cpu", blocks=3))
    *_, first, _ = perplexity_table(result).splitlines()
    assert first.split()[-1] == told(result["loss"])
    both = evaluate(
        EvaluateConfig(
            run=out, device="cpu", blocks=3, domains=("table", "verse"), out=tmp_path / "both.json"
        )
    )
    assert f"{both['average_perplexity']:.2f}" == told(result["loss"])


@pytest.mark.parametrize(
    ("loss", "targets", "expected"),
    [
        ({"a": 1.0, "b": 3.0}, {}, {"the 2 domains": 2.0}),
        ({"a": 1.0}, {}, {"the domain a": 1.0}),
        ({"a": 1.0, "b": 3.0}, {"b": 1.0}, {"the target b": 3.0, "the training domain a": 1.0}),
        ({"a": 1.0, "b": 3.0}, {"a": 0.3, "b": 0.3, "c": 0.4}, {"the 2 targets": 2.0}),
        (
            {"a": 1.0, "b": 3.0, "c": 5.0},
            {"a": 0.6, "b": 0.2, "d": 0.2},
            {"the targets a (0.75) and b (0.25)": 1.5, "the training domain c": 5.0},
        ),
    ],
)
def test_a_perplexity_says_on_what_text_it_is(loss, targets, expected):
    found = perplexity_on(loss, targets)
    assert list(found) == list(expected)
    assert found == pytest.approx({text: math.exp(value) for text, value in expected.items()})
    name = next(iter(expected))
    both = {"perplexity": {name: 2.0}, "loss": loss, "targets": targets}
    # A domain's name is no reason to lose a row.
    assert perplexity_table(both).count(name) == 2
