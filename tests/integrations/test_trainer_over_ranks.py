"""DoGETrainer over ranks trains what one process trains on the same batches.

accelerate shards models on GPUs only, so ranks with an fsdp config say that they have some. All
else is what runs there: accelerate's `fully_shard`, its exchange of the optimizer's parameters, its
checkpoints.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from doge_fast.integrations.transformers import DoGETrainer
from tests.integrations.trainers import EVERY_STEP_LOGGED, arguments, tiny
from tests.models import tiny_gpt2
from tests.ranks import as_launched

DOMAINS = ("ab", "cd", "ef")
ROWS = (*DOMAINS, "far")
LENGTH, STEPS, BEGUN = 8, 4, 2
# Of every domain in a step, over all ranks; the larger one where each rank has a part of each.
BATCH, EVEN_BATCH = 6, 12
NAMES = ["transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight"]


class Trained(NamedTuple):
    """What a rank has at the end."""

    theta_N: Tensor
    alpha_K: Tensor
    alpha_mean_K: Tensor
    log: list[dict[str, float]]
    num_processes: int
    is_in_shards: bool


def examples(domain: str, number: int, num_lengths: int = LENGTH - 2) -> list[dict[str, Any]]:
    """Tokens of which some are not to be predicted: the ranks' parts have unequal numbers."""
    row = ROWS.index(domain)
    generator = torch.Generator().manual_seed(row)
    found = []
    for index in range(number):
        ids_L = torch.randint(4 * row, 4 * row + 16, (LENGTH,), generator=generator)
        labels_L = ids_L.clone()
        labels_L[: index % num_lengths] = -100
        found.append({"input_ids": ids_L.tolist(), "labels": labels_L.tolist()})
    return found


class Batches(IterableDataset[Any]):
    """Finished batches of unequal sizes, in the first step fewer examples than ranks."""

    def __iter__(self) -> Iterator[Any]:
        for step in range(100):
            sizes = {"ab": 1, "cd": 1, "ef": 1} if step == 0 else {"ab": 5, "cd": 1, "ef": 3}
            yield {
                name: {
                    key: torch.tensor([row[key] for row in examples(name, 40)[step : step + size]])
                    for key in ("input_ids", "labels")
                }
                for name, size in sizes.items()
            }


def small_model(kind: str = "gpt2") -> nn.Module:
    if kind == "gpt2":
        return tiny_gpt2(num_layers=1).double()
    # Has buffers, which DistributedDataParallel sends in a forward pass.
    return tiny(kind)


def in_float64(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The usual loss, which transformers computes in float32."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    # Trainer multiplies by the number of ranks what a function of one's own returns.
    return total / num_items_in_batch


def arguments_of_ranks(
    folder: str, batch: int, num_micro: int, config: dict[str, Any] | None, **more: Any
) -> TrainingArguments:
    """Of a run of ranks, with an fsdp config unless it is None."""
    as_launched()
    args = arguments(
        Path(folder),
        per_device_train_batch_size=batch // torch.distributed.get_world_size() // num_micro,
        gradient_accumulation_steps=num_micro,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=BEGUN,
        include_num_input_tokens_seen="all",
        fsdp=None if config is None else True,
        fsdp_config=config,
        **EVERY_STEP_LOGGED,
        **more,
    )
    assert args.device.type == "cpu"
    if config is not None:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return args


def data_of(kind: str, rows: Sequence[str], num_lengths: int) -> Any:
    """What `trained` trains on."""
    if kind == "batches":
        return Batches()
    # 25 is no multiple of a step: the last one of a pass has one example of every domain.
    numbers = {name: 24 if kind == "even" else 25 - 5 * ROWS.index(name) for name in rows}
    if kind == "column":
        mixed = [row | {"domain": name} for name, n in numbers.items() for row in examples(name, n)]
        return datasets.Dataset.from_list(mixed)
    return {
        name: datasets.Dataset.from_list(examples(name, number, num_lengths))
        for name, number in numbers.items()
    }


def trained(
    data: str, mode: str, how: str, folder: str, config: dict[str, Any] | None = None
) -> Trained:
    """What a few steps leave.

    Args:
        data: "mapping", "column", "batches"; "even": a mapping of equal domains.
        mode: of DoGETrainer.
        how: "": nothing else; "halves": two micro-batches; "target": a held-out domain and a
            selection by name; "drawn": two domains in a step; "means": a model that takes no number
            of targets; "llama": that architecture; "smoothed": labels; "begun": stops with a
            checkpoint; "resumed": goes on there; "aligned": by that rule, for a held-out domain.
        folder: of checkpoints, common to all ranks.
        config: `fsdp_config`; None: whole parameters.
    """
    rows = ROWS if how in ("target", "aligned") else DOMAINS
    rule = {"score": "aligned"} if how == "aligned" else {"mu": 0.05}
    # Of three on three ranks a rank has one example of a domain, or two, or all.
    batch = EVEN_BATCH if data == "even" else BATCH // 2 if how == "aligned" else BATCH
    # A mean of means counts examples; it is that of all tokens where all have as many.
    dataset = data_of(data, rows, num_lengths=1 if how == "means" else LENGTH - 2)
    trainer = DoGETrainer(
        model=small_model("llama" if how == "llama" else "gpt2"),
        args=arguments_of_ranks(
            folder,
            batch,
            2 if how in ("halves", "means") else 1,
            config,
            max_steps=BEGUN if how == "begun" else STEPS,
            save_strategy="steps" if how == "begun" else "no",
            label_smoothing_factor=0.1 if how == "smoothed" else 0.0,
        ),
        train_dataset=dataset,
        domains=DOMAINS,
        target={"far": 1.0} if rows == ROWS else "universal",
        selection=NAMES if how == "target" else None,
        domains_per_step=2 if how == "drawn" else None,
        mode=mode,
        compute_loss_func=None if mode == "stacked" or how == "smoothed" else in_float64,
        **rule,
    )
    if how == "means":
        # What Trainer finds out of a model whose forward takes no further arguments.
        trainer.model_accepts_loss_kwargs = False
    trainer.train(resume_from_checkpoint=how == "resumed")
    params = list(trainer.model.parameters())
    is_in_shards = all(isinstance(param, DTensor) for param in params)
    whole = [param.full_tensor() if isinstance(param, DTensor) else param for param in params]
    return Trained(
        torch.cat([param.detach().flatten() for param in whole]),
        trainer.doge.alpha,
        trainer.doge.alpha_mean,
        [line for line in trainer.state.log_history if "loss" in line],
        trainer.accelerator.num_processes,
        is_in_shards,
    )


def check(
    together: list[Trained], alone: Trained, *, exactly: float = 1e-12, is_in_shards: bool = False
) -> None:
    """Ranks against one process."""
    assert not torch.equal(alone.alpha_K, torch.full_like(alone.alpha_K, 1 / 3))
    for rank in together:
        assert rank.num_processes == len(together)
        assert rank.is_in_shards == is_in_shards
        assert torch.equal(rank.theta_N, together[0].theta_N)
        assert torch.equal(rank.alpha_mean_K, together[0].alpha_mean_K)
        torch.testing.assert_close(rank.theta_N, alone.theta_N, rtol=0, atol=exactly)
        torch.testing.assert_close(rank.alpha_mean_K, alone.alpha_mean_K, rtol=0, atol=exactly)
        for ours, theirs in zip(rank.log, alone.log, strict=True):
            assert ours.keys() == theirs.keys()
            for name in theirs:
                if "per_second" not in name and "runtime" not in name:
                    # Losses of a step are summed in float32.
                    assert ours[name] == pytest.approx(theirs[name], rel=1e-6), name


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("num_ranks", "data", "mode", "how", "config"),
    [
        (2, "mapping", "sequential", "", None),
        (2, "batches", "stacked", "", None),
        pytest.param(3, "column", "sequential", "halves", None, marks=EXHAUSTIVE),
        pytest.param(3, "mapping", "sequential", "target", None, marks=EXHAUSTIVE),
        pytest.param(2, "mapping", "stacked", "drawn", None, marks=EXHAUSTIVE),
        pytest.param(3, "mapping", "stacked", "means", None, marks=EXHAUSTIVE),
        pytest.param(4, "batches", "sequential", "llama", None, marks=EXHAUSTIVE),
        *(
            pytest.param(num_ranks, "even", "auto", how, config, marks=EXHAUSTIVE)
            for num_ranks, how, config in (
                (2, "", {}),
                (3, "", {"reshard_after_forward": False}),
                (2, "halves", {"reshard_after_forward": False}),
                (2, "target", {}),
                (2, "drawn", {}),
                (2, "", {"transformer_layer_cls_to_wrap": "GPT2Block"}),
                (2, "smoothed", {}),
            )
        ),
    ],
)
def test_ranks_train_what_one_process_trains(ranks, tmp_path, num_ranks, data, mode, how, config):
    # The layers of Llama compute in float32, and smoothed losses are.
    exactly = 1e-6 if how in ("llama", "smoothed") else 1e-12
    (alone,) = ranks.run(1, trained, data, mode, how, str(tmp_path))
    together = ranks.run(num_ranks, trained, data, mode, how, str(tmp_path), config)
    assert len(alone.log) == STEPS
    check(together, alone, exactly=exactly, is_in_shards=config is not None)


@pytest.mark.parametrize(
    ("num_ranks", "data", "config"),
    [(3, "mapping", None), pytest.param(2, "even", {}, marks=EXHAUSTIVE)],
    ids=["unequal parts", "shards"],
)
def test_halves_on_ranks_add_up_to_one_process_s_gradient(ranks, tmp_path, num_ranks, data, config):
    """The weights are uniform in the first steps, whichever examples a half has."""
    (alone,) = ranks.run(1, trained, data, "sequential", "aligned", str(tmp_path))
    for rank in ranks.run(num_ranks, trained, data, "sequential", "aligned", str(tmp_path), config):
        assert rank.is_in_shards == (config is not None)
        torch.testing.assert_close(rank.theta_N, alone.theta_N, rtol=0, atol=1e-12)


def refused(folder: str, what: str) -> str:
    """What is said; but for "alone" the model is in shards."""
    as_launched()
    number = 25 if what == "last" else 24
    data = {name: datasets.Dataset.from_list(examples(name, number)) for name in DOMAINS}
    if what == "alone":
        # Without `use_cpu`, on a machine without GPUs: each process would train all by itself.
        args = TrainingArguments(output_dir=folder, report_to="none")
        assert args.world_size == 1
    else:
        args = arguments_of_ranks(folder, EVEN_BATCH, 1, {}, max_steps=2)
    with pytest.raises((RuntimeError, ValueError)) as error:
        DoGETrainer(
            model=small_model(),
            args=args,
            train_dataset=Batches() if what == "few" else data,
            domains=DOMAINS,
            mode="stacked" if what == "stacked" else "auto",
        ).train()
    return str(error.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("what", "said"),
    [
        pytest.param(
            *("alone", "a model of its own in each process"),
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="on GPUs Trainer joins the processes"
            ),
        ),
        ("stacked", "fsdp"),
        ("last", "got {'the last batch of an epoch': 1}"),
        ("few", "got {'ab': 1, 'cd': 1, 'ef': 1}"),
    ],
)
def test_what_ranks_do_not_allow_is_said_on_all(ranks, tmp_path, what, said):
    for sentence in ranks.run(2, refused, str(tmp_path), what):
        assert said in sentence


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("before", "after", "data", "config"),
    [
        (2, 3, "mapping", None),
        (3, 1, "mapping", None),
        (2, 3, "even", {"state_dict_type": "FULL_STATE_DICT"}),
        (2, 2, "even", {"state_dict_type": "FULL_STATE_DICT"}),
        (2, 2, "even", {"state_dict_type": "SHARDED_STATE_DICT"}),
    ],
)
def test_a_run_resumes_with_another_number_of_ranks(ranks, tmp_path, before, after, data, config):
    work = (data, "sequential" if config is None else "auto")
    (alone,) = ranks.run(1, trained, *work, "", str(tmp_path / "alone"))
    ranks.run(before, trained, *work, "begun", str(tmp_path / "run"), config)
    if config is None:
        written = sorted(path.name for path in (tmp_path / "run").rglob("*.safetensors"))
        assert written == ["model.safetensors"]
    together = ranks.run(after, trained, *work, "resumed", str(tmp_path / "run"), config)
    logged = alone._replace(log=together[0].log)
    check(together, logged, is_in_shards=config is not None)
