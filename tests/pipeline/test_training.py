"""What both stages tell Trainer, and how a held-out loss is measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from doge_fast.pipeline import training
from doge_fast.pipeline.config import ProxyConfig, TrainingConfig
from doge_fast.pipeline.proxy import learn_weights
from doge_fast.pipeline.trainer import held_out_losses
from doge_fast.pipeline.training import device_of, training_arguments


def tiny_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_layer=1, n_head=1, n_embd=8, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def blocks(count: int) -> datasets.Dataset:
    ids = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(1))
    return datasets.Dataset.from_dict({"input_ids": ids.tolist()}).with_format("numpy")


def test_the_trainer_is_told_what_was_asked(tmp_path: Path) -> None:
    config = TrainingConfig(
        steps=50, weight_decay=0.02, max_grad_norm=0.7, seed=5, save_every=10, device="cpu"
    )
    args = training_arguments(config, tmp_path)
    assert (args.max_steps, args.weight_decay, args.max_grad_norm, args.seed) == (50, 0.02, 0.7, 5)
    assert args.save_strategy == "steps"
    assert args.save_steps == 10
    assert training_arguments(TrainingConfig(steps=95, device="cpu"), tmp_path).save_steps == 10
    # A twentieth of the steps.
    assert args.warmup_steps == 2
    never = TrainingConfig(save_every=0, device="cpu")
    assert training_arguments(never, tmp_path).save_strategy == "no"
    assert args.report_to == []
    assert not args.push_to_hub
    assert not args.bf16
    assert training_arguments(TrainingConfig(dtype="bfloat16", device="cpu"), tmp_path).bf16


def only(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """Torch sees these devices, and the CPU."""
    for kind, module in (("cuda", torch.cuda), ("xpu", torch.xpu), ("mps", torch.backends.mps)):
        monkeypatch.setattr(module, "is_available", lambda kind=kind: kind in kinds)


def test_the_device_is_there_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    assert device_of("auto") == device_of("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device is cuda, and torch sees no GPU here"):
        device_of("cuda")
    with pytest.raises(ValueError, match="device is mps, and torch sees no mps device here"):
        device_of("mps")
    only(monkeypatch, "cuda", "xpu", "mps")
    assert [device_of(name).type for name in ("auto", "cpu", "cuda", "xpu", "mps")] == [
        *("cuda", "cpu", "cuda", "xpu", "mps")
    ]
    only(monkeypatch, "xpu", "mps")
    assert device_of("auto").type == "xpu"


def test_what_needs_float64_does_not_run_on_mps(
    monkeypatch: pytest.MonkeyPatch, proxy: Callable[..., ProxyConfig]
) -> None:
    only(monkeypatch, "mps")
    assert device_of("auto").type == "mps"
    assert device_of("auto", needs_float64=True).type == "cpu"
    config = proxy(device="mps")
    with pytest.raises(ValueError, match=r"mps has no float64\. Pass device=cpu"):
        learn_weights(config)
    assert not config.out.exists()


def test_ranks_meet_on_the_device_that_trains(
    monkeypatch: pytest.MonkeyPatch, proxy: Callable[..., ProxyConfig]
) -> None:
    only(monkeypatch, "mps")
    wait, met = training.wait_for_ranks, []
    monkeypatch.setattr(training, "wait_for_ranks", lambda device: met.append(wait(device)))
    learn_weights(proxy(device="auto", steps=2))
    assert met == [torch.device("cpu")]


def test_trainer_takes_the_device_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only(monkeypatch, "xpu")
    # Torch sees one and Trainer, which asks elsewhere, does not.
    monkeypatch.setattr(TrainingArguments, "device", torch.device("cpu"))
    with pytest.raises(ValueError, match="device is xpu, and Trainer takes cpu on this machine"):
        training_arguments(TrainingConfig(device="xpu"), tmp_path)


def test_a_held_out_loss_asks_for_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "double", lambda *_: pytest.fail("float64"))
    assert held_out_losses(tiny_model(), {"a": blocks(9)}, batch_size=4)[0]["a"] > 0


@pytest.mark.parametrize(("num_blocks", "measured"), [(None, 21), (7, 7), (100, 21)])
def test_a_held_out_loss_is_a_mean_over_tokens(num_blocks: Any, measured: int) -> None:
    model, held_out = tiny_model().train(), blocks(21)
    options = {"num_blocks": num_blocks, "batch_size": 4}
    losses, counts = held_out_losses(model, {"a": held_out}, **options)
    loss, count = losses["a"], counts["a"]
    assert count == measured
    assert model.training
    indices = [i * 21 // measured for i in range(measured)]
    tokens_BL = torch.tensor(held_out[indices]["input_ids"])
    with torch.no_grad():
        expected = model.eval()(tokens_BL, labels=tokens_BL).loss
    assert loss == pytest.approx(float(expected), rel=1e-6)


def test_a_held_out_loss_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        held_out_losses(tiny_model(), {"a": blocks(2).select([])})
