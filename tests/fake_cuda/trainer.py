"""Hugging Face's Trainer on the fake device; tests/method/test_fake_cuda.py starts it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from doge_fast.integrations.transformers import DoGETrainer
from tests import fake_cuda
from tests.integrations.trainers import arguments
from tests.models import tiny_gpt2

DOMAINS = ["a", "b"]


class Model(nn.Module):
    """Ours, which reads nothing on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)

    def forward(self, input_ids: Tensor, labels: Tensor, **numbers: Any) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids)).flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten())}


def gpt2() -> nn.Module:
    """Of transformers, whose blocks are full: its batches have no mask."""
    return tiny_gpt2(num_layers=1, attn_implementation="eager")


@pytest.mark.parametrize(
    ("make", "mode", "micro_batches", "waits", "score"),
    [
        (Model, "sequential", 1, 0, "paper"),
        (Model, "sequential", 2, 0, "paper"),
        (Model, "sequential", 1, 0, "aligned"),
        # In each forward transformers looks whether positions are those of packed sequences.
        (gpt2, "sequential", 1, 2, "paper"),
        (gpt2, "sequential", 2, 4, "paper"),
        # Two halves of each domain.
        (gpt2, "sequential", 1, 4, "aligned"),
        (gpt2, "stacked", 1, 1, "paper"),
        (gpt2, "stacked", 1, 1, "aligned"),
    ],
)
def test_a_step_of_trainer_waits_for_nothing_of_ours(
    make, mode, micro_batches, waits, score, tmp_path, monkeypatch
):
    tokens = torch.randint(40, (16, 8), generator=torch.Generator().manual_seed(0))
    changes = {"use_cpu": False, "optim": "adamw_torch_fused", "logging_nan_inf_filter": False}
    changes |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": micro_batches}
    args = arguments(tmp_path, max_steps=4, dataloader_pin_memory=True, **changes)
    args._n_gpu = 1
    rows = [{"input_ids": each, "labels": each} for each in tokens]
    trainer = DoGETrainer(
        model=make(),
        args=args,
        train_dataset=dict.fromkeys(DOMAINS, rows),
        domains=DOMAINS,
        mode=mode,
        score=score,
    )
    found: list[list[str]] = []
    zero_grad = trainer.create_optimizer().zero_grad

    def end_of_step(**options: Any) -> None:
        found.append(fake_cuda.waits())
        zero_grad(**options)

    monkeypatch.setattr(trainer.doge, "zero_grad", end_of_step)
    trainer.train()
    assert trainer.doge.num_steps == 4
    assert next(trainer.model.parameters()).is_cuda
    # From the loader to the end of the step; in the first ones tables are uploaded, and whether
    # the loss divides by the number of targets is measured.
    assert [len(each) for each in found[-2:]] == [waits, waits], found
    assert float(trainer.doge.alpha.sum()) == pytest.approx(1)
