"""DoGETrainer with an unbiased score: it cuts each domain's batch into halves by itself."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import default_data_collator

from doge_fast.integrations.dealing import Deal
from doge_fast.integrations.transformers import DoGETrainer
from tests.integrations.test_transformers import Batches, arguments, tiny_model
from tests.ranks import Ranks, as_launched

DOMAINS = ["ab", "cd", "ef", "gh"]

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(folder: Path, mode: str, micro: int = 1, target: str = "universal") -> dict[str, Any]:
    domains = DOMAINS if target == "universal" else DOMAINS[:3]
    rows = domains if target == "universal" else [*domains, target]
    trainer = DoGETrainer(
        model=tiny_model(),
        args=arguments(folder, gradient_accumulation_steps=micro),
        train_dataset=Batches(rows, 0, micro),
        domains=domains,
        target=target,
        mode=mode,  # type: ignore[arg-type]
        mu=0.005,
        score="unbiased",
    )
    trainer.train()
    assert trainer.doge.last is not None
    params: list[Tensor] = [param.detach().flatten() for param in trainer.model.parameters()]
    return {
        "alpha": trainer.doge.alpha_mean,
        "difficulty": trainer.doge.last.difficulty,
        "theta": torch.cat(params),
        "losses": torch.stack([trainer.domain_losses[name] for name in rows]),
    }


@pytest.mark.parametrize("micro", [1, 2])
def test_both_modes_compare_the_same_halves(tmp_path: Path, micro: int) -> None:
    one_by_one, stacked = (trained(tmp_path, mode, micro) for mode in ("sequential", "stacked"))
    for name, expected in one_by_one.items():
        torch.testing.assert_close(stacked[name], expected, rtol=1e-4, atol=1e-6)
    assert (one_by_one["alpha"] - 1 / 4).abs().max() > 1e-4


def test_towards_a_target_there_are_no_halves(tmp_path: Path) -> None:
    one_by_one, stacked = (
        trained(tmp_path, mode, target="far") for mode in ("sequential", "stacked")
    )
    for name, expected in one_by_one.items():
        torch.testing.assert_close(stacked[name], expected, rtol=1e-4, atol=1e-6)


def on_a_rank(folder: Path, mode: str) -> dict[str, Any]:
    as_launched()
    return trained(folder, mode)


@pytest.mark.parametrize("mode", ["sequential", "stacked"])
def test_ranks_learn_what_one_process_does(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    alone = trained(tmp_path, mode)
    for found in ranks.run(2, on_a_rank, tmp_path, mode):
        torch.testing.assert_close(found["alpha"], alone["alpha"], rtol=1e-4, atol=1e-6)
        # AdamW enlarges how small gradients are rounded; this is a 300th of a step at 3e-3.
        torch.testing.assert_close(found["theta"], alone["theta"], rtol=1e-4, atol=1e-5)


def test_pieces_of_ranks_are_of_whole_pairs() -> None:
    deal = Deal(in_pairs=True)
    sizes = {"a": 6, "b": 2, "c": 4}
    dealt = [deal(sizes, rank, 4) for rank in range(4)]
    assert dealt == [{"a": (0, 2)}, {"a": (2, 6)}, {"b": (0, 2)}, {"c": (0, 4)}]
    with pytest.raises(ValueError, match=r"odd number of examples: \{'b': 3\}"):
        deal({"a": 2, "b": 3}, 0, 2)


def test_workers_that_are_spawned_are_sent_what_collates(tmp_path: Path) -> None:
    """As they are wherever processes do not fork."""
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
    trainer = DoGETrainer(
        model=tiny_model(),
        args=arguments(tmp_path, per_device_train_batch_size=2),
        train_dataset={name: rows for name in DOMAINS},
        domains=DOMAINS,
        data_collator=default_data_collator,
        score="unbiased",
    )
    pickle.dumps(trainer.get_train_dataloader().collate_fn)


def test_a_last_batch_without_halves_is_refused_before_the_first_step(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 5
    trainer = DoGETrainer(
        model=tiny_model(),
        args=arguments(tmp_path, per_device_train_batch_size=2),
        train_dataset={name: rows for name in DOMAINS},
        domains=DOMAINS,
        score="unbiased",
    )
    with pytest.raises(ValueError, match=r"\{'the last batch of an epoch': 1\}"):
        trainer.train()
