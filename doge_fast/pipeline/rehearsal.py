"""What a run would read, train and write, and what it would take: a dry run of a stage."""

import copy
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from doge_fast.pipeline import memory, records, tables
from doge_fast.pipeline import stage as stages
from doge_fast.pipeline.memory import size_text
from doge_fast.pipeline.stage import Stage

# Of them the first is not counted: compilers and allocators take their time in it.
TIMED_STEPS = 4


class _Clock(TrainerCallback):
    """When each step was done on the device."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.times.append(time.monotonic())


def rehearse(stage: Stage[Any]) -> str:
    """Check, read and build all that a run needs, and time a few steps; leave nothing.

    Args:
        stage: not used before.

    Returns:
        Text for a terminal.

    Raises:
        ValueError: what the run would refuse.
    """
    recorded = stages.check(stage)
    if recorded is not None and stage.is_finished():
        return f"{stage.out}: complete already, nothing to do"
    model = stages.prepare(stage, recorded)
    parameters = model.num_parameters(only_trainable=True)
    steps, of_step = stage.config.training.steps, sum(stage.tokens(1).values())
    plan = [
        ("model", f"{stage.config.model.model}, {parameters:,} parameters"),
        *stage.outline,
        ("steps", f"{steps:,} of {of_step:,} tokens, {of_step * steps:,} in all"),
        *_written(stage, parameters, is_resumed=recorded is not None),
        *_memory(stage, parameters),
        *_time(stage, model),
    ]
    both = (_domains(stage), tables.text(tables.table_of(("", "dry run"), plan), left=[0]))
    return "\n\n".join(both)


def _domains(stage: Stage[Any]) -> str:
    """What there is of every domain, and how often it would be read."""
    corpus, config = stage.corpus, stage.config
    read = stage.tokens(config.training.steps)
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


def _written(stage: Stage[Any], parameters: int, *, is_resumed: bool) -> Iterator[tuple[str, str]]:
    where = f"{stage.out}, which is resumed" if is_resumed else str(stage.out)
    yield "writes", f"{where}: config.json, metrics.jsonl, weights.json,"
    yield "", f"model/ ({size_text(4 * parameters)})"
    if stage.config.training.save_every != 0:
        yield "", f"and, until it is complete, two checkpoints ({size_text(12 * parameters)} each)"


def _memory(stage: Stage[Any], parameters: int) -> Iterator[tuple[str, str]]:
    """Of what has the model's size."""
    parts = memory.needed(parameters, len(stage.rows))
    known = {name: size for name, size in parts.items() if size}
    yield "memory", f"{size_text(sum(known.values()))} and activations, about:"
    yield from (("", f"{size_text(size)} {name}") for name, size in known.items())
    if (free := memory.free_bytes(stage.device)) is not None:
        yield "", f"of {size_text(free)} that are free on {stage.device.type}"


def _time(stage: Stage[Any], model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Of real steps of the stage, in a directory that goes with them."""
    config, clock, timed = stage.config, _Clock(), copy.copy(stage)
    short = replace(
        config.training,
        steps=TIMED_STEPS,
        warmup_steps=0,
        eval_every=None,
        eval_blocks=1,
        save_every=0,
        report_to=(),
    )
    with tempfile.TemporaryDirectory() as folder:
        timed.out = Path(folder) / f"{stage.out.name} (timing)"
        timed.config = replace(config, out=timed.out, training=short)
        with records.alone(timed.out):
            device = stages.train(timed, model, callbacks=[clock]).args.device.type
    step = statistics.median(after - before for before, after in itertools.pairwise(clock.times))
    total = timedelta(seconds=round(step * config.training.steps))
    if device == "cuda":
        yield "", f"{size_text(torch.cuda.max_memory_allocated())} at the most in the steps timed"
    yield "time", f"{total} at {step:.3g} s a step on {device},"
    yield "", "and evaluations on held-out blocks"
