"""What a run would read and train, and how long it would take: a dry run of a stage."""

import itertools
import statistics
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerControl

from doge_fast.pipeline import base, proxy, stage, tables
from doge_fast.pipeline.config import BaseConfig, ProxyConfig
from doge_fast.pipeline.domains import Batches
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
        UserError: what the run would refuse.
    """
    config = replace(config, dry_run=False)
    existing = stage.existing_run(config)
    if existing.is_complete:
        return f"{config.out}: complete already, nothing to do"
    prepare: Any = proxy.prepare if isinstance(config, ProxyConfig) else base.prepare
    trainer: ProxyTrainer | MixtureTrainer = prepare(config, existing)
    device, training = trainer.args.device, config.training
    parameters = cast(PreTrainedModel, trainer.model).num_parameters(only_trainable=True)
    of_step = sum(trainer.tokens(1).values())
    resumed = "" if existing.record is None else ", which is resumed"
    plan = [
        ("model", f"{config.model.model}, {parameters:,} parameters"),
        *_settings(trainer),
        ("steps", f"{training.steps:,} of {of_step:,} tokens, {of_step * training.steps:,} in all"),
        ("writes", f"{config.out}{resumed}"),
    ]
    step = seconds_per_step(trainer)
    total = timedelta(seconds=round(step * training.steps))
    plan.append(("time", f"{total} at {step:.3g} s a step on {device.type},"))
    plan.append(("", "and evaluations on held-out blocks"))
    both = (_domains(trainer), tables.text(tables.table_of(("", "dry run"), plan), left=[0]))
    return "\n\n".join(both)


def _settings(trainer: ProxyTrainer | MixtureTrainer) -> list[tuple[str, str]]:
    """The stage's own."""
    if isinstance(trainer, ProxyTrainer):
        # The aligned rule has no mu.
        rule = ("mu", f"{trainer.mu:g}") if trainer.mu else ("score", trainer.config.score)
        return [("target", ", ".join(trainer.config.target)), rule]
    phases = f", {len(trainer.phases)} phases" if len(trainer.phases) > 1 else ""
    return [("weights", cast(BaseConfig, trainer.config).weights + phases)]


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


def seconds_per_step(trainer: ProxyTrainer | MixtureTrainer) -> float:
    """The median of a few first steps, which are taken; the trainer is spent."""
    clock = _Clock()
    trainer.train_dataset = Batches(trainer.batch)
    trainer.add_callback(clock)
    trainer.train()
    return statistics.median(after - before for before, after in itertools.pairwise(clock.times))
