"""DoGETrainer with an fsdp config trains what one process trains on the same batches.

accelerate shards models on GPUs only, so the ranks here say that they have some. All else is what
runs there: accelerate's `fully_shard`, its exchange of the optimizer's parameters, its checkpoints.
"""

from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from doge_fast.integrations.transformers import DoGETrainer
from tests.integrations.test_trainer_over_ranks import (
    DOMAINS,
    ROWS,
    Batches,
    examples,
    in_float64,
    small_model,
)
from tests.ranks import Ranks, as_launched

pytestmark = pytest.mark.exhaustive

STEPS, BEGUN = 4, 2
# Of every domain in a step, over all ranks.
BATCH = 12
NAMES = ["transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight"]


class Trained(NamedTuple):
    """What a rank has at the end."""

    theta_N: Tensor
    alpha_mean_K: Tensor
    is_in_shards: bool
    losses: list[float]


def begun(folder: str, num_micro: int, config: dict[str, Any] | None, **more: Any) -> Any:
    """The arguments of a run, with an fsdp config unless it is None."""
    as_launched()
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH // torch.distributed.get_world_size() // num_micro,
        gradient_accumulation_steps=num_micro,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        save_steps=BEGUN,
        fsdp=None if config is None else True,
        fsdp_config=config,
        **more,
    )
    assert args.device.type == "cpu"
    if config is not None:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return args


def trained(how: str, folder: str, config: dict[str, Any] | None) -> Trained:
    """What a few steps leave.

    Args:
        how: "": nothing else; "halves": two micro-batches; "target": a held-out domain and a
            selection by name; "drawn": two domains in a step; "begun": stops with a checkpoint;
            "resumed": goes on there.
        folder: of checkpoints, common to all ranks.
        config: `fsdp_config`; None: whole parameters.
    """
    args = begun(
        folder,
        2 if how == "halves" else 1,
        config,
        max_steps=BEGUN if how == "begun" else STEPS,
        save_strategy="steps" if how == "begun" else "no",
    )
    has_target = how == "target"
    rows = ROWS if has_target else DOMAINS
    trainer = DoGETrainer(
        model=small_model(),
        args=args,
        train_dataset={name: datasets.Dataset.from_list(examples(name, 24)) for name in rows},
        domains=DOMAINS,
        mu=0.05,
        target={"far": 1.0} if has_target else "universal",
        selection=NAMES if has_target else None,
        domains_per_step=2 if how == "drawn" else None,
        compute_loss_func=in_float64,
    )
    trainer.train(resume_from_checkpoint=how == "resumed")
    params = list(trainer.model.parameters())
    are_in_shards = {isinstance(param, DTensor) for param in params}
    whole = [param.full_tensor() if isinstance(param, DTensor) else param for param in params]
    theta_N = torch.cat([param.detach().flatten() for param in whole])
    losses = [line["loss/ab"] for line in trainer.state.log_history if "loss/ab" in line]
    return Trained(theta_N, trainer.doge.alpha_mean, are_in_shards == {True}, losses)


def check(together: list[Trained], alone: Trained) -> None:
    """Ranks against one process."""
    assert not torch.equal(alone.alpha_mean_K, torch.full_like(alone.alpha_mean_K, 1 / 3))
    for rank in together:
        assert rank.is_in_shards
        assert torch.equal(rank.alpha_mean_K, together[0].alpha_mean_K)
        torch.testing.assert_close(rank.theta_N, alone.theta_N, rtol=0, atol=1e-12)
        torch.testing.assert_close(rank.alpha_mean_K, alone.alpha_mean_K, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("num_ranks", "how", "config"),
    [
        (2, "", {}),
        (3, "", {"reshard_after_forward": False}),
        (2, "halves", {"reshard_after_forward": False}),
        (2, "target", {}),
        (2, "drawn", {}),
        (2, "", {"transformer_layer_cls_to_wrap": "GPT2Block"}),
    ],
)
def test_shards_train_what_one_process_trains(
    ranks: Ranks, tmp_path: Path, num_ranks: int, how: str, config: dict[str, Any]
) -> None:
    (alone,) = ranks.run(1, trained, how, str(tmp_path), None)
    together = ranks.run(num_ranks, trained, how, str(tmp_path), config)
    check(together, alone)
    for rank in together:
        assert rank.losses == pytest.approx(alone.losses, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "after"), [("FULL_STATE_DICT", 3), ("FULL_STATE_DICT", 2), ("SHARDED_STATE_DICT", 2)]
)
def test_a_run_in_shards_resumes(ranks: Ranks, tmp_path: Path, kind: str, after: int) -> None:
    config = {"state_dict_type": kind}
    (alone,) = ranks.run(1, trained, "", str(tmp_path / "alone"), None)
    ranks.run(2, trained, "begun", str(tmp_path / "run"), config)
    check(ranks.run(after, trained, "resumed", str(tmp_path / "run"), config), alone)


def run_badly(folder: str, what: str) -> None:
    """What DoGETrainer refuses."""
    number = 25 if what == "last" else 24
    data = {name: datasets.Dataset.from_list(examples(name, number)) for name in DOMAINS}
    trainer = DoGETrainer(
        model=small_model(),
        args=begun(folder, 1, {}, max_steps=2),
        train_dataset=Batches() if what == "few" else data,
        domains=DOMAINS,
        mode="stacked" if what == "stacked" else "auto",
    )
    trainer.train()


def refused(folder: str, what: str) -> str:
    """What is said."""
    with pytest.raises((RuntimeError, ValueError)) as error:
        run_badly(folder, what)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("stacked", "takes a whole model, and fsdp cuts it"),
        ("last", "all 2 ranks run every domain of a step; got {'the last batch of an epoch': 1}"),
        ("few", "all 2 ranks run every domain of a step; got {'ab': 1, 'cd': 1, 'ef': 1}"),
    ],
)
def test_what_shards_do_not_allow_is_said_on_all_ranks(
    ranks: Ranks, tmp_path: Path, what: str, sentence: str
) -> None:
    for said in ranks.run(2, refused, str(tmp_path), what):
        assert sentence in said
