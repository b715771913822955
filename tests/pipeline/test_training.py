"""What both stages tell Trainer, and how a held-out loss is measured."""

import datasets
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from doge_fast.pipeline.config import TrainingConfig
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


def test_the_trainer_is_told_what_was_asked(tmp_path):
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


def test_the_device_is_there_or_refused(monkeypatch):
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert device_of("auto").type == ("cuda" if has_gpu else "cpu")
        assert device_of("cpu").type == "cpu"
    assert device_of("cuda").type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is cuda, and torch sees no GPU here"):
        device_of("cuda")


@pytest.mark.parametrize(("num_blocks", "measured"), [(None, 21), (7, 7), (100, 21)])
def test_a_held_out_loss_is_a_mean_over_tokens(num_blocks, measured):
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


def test_a_held_out_loss_needs_a_block():
    with pytest.raises(ValueError, match="at least one block"):
        held_out_losses(tiny_model(), {"a": blocks(2).select([])})
