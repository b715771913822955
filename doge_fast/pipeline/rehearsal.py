"""Dry run: report what a command would read and train, and how long it would take."""

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

from transformers import PreTrainedModel, TrainerCallback, TrainerControl

from doge_fast.pipeline import base, progress, proxy, stage, tables, temperature
from doge_fast.pipeline.config import BaseConfig, ProxyConfig, TemperatureConfig
from doge_fast.pipeline.domains import Batches
from doge_fast.pipeline.trainer import RecordedTrainer


class _FewSteps(TrainerCallback):
    """Stops a training once enough steps are timed."""

    def __init__(self) -> None:
        self.clock, self.seconds = progress.StepClock(), math.nan

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        timed = self.clock.add()
        control.should_save, control.should_training_stop = False, timed is not None
        self.seconds = self.seconds if timed is None else timed


def seconds_per_step(trainer: RecordedTrainer) -> float:
    """Median time of a step; runs a few steps, so the trainer cannot be used afterwards."""
    few = _FewSteps()
    trainer.train_dataset = Batches(trainer.batch)
    trainer.args.max_steps = 1 + progress.TIMED_STEPS
    trainer.add_callback(few)
    trainer.train()
    return few.seconds


def rehearse(config: ProxyConfig | BaseConfig | TemperatureConfig) -> str:
    """Check and build a command's inputs, time a few steps, write no run; return tables as text."""
    out, models, told = config.out, 1, list[tuple[str, str]]()
    if isinstance(config, TemperatureConfig):
        config, out, models, told = temperature.example(config)
    config = stage.resolved(replace(config, dry_run=False))
    existing = stage.existing_run(config)
    if existing.is_complete:
        return f"{out}: complete already, nothing to do"
    make: Any = proxy.proxy_trainer if isinstance(config, ProxyConfig) else base.base_trainer
    trainer: RecordedTrainer = make(config, existing)
    corpus, steps, of_step = trainer.corpus, config.training.steps, sum(trainer.tokens(1).values())
    sizes, read = corpus.train_tokens, trainer.tokens(steps)
    held = {name: len(blocks) for name, blocks in corpus.validation.items()}
    rows = [
        (*(name, f"{sizes[name]:,}", f"{corpus.documents[name]:,}", f"{held[name]:,}"), epochs)
        for name in sizes
        for epochs in [f"{read[name] / sizes[name]:.2f}" if name in read else "not read"]
    ]
    epochs = "epochs" if models == 1 else "epochs of one model"
    header = ("domain", "tokens", "documents", "held-out blocks", epochs)
    parameters = cast(PreTrainedModel, trainer.model).num_parameters(only_trainable=True)
    if isinstance(config, ProxyConfig):
        # The aligned rule has no mu.
        mu = cast(proxy.ProxyTrainer, trainer).mu
        rule = ("mu", f"{mu:g}") if mu else ("score", config.score)
        told += [("target", ", ".join(config.target)), rule]
    elif not told:
        told = [("weights", config.weights)]
    seconds = seconds_per_step(trainer)
    device, dtype = trainer.args.device.type, config.training.dtype
    total = timedelta(seconds=round(seconds * steps * models))
    each = "" if models == 1 else f"{of_step * steps:,} each, "
    plan = [
        ("model", f"{config.model.model}, {parameters:,} parameters"),
        ("steps", f"{steps:,} of {of_step:,} tokens, {each}{of_step * steps * models:,} in all"),
        *told,
        ("writes", f"{out}{'' if existing.record is None else ', which is resumed'}"),
        ("time", f"{total} at {seconds:.3g} s a step on {device} in {dtype}, and evaluations"),
    ]
    both = tables.table_of(header, rows), tables.table_of(("", "dry run"), plan)
    return f"{tables.text(both[0])}\n\n{tables.text(both[1], left=[0])}"
