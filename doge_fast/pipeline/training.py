"""Trainer's arguments for every stage, and the device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from accelerate import PartialState
from transformers import TrainingArguments

from doge_fast.pipeline import ranks, records
from doge_fast.pipeline.config import TrainingConfig
from doge_fast.pipeline.failures import UserError


def training_arguments(config: TrainingConfig, out: Path) -> TrainingArguments:
    """Arguments for AdamW with linear warm-up and cosine decay to `min_learning_rate`.

    Checkpoints go to the run directory `out`. Nothing is reported to services outside the machine.

    Raises:
        UserError: the device is absent.

    Source: DoGE, appendix model-archs.
    """
    device = device_of(config.device)
    warmup = config.steps // 20 if config.warmup_steps is None else config.warmup_steps
    save_every = -(-config.steps // 10) if config.save_every is None else config.save_every
    arguments = TrainingArguments(
        # Trainer writes checkpoints here file by file; `records.complete_checkpoint` renames them.
        # Absolute, since Trainer expands a leading `~`.
        output_dir=str((out / records.CHECKPOINTS / records.WRITING).absolute()),
        max_steps=config.steps,
        # Only reported: the batches are ready-made.
        per_device_train_batch_size=1,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": config.min_learning_rate},
        warmup_steps=warmup,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        use_cpu=device.type == "cpu",
        bf16=config.dtype == "bfloat16",
        torch_compile=config.compile,
        save_strategy="steps" if save_every else "no",
        save_steps=save_every or config.steps,
        # Batch t depends on (seed, t) only and the loader starts at the resumed step.
        ignore_data_skip=True,
        remove_unused_columns=False,
        dataloader_pin_memory=device.type == "cuda",
        # `Recorder` writes the records; Trainer's logging would synchronise at every step.
        logging_strategy="no",
        logging_nan_inf_filter=False,
        disable_tqdm=True,
    )
    # One device per process: otherwise Trainer would split the ready-made batches.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    # Trainer adds trackers that it finds in the environment.
    arguments.report_to = []
    return arguments


@contextmanager
def own_settings() -> Iterator[None]:
    """Hide accelerate's environment variables within the block, so that the run's settings apply.

    `accelerate launch` sets them (mixed precision, compilation, FSDP, accumulation); they would
    override settings that config.json records. The variables of ranks and devices stay.
    """
    names = [name for name in os.environ if name.startswith("ACCELERATE_")]
    others = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(others)


def wait_for_ranks(device: torch.device) -> torch.device:
    """Wait for the other ranks; return this rank's device, of the given kind."""
    if ranks.number() == 1:
        return device
    with own_settings():
        state = PartialState(cpu=device.type == "cpu")
    state.wait_for_everyone()
    return cast(torch.device, state.device)


def device_of(name: str) -> torch.device:
    """The device for a name; "auto" is a GPU if there is one.

    Raises:
        UserError: torch sees no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UserError("device is cuda, and torch sees no GPU here. Pass device=cpu or auto.")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")
