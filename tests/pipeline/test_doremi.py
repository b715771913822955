"""DoReMi's weights follow the loss in excess of a reference, and its runs are runs like others."""

import math
import shutil
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from doge_fast.losses import token_losses
from doge_fast.mixture.counts import Phase
from doge_fast.pipeline import domains, records, report
from doge_fast.pipeline.base import train_base
from doge_fast.pipeline.config import DoReMiConfig, ReportConfig
from doge_fast.pipeline.domains import BlockSampler, mixed_batch
from doge_fast.pipeline.doremi import DoReMiTrainer, learn_by_excess_loss
from doge_fast.pipeline.model import open_model
from doge_fast.weights.group_dro import SMOOTHING, STEP_SIZE, domain_means
from tests.pipeline.stages import NAMES, killed_at

Make = Callable[..., DoReMiConfig]


@pytest.fixture
def doremi(configured: Callable[..., Make]) -> Make:
    """Makes a DoReMiConfig against a reference that is named."""
    return configured(DoReMiConfig, batch_size=8)


def test_a_run_leaves_weights_records_and_a_model(doremi, trained_base):
    config = doremi(reference=trained_base)
    assert learn_by_excess_loss(config).path == config.out
    held = sorted(entry.name for entry in config.out.iterdir())
    assert held == ["config.json", "metrics.jsonl", "model", "weights.json"]
    assert records.read_json(config.out / records.CONFIG)["stage"] == "doremi"
    record = records.read_weights(config.out, domains=NAMES)
    assert record["method"] == record["variant"] == "doremi"
    assert (record["steps"], record["batch_size"], record["block_size"]) == (8, 8, 16)
    # What the run cost can be counted from it: tokens and parameters of both models.
    model = AutoModelForCausalLM.from_pretrained(config.out / "model")
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    assert record["tokens"] == 8 * 8 * 16
    told = record["reference"]
    assert (told["run"], told["steps"], told["tokens"]) == (str(trained_base), 8, 8 * 8 * 16)
    assert told["parameters"] == record["parameters"]
    assert len(told["model_sha256"]) == 64
    assert {entry["reference_weight"] for entry in record["domains"]} == {0.25}
    assert not [file for file in config.out.rglob("*") if file.suffix in (".pt", ".bin", ".pth")]


@pytest.mark.parametrize(
    ("variant", "changes"),
    [("doremi", {}), ("doge", {}), ("doremi", {"step_size": 0.1, "smoothing": 0.5})],
)
def test_lines_hold_the_weights_and_what_moved_them(doremi, trained_base, variant, changes):
    config = doremi(reference=trained_base, variant=variant, **changes)
    learn_by_excess_loss(config)
    step_size = changes.get("step_size", STEP_SIZE[variant])
    smoothing = changes.get("smoothing", SMOOTHING[variant])
    record = records.read_weights(config.out)
    told = (record["variant"], record["step_size"], record["smoothing"])
    assert told == (variant, step_size, smoothing)
    lines = records.read_metrics(config.out, kind="train")
    assert [line["step"] for line in lines] == list(range(9))
    assert lines[0]["alpha"] == lines[0]["alpha_mean"] == dict.fromkeys(NAMES, 0.25)
    alpha, seen = [0.25] * 4, []
    for line in lines[1:]:
        excess = [line["excess"][name] for name in NAMES]
        grown = [a * math.exp(step_size * e) for a, e in zip(alpha, excess, strict=True)]
        alpha = [(1 - smoothing) * each / sum(grown) + smoothing / 4 for each in grown]
        seen.append(alpha)
        assert list(line["alpha"].values()) == pytest.approx(alpha, rel=1e-13)
        mean = [math.fsum(each) / len(seen) for each in zip(*seen, strict=True)]
        assert list(line["alpha_mean"].values()) == pytest.approx(mean, rel=1e-13)
        for name in NAMES:
            least = max(0.0, line["loss"][name] - line["reference_loss"][name])
            # Differences of losses below 8 nats, in float32; their mean is within an ulp of 8.
            assert line["excess"][name] >= least - 2**-20
            # A mean of clipped numbers is above the clipped mean.
            assert variant == "doremi" or line["excess"][name] <= least + 2**-20
    assert records.weights_by_name(record) == lines[-1]["alpha_mean"]
    assert lines[-1]["tokens"] == dict.fromkeys(NAMES, 8 * 2 * 16)
    # A fresh model predicts worse than one of 8 steps, so something has moved.
    assert all(excess > 0 for excess in lines[1]["excess"].values())
    assert lines[-1]["alpha"] != lines[0]["alpha"]
    held_out = records.read_metrics(config.out, kind="eval")
    assert [line["step"] for line in held_out] == [8]
    assert set(held_out[0]["loss"]) == set(NAMES)


def test_the_reference_is_measured_as_it_is_and_stays_so(doremi, trained_base):
    """The recorded losses are those of the model in its folder, without dropout."""
    before = (trained_base / "model/model.safetensors").read_bytes()
    config = doremi(reference=trained_base)
    learn_by_excess_loss(config)
    corpus = domains.load_corpus(config.corpus)
    num_blocks = {name: len(corpus.train[name]) for name in NAMES}
    mixture = BlockSampler(0, [Phase(0, dict.fromkeys(NAMES, 0.25))], 8, num_blocks)
    model = open_model(trained_base / "model").train(False)
    for line in records.read_metrics(config.out, kind="train")[1::3]:
        batch = mixed_batch(corpus, mixture.blocks(line["step"] - 1))
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits
        losses_K = domain_means(token_losses(logits, batch["labels"]), batch["domain_ids"], 4)
        measured = [line["reference_loss"][name] for name in NAMES]
        assert measured == pytest.approx(losses_K.tolist(), rel=4 * 2**-23)
    assert (trained_base / "model/model.safetensors").read_bytes() == before


def test_batches_follow_the_references_weights_and_so_does_the_start(doremi, base):
    """Natural weights: prose has three times the text; some domains are missing in some steps."""
    reference = train_base(base("reference", weights="natural")).path
    run = learn_by_excess_loss(doremi(reference=reference, batch_size=3, steps=12))
    lines, record = run.metrics("train"), run.record
    weights = {entry["name"]: entry["reference_weight"] for entry in record["domains"]}
    assert max(weights, key=weights.__getitem__) == "prose"
    assert weights == {entry["name"]: entry["prior"] for entry in record["domains"]}
    assert lines[0]["alpha"] == weights
    drawn = lines[-1]["tokens"]
    assert max(drawn, key=drawn.__getitem__) == "prose"
    assert sum(drawn.values()) == 12 * 3 * 16
    absent = [
        (before, line, name)
        for before, line in pairwise(lines[1:])
        for name in NAMES
        if line["loss"][name] is None
    ]
    assert absent
    assert all(line["excess"][name] == before["excess"][name] for before, line, name in absent)
    unseen = [name for name in NAMES if lines[1]["loss"][name] is None]
    assert unseen
    assert all(lines[1]["excess"][name] is None for name in unseen)


def test_a_proxy_of_another_size_and_a_held_out_domain(doremi, base):
    against = train_base(base("reference", targets=("verse",))).path
    run = learn_by_excess_loss(doremi(reference=against, targets=("verse",), model="tiny"))
    assert list(run.weights) == NAMES[:3]
    assert run.record["parameters"] > run.record["reference"]["parameters"]
    assert "verse" in run.metrics("eval")[-1]["loss"]


def test_a_run_does_not_go_on_against_another_reference(
    doremi, base, trained_base, monkeypatch, tmp_path
):
    against = shutil.copytree(trained_base, tmp_path / "base")
    config = doremi(reference=against, save_every=3, batch_size=3)
    with killed_at(monkeypatch, "training_step", 6):
        learn_by_excess_loss(config)
    # Half a run is reported as such.
    page = report.write_report(ReportConfig(runs=(config.out,)))
    assert "not complete, its records end at step 5 of 8" in page.read_text(encoding="utf-8")
    page.unlink()
    shutil.rmtree(against)
    train_base(base(seed=1))
    with pytest.raises(ValueError, match="reference"):
        learn_by_excess_loss(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_is_that_of_the_weighted_loss(doremi, trained_base, dtype, monkeypatch):
    """What Trainer differentiates is the loop's loss at this step's weights, not the last's."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    original = DoReMiTrainer._move

    def watched(self: DoReMiTrainer, losses: Tensor, reference: Tensor, ids: Tensor) -> None:
        original(self, losses, reference, ids)
        seen.append((losses.clone(), ids, self.weights.alpha))

    monkeypatch.setattr(DoReMiTrainer, "_move", watched)
    losses = []
    step = DoReMiTrainer.training_step

    def noted(self: DoReMiTrainer, *args: Any, **kwargs: Any) -> Tensor:
        losses.append(step(self, *args, **kwargs))
        assert not self.reference.training
        assert all(p.grad is None for p in self.reference.parameters())
        return losses[-1]

    monkeypatch.setattr(DoReMiTrainer, "training_step", noted)
    learn_by_excess_loss(doremi(reference=trained_base, steps=3, dtype=dtype))
    for loss, (losses_BT, ids_B, alpha_K) in zip(losses, seen, strict=True):
        # Blocks are drawn uniformly, so an example's weight is that of its domain.
        weights_B = alpha_K.double()[ids_B]
        expected = (weights_B * losses_BT.double().mean(1)).sum() / weights_B.sum()
        # Eight float32 products.
        assert float(loss) == pytest.approx(float(expected), rel=16 * 2**-23)
    assert len(losses) == 3
