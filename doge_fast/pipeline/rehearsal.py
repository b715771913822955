"""What a run would read, train and write, and what it would take: a dry run of a stage."""

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
from transformers import TrainerCallback, TrainerControl

from doge_fast.pipeline import base, memory, proxy, stage, tables
from doge_fast.pipeline.config import BaseConfig, ProxyConfig
from doge_fast.pipeline.domains import Batches
from doge_fast.pipeline.memory import size_text
from doge_fast.pipeline.proxy import ProxyTrainer
from doge_fast.pipeline.trainer import MixtureTrainer

# Of them the first is not counted: compilers and allocators take their time in it.
TIMED_STEPS = 4


class _Clock(TrainerCallback):
    """When each step was done on the device; ends the training after a few."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.times.append(time.monotonic())
        control.should_save = False
        control.should_training_stop = len(self.times) == TIMED_STEPS


def rehearse(config: ProxyConfig | BaseConfig) -> str:
    """Check, read and build all that a run needs, and time a few steps; leave nothing.

    Args:
        config: of the run.

    Returns:
        Text for a terminal.

    Raises:
        ValueError: what the run would refuse.
    """
    config = replace(config, dry_run=False)
    existing = stage.existing_run(config)
    if existing.is_complete:
        return f"{config.out}: complete already, nothing to do"
    prepare: Any = proxy.prepare if isinstance(config, ProxyConfig) else base.prepare
    trainer = prepare(config, existing)
    parameters = trainer.model.num_parameters(only_trainable=True)
    steps, of_step = config.training.steps, sum(trainer.tokens(1).values())
    plan = [
        ("model", f"{config.model.model}, {parameters:,} parameters"),
        *_settings(trainer),
        ("steps", f"{steps:,} of {of_step:,} tokens, {of_step * steps:,} in all"),
        *_written(trainer, parameters, is_resumed=bool(existing.record)),
        *_memory(trainer, parameters),
        *_time(trainer),
    ]
    both = (_domains(trainer), tables.text(tables.table_of(("", "dry run"), plan), left=[0]))
    return "\n\n".join(both)


def _settings(trainer: ProxyTrainer | MixtureTrainer) -> Iterator[tuple[str, str]]:
    """The stage's own."""
    if isinstance(trainer, ProxyTrainer):
        yield "target", ", ".join(trainer.config.target)
        yield "mu", f"{trainer.mu:g}"
    else:
        phases = f", {len(trainer.phases)} phases" if len(trainer.phases) > 1 else ""
        yield "weights", cast(BaseConfig, trainer.config).weights + phases


def _domains(trainer: ProxyTrainer | MixtureTrainer) -> str:
    """What there is of every domain, and how often it would be read."""
    corpus, read = trainer.corpus, trainer.tokens(trainer.config.training.steps)
    rows = [
        (
            name,
            f"{corpus.train_tokens[name]:,}",
            f"{corpus.documents[name]:,}",
            f"{len(corpus.validation[name]):,}",
            f"{read[name] / corpus.train_tokens[name]:.2f}" if name in read else "not read",
        )
        for name in (*corpus.names, *corpus.targets)
    ]
    header = ("domain", "tokens", "documents", "held-out blocks", "epochs")
    return tables.text(tables.table_of(header, rows))


def _written(
    trainer: ProxyTrainer | MixtureTrainer, parameters: int, *, is_resumed: bool
) -> Iterator[tuple[str, str]]:
    out = trainer.config.out
    where = f"{out}, which is resumed" if is_resumed else str(out)
    yield "writes", f"{where}: config.json, metrics.jsonl, weights.json,"
    yield "", f"model/ ({size_text(4 * parameters)})"
    if trainer.config.training.save_every != 0:
        yield "", f"and, until it is complete, two checkpoints ({size_text(12 * parameters)} each)"


def _memory(trainer: ProxyTrainer | MixtureTrainer, parameters: int) -> Iterator[tuple[str, str]]:
    """Of what has the model's size."""
    parts = memory.needed(parameters, trainer.num_rows)
    known = {name: size for name, size in parts.items() if size}
    yield "memory", f"{size_text(sum(known.values()))} and activations, about:"
    yield from (("", f"{size_text(size)} {name}") for name, size in known.items())
    device = trainer.args.device
    if (free := memory.free_bytes(device)) is not None:
        yield "", f"of {size_text(free)} that are free on {device.type}"


def seconds_per_step(trainer: ProxyTrainer | MixtureTrainer) -> float:
    """The median of a few first steps, which are taken; the trainer is spent."""
    clock = _Clock()
    trainer.train_dataset = Batches(trainer.batch)
    trainer.add_callback(clock)
    trainer.train()
    return statistics.median(after - before for before, after in itertools.pairwise(clock.times))


def _time(trainer: ProxyTrainer | MixtureTrainer) -> Iterator[tuple[str, str]]:
    """Of the first steps of the run."""
    device = trainer.args.device.type
    step = seconds_per_step(trainer)
    total = timedelta(seconds=round(step * trainer.config.training.steps))
    if device == "cuda":
        yield "", f"{size_text(torch.cuda.max_memory_allocated())} at the most in the steps timed"
    yield "time", f"{total} at {step:.3g} s a step on {device},"
    yield "", "and evaluations on held-out blocks"
