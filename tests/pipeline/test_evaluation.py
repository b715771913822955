"""Perplexities are those of the run's model on its held-out blocks, and of nothing else."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from doge_fast.pipeline import records
from doge_fast.pipeline.base import train_base
from doge_fast.pipeline.config import BaseConfig, EvaluateConfig
from doge_fast.pipeline.domains import load_corpus
from doge_fast.pipeline.evaluation import evaluate, table
from doge_fast.pipeline.model import open_model

NAMES = ["code", "prose", "table"]


@pytest.fixture
def run(base: Callable[..., BaseConfig]) -> BaseConfig:
    config = base(targets=("verse",))
    train_base(config)
    return config


def test_the_loss_is_the_mean_over_all_predicted_tokens(run: BaseConfig) -> None:
    result = evaluate(EvaluateConfig(run=run.out, batch_size=5, device="cpu"))
    corpus = load_corpus(run.corpus, targets=("verse",))
    model = open_model(run.out / "model").double().eval()
    for name in (*NAMES, "verse"):
        tokens_BL = torch.tensor(np.stack(corpus.validation[name]["input_ids"]))
        with torch.no_grad():
            logits = model(tokens_BL).logits[:, :-1]
        exact = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BL[:, 1:].flatten())
        # float32 forward passes against float64 ones.
        assert result["loss"][name] == pytest.approx(float(exact), rel=1e-5)
        assert result["blocks"][name] == len(tokens_BL)
        assert result["perplexity"][name] == math.exp(result["loss"][name])


def test_the_average_is_the_exponential_of_the_mean_loss(run: BaseConfig) -> None:
    result = evaluate(EvaluateConfig(run=run.out, device="cpu"))
    mean = sum(result["loss"].values()) / 4
    assert result["average_perplexity"] == pytest.approx(math.exp(mean), rel=1e-12)
    assert result["step"] == 8
    assert records.read_evaluation(run.out) == result
    assert f"{result['average_perplexity']:.2f}" in table(result)


def test_some_blocks_of_some_domains(run: BaseConfig) -> None:
    result = evaluate(
        EvaluateConfig(run=run.out, blocks=3, domains=("verse", "code"), device="cpu")
    )
    assert result["blocks"] == {"verse": 3, "code": 3}


def test_asking_again_gives_the_same_and_the_batch_does_not_matter(run: BaseConfig) -> None:
    one, two, other = (
        evaluate(EvaluateConfig(run=run.out, batch_size=size, device="cpu")) for size in (16, 16, 3)
    )
    assert one == two
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)


def test_bad_input_is_answered_in_a_sentence(run: BaseConfig, tmp_path: Path) -> None:
    ask = EvaluateConfig(run=run.out, device="cpu")
    with pytest.raises(ValueError, match="knows the domains code, prose, table, verse; got poetry"):
        evaluate(replace(ask, domains=("poetry",)))
    with pytest.raises(ValueError, match="at least 1; got None and 0"):
        evaluate(replace(ask, batch_size=0))
    with pytest.raises(ValueError, match="is not a run directory"):
        evaluate(replace(ask, run=tmp_path / "nothing"))
    (run.out / "model").rename(run.out / "elsewhere")
    with pytest.raises(ValueError, match="has no model/: its run is not complete"):
        evaluate(ask)


def test_a_changed_corpus_is_not_measured(run: BaseConfig, tmp_path: Path) -> None:
    record = records.read_json(run.out / "config.json")
    record["corpus"]["tokenizer_sha256"] = "0" * 64
    records.write_json(run.out / "config.json", record)
    with pytest.raises(ValueError, match="trained with the tokenizer 000000000000"):
        evaluate(EvaluateConfig(run=run.out, device="cpu"))
