"""The one way both stages run the Trainer: records, held-out losses, checkpoints, resuming.

Checkpoints are in Trainer's own format, written beside and renamed, and removed once the run is
complete; what stays is `model/`, which `AutoModelForCausalLM` opens. Batch t is a function of
(seed, t), so a resumed run starts its data at the checkpoint's step and replays nothing.
"""

import copy
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    TensorBoardCallback,
    get_available_reporting_integrations,
)
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from doge_fast import weights_file
from doge_fast.pipeline import progress, records
from doge_fast.pipeline.config import ModelConfig, TrainingConfig
from doge_fast.pipeline.domains import Corpus
from doge_fast.pipeline.model import build_model

MODEL = "model"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
# The project of a tracker that sorts runs into projects, where its own variable names no other.
PROJECT = "doge-fast"
# What to install for a tracker whose name is not that of its package.
_PACKAGES = {"azure_ml": "azureml-core", "comet_ml": "comet-ml", "flyte": "flytekit"}
# A line waits this long on the device at most: reading it makes the host wait for the step.
FLUSH_SECONDS = 1.0

_log = logging.getLogger("doge_fast")


class ByName(NamedTuple):
    """A [K] tensor that a record holds as {name: value}."""

    names: tuple[str, ...]
    values: Tensor


class Task(NamedTuple):
    """What a stage gives to `train`."""

    out: Path
    """The run directory, opened."""
    trainer: Callable[..., "RecordedTrainer"]
    """Makes the trainer from Trainer's keyword arguments."""
    model: PreTrainedModel
    """The fresh model; see `fresh_model`."""
    batches: Callable[[int], IterableDataset[Any]]
    """The batches from a step on (0 is the first)."""
    measure: Callable[[Any, int], dict[str, Any]]
    """(trainer, step) -> fields of the step's line; tensors and `ByName` are read later."""
    first_line: dict[str, Any] | None
    """Fields of the line of step 0, where there is something to say before the first step."""
    held_out: Mapping[str, Any]
    """Blocks of every domain whose loss is followed."""
    log_every: int
    """Steps between lines."""


def train(task: Task, config: TrainingConfig) -> "RecordedTrainer":
    """Run the stage's steps, from its last checkpoint where there is one.

    Args:
        task: the stage's part.
        config: the Trainer's part.

    Returns:
        The trainer, at the last step. `finish` closes the run.

    Raises:
        ValueError: a setting is out of its range, or the device is absent.
    """
    arguments = training_arguments(config, task.out)
    checkpoint = _last_checkpoint(task.out)
    start = _step_of(checkpoint)
    if checkpoint is not None:
        _log.info("%s: resuming at step %d of %d", task.out, start, config.steps)
    records.resume_metrics(task.out, step=-1 if checkpoint is None else start)
    set_seed(config.seed)
    # A checkpoint holds a shared matrix once; Trainer takes the other name for missing and says so.
    task.model._keys_to_ignore_on_save = set(task.model.all_tied_weights_keys)
    trainer = task.trainer(
        model=task.model, args=arguments, train_dataset=task.batches(start), task=task
    )
    trainer.eval_every, trainer.eval_blocks = config.eval_every, config.eval_blocks
    trainer.checkpoint = checkpoint
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return trainer


def fresh_model(model: ModelConfig, config: TrainingConfig, corpus: Corpus) -> PreTrainedModel:
    """The model that the seed gives, for the corpus; a run of this seed always begins with it.

    Raises:
        ValueError: what `training_arguments` and `build_model` refuse.
    """
    check(config)
    device_of(config.device)
    set_seed(config.seed)
    return build_model(model, corpus.tokenizer, block_size=corpus.block_size)


def finish(out: Path, trainer: "RecordedTrainer", tokenizer: PreTrainedTokenizerBase) -> None:
    """Leave `model/` with weights and tokenizer, complete or not at all, and no checkpoints."""
    beside = out / f".{MODEL}"
    shutil.rmtree(beside, ignore_errors=True)
    model = cast(PreTrainedModel, trainer.model)
    # Trainer switches it off for training; whoever generates wants it.
    model.config.use_cache = True
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    os.replace(beside, out / MODEL)
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)


def closed(out: Path) -> bool:
    """Whether the run in `out` is complete; then says so and drops checkpoints that a kill left."""
    if not is_finished(out):
        return False
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
    _log.info("%s: complete already, nothing to do", out)
    return True


def is_finished(out: Path) -> bool:
    """Whether the run in `out` came to its end; `model/` is the last thing that it leaves."""
    return (out / MODEL).is_dir()


def check_finished(run: Path) -> None:
    """Refuse a run that has no model yet.

    Raises:
        ValueError: it is not complete.
    """
    if not is_finished(run):
        raise ValueError(
            f"{run} has no {MODEL}/: its run is not complete. Repeat the command that began it; it "
            "resumes."
        )


def training_arguments(config: TrainingConfig, out: Path) -> TrainingArguments:
    """AdamW with linear warm-up and a cosine to `min_learning_rate`.

    Nothing leaves the machine unless `report_to` names a tracker that sends it.

    Raises:
        ValueError: a setting is out of its range, or the device is absent.

    Source: DoGE, appendix model-archs.
    """
    check(config)
    device = device_of(config.device)
    warmup = config.steps // 20 if config.warmup_steps is None else config.warmup_steps
    tenth = -(-config.steps // 10)
    save_every = tenth if config.save_every is None else config.save_every
    arguments = TrainingArguments(
        output_dir=str(out / CHECKPOINTS),
        max_steps=config.steps,
        # Only reported: the batches come ready-made.
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
        # The records are ours; Trainer's own would stop the device at every step. Trackers are told
        # what the records are told.
        report_to=list(config.report_to),
        run_name=out.name,
        project=PROJECT,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        eval_strategy="no",
        disable_tqdm=True,
    )
    # One process, one device: otherwise Trainer would split the ready-made batches.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    # Trainer adds one by itself where its environment has it.
    arguments.report_to = list(config.report_to)
    return arguments


def check(config: TrainingConfig) -> None:
    """Raise ValueError where a setting is out of its range."""
    positive = ("steps", "learning_rate", "max_grad_norm", "eval_blocks")
    for name in positive if config.eval_every is None else (*positive, "eval_every"):
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} must be > 0; got {getattr(config, name)}.")
    if config.save_every is not None and config.save_every < 0:
        raise ValueError(f"save_every must be at least 0, for none; got {config.save_every}.")
    if not 0 <= config.min_learning_rate <= config.learning_rate:
        raise ValueError(
            "min_learning_rate must lie between 0 and learning_rate; got "
            f"{config.min_learning_rate} and {config.learning_rate}. Lower the first with the "
            "second."
        )
    if config.warmup_steps is not None and not 0 <= config.warmup_steps < config.steps:
        raise ValueError(
            f"warmup_steps must be at least 0 and less than steps; got {config.warmup_steps} of "
            f"{config.steps}."
        )
    _check_trackers(config.report_to)


def _check_trackers(names: Sequence[str]) -> None:
    known = sorted(INTEGRATION_TO_CALLBACK)
    for name in names:
        if name not in known:
            raise ValueError(
                f"report_to must name trackers among {', '.join(known)}; got {name!r}."
            )
        if name not in get_available_reporting_integrations():  # type: ignore[no-untyped-call]
            raise ValueError(
                f"report_to names {name}, which is not installed or not set up: pip install "
                f"{_PACKAGES.get(name, name)}."
            )


def device_of(name: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" means here.

    Raises:
        ValueError: another name, or there is no GPU where one is asked for.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda; got {name!r}.")
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ValueError("device is cuda, and torch sees no GPU here. Pass device=cpu or auto.")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def _last_checkpoint(out: Path) -> Path | None:
    """The last complete checkpoint; what a killed run was writing is under another name."""
    folder = out / CHECKPOINTS
    if not folder.is_dir():
        return None
    found: str | None = get_last_checkpoint(str(folder))  # type: ignore[no-untyped-call]
    return None if found is None else Path(found)


def _step_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.rsplit("-", 1)[1])


class RecordedTrainer(Trainer):
    """Trainer over ready-made batches that keeps metrics.jsonl and whole checkpoints only."""

    def __init__(self, *args: Any, task: Task, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # One micro-batch is the whole step: the model's own mean is the loss, and Trainer need
        # not count targets for it (some versions count one too many in every block).
        self.model_accepts_loss_kwargs = False
        self.task = task
        self.eval_every: int | None = None
        self.eval_blocks = 1
        # Where the run goes on from, until its first step.
        self.checkpoint: Path | None = None
        self.step_loss: Tensor | None = None
        self.step_lr = 0.0
        self._pending: list[dict[str, Any]] = []
        self._is_saving = False
        self.remove_callback(PrinterCallback)
        for callback in self.callback_handler.callbacks:
            # Its own choice lies among the checkpoints, which `finish` removes.
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = str(task.out / TENSORBOARD)
        self.add_callback(_Recorder(self))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The batches as the stage makes them."""
        dataset = cast("IterableDataset[Any]", self.train_dataset)
        return DataLoader(dataset, batch_size=None, pin_memory=self.args.dataloader_pin_memory)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Trainer's, remembering what the records want of it."""
        assert self.optimizer is not None
        if self.checkpoint is not None:
            # Dropout goes on; Trainer leaves the generators alone where no data are skipped.
            self._load_rng_state(str(self.checkpoint))
            self.checkpoint = None
        self.step_lr = float(self.optimizer.param_groups[0]["lr"])
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.step_loss = loss
        return loss

    def evaluate_domains(self) -> dict[str, float]:
        """Held-out loss of every domain that is followed, in nats per token."""
        model = cast(PreTrainedModel, self.model)
        return {
            name: held_out_loss(model, blocks, num_blocks=self.eval_blocks)[0]
            for name, blocks in self.task.held_out.items()
        }

    def record(self, line: dict[str, Any]) -> None:
        """Keep a line for metrics.jsonl; tensors in it are read at the next flush."""
        self._pending.append(line)

    def flush(self) -> None:
        """Write the lines that wait. Waits for the device."""
        for line in self._pending:
            plain = {key: _by_name(value) for key, value in line.items()}
            records.append_metrics(self.task.out, plain)
            if self.args.report_to:
                self._tell_trackers(weights_file.plain(plain))
        self._pending.clear()

    def _tell_trackers(self, line: Mapping[str, Any]) -> None:
        """A line for Trainer's callbacks of the trackers, at its own step."""
        state = copy.copy(self.state)
        state.global_step = line["step"]
        self.callback_handler.on_log(self.args, state, self.control, scalars_of(line))

    # Checkpoints. Trainer writes file by file into a folder that it calls complete from the start.

    def _get_output_dir(self, trial: Any) -> str:
        folder = str(super()._get_output_dir(trial))
        return os.path.join(folder, ".writing") if self._is_saving else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.flush()
        folder = Path(super()._get_output_dir(trial))
        shutil.rmtree(folder / ".writing", ignore_errors=True)
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._is_saving = False
        name = f"checkpoint-{self.state.global_step}"
        # One that a killed run left at this very step belongs to the same trajectory.
        shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(folder / ".writing" / name, folder / name)
        for older in folder.glob("checkpoint-*"):
            if older.name != name:
                shutil.rmtree(older)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        # A pickle of what config.json says.
        folder = Path(cast(str, output_dir or self.args.output_dir))
        (folder / "training_args.bin").unlink(missing_ok=True)


class _Recorder(TrainerCallback):
    """Follows the steps: lines, held-out losses, progress bar."""

    def __init__(self, trainer: RecordedTrainer) -> None:
        self.trainer = trainer
        self.bar: Any = None
        self.last_flush = self.last_line = time.monotonic()
        self.last_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        task = self.trainer.task
        if state.global_step == 0 and task.first_line is not None:
            self.trainer.record({"step": 0, "kind": "train", **task.first_line})
            self.trainer.flush()
        self.last_line, self.last_step = time.monotonic(), state.global_step
        self.bar = progress.bar(state.max_steps, task.out.name, "step", initial=state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step, task = state.global_step, self.trainer.task
        is_last = step >= state.max_steps
        if step % task.log_every == 0 or is_last:
            self._add_line(step)
        every = self.trainer.eval_every
        if is_last or (every is not None and step % every == 0):
            loss = self.trainer.evaluate_domains()
            self.trainer.record({"step": step, "kind": "eval", "loss": loss})
            # Not part of what a step costs.
            self.last_line, self.last_step = time.monotonic(), step
        if is_last:
            # `finish` follows at once; a checkpoint of the last step would start one step more.
            control.should_save = False
        self._flush(force=is_last)
        self.bar.update()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar.close()

    def _add_line(self, step: int) -> None:
        now = time.monotonic()
        line = {
            "step": step,
            "kind": "train",
            "lr": self.trainer.step_lr,
            **self.trainer.task.measure(self.trainer, step),
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
        each = value if isinstance(value, Mapping) else {None: value}
        flat |= {
            prefix + (field if name is None else f"{field}/{name}"): number
            for name, number in each.items()
        }
    numbers = {key: _number(value) for key, value in flat.items() if key != prefix + "step"}
    return {key: value for key, value in numbers.items() if value is not None}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, bool | int | float) else None


def _by_name(value: Any) -> Any:
    """What a record holds of a field: `ByName` becomes {name: value}."""
    if isinstance(value, ByName):
        return dict(zip(value.names, value.values.tolist(), strict=True))
    return value


def held_out_loss(
    model: PreTrainedModel, blocks: Any, *, num_blocks: int | None = None, batch_size: int = 16
) -> tuple[float, int]:
    """Mean cross-entropy per predicted token over held-out blocks, and how many were measured.

    Fewer blocks than there are: evenly spaced ones, always the same.

    Args:
        model: a causal language model; its mode is put back.
        blocks: a dataset with a column `input_ids` of blocks of one length.
        num_blocks: how many; None: all.
        batch_size: blocks in a forward pass.

    Returns:
        (nats per token, number of blocks).

    Raises:
        ValueError: there is no block.
    """
    total = len(blocks)
    if total == 0:
        raise ValueError("A held-out loss needs at least one block; the domain has none.")
    count = total if num_blocks is None else min(num_blocks, total)
    indices = np.arange(count) * total // count
    device = next(model.parameters()).device
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    was_training = model.training
    model.train(False)
    with torch.no_grad():
        for chunk in np.array_split(indices, -(-count // batch_size)):
            tokens_BL = torch.as_tensor(np.stack(blocks[chunk]["input_ids"])).to(device, torch.long)
            loss_sum += model(input_ids=tokens_BL, labels=tokens_BL).loss.double() * len(chunk)
    model.train(was_training)
    return float(loss_sum) / count, count
