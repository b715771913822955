"""DoGETrainer is Trainer with a gradient per domain: twins of hand-written loops, and refusals."""

import copy
import importlib.util
import pickle
from collections.abc import Iterator
from inspect import signature
from itertools import count
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PegasusConfig,
    PegasusForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
    get_scheduler,
)

from doge_fast import flat_buffer
from doge_fast.integrations import causal_lm, domain_data
from doge_fast.integrations import transformers as host
from doge_fast.integrations.domain_data import DomainStream, DomainZip, split_by_domain
from doge_fast.integrations.transformers import DoGETrainer
from doge_fast.optimizer import DoGEOptimizer
from tests.integrations.trainers import EVERY_STEP_LOGGED, arguments
from tests.models import tiny_gpt2

DOMAINS = ["ab", "cd", "ef"]
LENGTH = 12

EXHAUSTIVE = pytest.mark.exhaustive

pytestmark = pytest.mark.usefixtures("one_thread")


def tokens(step: int, domain: int, rows: int = 4) -> torch.Tensor:
    """Domains use overlapping parts of the vocabulary, so that their gradients differ."""
    generator = torch.Generator().manual_seed(1000 * step + domain)
    return torch.randint(8 * domain, 8 * domain + 20, (rows, LENGTH), generator=generator)


def batch_of(step: int, names: list[str], rows: int = 4) -> dict[str, dict[str, torch.Tensor]]:
    rows_of = {name: tokens(step, domain, rows) for domain, name in enumerate(names)}
    return {name: {"input_ids": ids, "labels": ids.clone()} for name, ids in rows_of.items()}


class Batches(IterableDataset[Any]):
    """Batch t is a function of t, cut into `micro` micro-batches.

    With `is_masked` some of the first row's tokens are no targets, more in the first micro-batch.
    With `is_apart` each domain is a micro-batch.
    """

    def __init__(
        self,
        names: list[str] = DOMAINS,
        start: int = 0,
        micro: int = 1,
        *,
        is_masked: bool = False,
        is_apart: bool = False,
    ) -> None:
        self.names, self.start, self.micro, self.is_masked = names, start, micro, is_masked
        self.is_apart = is_apart

    def __iter__(self) -> Iterator[Any]:
        for step in count(self.start):
            batch = batch_of(step, self.names)
            if self.is_masked:
                batch[self.names[0]]["labels"][:3, 2:] = -100
            if self.is_apart:
                yield from ({name: domain} for name, domain in batch.items())
                continue
            for part in range(self.micro):
                yield {
                    name: {key: rows.chunk(self.micro)[part] for key, rows in domain.items()}
                    for name, domain in batch.items()
                }


AS_IN_THE_PAPER: dict[str, Any] = {"mu": 0.005, "domain_max_grad_norm": None}
OF_TRAINERS = {*signature(DoGETrainer).parameters, *signature(Trainer).parameters}


def trainer_for(
    out: Path,
    data: Any = None,
    *,
    kind: type[DoGETrainer] = DoGETrainer,
    doge: dict[str, Any] = AS_IN_THE_PAPER,
    **changes: Any,
) -> DoGETrainer:
    """A trainer of a small model on `Batches`; `changes`: of DoGETrainer or TrainingArguments."""
    given = {name: changes.pop(name) for name in OF_TRAINERS & changes.keys()}
    options: dict[str, Any] = {"domains": DOMAINS, "mode": "sequential"} | doge | given
    if "model_init" not in options:
        options.setdefault("model", tiny_gpt2())
    if data is None:
        data = Batches(options["domains"], micro=changes.get("gradient_accumulation_steps", 1))
    return kind(args=arguments(out, **changes), train_dataset=data, **options)


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def by_hand(model: GPT2LMHeadModel, args: TrainingArguments, **doge: Any) -> DoGEOptimizer:
    """The same training with three lines of DoGE in an ordinary loop."""
    groups = Trainer(model=model, args=args).create_optimizer()
    optimizer = DoGEOptimizer(groups, max_grad_norm=args.max_grad_norm, **AS_IN_THE_PAPER, **doge)
    schedule = get_scheduler("linear", optimizer, 0, args.max_steps)
    model.train()
    for step in range(args.max_steps):
        for name, batch in batch_of(step, list(optimizer.names)).items():
            with optimizer.domain(name):
                targets = torch.tensor(batch["labels"][:, 1:].numel())
                model(**batch, num_items_in_batch=targets).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return optimizer


def test_the_aligned_rule_has_its_halves_in_every_mode(tmp_path, monkeypatch):
    """From the batch of two passes or one, from a stacked pass, and from two micro-batches."""
    monkeypatch.setattr(causal_lm, "MOST_TOKENS", {"cpu": 0})
    monkeypatch.setattr(flat_buffer, "SHARED_BYTES", {"cpu": 1})
    ways = (
        {"mode": "sequential"},
        {"mode": "auto"},
        {"mode": "stacked"},
        {"gradient_accumulation_steps": 2},
    )
    trainers = [
        trainer_for(
            tmp_path / str(number),
            Batches([*DOMAINS, "far"], micro=way.get("gradient_accumulation_steps", 1)),
            doge={"score": "aligned", "target": "far"},
            max_steps=26,
            **way,
        )
        for number, way in enumerate(ways)
    ]
    for trainer in trainers:
        trainer.train()
    batch = batch_of(0, [*DOMAINS, "far"])
    passes = [trainer._batches_to_stack(batch) for trainer in trainers]
    assert [list(map(len, each)) for each in passes] == [[], [1, 1, 1, 1], [4], []]
    # A stacked pass that is a whole step keeps the rows of the tied head and of one layer.
    kept, _, dropped, _ = (trainer.doge.buffer.num_bytes for trainer in trainers)
    assert dropped < kept / 2
    first, *others = [trainer.doge.alpha for trainer in trainers]
    assert (first - 1 / len(DOMAINS)).abs().max() > 0.01
    for other in others:
        # A stacked pass adds up in another order: some ulp of float32 in each of 26 steps.
        torch.testing.assert_close(other, first, rtol=0, atol=26 * 2**-23)


class Alike(IterableDataset[Any]):
    """Examples of a domain repeat one token, and differ in their number of targets alone.

    `lengths` are those numbers, for each micro-batch.
    """

    def __init__(self, lengths: list[list[int]]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        while True:
            for lengths in self.lengths:
                ids = torch.ones(len(lengths), LENGTH, dtype=torch.int64)
                is_target = torch.arange(LENGTH) <= torch.tensor(lengths)[:, None]
                batch = {
                    name: {"input_ids": number * ids, "labels": number * ids}
                    for number, name in enumerate(DOMAINS, 1)
                }
                for name in DOMAINS[:2]:
                    batch[name]["labels"].masked_fill_(~is_target, -100)
                yield batch


def mean_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("lengths", [[[3, 8, 11, 2, 7]], [[3, 8, 11, 2], [5, 1]]], ids=str)
@pytest.mark.parametrize(
    "way",
    [
        {"mode": "sequential"},
        {"mode": "auto"},
        {"mode": "stacked"},
        {"mode": "sequential", "takes_number": False},
        {"mode": "stacked", "takes_number": False},
        {"mode": "sequential", "compute_loss_func": mean_loss},
    ],
    # Not of the function: its address differs from process to process.
    ids=["sequential", "auto", "stacked", "sequential, a mean", "stacked, a mean", "own mean"],
)
def test_halves_weigh_as_the_loss_does(tmp_path, monkeypatch, way, lengths):
    """Without noise the product of the halves is the square of their sum."""
    # "auto" takes a pass of each domain.
    monkeypatch.setattr(causal_lm, "MOST_TOKENS", {"cpu": 0})
    torch.manual_seed(0)
    config = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    way = dict(way)
    takes_number = way.pop("takes_number", True)
    trainer = trainer_for(
        tmp_path,
        Alike(lengths),
        model=LlamaForCausalLM(LlamaConfig(**config, **heads)).double(),
        doge={"score": "aligned"},
        max_steps=1,
        gradient_accumulation_steps=len(lengths),
        **way,
    )
    if not takes_number:
        trainer.model_accepts_loss_kwargs = False
    trainer.train()
    last = trainer.doge.last
    assert last is not None
    products, squares = last.gram.diagonal(), last.grad_norms**2
    # Llama's norms round to float32.
    torch.testing.assert_close(products, squares, rtol=2**-23, atol=0)


def test_a_loss_that_is_a_mean_has_that_of_both_halves(tmp_path):
    losses = []
    for score in ("paper", "aligned"):
        doge = {"score": score}
        trainer = trainer_for(tmp_path, doge=doge, compute_loss_func=mean_loss, max_steps=1)
        trainer.train()
        losses.append(torch.stack([*trainer.domain_losses.values()]))
    torch.testing.assert_close(*losses)


def test_halves_of_the_last_step_of_an_epoch_are_those_of_its_batch(tmp_path):
    """Five micro-batches: the third step has one, where the others have two."""
    trainer = trainer_for(
        tmp_path,
        mixed(dict.fromkeys(DOMAINS, 10)),
        doge={"score": "aligned"},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        max_steps=-1,
    )
    trainer.train()
    assert trainer.doge.num_steps == 3


SELECTED = "transformer.h.0.mlp.c_fc.weight"


@pytest.mark.parametrize(
    ("target", "rows", "selection"),
    [("universal", DOMAINS, None), ({"ef": 0.5, "far": 2.0}, [*DOMAINS, "far"], SELECTED)],
    ids=["universal", "held-out and selected"],
)
def test_trainer_equals_a_loop_written_by_hand(tmp_path, target, rows, selection):
    names = None if selection is None else [selection]
    trainer = trainer_for(tmp_path, Batches(rows), target=target, selection=names)
    trainer.train()
    model = tiny_gpt2()
    selected = None if selection is None else [model.get_parameter(selection)]
    optimizer = by_hand(
        model, arguments(tmp_path), domains=DOMAINS, target=target, selection=selected
    )
    assert torch.equal(trainer.doge.alpha, optimizer.alpha)
    assert torch.equal(trainer.doge.alpha_mean, optimizer.alpha_mean)
    assert torch.equal(parameters(trainer.model), parameters(model))
    assert trainer.weights == optimizer.weights
    assert not torch.equal(trainer.doge.alpha, torch.full_like(optimizer.alpha, 1 / 3))


def test_one_domain_equals_plain_training(tmp_path):
    trainer = trainer_for(tmp_path, domains=["ab"])
    trainer.train()
    model = tiny_gpt2()
    rows = torch.cat([tokens(step, 0) for step in range(6)])
    plain = Trainer(
        model=model,
        args=arguments(
            tmp_path, per_device_train_batch_size=4, train_sampling_strategy="sequential"
        ),
        train_dataset=datasets.Dataset.from_dict(
            {"input_ids": rows.tolist(), "labels": rows.tolist()}
        ),
    )
    plain.train()
    difference = (parameters(trainer.model) - parameters(model)).abs().max()
    # Both clip, in another order of float32 operations; AdamW divides by roots of squares.
    assert difference < 1e-5 * parameters(model).abs().max()
    assert trainer.weights == {"ab": 1.0}


@pytest.mark.parametrize("micro", [1, pytest.param(2, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("drawn", [None, 2])
def test_stacked_mode_equals_sequential_mode(tmp_path, micro, drawn):
    """To float32's rounding, and what six steps of AdamW make of it; logs say of whom."""
    both = {}
    for mode in ("sequential", "stacked", "auto"):
        trainer = both[mode] = trainer_for(
            tmp_path / mode,
            mode=mode,
            domains_per_step=drawn,
            max_grad_norm=0.0,
            gradient_accumulation_steps=micro,
            **EVERY_STEP_LOGGED,
        )
        trainer.train()
        lines = [line for line in trainer.state.log_history if "loss" in line]
        logged = [{name for name in DOMAINS if line.get(f"loss/{name}", 0) > 0} for line in lines]
        assert [len(names) for names in logged] == 6 * [drawn or 3]
        assert set.union(*logged) == set(DOMAINS)
        assert [lines[-1][f"alpha/{name}"] for name in DOMAINS] == trainer.doge.alpha.tolist()
        assert {name: lines[-1][f"alpha_mean/{name}"] for name in DOMAINS} == trainer.weights
    assert torch.equal(both["auto"].doge.alpha, both["stacked"].doge.alpha)
    assert not torch.equal(both["sequential"].doge.alpha, both["stacked"].doge.alpha)
    ours, theirs = both["stacked"], both["sequential"]
    torch.testing.assert_close(ours.doge.alpha, theirs.doge.alpha, rtol=1e-5, atol=0)
    torch.testing.assert_close(parameters(ours.model), parameters(theirs.model), rtol=0, atol=1e-5)
    for name, loss in theirs.domain_losses.items():
        torch.testing.assert_close(ours.domain_losses[name], loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "bf16", [False, pytest.param(True, marks=EXHAUSTIVE)], ids=["float32", "bfloat16"]
)
def test_large_logits_are_computed_one_domain_at_a_time(tmp_path, monkeypatch, bf16):
    """The same weights, to the rounding of the products."""
    # As on a device that is no CPU.
    monkeypatch.setattr(causal_lm, "MOST_LOGITS_BYTES", {})
    naive = trainer_for(tmp_path / "a", mode="stacked", bf16=bf16)
    naive.train()
    monkeypatch.setattr(causal_lm, "MOST_LOGITS_BYTES", {"cpu": 0})
    fused = mock.Mock(wraps=causal_lm.linear_domain_losses)
    monkeypatch.setattr(causal_lm, "linear_domain_losses", fused)
    trainer = trainer_for(tmp_path / "b", mode="stacked", bf16=bf16)
    trainer.train()
    assert fused.call_count == 6
    # What a hook changes of the logits must not be lost.
    hook = trainer.model.lm_head.register_forward_hook(lambda *_: None)
    trainer.training_step(trainer.model, batch_of(0, DOMAINS))
    assert fused.call_count == 6
    hook.remove()
    rtol = 1e-2 if bf16 else 1e-5
    torch.testing.assert_close(trainer.doge.alpha, naive.doge.alpha, rtol=rtol, atol=0)
    monkeypatch.setattr(trainer.model.config, "model_type", "gemma2")
    trainer.training_step(trainer.model, batch_of(0, DOMAINS))
    assert fused.call_count == 6


def stackable(trainer: DoGETrainer, inputs: Any) -> bool:
    trainer.create_optimizer()
    return bool(trainer._batches_to_stack(inputs))


def test_auto_mode_stacks_small_batches_of_known_architectures(tmp_path, monkeypatch):
    trainer = trainer_for(tmp_path, mode="auto")
    batch = batch_of(0, DOMAINS)
    assert stackable(trainer, batch)
    for place, name, value in (
        (causal_lm, "MOST_TOKENS", {"cpu": 4 * LENGTH - 1}),
        (causal_lm, "MOST_TOKENS_TOGETHER", 3 * 4 * LENGTH - 1),
        (trainer.model.config, "model_type", "abacus"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            assert not stackable(trainer, batch)


def shorter(batch: Any) -> Any:
    return batch | {"ab": {key: rows[:, :5] for key, rows in batch["ab"].items()}}


def with_images(batch: Any) -> Any:
    return {name: rows | {"pixel_values": rows["labels"]} for name, rows in batch.items()}


def without_labels(batch: Any) -> Any:
    return batch | {"ab": {"input_ids": batch["ab"]["input_ids"]}}


class OwnLoss(DoGETrainer):
    """Of a user's."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class OwnForward(GPT2LMHeadModel):
    """A stacked pass takes the logits, so it would leave out a loss that is computed here."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def with_another_forward() -> GPT2LMHeadModel:
    model = tiny_gpt2()
    model.forward = MethodType(lambda self, **inputs: type(self).forward(self, **inputs), model)
    return model


def with_a_hook() -> GPT2LMHeadModel:
    model = tiny_gpt2()
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda param: None)
    return model


def with_a_router() -> GPT2LMHeadModel:
    model = tiny_gpt2()
    model.config.output_router_logits = True
    return model


def tiny_pegasus() -> PegasusForCausalLM:
    """Of transformers, with a loss of its own that does not shift the labels."""
    sizes = {"d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    return PegasusForCausalLM(PegasusConfig(vocab_size=tiny_gpt2().config.vocab_size, **sizes))


class Aligned(PreTrainedModel):
    """Of a user's, which transformers does not know: label i is that of logits i."""

    config_class, _supports_sdpa = GPT2Config, True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.head = torch.nn.Embedding(config.vocab_size, config.vocab_size)
        self.post_init()

    def forward(
        self, input_ids: Any, labels: Any = None, num_items_in_batch: Any = 1, **_: Any
    ) -> Any:
        logits = self.head(input_ids)
        lost = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": lost / num_items_in_batch, "logits": logits}


class AlignedGPT2(GPT2LMHeadModel):
    forward = Aligned.forward

    def head(self, input_ids: Any) -> Any:
        return self.lm_head(self.transformer(input_ids).last_hidden_state)


@pytest.mark.parametrize(
    ("kind", "per_example"), [(OwnForward, 11), (Aligned, 12), (AlignedGPT2, 12)]
)
def test_targets_are_counted_as_the_model_shifts_its_labels(tmp_path, kind, per_example):
    trainer = trainer_for(tmp_path, model_init=lambda: kind(tiny_gpt2().config))
    trainer.create_optimizer()
    _, found = trainer.get_batch_samples(iter([batch_of(0, DOMAINS)]), 1, torch.device("cpu"))
    for name, batch in batch_of(0, DOMAINS).items():
        assert batch["labels"].shape[1] == LENGTH == 12
        assert found[name] == len(batch["labels"]) * per_example


@pytest.mark.parametrize(
    ("change", "changes", "message"),
    [
        (shorter, {}, "length"),
        (with_images, {}, "pixel_values"),
        (without_labels, {}, "lacks"),
        (dict, {"kind": OwnLoss}, "loss"),
        (dict, {"model_init": lambda: OwnForward(tiny_gpt2().config)}, "OwnForward"),
        (dict, {"model_init": with_another_forward}, "forward"),
        (dict, {"model_init": with_a_hook}, "hook"),
        (dict, {"model_init": with_a_router}, "loss"),
        (dict, {"model_init": tiny_pegasus}, "loss"),
    ],
    ids=[
        "lengths",
        "images",
        "labels",
        "loss",
        "forward",
        "forward-of-one-model",
        "hook",
        "router",
        "pegasus",
    ],
)
def test_what_cannot_be_stacked_is_refused_or_run_in_turn(change, changes, message, tmp_path):
    inputs = change(batch_of(0, DOMAINS))
    assert not stackable(trainer_for(tmp_path, **changes, mode="auto"), inputs)
    with pytest.raises(ValueError, match=message):
        stackable(trainer_for(tmp_path, **changes, mode="stacked"), inputs)


def test_targets_without_labels_are_zero_on_the_device_that_is_asked_for():
    batches = [{"ab": {"input_ids": tokens(0, 0)}}]
    found = causal_lm.num_targets(batches, DOMAINS, torch.device("meta"), is_shifted=True)
    assert (found.shape, found.device.type) == ((3,), "meta")


class IgnoringTargets(DoGETrainer):
    """Takes the number of targets and returns the mean over the micro-batch, as many heads do."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(**inputs).loss


def test_loss_that_divides_only_a_part_gets_the_number_of_targets(tmp_path):
    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        lost = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        # Far larger than the part of the tokens.
        return lost / num_items_in_batch + logits.logsumexp(-1).square().mean()

    trainer = trainer_for(
        tmp_path, Batches(micro=2), compute_loss_func=loss_of, gradient_accumulation_steps=2
    )
    trainer.train()
    assert trainer.doge.num_steps


@pytest.mark.parametrize("generator", [np.random, np.random.default_rng(0)], ids=["numpy's", "own"])
def test_trial_of_a_loss_leaves_random_state_and_buffers_unchanged(tmp_path, generator):
    class Drawing(IgnoringTargets):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            model.calls.add_(1)
            return super().compute_loss(model, *args, **kwargs) * (1 + generator.random())

    found = []
    for is_measured in (True, False):
        np.random.seed(0)
        batches = Batches(micro=2)
        trainer = trainer_for(tmp_path, batches, kind=Drawing, gradient_accumulation_steps=2)
        trainer.model.register_buffer("calls", torch.zeros(()))
        if not is_measured:
            trainer.loss_is_scaled_for_ga = False
        elif generator is not np.random:
            # Nobody can take back what it has drawn.
            with pytest.raises(RuntimeError, match="loss_is_scaled_for_ga"):
                trainer.train()
            return
        trainer.train()
        found.append([trainer.doge.alpha, trainer.model.calls])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_targets_of_a_custom_loss_are_counted_as_by_trainer(tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, num_hidden_layers=1, **shape))
    model.loss_function = lambda logits, labels, **_: F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    trainer = trainer_for(tmp_path, model_init=lambda: model)
    trainer.create_optimizer()
    _, counts = trainer.get_batch_samples(iter(Batches()), 1, torch.device("cpu"))
    assert counts["ab"] == 4 * (LENGTH - 1)


# Means over micro-batches are that of the whole where all have as many targets.
@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize(("kind", "is_masked"), [(DoGETrainer, True), (IgnoringTargets, False)])
def test_micro_batches_equal_the_whole_batch_up_to_rounding(tmp_path, kind, is_masked, is_apart):
    """A domain's loss is its mean over the tokens of the whole step, however they are cut."""
    whole, parts = (
        trainer_for(
            tmp_path,
            Batches(micro=micro, is_masked=is_masked, is_apart=is_apart and micro > 1),
            kind=kind,
            gradient_accumulation_steps=len(DOMAINS) if is_apart and micro > 1 else micro,
            **EVERY_STEP_LOGGED,
        )
        for micro in (1, 2)
    )
    whole.train()
    parts.train()
    logged = [each.state.log_history[0]["loss"] for each in (whole, parts)]
    # Trainer rounds both to four digits.
    assert logged[0] == pytest.approx(logged[1], abs=1.01e-4)
    torch.testing.assert_close(parts.doge.alpha, whole.doge.alpha, rtol=1e-5, atol=0)
    for name in DOMAINS:
        torch.testing.assert_close(parts.domain_losses[name], whole.domain_losses[name])
    torch.testing.assert_close(parameters(parts.model), parameters(whole.model))
    expected = tiny_gpt2()(**next(iter(Batches(is_masked=is_masked)))["ab"]).loss.detach()
    assert parts.state.log_history[0]["loss/ab"] == pytest.approx(float(expected), rel=1e-5)


def test_a_step_without_domains_is_refused(tmp_path):
    def one_domain(_: Any, model: Any, batches: Any, *__: Any) -> Any:
        model(**batches["ab"]).loss.backward()
        return torch.zeros(())

    kind = type("OneDomain", (DoGETrainer,), {"training_step": one_domain})
    with pytest.raises(RuntimeError, match="outside any domain"):
        trainer_for(tmp_path, kind=kind).train()


@pytest.mark.parametrize(
    ("micro", "replays"), [(1, True), (1, False), pytest.param(2, False, marks=EXHAUSTIVE)]
)
def test_resumed_run_equals_the_uninterrupted_run(tmp_path, micro, replays):
    """Trainer replays the data; a stream that begins where the run stopped needs no replay."""
    changes: dict[str, Any] = {
        "gradient_accumulation_steps": micro,
        "ignore_data_skip": not replays,
    }
    whole = trainer_for(tmp_path / "whole", **changes)
    whole.train()
    trainer_for(tmp_path / "cut", **changes, save_strategy="steps", save_steps=4).train()
    data = Batches(start=0 if replays else 4, micro=micro)
    resumed = trainer_for(tmp_path / "cut", data, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    assert torch.equal(parameters(resumed.model), parameters(whole.model))
    assert torch.equal(resumed.doge.alpha_mean, whole.doge.alpha_mean)


@pytest.mark.parametrize("mode", ["sequential", "stacked"])
def test_loss_scale_changes_no_weight(tmp_path, mode):
    plain, scaled = (trainer_for(tmp_path / name, mode=mode) for name in ("a", "b"))
    plain.train()
    # float16 needs a GPU to train on; its scaler does not. A power of two rounds nothing, but for
    # the sums over a stacked batch.
    scaled.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled.train()
    rtol = 0 if mode == "sequential" else 1e-6
    torch.testing.assert_close(scaled.doge.alpha, plain.doge.alpha, rtol=rtol, atol=0)
    if mode == "sequential":
        assert torch.equal(parameters(scaled.model), parameters(plain.model))


def test_rank_reads_only_its_own_examples():
    read: list[tuple[str, int]] = []

    class Rows(Dataset[Any]):
        def __init__(self, name: str) -> None:
            self.name = name

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, int]:
            read.append((self.name, index))
            return {"x": index}

    zipped = DomainZip({name: Rows(name) for name in DOMAINS})

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([row["x"] for row in rows])}

    found = domain_data.collate_by_domain([zipped[i] for i in range(4)], collate, "domain", (1, 2))
    assert {name: batch["x"].tolist() for name, batch in found.items()} == {
        "cd": [2, 3],
        "ef": [0, 1, 2, 3],
    }
    # And the first of every domain, to see that it is one.
    assert set(read) == {("ab", 0), ("cd", 0), ("cd", 2), ("cd", 3), *(("ef", i) for i in range(4))}
    # A worker of the loader sends it.
    for sent in (found, pickle.loads(pickle.dumps(found)), copy.copy(found)):
        assert sent.counts == {"cd": 2, "ef": 4}
        assert sent.sizes == dict.fromkeys(DOMAINS, 4)


def test_collated_batch_is_cut_if_every_entry_holds_the_examples():
    def batch(**more: Any) -> dict[str, Any]:
        return {name: {"x": torch.arange(4), **more} for name in DOMAINS}

    parts = [domain_data.part_of(batch(y=torch.arange(4)), rank, 2) for rank in range(2)]
    assert [part["cd"]["y"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert [*parts[0]] == ["ab", "cd"]
    # Nothing is cut where every rank has whole domains.
    assert [*domain_data.part_of(batch(longest=7), 1, 3)] == ["cd"]
    with pytest.raises(ValueError, match="longest"):
        domain_data.part_of(batch(longest=7), 0, 2)


def mixed(counts: dict[str, int], **columns: Any) -> datasets.Dataset:
    """Examples of all domains, shuffled together, with a column that names them: as most have."""
    rows = [
        {"input_ids": ids, "labels": ids, "domain": name}
        for domain, (name, count) in enumerate(counts.items())
        for ids in tokens(0, domain, count).tolist()
    ]
    dataset = datasets.Dataset.from_list(rows).shuffle(seed=1)
    for name, value in columns.items():
        dataset = dataset.add_column(name, [value] * len(dataset))
    return dataset


IN_TURN: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "train_sampling_strategy": "sequential",
}
COUNTS = {"ab": 8, "cd": 5, "ef": 6}


def by_domain(dataset: datasets.Dataset) -> dict[str, datasets.Dataset]:
    return {name: dataset.filter(lambda row, n=name: row["domain"] == n) for name in COUNTS}


def test_mixed_dataset_is_split_by_its_domain_column(tmp_path):
    """As where the domains are apart already; an epoch is that of the longest, others repeat."""
    dataset = mixed(COUNTS, note="not for the model")
    one_epoch = IN_TURN | {"max_steps": -1, "num_train_epochs": 1}
    apart = trainer_for(tmp_path, by_domain(dataset), **one_epoch)
    for rows in next(iter(apart.get_train_dataloader())).values():
        assert set(rows) == {"input_ids", "labels"}
        assert rows["input_ids"].shape == (2, LENGTH)
    apart.train()
    assert apart.state.global_step == 4
    labelled = dataset.cast_column("domain", datasets.ClassLabel(names=DOMAINS))
    for given in (dataset, labelled, list(dataset), dataset.with_format("torch")):
        trainer = trainer_for(tmp_path, given, **IN_TURN)
        trainer.train()
        assert torch.equal(trainer.doge.alpha_mean, apart.doge.alpha_mean)
        assert torch.equal(parameters(trainer.model), parameters(apart.model))
    assert [DomainZip({"a": [0, 1, 2], "b": [3, 4]})[i]["b"] for i in range(3)] == [3, 4, 3]


def test_domain_column_may_have_another_name_and_name_a_target(tmp_path):
    dataset = mixed(COUNTS | {"far": 4}).rename_column("domain", "source")

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        assert not any("source" in example for example in examples)
        return default_data_collator(examples)

    for columns in (True, False):
        options = {"remove_unused_columns": columns, "data_collator": collate}
        trainer = trainer_for(tmp_path, dataset, target="far", domain_column="source", **options)
        batch = next(iter(trainer.get_train_dataloader()))
        assert list(batch) == [*DOMAINS, "far"]
        assert all(set(rows) == {"input_ids", "labels"} for rows in batch.values())


def test_a_domain_column_that_lacks_a_name_or_has_another_says_which():
    dataset = mixed(dict.fromkeys(("ab", "cd"), 2))
    with pytest.raises(ValueError, match="no example has ef, gh"):
        split_by_domain(dataset, "domain", ["ab", "cd", "gh", "ef"])
    with pytest.raises(ValueError, match="it also has cd"):
        split_by_domain(dataset, "domain", ["ab"])


@pytest.mark.parametrize("kind", ["mixed", "labelled", "tensors", "interleaved"])
def test_stream_is_grouped_by_domain_in_its_order(tmp_path, kind):
    dataset = mixed(COUNTS)
    apart = by_domain(dataset)
    streams = {name: rows.to_iterable_dataset() for name, rows in apart.items()}
    if kind in ("labelled", "tensors"):
        # The names in another order than those of the trainer.
        dataset = dataset.cast_column("domain", datasets.ClassLabel(names=DOMAINS[::-1]))
    stream = dataset.to_iterable_dataset()
    if kind == "tensors":
        stream = stream.with_format("torch")
    if kind == "interleaved":
        stream = datasets.interleave_datasets(
            [*streams.values()], stopping_strategy="all_exhausted"
        )
    trainer = trainer_for(tmp_path, stream, **(IN_TURN | {"max_steps": 2}))
    seen = list(trainer.get_train_dataloader())
    # The rarest has five. The longest has eight, the last of which ends the stream; the others
    # start again.
    assert len(seen) == (3 if kind == "interleaved" else 2)
    for name, rows in apart.items():
        rows_seen = [row for batch in seen for row in batch[name]["input_ids"].tolist()]
        assert rows_seen == (rows["input_ids"][:] * 2)[: len(rows_seen)]
    trainer.train()
    assert trainer.doge.num_steps == 2


def seen_of(tmp_path: Path, stream: Any, **changes: Any) -> list[tuple[int, list[Any]]]:
    """The step of each micro-batch, and the first domain's examples in it."""
    seen: list[tuple[int, list[Any]]] = []

    class Seeing(DoGETrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            seen.append((self.state.global_step, inputs["ab"]["input_ids"].tolist()))
            return super().training_step(model, inputs, num_items_in_batch)

    trainer_for(tmp_path, stream, kind=Seeing, per_device_train_batch_size=2, **changes).train()
    return seen


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=EXHAUSTIVE)])
def test_shuffled_stream_has_a_new_order_in_every_epoch(tmp_path, workers):
    stream = mixed({name: 6 for name in DOMAINS}).to_iterable_dataset().shuffle(seed=3)
    seen = seen_of(tmp_path, stream, dataloader_num_workers=workers)
    passes = [[row for _, batch in seen[i : i + 3] for row in batch] for i in (0, 3)]
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1])


def test_rest_of_a_stream_is_no_part_of_another_step(tmp_path):
    """What is left at the end of a pass is no part of another step."""
    stream = mixed({name: 6 for name in DOMAINS}).to_iterable_dataset()
    seen = seen_of(tmp_path, stream, gradient_accumulation_steps=2, max_steps=3)
    assert [step for step, _ in seen] == [0, 0, 1, 1, 2, 2]
    assert not seen_of(tmp_path, stream, gradient_accumulation_steps=4, max_steps=3)


def test_stream_skips_a_surplus_and_names_the_domains_it_lacks(monkeypatch):
    def grouped(names: list[Any], rows: tuple[str, str] = ("a", "b")) -> list[Any]:
        stream: Any = [{"domain": name, "number": i} for i, name in enumerate(names)]
        return list(DomainStream(stream, "domain", rows, batch_size=1, collate=list))

    # Numbers name domains too.
    assert [batch["1"][0]["number"] for batch in grouped([0, 1, 1, 0], ("0", "1"))] == [1, 2]
    monkeypatch.setattr(domain_data, "WAITING_STEPS", 2)
    batches = grouped(["a", "a", "a", "a", "b", "b", "b", "a", "b"])
    assert [[batch[name][0]["number"] for name in ("a", "b")] for batch in batches] == [
        [0, 4],
        [1, 5],
        [7, 6],
    ]
    with pytest.raises(KeyError, match="c"):
        grouped(["a", "c"])
    with pytest.raises(ValueError, match=r"2 .*'b'"):
        grouped(["a", "a"])
    monkeypatch.setattr(domain_data, "MOST_EXAMPLES_WITHOUT", 3)
    with pytest.raises(ValueError, match="3 examples"):
        grouped(["a", "b", "a", "a", "a", "b"])


def test_padding_of_a_collator_is_no_target(tmp_path):
    """As in most scripts; padding is no target of any domain."""

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        assert all(set(example) == {"input_ids"} for example in examples)
        parts = [torch.as_tensor(example["input_ids"]) for example in examples]
        ids, labels = (pad_sequence(parts, True, value) for value in (0, -100))
        return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}

    ragged = mixed(COUNTS).map(
        lambda row, index: {"input_ids": row["input_ids"][: 6 + index % 7]}, with_indices=True
    )
    trainer = trainer_for(
        tmp_path,
        ragged.remove_columns("labels"),
        model_init=lambda: tiny_gpt2(),
        data_collator=collate,
        **(IN_TURN | {"max_steps": 1}),
    )
    batch = next(iter(trainer.get_train_dataloader()))["ab"]
    trainer.train()
    # The mean over the tokens that are there, one after another.
    model, losses = tiny_gpt2(), []
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        short = ids[: int((labels != -100).sum())][None]
        losses += [model(short).logits[0, :-1].log_softmax(-1).gather(1, short[0, 1:, None])]
    expected = -torch.cat(losses).mean().detach()
    torch.testing.assert_close(trainer.domain_losses["ab"], expected)


def test_smoothed_labels_are_those_of_the_next_token(tmp_path):
    trainer = trainer_for(tmp_path, label_smoothing_factor=0.1, max_steps=1)
    trainer.train()
    ids = batch_of(0, DOMAINS)["ab"]["input_ids"]
    logs = tiny_gpt2()(ids).logits[:, :-1].log_softmax(-1)
    expected = -(0.9 * logs.gather(-1, ids[:, 1:, None]).mean() + 0.1 * logs.mean())
    torch.testing.assert_close(trainer.domain_losses["ab"], expected.detach())


def test_evaluation_gives_the_loss_of_the_model_and_training_goes_on(tmp_path):
    """A mean over predicted tokens; of an optimizer that evaluates other parameters, as well."""
    dataset = mixed({"ab": 4})
    ids = torch.tensor(dataset["input_ids"][:])
    kinds = ["adamw_torch"]
    if importlib.util.find_spec("schedulefree") is not None:
        kinds.append("schedule_free_adamw")
    for kind in kinds:
        trainer = trainer_for(tmp_path, optim=kind, lr_scheduler_type="constant")
        for times in (1, 2):
            trainer.train()
            assert trainer.doge.num_steps == 6 * times
            found = trainer.evaluate(dataset)["eval_loss"]
            with torch.no_grad():
                expected = float(trainer.model(ids, labels=ids).loss)
            assert found == pytest.approx(expected, rel=1e-5)
        assert not trainer.doge.inner.param_groups[0].get("train_mode")


def test_device_cache_is_emptied_every_torch_empty_cache_steps(tmp_path, monkeypatch):
    steps: list[int] = []
    trainer = trainer_for(tmp_path, torch_empty_cache_steps=2)
    monkeypatch.setattr(host, "clear_device_cache", lambda: steps.append(trainer.state.global_step))
    trainer.train()
    assert steps == [0, 2, 4]


@pytest.mark.parametrize(
    ("kind", "limit"), [("of the trainer", 0.5), ("ready", 0.25), ("left to the loop", 0.5)]
)
def test_combined_gradient_is_clipped_once(tmp_path, monkeypatch, kind, limit):
    model = tiny_gpt2()
    inner = own = torch.optim.SGD(model.named_parameters(), lr=0.1)
    if kind != "of the trainer":
        most = limit if kind == "ready" else None
        own = DoGEOptimizer(inner, domains=DOMAINS, max_grad_norm=most)
    # A ready one knows the domains.
    doge = {"domains": DOMAINS if own is inner else ()}
    trainer = trainer_for(
        tmp_path, Batches(), doge=doge, model=model, optimizers=(own, None), max_steps=2
    )
    if kind != "left to the loop":
        monkeypatch.delattr(type(trainer.accelerator), "clip_grad_norm_")
    norms: list[float] = []

    def measure(*_: Any) -> None:
        grads = [param.grad.flatten() for param in model.parameters()]
        norms.append(float(torch.cat(grads).norm()))

    inner.register_step_pre_hook(measure)
    trainer.train()
    assert trainer.doge.inner is inner
    assert own is inner or trainer.doge is own
    assert float(trainer.doge.last.combined_norm) > 0.5
    assert inner.param_groups[0]["lr"] == 0
    # c n / (n + 1e-6), in float32.
    assert norms == pytest.approx([limit, limit], rel=1e-5)


@pytest.mark.parametrize("drawn", [None, 2])
def test_ready_optimizer_decides_the_domains_and_how_many_a_step_has(tmp_path, drawn):
    trainer = with_a_ready_optimizer(tmp_path, domains_per_step=drawn)
    assert trainer.names == ("x", "y", "z")
    assert trainer._are_steps_partial == (drawn is not None)


def test_optimizer_and_schedule_may_be_given_in_every_form(tmp_path):
    """Given ready, or as a class, or as a factory that wraps by itself: the same training."""
    sgd: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}

    class Factory:
        def __call__(self, model: torch.nn.Module, **options: Any) -> DoGEOptimizer:
            inner = torch.optim.SGD(model.named_parameters(), **options)
            return DoGEOptimizer(inner, domains=DOMAINS)

    def trained(**options: Any) -> DoGETrainer:
        constant = {"max_steps": 3, "weight_decay": 0.0, "lr_scheduler_type": "constant"}
        trainer = trainer_for(tmp_path, doge={}, **constant, **options)
        trainer.train()
        return trainer

    by_class = trained(optimizer_cls_and_kwargs=(torch.optim.SGD, sgd))
    by_factory = trained(optimizer_cls_and_kwargs=(Factory, sgd))
    model = tiny_gpt2()
    ready = torch.optim.SGD(model.named_parameters(), **sgd)
    given = trained(model=model, optimizers=(ready, None))
    assert given.doge.inner is ready
    # Trainer's groups have the parameters in another order, and the factory leaves the clip to the
    # loop: both round in another order.
    for other in (by_class, by_factory):
        torch.testing.assert_close(parameters(given.model), parameters(other.model))

    model = tiny_gpt2()
    halves = [[*model.parameters()][start::2] for start in (0, 1)]
    several = trained(
        model=model, optimizers=([torch.optim.SGD(half, **sgd) for half in halves], None)
    )
    torch.testing.assert_close(parameters(given.model), parameters(several.model))

    model = tiny_gpt2()
    ready = torch.optim.SGD(model.named_parameters(), **sgd)
    halving = torch.optim.lr_scheduler.StepLR(ready, step_size=1, gamma=0.5)
    scheduled = trained(model=model, optimizers=(ready, halving))
    assert scheduled.doge.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    assert not torch.equal(parameters(scheduled.model), parameters(given.model))


def compiled(backend: str) -> dict[str, Any]:
    return {"torch_compile": True, "torch_compile_backend": backend}


def is_compiled(trainer: DoGETrainer) -> bool:
    return trainer.model_wrapped is not trainer.model


def is_checkpointed(trainer: DoGETrainer) -> bool:
    return bool(trainer.model.is_activation_checkpointing)


CHECKPOINTED = {"activation_checkpointing": True}
SOAK = pytest.mark.soak


# Of torch's own making: its compiler warns of itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("changes", "is_so", "mode", "rtol"),
    [
        (CHECKPOINTED, is_checkpointed, "sequential", 1e-6),
        (CHECKPOINTED, is_checkpointed, "stacked", 1e-6),
        (compiled("eager"), is_compiled, "sequential", 1e-6),
        pytest.param(compiled("eager"), is_compiled, "stacked", 1e-6, marks=SOAK),
        pytest.param(compiled("aot_eager"), is_compiled, "sequential", 1e-6, marks=SOAK),
        pytest.param(compiled("inductor"), is_compiled, "sequential", 1e-4, marks=SOAK),
        # Eight bits of mantissa in every product.
        ({"bf16": True}, lambda it: it.args.bf16, "sequential", 2**-5),
    ],
)
def test_compiled_checkpointed_and_16_bit_models_learn_the_same(
    tmp_path, changes, is_so, mode, rtol
):
    torch.compiler.reset()
    plain, other = (
        trainer_for(tmp_path, model=tiny_gpt2(num_layers=1), mode=mode, max_steps=2, **each)
        for each in ({}, changes)
    )
    plain.train()
    other.train()
    assert is_so(other)
    torch.testing.assert_close(other.doge.alpha, plain.doge.alpha, rtol=rtol, atol=0)
    if "bf16" in changes:
        assert not torch.equal(parameters(other.model), parameters(plain.model))
    else:
        torch.testing.assert_close(
            parameters(other.model), parameters(plain.model), rtol=1e-4, atol=1e-5
        )
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused head", "whole"])
@pytest.mark.parametrize("has_wrapper", [False, True], ids=["argument", "compiled before"])
def test_a_compiled_model_is_stacked_like_another(tmp_path, monkeypatch, is_fused, has_wrapper):
    """By its shapes; before a fused head the body is compiled."""
    monkeypatch.setattr(causal_lm, "MOST_LOGITS_BYTES", {"cpu": 0} if is_fused else {})
    fused = mock.Mock(wraps=causal_lm.linear_domain_losses)
    monkeypatch.setattr(causal_lm, "linear_domain_losses", fused)
    trainers = []
    for changes in ({}, {} if has_wrapper else compiled("eager")):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        model: Any = tiny_gpt2(num_layers=1)
        if has_wrapper and trainers:
            model = torch.compile(model, backend="eager")
        trainers.append(trainer_for(tmp_path, model=model, mode="auto", **changes))
        assert stackable(trainers[-1], batch_of(0, DOMAINS))
        trainers[-1].train()
    plain, other = trainers
    assert fused.call_count == (2 * plain.state.global_step if is_fused else 0)
    # Of the body alone, or of the whole model.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    torch.testing.assert_close(other.doge.alpha, plain.doge.alpha, rtol=1e-6, atol=0)
    torch.testing.assert_close(parameters(other.model), parameters(plain.model))
    torch.compiler.reset()


class Flat(IterableDataset[Any]):
    """Batches that are not by domain."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield batch_of(0, ["ab"])["ab"]


def train_as(out: Path, **methods: Any) -> None:
    """Training of DoGETrainer before a trainer that has methods of its own."""
    other = type("Other", (Trainer,), methods)
    trainer_for(out, kind=type("Both", (DoGETrainer, other), {})).train()


def loss_alone(self: Any, *given: Any) -> Any:
    return self.compute_loss(*given[:2])


def on_two_gpus(out: Path) -> DoGETrainer:
    args = copy.deepcopy(arguments(out))
    args._n_gpu = 2
    return DoGETrainer(model=tiny_gpt2(), args=args, domains=DOMAINS)


def check_host(out: Path, host_of: str) -> None:
    trainer = trainer_for(out)
    setattr(trainer, host_of, True)
    trainer.check_host()


def with_a_ready_optimizer(
    out: Path, domains_per_step: int | None = None, **options: Any
) -> DoGETrainer:
    model = tiny_gpt2()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    ready = DoGEOptimizer(inner, domains=["x", "y", "z"], domains_per_step=domains_per_step)
    return DoGETrainer(model=model, args=arguments(out), optimizers=(ready, None), **options)


def resume_without(out: Path, lost: str) -> None:
    trainer_for(out, save_strategy="steps", save_steps=4).train()
    (out / "checkpoint-4" / lost).unlink()
    trainer_for(out).train(resume_from_checkpoint=str(out / "checkpoint-4"))


TRANSFORMERS_SHARDS = "is_distributed_loading_by_transformers"
ONES = {name: [1] for name in DOMAINS}
LENGTHS = {"train_sampling_strategy": "group_by_length"}


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda out: trainer_for(out, (), domains={"ab": 0.7, "cd": 0.3}), ValueError, "domains"),
        (lambda out: trainer_for(out, (), domains="ab"), ValueError, "domains"),
        (lambda out: trainer_for(out, (), domains=[]), ValueError, "domains"),
        (lambda out: trainer_for(out, mode="sideways"), ValueError, "sideways"),
        (lambda out: trainer_for(out).weights, RuntimeError, "create_optimizer"),
        (on_two_gpus, RuntimeError, "GPU"),
        (lambda out: check_host(out, "is_deepspeed_enabled"), RuntimeError, "deepspeed"),
        (lambda out: check_host(out, "is_fsdp_enabled"), RuntimeError, "FSDP1"),
        (lambda out: check_host(out, TRANSFORMERS_SHARDS), RuntimeError, "distributed_config"),
        (lambda out: with_a_ready_optimizer(out, domains=["y", "x"]), ValueError, "domains"),
        (lambda out: with_a_ready_optimizer(out, mu=1.0, absent="keep"), ValueError, "mu, absent"),
        (lambda out: resume_without(out, "optimizer.pt"), FileNotFoundError, "optimizer"),
        (lambda out: resume_without(out, "scheduler.pt"), FileNotFoundError, "scheduler"),
        (lambda out: train_as(out, get_batch_samples=loss_alone), RuntimeError, "never run"),
        (lambda out: trainer_for(out, Flat()).train(), ValueError, "input_ids"),
        (lambda out: trainer_for(out, ONES, **LENGTHS).train(), ValueError, "lengths"),
        (lambda out: trainer_for(out, Batches(DOMAINS[:2])).train(), RuntimeError, "'ef'"),
        (lambda out: trainer_for(out, Batches([*DOMAINS, "zz"])).train(), ValueError, "'zz'"),
        (
            lambda out: trainer_for(out, mixed(COUNTS | {"far": 4})).train(),
            ValueError,
            "also has far",
        ),
        (lambda out: trainer_for(out, mixed(COUNTS), target="nl").train(), ValueError, "'nl'"),
    ],
)
def test_misuse_of_the_trainer_is_refused(call, error, word, tmp_path):
    with pytest.raises(error, match=word):
        call(tmp_path)
