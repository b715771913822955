"""What both stages tell Trainer, and where they train."""

import pytest
import torch

from doge_fast.pipeline.config import TrainingConfig
from doge_fast.pipeline.training import device_of, training_arguments


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
