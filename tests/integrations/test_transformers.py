"""DoGETrainer is Trainer with a gradient per domain: twins of hand-written loops, and refusals."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, get_scheduler

from doge_fast.integrations import transformers as hosts
from doge_fast.integrations.transformers import DoGETrainer, DomainZip
from doge_fast.optimizer import DoGEOptimizer

DOMAINS = ["ab", "cd", "ef"]
VOCAB = 48
LENGTH = 12


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on two threads, far slower where others compute too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_model(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_layer=2,
        n_head=2,
        n_embd=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def tokens(step: int, domain: int, rows: int = 4) -> torch.Tensor:
    """Domains use overlapping parts of the vocabulary, so that their gradients differ."""
    generator = torch.Generator().manual_seed(1000 * step + domain)
    return torch.randint(8 * domain, 8 * domain + 20, (rows, LENGTH), generator=generator)


def batch_of(step: int, names: list[str], rows: int = 4) -> dict[str, dict[str, torch.Tensor]]:
    found = {name: tokens(step, domain, rows) for domain, name in enumerate(names)}
    return {name: {"input_ids": ids, "labels": ids.clone()} for name, ids in found.items()}


class Batches(IterableDataset[Any]):
    """Batch t is a function of t."""

    def __init__(self, names: list[str], start: int = 0, micro: int = 1) -> None:
        self.names, self.start, self.micro = names, start, micro

    def __iter__(self) -> Iterator[Any]:
        step = self.start
        while True:
            for part in range(self.micro):
                batch = batch_of(step, self.names)
                yield {
                    name: {key: rows.chunk(self.micro)[part] for key, rows in domain.items()}
                    for name, domain in batch.items()
                }
            step += 1


def arguments(out: Path, **changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": 6,
        "learning_rate": 3e-3,
        "weight_decay": 0.01,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    return TrainingArguments(**(options | changes))


def trainer_for(out: Path, *, names: list[str] = DOMAINS, **changes: Any) -> DoGETrainer:
    doge: dict[str, Any] = {
        "domains": names,
        "mu": 0.005,
        "mode": changes.pop("mode", "sequential"),
    }
    start = changes.pop("start", 0)
    micro = changes.get("gradient_accumulation_steps", 1)
    passed = ("target", "selection", "domains_per_step")
    doge |= {key: changes.pop(key) for key in passed if key in changes}
    rows = changes.pop("rows", names)
    return DoGETrainer(
        model=tiny_model(),
        args=arguments(out, **changes),
        train_dataset=Batches(rows, start, micro),
        **doge,
    )


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def by_hand(model: GPT2LMHeadModel, args: TrainingArguments, **doge: Any) -> DoGEOptimizer:
    """The same training with three lines of DoGE in an ordinary loop."""
    groups = Trainer(model=model, args=args).create_optimizer()
    optimizer = DoGEOptimizer(groups, max_grad_norm=args.max_grad_norm, mu=0.005, **doge)
    schedule = get_scheduler("linear", optimizer, 0, args.max_steps)
    model.train()
    for step in range(args.max_steps):
        for name, batch in batch_of(step, list(optimizer.rows)).items():
            with optimizer.domain(name):
                targets = torch.tensor(batch["labels"][:, 1:].numel())
                model(**batch, num_items_in_batch=targets).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(
    ("target", "rows"),
    [("universal", DOMAINS), ({"far": 1.0}, [*DOMAINS, "far"]), ({"ef": 0.5, "far": 2.0}, None)],
    ids=["universal", "held-out", "several"],
)
def test_is_the_loop_written_by_hand(tmp_path: Path, target: Any, rows: list[str] | None) -> None:
    trainer = trainer_for(tmp_path, target=target, rows=rows or [*DOMAINS, "far"])
    trainer.train()
    model = tiny_model()
    optimizer = by_hand(model, arguments(tmp_path), domains=DOMAINS, target=target)
    assert torch.equal(trainer.doge.alpha, optimizer.alpha)
    assert torch.equal(trainer.doge.alpha_mean, optimizer.alpha_mean)
    assert torch.equal(parameters(trainer.model), parameters(model))
    assert trainer.weights == optimizer.weights
    assert not torch.equal(trainer.doge.alpha, torch.full_like(optimizer.alpha, 1 / 3))


def test_one_domain_is_plain_training(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, names=["ab"])
    trainer.train()
    model = tiny_model()
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


@pytest.mark.parametrize("micro", [1, 2])
def test_one_pass_for_all_domains_learns_the_same(tmp_path: Path, micro: int) -> None:
    """To float32's rounding, and what six steps of AdamW make of it."""
    both = {}
    for mode in ("sequential", "stacked", "auto"):
        trainer = trainer_for(
            tmp_path / mode, mode=mode, max_grad_norm=0.0, gradient_accumulation_steps=micro
        )
        trainer.train()
        both[mode] = trainer
    assert torch.equal(both["auto"].doge.alpha, both["stacked"].doge.alpha)
    assert not torch.equal(both["sequential"].doge.alpha, both["stacked"].doge.alpha)
    ours, theirs = both["stacked"], both["sequential"]
    torch.testing.assert_close(ours.doge.alpha, theirs.doge.alpha, rtol=1e-5, atol=0)
    torch.testing.assert_close(parameters(ours.model), parameters(theirs.model), rtol=0, atol=1e-5)
    for name, loss in theirs.domain_losses.items():
        torch.testing.assert_close(ours.domain_losses[name], loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_many_logits_come_one_domain_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool
) -> None:
    """The same weights, to the rounding of the products."""
    naive = trainer_for(tmp_path / "a", mode="stacked", bf16=bf16)
    naive.train()
    monkeypatch.setattr(hosts, "MOST_LOGITS_BYTES", {"cpu": 0})
    called = []
    fused = hosts.linear_domain_losses
    monkeypatch.setattr(
        hosts, "linear_domain_losses", lambda *args, **kw: called.append(1) or fused(*args, **kw)
    )
    trainer = trainer_for(tmp_path / "b", mode="stacked", bf16=bf16)
    trainer.train()
    assert len(called) == 6
    rtol = 1e-2 if bf16 else 1e-5
    torch.testing.assert_close(trainer.doge.alpha, naive.doge.alpha, rtol=rtol, atol=0)
    monkeypatch.setattr(trainer.model.config, "model_type", "gemma2")
    trainer.training_step(trainer.model, batch_of(0, DOMAINS))
    assert len(called) == 6


def test_a_loss_scale_changes_no_weight_of_a_stacked_batch(tmp_path: Path) -> None:
    plain, scaled = (trainer_for(tmp_path / name, mode="stacked") for name in ("a", "b"))
    plain.train()
    scaled.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scaled.train()
    torch.testing.assert_close(scaled.doge.alpha, plain.doge.alpha, rtol=1e-6, atol=0)


@pytest.mark.parametrize("micro", [1, 2])
def test_a_step_may_have_a_few_of_the_domains(tmp_path: Path, micro: int) -> None:
    trainers = []
    for mode in ("sequential", "stacked"):
        trainer = trainer_for(
            tmp_path / mode,
            mode=mode,
            domains_per_step=2,
            max_grad_norm=0.0,
            gradient_accumulation_steps=micro,
            logging_strategy="steps",
            logging_steps=1,
        )
        trainer.train()
        trainers.append(trainer)
        logged = [
            {name for name in DOMAINS if f"loss/{name}" in line}
            for line in trainer.state.log_history
            if "loss" in line
        ]
        assert len(logged) == 6
        assert all(len(names) == 2 for names in logged)
        assert set.union(*logged) == set(DOMAINS)
    sequential, stacked = trainers
    torch.testing.assert_close(stacked.doge.alpha, sequential.doge.alpha, rtol=1e-5, atol=0)
    assert stacked.doge.num_steps == 6


def stackable(trainer: DoGETrainer, inputs: Any) -> bool:
    trainer.create_optimizer()
    return trainer._is_to_be_stacked(trainer.model, inputs)


def test_auto_stacks_small_batches_of_known_architectures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_for(tmp_path, mode="auto")
    batch = batch_of(0, DOMAINS)
    assert stackable(trainer, batch)
    monkeypatch.setattr(hosts, "MOST_TOKENS", {"cpu": 4 * LENGTH - 1})
    assert not stackable(trainer, batch)
    monkeypatch.undo()
    monkeypatch.setattr(hosts, "MOST_TOKENS_TOGETHER", 3 * 4 * LENGTH - 1)
    assert not stackable(trainer, batch)
    monkeypatch.undo()
    monkeypatch.setattr(trainer.model.config, "model_type", "abacus")
    assert not stackable(trainer, batch)


def shorter(batch: Any) -> Any:
    return batch | {"ab": {key: rows[:, :5] for key, rows in batch["ab"].items()}}


def with_images(batch: Any) -> Any:
    return {name: rows | {"pixel_values": rows["labels"]} for name, rows in batch.items()}


def without_labels(batch: Any) -> Any:
    return batch | {"ab": {"input_ids": batch["ab"]["input_ids"]}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shorter, r"sequences of one length; got \[\(5,\), \(12,\)\]"),
        (with_images, "got input_ids, labels, pixel_values"),
        (without_labels, "some domain lacks them"),
    ],
    ids=["lengths", "images", "labels"],
)
def test_what_cannot_be_stacked_is_refused_or_runs_in_turn(
    change: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    inputs = change(batch_of(0, DOMAINS))
    assert not stackable(trainer_for(tmp_path, mode="auto"), inputs)
    with pytest.raises(ValueError, match=message):
        stackable(trainer_for(tmp_path, mode="stacked"), inputs)


def test_a_loss_of_ones_own_runs_in_turn(tmp_path: Path) -> None:
    class Mine(DoGETrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    options: dict[str, Any] = {
        "model": tiny_model(),
        "args": arguments(tmp_path),
        "domains": DOMAINS,
    }
    assert not stackable(Mine(**options), batch_of(0, DOMAINS))
    with pytest.raises(ValueError, match="the model's own loss, and another is set"):
        stackable(Mine(**options, mode="stacked"), batch_of(0, DOMAINS))


def test_micro_batches_change_nothing_but_rounding(tmp_path: Path) -> None:
    whole = trainer_for(tmp_path)
    parts = trainer_for(tmp_path, gradient_accumulation_steps=2)
    whole.train()
    parts.train()
    torch.testing.assert_close(parts.doge.alpha, whole.doge.alpha, rtol=1e-5, atol=0)
    for name in DOMAINS:
        torch.testing.assert_close(parts.domain_losses[name], whole.domain_losses[name])
    torch.testing.assert_close(parameters(parts.model), parameters(whole.model))


def test_a_domain_loss_is_its_mean_over_tokens_whatever_the_micro_batches_hold(
    tmp_path: Path,
) -> None:
    """Masked targets fall unevenly on the micro-batches; the mean is over the whole step."""
    batch = batch_of(0, DOMAINS)
    batch["ab"]["labels"][:3, 2:] = -100

    class Uneven(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            while True:
                for rows in (slice(0, 2), slice(2, 4)):
                    yield {
                        name: {key: value[rows] for key, value in domain.items()}
                        for name, domain in batch.items()
                    }

    trainer = trainer_for(tmp_path, gradient_accumulation_steps=2, max_steps=1)
    trainer.train_dataset = Uneven()
    trainer.train()
    expected = tiny_model()(**batch["ab"]).loss
    torch.testing.assert_close(trainer.domain_losses["ab"], expected.detach())


@pytest.mark.parametrize("micro", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_run(tmp_path: Path, micro: int) -> None:
    changes: dict[str, Any] = {"gradient_accumulation_steps": micro, "ignore_data_skip": True}
    whole = trainer_for(tmp_path / "whole", **changes)
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": 4}
    trainer_for(tmp_path / "cut", **changes, **saving).train()
    resumed = trainer_for(tmp_path / "cut", **changes, start=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    assert torch.equal(parameters(resumed.model), parameters(whole.model))
    assert torch.equal(resumed.doge.alpha_mean, whole.doge.alpha_mean)


def test_a_resumed_run_may_replay_the_data_as_trainer_does(tmp_path: Path) -> None:
    whole = trainer_for(tmp_path / "whole")
    whole.train()
    trainer_for(tmp_path / "cut", save_strategy="steps", save_steps=4).train()
    resumed = trainer_for(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    assert torch.equal(parameters(resumed.model), parameters(whole.model))


def test_the_combined_gradient_is_cut_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_for(tmp_path, max_steps=2)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Trainer clipped again")

    monkeypatch.setattr(trainer.accelerator, "clip_grad_norm_", refuse)
    norms: list[float] = []
    trainer.create_optimizer()
    trainer.doge.register_step_pre_hook(
        lambda optimizer, args, kwargs: norms.append(
            float(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).norm())
        )
    )
    trainer.train()
    assert trainer.doge.last is not None
    assert float(trainer.doge.last.combined_norm) > 0.5
    # c n / (n + 1e-6), in float32.
    assert norms == pytest.approx([0.5, 0.5], rel=1e-5)


def test_no_clipping_where_none_is_asked_for(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, max_steps=1, max_grad_norm=0.0)
    trainer.train()
    assert trainer.doge.rule.max_grad_norm is None


def test_trains_under_bfloat16_autocast(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, bf16=True)
    trainer.train()
    exact = trainer_for(tmp_path)
    exact.train()
    assert not torch.equal(parameters(trainer.model), parameters(exact.model))
    # Eight bits of mantissa in every product.
    torch.testing.assert_close(trainer.doge.alpha, exact.doge.alpha, rtol=2**-5, atol=0)


def test_a_loss_scale_changes_no_weight(tmp_path: Path) -> None:
    plain = trainer_for(tmp_path)
    plain.train()
    scaled = trainer_for(tmp_path)
    # float16 needs a GPU to train on; its scaler does not. A power of two rounds nothing.
    scaled.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled.train()
    assert torch.equal(scaled.doge.alpha, plain.doge.alpha)
    assert torch.equal(parameters(scaled.model), parameters(plain.model))


def test_the_schedule_reaches_the_wrapped_optimizer(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, lr_scheduler_type="cosine", warmup_steps=2)
    seen: list[float] = []
    trainer.create_optimizer()
    trainer.doge.inner.register_step_pre_hook(
        lambda optimizer, args, kwargs: seen.append(optimizer.param_groups[0]["lr"])
    )
    trainer.train()
    assert seen[:3] == pytest.approx([0.0, 1.5e-3, 3e-3])
    assert trainer.doge.inner.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_logs_carry_losses_and_weights_by_domain(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, logging_strategy="steps", logging_steps=3)
    trainer.train()
    last = trainer.state.log_history[-2]
    assert [last[f"alpha/{name}"] for name in DOMAINS] == trainer.doge.alpha.tolist()
    assert {f"alpha_mean/{name}": weight for name, weight in trainer.weights.items()}.items() <= (
        last.items()
    )
    assert all(last[f"loss/{name}"] > 0 for name in DOMAINS)


def test_selection_by_name_restricts_the_columns(tmp_path: Path) -> None:
    everything = trainer_for(tmp_path, max_steps=2)
    some = trainer_for(tmp_path, max_steps=2, selection=["transformer.h.0.mlp.c_fc.weight"])
    everything.train()
    some.train()
    assert some.doge.last is not None
    assert everything.doge.last is not None
    assert (some.doge.last.gram.diagonal() < everything.doge.last.gram.diagonal()).all()


def test_datasets_by_domain_are_collated_by_domain(tmp_path: Path) -> None:
    def rows(domain: int, count: int) -> datasets.Dataset:
        ids = tokens(0, domain, count).tolist()
        return datasets.Dataset.from_dict(
            {"input_ids": ids, "labels": ids, "note": ["not for the model"] * count}
        )

    trainer = DoGETrainer(
        model=tiny_model(),
        args=arguments(tmp_path, per_device_train_batch_size=2, max_steps=-1, num_train_epochs=1),
        train_dataset={"ab": rows(0, 8), "cd": rows(1, 3)},
        domains=["ab", "cd"],
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert {name: set(domain) for name, domain in batch.items()} == {
        "ab": {"input_ids", "labels"},
        "cd": {"input_ids", "labels"},
    }
    assert all(domain["input_ids"].shape == (2, LENGTH) for domain in batch.values())
    trainer.train()
    assert trainer.state.global_step == 4
    assert sum(trainer.weights.values()) == pytest.approx(1)


def test_a_zip_is_as_long_as_its_longest_domain_and_repeats_the_others() -> None:
    zipped = DomainZip({"ab": [0, 1, 2, 3, 4], "cd": [10, 11]})
    assert len(zipped) == 5
    assert [zipped[i]["cd"] for i in range(5)] == [10, 11, 10, 11, 10]
    with pytest.raises(ValueError, match=r"of which \['cd'\] hold none"):
        DomainZip({"ab": [1], "cd": []})


def test_train_can_be_called_again(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, max_steps=2)
    trainer.train()
    first = trainer.doge
    trainer.train()
    assert trainer.doge is first
    assert trainer.doge.num_steps == 4


def test_a_doge_optimizer_of_ones_own_is_used_as_it_is(tmp_path: Path) -> None:
    model = tiny_model()
    own = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=DOMAINS, mu=1.0)
    trainer = DoGETrainer(
        model=model,
        args=arguments(tmp_path, max_steps=1),
        train_dataset=Batches(DOMAINS),
        domains=DOMAINS,
        optimizers=(own, None),
    )
    trainer.train()
    assert trainer.doge is own
    assert own.num_steps == 1


def test_misuse_is_answered_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs the names of the training domains"):
        DoGETrainer(model=tiny_model(), args=arguments(tmp_path))
    with pytest.raises(ValueError, match="auto, sequential, stacked; got 'sideways'"):
        trainer_for(tmp_path, mode="sideways")
    flat = trainer_for(tmp_path)
    flat.train_dataset = _Flat()
    with pytest.raises(ValueError, match=r"batches by domain.*got \['input_ids', 'labels'\]"):
        flat.train()
    with pytest.raises(RuntimeError, match=r"missing \['ef'\]"):
        trainer_for(tmp_path, rows=DOMAINS[:2]).train()
    with pytest.raises(ValueError, match="unknown domain 'zz'"):
        trainer_for(tmp_path, rows=[*DOMAINS, "zz"]).train()
    with pytest.raises(RuntimeError, match="exist once train"):
        _ = trainer_for(tmp_path).weights
    args = copy.deepcopy(arguments(tmp_path))
    args._n_gpu = 2
    with pytest.raises(RuntimeError, match="one process on one device"):
        DoGETrainer(model=tiny_model(), args=args, domains=DOMAINS)


class _Flat(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield batch_of(0, ["ab"])["ab"]
