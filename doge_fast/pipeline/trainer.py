"""Trainer over ready-made batches: records, held-out losses, whole checkpoints, progress.

Checkpoints are in Trainer's own format; `records.checkpoints` makes generations of them. Batch t is
a function of (seed, t), so a resumed run starts its data at the checkpoint's step and replays
nothing.
"""

import copy
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, reduce
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback

from doge_fast import weights_file
from doge_fast.failures import FileFailure
from doge_fast.pipeline import health, progress, ranks, records

TENSORBOARD = "tensorboard"
# A line waits this long on the device at most: reading it makes the host wait for the step.
FLUSH_SECONDS = 1.0

Value = TypeVar("Value")

_log = logging.getLogger("doge_fast")


def from_first(call: Callable[[], Value]) -> Value:
    """What `call` returns on the first process, on all; where it raises there, all raise.

    Raises:
        FileFailure: on the others, with the words of what was raised on the first.
    """
    if ranks.number() == 1:
        return call()
    # (what it returned, what it raised)
    told: list[Any] = [None, None]
    failure = None
    if ranks.is_first():
        try:
            told[0] = call()
        except Exception as error:
            failure, told[1] = error, str(error)
    broadcast_object_list(told)
    if failure is not None:
        raise failure
    if told[1] is not None:
        raise FileFailure(told[1])
    return cast(Value, told[0])


class ByName(NamedTuple):
    """A [K] tensor that a record holds as {name: value}."""

    names: tuple[str, ...]
    values: Tensor

    def read(self) -> dict[str, float]:
        """Waits for the device."""
        return dict(zip(self.names, self.values.tolist(), strict=True))


class RecordedTrainer(Trainer):
    """Trainer over ready-made batches that keeps metrics.jsonl and whole checkpoints only.

    `stage` is a `Stage`; asked for are its config, corpus, start, measure and how it is lost.
    """

    def __init__(self, *args: Any, stage: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # One micro-batch is the whole step: the model's own mean is the loss, and Trainer need
        # not count targets for it (some versions count one too many in every block).
        self.model_accepts_loss_kwargs = False
        self.stage = stage
        # Where the run goes on from, until its first step.
        self._checkpoint: str | None = None
        self.step_loss: Tensor | None = None
        self.step_lr = 0.0
        self.held_out: dict[str, float] = {}
        self.warned: set[str] = set()
        self._pending: list[dict[str, Any]] = []
        self.remove_callback(PrinterCallback)
        for callback in self.callback_handler.callbacks:
            # Its own choice lies among the checkpoints, which `finish` removes.
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = str(stage.config.out / TENSORBOARD)
        self.add_callback(_Recorder(self))

    def go_on(self, checkpoint: Path | None) -> None:
        """Train to the end, from a checkpoint or from the beginning."""
        self._checkpoint = None if checkpoint is None else str(checkpoint)
        self.train(resume_from_checkpoint=self._checkpoint)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The batches as the stage makes them."""
        dataset = cast("IterableDataset[Any]", self.train_dataset)
        return DataLoader(dataset, batch_size=None, pin_memory=self.args.dataloader_pin_memory)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Trainer's, remembering what the records want of it."""
        assert self.optimizer is not None
        if self._checkpoint is not None:
            # Dropout goes on; Trainer leaves the generators alone where no data are skipped.
            self._load_rng_state(self._checkpoint)
            self._checkpoint = None
        self.step_lr = float(self.optimizer.param_groups[0]["lr"])
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.step_loss = self.mean_of_ranks(loss)
        return loss

    def mean_of_ranks(self, loss: Tensor) -> Tensor:
        """Of a number that every rank has."""
        return loss if self.args.world_size == 1 else self.accelerator.reduce(loss, "mean")

    def evaluate_domains(self) -> dict[str, float]:
        """Held-out loss of every domain that is followed, in nats per token."""
        model, count = cast(PreTrainedModel, self.model), self.stage.config.training.eval_blocks
        domains = self.stage.corpus.validation
        self.held_out = held_out_losses(model, domains, num_blocks=count)[0]
        return self.held_out

    def record(self, line: dict[str, Any]) -> None:
        """Keep a line for metrics.jsonl; tensors in it are read at the next flush."""
        self._pending.append(line)

    def flush(self) -> None:
        """Write the lines that wait. Waits for the device."""
        for line in self._pending if self.args.should_save else ():
            plain: dict[str, Any] = {
                key: value.read() if isinstance(value, ByName) else value
                for key, value in line.items()
            }
            if found := self.stage.warnings_of(plain):
                plain["warnings"] = found
                self._warn(plain["step"], found)
            records.append_metrics(self.stage.config.out, plain)
            if self.args.report_to:
                self._tell_trackers(weights_file.plain(plain))
        self._pending.clear()

    def _warn(self, step: int, found: Mapping[str, list[str]]) -> None:
        """Say on the terminal what is found of the weights, each once in a run."""
        for what in found.keys() - self.warned:
            told = f"{health.domains_told(found[what])} {health.TOLD[what]}"
            _log.warning("%s, step %d: %s.", self.stage.config.out, step, told)
        self.warned |= found.keys()

    def _tell_trackers(self, line: Mapping[str, Any]) -> None:
        """A line for Trainer's callbacks of the trackers, at its own step."""
        state = copy.copy(self.state)
        state.global_step = line["step"]
        self.callback_handler.on_log(self.args, state, self.control, scalars_of(line))


class _Recorder(TrainerCallback):
    """Follows the steps: lines, held-out losses, lost steps, whole checkpoints, progress bar."""

    def __init__(self, trainer: RecordedTrainer) -> None:
        self.trainer = trainer
        self.bar: Any = None
        config = trainer.stage.config.training
        self.lost = health.LostSteps(config.max_skipped_steps, trainer.args.device)
        self.last_flush = self.last_line = time.monotonic()
        self.last_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        stage = self.trainer.stage
        if state.global_step == 0 and stage.start is not None:
            # Their average too.
            weights = {"alpha": stage.start, "alpha_mean": stage.start}
            self.trainer.record({"step": 0, "kind": "train", **weights})
            self.trainer.flush()
        self.last_line, self.last_step = time.monotonic(), state.global_step
        self.bar = progress.bar(
            state.max_steps, stage.config.out.name, "step", initial=state.global_step
        )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step, config = state.global_step, self.trainer.stage.config
        is_last = step >= state.max_steps
        self.lost.add(self.trainer.stage.is_lost(self.trainer))
        if too_many := self.lost.too_many(step):
            self._end_as_lost(step, too_many)
        if step % config.log_every == 0 or is_last:
            self._add_line(step)
        every = config.training.eval_every
        if is_last or (every is not None and step % every == 0):
            loss = self.trainer.evaluate_domains()
            self.trainer.record({"step": step, "kind": "eval", "loss": loss})
            # Not part of what a step costs.
            self.last_line, self.last_step = time.monotonic(), step
        if control.should_save and (is_last or self.lost.in_a_row()):
            # The run is closed at once; a checkpoint of the last step would start one step more.
            # And what goes on from a lost step would count anew how many there are.
            control.should_save = False
        self._flush(force=is_last)
        self.bar.update()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Lines that a checkpoint remembers.
        self.trainer.flush()
        # Every rank writes the state of its random generators.
        self.trainer.accelerator.wait_for_everyone()
        run, step = self.trainer.stage.out, state.global_step
        from_first(lambda: records.complete_checkpoint(run, step))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar.close()

    def _end_as_lost(self, step: int, number: int) -> None:
        """Keep the line of this step, and raise `Diverged`; every rank does."""
        self._add_line(step)
        self._flush(force=True)
        self.bar.close()
        # A launcher ends the others as soon as one has ended.
        self.trainer.accelerator.wait_for_everyone()
        stage = self.trainer.stage
        names = stage.lost_domains(self.trainer)
        whose = f" of {health.domains_told(names)}" if names else ""
        raise health.Diverged(
            f"{stage.out} has diverged: up to step {step}, {number} steps in a row were lost, for "
            f"the loss or the gradient{whose} is not finite. {health.WAY_OUT}"
        )

    def _add_line(self, step: int) -> None:
        now = time.monotonic()
        line = {
            "step": step,
            "kind": "train",
            "lr": self.trainer.step_lr,
            **self.trainer.stage.measure(self.trainer, step),
            "seconds": (now - self.last_line) / (step - self.last_step),
        }
        self.trainer.record(line)
        self.last_line, self.last_step = now, step

    def _flush(self, *, force: bool) -> None:
        now = time.monotonic()
        # Nothing waits for a CPU.
        if force or self.trainer.args.device.type == "cpu" or now - self.last_flush > FLUSH_SECONDS:
            self.trainer.flush()
            self.last_flush = now
            assert self.trainer.step_loss is not None
            self.bar.set_postfix(loss=f"{float(self.trainer.step_loss):.3f}", refresh=False)


def scalars_of(line: Mapping[str, Any]) -> dict[str, float]:
    """What of a line of metrics.jsonl a tracker is told: {"alpha/arxiv": 0.3, "lr": 5e-4, ...}.

    Numbers keep their names; numbers by domain are FIELD/DOMAIN. Trainer's trackers put "train/" in
    front of these, and "eval/" in the place of the "eval_" that lines of held-out losses begin
    with. Lists, matrices and nulls are left to the file.
    """
    prefix = "eval_" if line["kind"] == "eval" else ""
    flat: dict[str, Any] = {}
    for field, value in line.items():
        if isinstance(value, Mapping):
            flat |= {f"{prefix}{field}/{name}": number for name, number in value.items()}
        elif field != "step":
            flat[prefix + field] = value
    return {name: float(each) for name, each in flat.items() if isinstance(each, int | float)}


def held_out_losses(
    model: PreTrainedModel,
    domains: Mapping[str, Any],
    what: str = "held-out loss",
    *,
    num_blocks: int | None = None,
    batch_size: int = 16,
) -> tuple[dict[str, float], dict[str, int]]:
    """Mean cross-entropy per predicted token over held-out blocks of every domain.

    Args:
        model: a causal language model; its mode is put back.
        domains: {name: data set with a column `input_ids` of blocks of one length}.
        what: stands before the progress bar.
        num_blocks: of each domain, evenly spaced ones, always the same; None: all.
        batch_size: blocks in a forward pass.

    Returns:
        ({name: nats per token}, {name: blocks measured}).

    Raises:
        ValueError: a domain has no block.
    """
    counts = {name: min(num_blocks or len(blocks), len(blocks)) for name, blocks in domains.items()}
    if not all(counts.values()):
        raise ValueError(f"A held-out loss needs at least one block of every domain; got {counts}.")
    device = next(model.parameters()).device
    chunks = []
    for name, blocks in domains.items():
        indices = np.arange(counts[name]) * len(blocks) // counts[name]
        parts = np.array_split(indices, -(-len(indices) // batch_size))
        chunks += [(name, chunk) for chunk in parts]
    rank, num_ranks = ranks.place()
    means_C = torch.zeros(len(chunks), device=device)
    was_training = model.training
    model.train(False)
    with torch.no_grad(), progress.bar(sum(counts.values()), what, "block") as bar:
        # Of several ranks each measures some, and the sum of what they have is exact.
        for index, (name, chunk) in enumerate(chunks):
            if index % num_ranks == rank:
                tokens_BL = torch.as_tensor(np.stack(domains[name][chunk]["input_ids"]))
                tokens_BL = tokens_BL.to(device, torch.long)
                means_C[index] = model(input_ids=tokens_BL, labels=tokens_BL).loss
            bar.update(len(chunk))
    model.train(was_training)
    if num_ranks > 1:
        means_C = reduce(means_C, "sum")
    # Added on the host, in float64: not every device has it.
    sums = dict.fromkeys(domains, 0.0)
    for (name, chunk), mean in zip(chunks, means_C.tolist(), strict=True):
        sums[name] += mean * len(chunk)
    return {name: total / counts[name] for name, total in sums.items()}, counts
