"""Hugging Face's Trainer on the fake device; tests/method/test_fake_cuda.py starts it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from doge_fast.integrations.transformers import DoGETrainer
from tests import fake_cuda

DOMAINS = ["a", "b"]


class Model(nn.Module):
    """Ours, because models of transformers read masks and positions on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)

    def forward(self, input_ids: Tensor, labels: Tensor, **numbers: Any) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids)).flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten())}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_step_of_trainer_waits_for_nothing(
    micro_batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(40, (16, 8), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=micro_batches,
        optim="adamw_torch_fused",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )
    arguments._n_gpu = 1
    rows = [{"input_ids": each, "labels": each} for each in tokens]
    trainer = DoGETrainer(
        model=Model(), args=arguments, train_dataset=dict.fromkeys(DOMAINS, rows), domains=DOMAINS
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
    assert found[-2:] == [[], []]
    assert sum(trainer.weights.values()) == pytest.approx(1)
