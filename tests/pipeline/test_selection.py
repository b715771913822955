"""A run scores every parameter, survives being killed, and its lists are what a proxy reads."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from doge_fast.cancellation import READINGS, CancellationEffect
from doge_fast.pipeline import records
from doge_fast.pipeline.config import SelectConfig
from doge_fast.pipeline.selection import measure_cancellation, selection_trainer
from doge_fast.pipeline.stage import ExistingRun
from tests.pipeline.stages import NAMES

Make = Callable[..., SelectConfig]
# One layer of 12 tensors, two embeddings, the last norm's two.
NUM_PARAMETERS = 16


@pytest.fixture
def asked(configured: Callable[..., Make]) -> Make:
    """Makes a SelectConfig."""
    return configured(SelectConfig, batch_size=8, log_every=1, strategies=("low3", "high3"))


def test_a_run_leaves_scores_and_lists(asked):
    config = asked()
    assert measure_cancellation(config) == config.out
    held = sorted(entry.name for entry in config.out.iterdir())
    lists = ["selection-high3.json", "selection-low3.json"]
    assert held == ["cancellation.json", "config.json", "metrics.jsonl", *lists]
    record = records.read_json(config.out / "cancellation.json")
    assert (record["steps"], len(record["columns"])) == (8, NUM_PARAMETERS)
    assert list(record["scores"]) == list(READINGS)
    for reading in READINGS:
        assert record["scores"][reading].keys() == record["columns"].keys()
        assert all(score > 0 for score in record["scores"][reading].values())
    # The warm-up starts at a learning rate of zero: a step without a change.
    assert set(record["terms"]["norms-over-change"].values()) == {7}
    assert set(record["terms"]["change-over-sum"].values()) == {8}
    ranked = sorted(record["columns"], key=record["scores"]["norms-over-change"].__getitem__)
    for strategy, names in (("low3", ranked[:3]), ("high3", ranked[:-4:-1])):
        assert json.loads((config.out / f"selection-{strategy}.json").read_text()) == names
    low, high = record["selections"]
    total = sum(record["columns"].values())
    assert low["columns"] == sum(record["columns"][name] for name in ranked[:3])
    assert low["share"] == low["columns"] / total
    assert (high["strategy"], high["parameters"]) == ("high3", 3)
    lines = records.read_metrics(config.out, kind="train")
    # The mini-batch is of all domains alike.
    assert lines[-1]["tokens"] == dict.fromkeys(NAMES, 8 * 2 * 16)
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_scores_are_those_of_the_loop_by_hand(asked):
    """The same batches, a plain AdamW, one backward for each example."""
    config = asked(steps=2, warmup_steps=0, min_learning_rate=3e-3, max_grad_norm=1e9)
    measure_cancellation(config)
    trainer = selection_trainer(replace(config, out=config.out / "twin"), ExistingRun(None, False))
    model = trainer.model
    params = dict(model.named_parameters())
    decay = [param for param in params.values() if param.dim() > 1]
    rest = [param for param in params.values() if param.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    expected = dict.fromkeys(params, 0.0)
    for step in range(2):
        tokens = trainer.batch(step)["input_ids"]
        grads = [
            torch.autograd.grad(
                model(input_ids=row[None], labels=row[None]).loss, list(params.values())
            )
            for row in tokens
        ]
        before = {name: param.detach().clone() for name, param in params.items()}
        for param, *of_each in zip(params.values(), *grads, strict=True):
            param.grad = torch.stack(of_each).mean(0)
        optimizer.step()
        for (name, param), *of_each in zip(params.items(), *grads, strict=True):
            change = (param.detach() - before[name]).double().norm()
            expected[name] += float(sum(grad.double().norm() for grad in of_each) / change)
    found = records.read_json(config.out / "cancellation.json")["scores"]["norms-over-change"]
    for name, score in expected.items():
        # float32 gradients; AdamW divides by their size, so noise in the smallest is not small.
        assert found[name] == pytest.approx(score, rel=1e-3), name


def test_another_reading_ranks_by_it_and_is_another_run(asked):
    run = measure_cancellation(asked(reading="change-over-norms"))
    scores = records.read_json(run / "cancellation.json")["scores"]["change-over-norms"]
    lowest = json.loads((run / "selection-low3.json").read_text())[0]
    assert lowest == min(scores, key=scores.__getitem__)
    for other in ({}, {"reading": "change-over-norms", "strategies": ("low5",)}):
        with pytest.raises(ValueError, match="another run"):
            measure_cancellation(asked(**other))


def test_a_training_that_diverged_ranks_nothing(asked, monkeypatch):
    monkeypatch.setattr(CancellationEffect, "scores", lambda *_: {"ln_f.bias": float("nan")})
    with pytest.raises(ValueError, match=r"ln_f\.bias"):
        measure_cancellation(asked())
    assert not (asked().out / "cancellation.json").exists()
