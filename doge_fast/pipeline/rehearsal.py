"""What a run would read, train and write, and what it would take: a dry run of a stage."""

import copy
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, TrainerCallback

from doge_fast.pipeline import stage as stages
from doge_fast.pipeline import tables, training
from doge_fast.pipeline.stage import Stage

# Of them the first is not counted: compilers and allocators take their time in it.
TIMED_STEPS = 4


class Cost(NamedTuple):
    """What a few steps took."""

    seconds: float
    """Of a step."""
    device: str
    peak_bytes: int | None
    """Of the device's memory; None: not known."""


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
    if recorded is not None and stages.is_finished(stage):
        return f"{stage.out}: complete already, nothing to do"
    model = stages.prepare(stage, recorded)
    parameters = model.num_parameters(only_trainable=True)
    cost = _cost(stage, model)
    plan = [
        ("model", f"{stage.config.model.model}, {parameters:,} parameters"),
        *stage.outline,
        ("steps", _steps(stage)),
        *_written(stage, parameters, is_resumed=recorded is not None),
        *_needed(stage, parameters, cost),
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


def _steps(stage: Stage[Any]) -> str:
    steps, of_step = stage.config.training.steps, sum(stage.tokens(1).values())
    return f"{steps:,} of {of_step:,} tokens, {sum(stage.tokens(steps).values()):,} in all"


def _written(stage: Stage[Any], parameters: int, *, is_resumed: bool) -> Iterator[tuple[str, str]]:
    where = f"{stage.out}, which is resumed" if is_resumed else str(stage.out)
    yield "writes", f"{where}: config.json, metrics.jsonl, weights.json,"
    yield "", f"model/ ({_size(4 * parameters)})"
    if stage.config.training.save_every != 0:
        yield "", f"and, until it is complete, a checkpoint ({_size(12 * parameters)})"


def _needed(stage: Stage[Any], parameters: int, cost: Cost) -> Iterator[tuple[str, str]]:
    """Memory of what has the model's size, and time."""
    parts = {
        "parameters": 4 * parameters,
        "gradients": 4 * parameters,
        "AdamW": 8 * parameters,
        f"gradients of {len(stage.rows)} rows": 4 * parameters * len(stage.rows),
    }
    known = {name: size for name, size in parts.items() if size}
    yield "memory", f"{_size(sum(known.values()))} and activations, about:"
    yield from (("", f"{_size(size)} {name}") for name, size in known.items())
    if cost.peak_bytes is not None:
        yield "", f"{_size(cost.peak_bytes)} at the most in the steps that were timed"
    total = timedelta(seconds=round(cost.seconds * stage.config.training.steps))
    yield "time", f"{total} at {cost.seconds:.3g} s a step on {cost.device},"
    yield "", "and evaluations on held-out blocks"


def _cost(stage: Stage[Any], model: PreTrainedModel) -> Cost:
    """Real steps of the stage, in a directory that goes with them."""
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
        timed.out.mkdir()
        timed.config = replace(config, out=timed.out, training=short)
        stages.train(timed, model, callbacks=[clock])
    device = training.device_of(config.training.device, needs_float64=stage.needs_float64)
    seconds = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return Cost(statistics.median(seconds), device.type, peak)


def _size(num_bytes: float) -> str:
    """1.2 MB."""
    units = ("bytes", "kB", "MB", "GB", "TB")
    power = min(int(math.log10(max(1, num_bytes))) // 3, len(units) - 1)
    return f"{num_bytes / 1000**power:.3g} {units[power]}"
