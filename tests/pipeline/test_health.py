"""A training that computes no numbers ends as one that failed, and says where and whose."""

import math
import shutil
from collections.abc import Collection
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from doge_fast import cli
from doge_fast.integrations.transformers import DoGETrainer
from doge_fast.pipeline import records
from doge_fast.pipeline.config import EvaluateConfig
from doge_fast.pipeline.evaluation import evaluate
from doge_fast.pipeline.failures import Diverged
from doge_fast.pipeline.proxy import ProxyTrainer, learn_weights
from doge_fast.pipeline.reporting.proxies import remarks_on
from doge_fast.pipeline.trainer import LostSteps
from tests.pipeline.written_runs import write_proxy


def poison(patch: pytest.MonkeyPatch, domain: str, steps: Collection[int]) -> None:
    """The loss of a domain is infinite in these steps, and its gradient is not finite."""
    backward, compute = DoGETrainer._backward, DoGETrainer.compute_loss
    poisoned = []

    def told(self: Any, model: Any, name: str, *args: Any) -> Any:
        poisoned[:] = [name == domain and self.state.global_step + 1 in steps]
        return backward(self, model, name, *args)

    def infinite(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, *args, **kwargs)
        return loss * math.inf if poisoned[0] else loss

    patch.setattr(DoGETrainer, "_backward", told)
    patch.setattr(ProxyTrainer, "compute_loss", infinite, raising=False)


@pytest.mark.parametrize("name", ["proxy", "base", "doremi", "select"])
@pytest.mark.parametrize(
    ("max_skipped_steps", "eval_every", "last_step", "why"),
    [
        # The first step is one of the warm-up, at a rate of zero; the second one ends it.
        (3, None, 5, "up to step 5, 3 steps in a row were lost, for the loss or the gradient"),
        (20, None, 8, "the held-out loss of code, prose, table and verse is not finite"),
        (20, 6, 6, "at step 6 the held-out loss of code, prose, table and verse is not finite"),
    ],
    ids=["in a row", "at the end", "on the way"],
)
def test_a_learning_rate_that_no_model_survives_leaves_records_and_no_result(
    stage, name, max_skipped_steps, eval_every, last_step, why
):
    call, make = stage(name)
    patience = {"max_skipped_steps": max_skipped_steps, "eval_every": eval_every}
    config = make(log_every=1, learning_rate=1e20, min_learning_rate=0.0, **patience)
    with pytest.raises(Diverged) as error:
        call(config)
    said = str(error.value)
    assert said.startswith(f"{config.out} has diverged: {why}")
    assert said.endswith("or lengthen the warm-up (--warmup-steps).")
    assert records.read_json(config.out / records.CONFIG)["stage"] == name
    assert records.read_metrics(config.out, kind="train")[-1]["step"] == last_step
    left = {each.name for each in config.out.iterdir()}
    assert left - {"checkpoints"} == {"config.json", "metrics.jsonl"} | (
        # Of a base run these are what it was given.
        {"weights.json"} if name == "base" else set()
    )
    assert not records.has_model(config.out)


def test_the_domain_is_named_and_a_second_try_ends_alike(proxy, monkeypatch):
    poison(monkeypatch, "table", range(6, 100))
    config = proxy(mode="sequential", steps=40, save_every=2, max_skipped_steps=5)
    expected = "up to step 10, 5 steps in a row were lost, .* the gradient of table is not finite"
    for _ in range(2):
        with pytest.raises(Diverged, match=expected):
            learn_weights(config)
        # None of a lost step, from which the count would begin anew.
        found = sorted(each.name for each in (config.out / "checkpoints").glob("checkpoint-*"))
        assert found == ["checkpoint-2", "checkpoint-4"]
        lines = records.read_metrics(config.out, kind="train")
        assert [line["step"] for line in lines] == list(range(11))
        assert [line["skipped"] for line in lines[1:]] == [False] * 5 + [True] * 5
    # Patience is no other run.
    with pytest.raises(Diverged, match="step 13"):
        learn_weights(proxy(mode="sequential", steps=40, save_every=2, max_skipped_steps=8))


@pytest.mark.parametrize(("steps", "is_lost"), [(10, True), (20, False)])
def test_a_tenth_of_the_steps_may_be_lost(proxy, monkeypatch, steps, is_lost):
    lost = (3, 6)
    poison(monkeypatch, "verse", lost)
    config = proxy(mode="sequential", steps=steps)
    if is_lost:
        with pytest.raises(Diverged, match=f"2 of its {steps} steps were lost"):
            learn_weights(config)
    else:
        learn_weights(config)
    assert (config.out / "weights.json").exists() is not is_lost
    skipped = [line["step"] for line in records.read_metrics(config.out) if line.get("skipped")]
    assert skipped == list(lost)


def test_steps_are_counted_on_the_device_and_looked_at_now_and_then():
    lost = LostSteps(3, torch.device("cpu"))
    told = [True, True, False, True, True, True, False]
    found = []
    for step, is_lost in enumerate(told, start=1):
        lost.add(torch.tensor(is_lost))
        found.append((lost.in_a_row(), lost.too_many(step)))
    assert found == [(1, 0), (2, 0), (0, 0), (1, 0), (2, 0), (3, 3), (0, 3)]
    far = LostSteps(2, torch.device("meta"))
    far.add(torch.tensor(True, device="meta"))
    assert [far.too_many(step) for step in (1, 15)] == [0, 0]


def test_a_perplexity_that_is_not_finite_is_no_result(trained_base, tmp_path, capsys):
    run = shutil.copytree(trained_base, tmp_path / "run")
    weights = run / "model" / "model.safetensors"
    scaled = {name: value * 1e4 for name, value in load_file(weights).items()}
    save_file(scaled, weights, metadata={"format": "pt"})
    records.write_manifest(run / "model")
    with pytest.raises(Diverged, match="losses: code"):
        evaluate(EvaluateConfig(run=run, device="cpu"))
    assert not (run / "evaluation.json").exists()
    assert cli.main(["evaluate", str(run), "--device", "cpu"]) not in (0, None)
    printed, said = capsys.readouterr()
    assert printed == ""
    assert "has diverged" in said


def test_collapse_is_told_by_the_verb_alone(proxy, recwarn):
    run = learn_weights(proxy(mu=1e-6)).path
    assert "collapsed onto" in " ".join(" ".join(remarks_on(run)).split())
    # The wrapper's own warning is for loops of one's own.
    assert not [each for each in recwarn if "domain weights have collapsed" in str(each.message)]


def test_a_report_does_not_believe_a_run_that_diverged(tmp_path):
    run = write_proxy(tmp_path / "run", steps=20, skipped=range(5, 21), is_finished=False)
    told = " ".join(" ".join(remarks_on(run)).split())
    assert "16 of 20 logged steps were skipped because a gradient was not finite" in told
    assert "smaller mu" not in told


def test_of_uniform_weights_no_domain_gets_most(tmp_path):
    run = write_proxy(tmp_path / "run", steps=20, logits=[0.0] * 7, noise=0.0)
    told = " ".join(" ".join(remarks_on(run)).split())
    assert "the weights are uniform; effectively 7.0 of 7 domains" in told
    assert "most goes to" not in told
