"""Trainer over ready-made batches, with callbacks that write its records and stop it cleanly.

Its arguments and the device come first, then the trainers, then the callbacks. Batch t is a
function of (seed, t), so a resumed run starts its data at the checkpoint's step and replays
nothing. Checkpoints have Trainer's format; `records.folders` keeps the newest of them.
"""

import functools
import logging
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, reduce
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import PrinterCallback

from doge_fast.mixture.counts import Phase
from doge_fast.pipeline import domains, failures, progress, ranks, records
from doge_fast.pipeline.config import StageConfig, TrainingConfig
from doge_fast.pipeline.domains import Batch, Batches, BlockSampler, Corpus
from doge_fast.pipeline.failures import Diverged, FileFailure, UserError
from doge_fast.pipeline.named import visible
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.wording import count_text, first_few
from doge_fast.weights.diagnosis import MOST_SKIPPED

# Steps between looks at the counts of lost steps; a look makes the host wait for the device.
LOOK_EVERY = 16
# Lines stay on the device for at most this long; reading one makes the host wait for its step.
FLUSH_SECONDS = 1.0
# A cluster may signal torchrun and its processes, and torchrun forwards the signal: two signals
# within this time count as one.
ECHO_SECONDS = 5.0

Result = TypeVar("Result")

_log = logging.getLogger("doge_fast")


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
    if ranks.size() == 1:
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


def from_first(call: Callable[[], Result]) -> Result:
    """Call a function on the first rank and return its result on all; if it raises, all raise.

    Raises:
        FileFailure: on the other ranks, with the text of the first rank's error.
    """
    if ranks.size() == 1:
        return call()
    # [result, text of the error]
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
    return cast(Result, told[0])


class ByName(NamedTuple):
    """A [K] tensor that a record holds as {name: value}."""

    names: tuple[str, ...]
    values: Tensor

    def read(self) -> dict[str, float]:
        """Copy the values to the host; waits for the device."""
        return dict(zip(self.names, self.values.tolist(), strict=True))


class RecordedTrainer(Trainer):
    """Trainer over ready-made batches that writes a run's records.

    A subclass implements `batch`, `tokens` and `line`. One that learns domain weights implements
    `first_weights`; one with a `state_file` implements `own_state` and `load_own_state`.
    """

    state_file: ClassVar[str] = ""
    """Name of the subclass's file in a checkpoint; empty: no file."""

    def __init__(
        self, config: StageConfig, corpus: Corpus, model: PreTrainedModel, **kwargs: Any
    ) -> None:
        self.config, self.corpus = config, corpus
        with own_settings():
            arguments = training_arguments(config.training, config.out)
        # A checkpoint holds a tied matrix once, and Trainer would warn that the other names are
        # missing.
        model._keys_to_ignore_on_save = set(model.all_tied_weights_keys)
        # Trainer creates its output directory here; ours must not exist before the run begins.
        out, arguments.output_dir = arguments.output_dir, tempfile.gettempdir()
        with own_settings():
            super().__init__(model=model, args=arguments, **kwargs)
        arguments.output_dir = out
        # A step has one micro-batch, so the model's mean is the loss. Without this Trainer counts
        # the labels itself, and some versions count one too many per block.
        self.model_accepts_loss_kwargs = False
        # Checkpoint to resume from; None from the first step on.
        self._checkpoint: str | None = None
        self.step_loss: Tensor | None = None
        self.step_lr = 0.0
        self.remove_callback(PrinterCallback)

    def go_on(self, checkpoint: Path | None) -> None:
        """Train to the last step, from a checkpoint or from the beginning.

        Raises:
            Diverged: losses or gradients are no longer finite.
            Terminated, KeyboardInterrupt: a signal ended the training at a checkpoint.
        """
        start, out = 0, self.config.out
        if checkpoint is not None:
            start, self._checkpoint = records.step_of(checkpoint), str(checkpoint)
            _log.info("%s: resuming at step %d of %d", out, start, self.args.max_steps)
        last, of_step = self.args.max_steps, sum(self.tokens(1).values())
        progress.tell_once(
            f"{last} steps of {of_step} tokens, {count_text(of_step * last)} in all, on "
            f"{self.args.device.type} in {self.config.training.dtype}"
        )
        self.train_dataset = Batches(self.batch, start)
        stop = StopOnSignal(out)
        recorder = Recorder(self)
        self.add_callback(stop)
        self.add_callback(recorder)
        set_seed(self.args.seed)
        with closing(recorder), stop.watching(), own_settings():
            self.train(resume_from_checkpoint=self._checkpoint)

    # Methods that a stage's trainer overrides.

    def batch(self, step: int) -> Any:
        """The batch of a step (0 is the first); a function of the step alone."""
        raise NotImplementedError

    def tokens(self, steps: int) -> dict[str, int]:
        """{domain: its tokens in the first `steps` steps}."""
        raise NotImplementedError

    def line(self, step: int) -> Json:
        """Fields of the step's line in metrics.jsonl; a flush reads tensors and `ByName` values."""
        raise NotImplementedError

    def first_weights(self) -> Mapping[str, float] | None:
        """Domain weights before the first step; None: none are learned."""
        return None

    def is_lost(self) -> Tensor:
        """Whether the last step's loss is not finite; bool scalar, the same on all ranks."""
        assert self.step_loss is not None
        return ~self.step_loss.isfinite()

    def num_lost(self) -> int:
        """Number of skipped steps in the whole run; kept in checkpoints."""
        return 0

    def lost_domains(self) -> list[str]:
        """Domains with a non-finite loss or gradient in the last step, if known."""
        return []

    def own_state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors and text to save in a checkpoint's `state_file`."""
        raise NotImplementedError

    def load_own_state(self, state: dict[str, Tensor], text: dict[str, str]) -> None:
        """Restore what `own_state` returned."""
        raise NotImplementedError

    # Methods that Trainer calls.

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.state_file and self.args.should_save:
            state, text = self.own_state()
            state = {key: value.cpu() for key, value in state.items()}
            save_file(state, Path(str(output_dir), self.state_file), metadata=text or None)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.state_file and checkpoint is not None:
            # Read on the CPU: with several ranks the device may be cpu:0, which safe_open rejects.
            with safe_open(Path(checkpoint, self.state_file), framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                self.load_own_state(tensors, file.metadata() or {})

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader that yields the stage's batches unchanged."""
        dataset = cast("IterableDataset[Any]", self.train_dataset)
        return DataLoader(dataset, batch_size=None, pin_memory=self.args.dataloader_pin_memory)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Trainer's step; keeps learning rate and loss for the records."""
        assert self.optimizer is not None
        if self._checkpoint is not None:
            # Dropout must continue its random numbers, and with `ignore_data_skip` Trainer does not
            # restore the generators.
            self._load_rng_state(self._checkpoint)
            self._checkpoint = None
        self.step_lr = float(self.optimizer.param_groups[0]["lr"])
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.step_loss = self.mean_of_ranks(loss)
        return loss

    def _prepare_input(self, data: Any) -> Any:
        """Trainer's, but the host does not wait for the copy of a pinned tensor to the GPU."""
        if isinstance(data, Tensor) and data.is_pinned():
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def mean_of_ranks(self, loss: Tensor) -> Tensor:
        """Mean of a scalar over the ranks."""
        return loss if self.args.world_size == 1 else self.accelerator.reduce(loss, "mean")

    def evaluate_domains(self) -> dict[str, float]:
        """Held-out loss of every training and target domain, in nats per token."""
        model, count = cast(PreTrainedModel, self.model), self.config.training.eval_blocks
        return held_out_losses(model, self.corpus.validation, num_blocks=count)[0]


class MixtureTrainer(RecordedTrainer):
    """RecordedTrainer whose batches are drawn at domain weights fixed for each phase."""

    has_domain_ids: ClassVar[bool] = False
    """Whether a batch holds the domain index of each row."""

    def __init__(
        self, config: StageConfig, corpus: Corpus, model: PreTrainedModel, phases: Sequence[Phase]
    ) -> None:
        self.phases = phases
        num_blocks = {name: len(corpus.train[name]) for name in corpus.names}
        size = cast(Any, config).batch_size
        self.mixture = BlockSampler(config.training.seed, phases, size, num_blocks)
        super().__init__(config, corpus, model)

    def batch(self, step: int) -> Batch:
        """This rank's part of the blocks drawn at the weights."""
        batch = domains.mixed_batch(self.corpus, self.mixture.blocks(step), ranks.place())
        if not self.has_domain_ids:
            del batch["domain_ids"]
        return batch

    def tokens(self, steps: int) -> dict[str, int]:
        """{domain: its tokens}, from the block counts of the mixture."""
        drawn = zip(self.corpus.names, self.mixture.drawn(steps).tolist(), strict=True)
        return {name: blocks * self.corpus.block_size for name, blocks in drawn}

    def line(self, step: int) -> Json:
        """Loss of the step, and tokens per domain so far."""
        return {"loss": self.step_loss, "tokens": self.tokens(step)}


class StopOnSignal(TrainerCallback):
    """Ends a training after SIGTERM, SIGHUP or Ctrl-C: saves a checkpoint at the next step.

    A cluster sends SIGTERM some seconds before it takes a machine away; a terminal that closes
    sends SIGHUP. `watching` replaces the command line's handler of these signals. If another
    handler is installed, or none, it changes nothing.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        # The signal received, and its time on the monotonic clock.
        self._signal: int | None = None
        self._received_at = 0.0
        self._is_stopped = False
        # With several ranks: an all-reduce in flight since the step before, and its tensor, which
        # counts the ranks that have received a signal.
        self._reduction: tuple[Any, torch.Tensor] | None = None
        self._group: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Train within; raise Terminated or KeyboardInterrupt if a signal ended the training."""
        ours = failures.raise_terminated
        ending = [each for each in failures.ENDING_SIGNALS if signal.getsignal(each) is ours]
        if not ending:
            yield
            return
        if ranks.size() > 1:
            # A process group on the host, so that no step waits for the device.
            self._group = dist.new_group(backend="gloo")
        failures.late.clear()
        before = {each: signal.signal(each, self._receive) for each in (*ending, signal.SIGINT)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
        if self._is_stopped:
            # There may be none: a lost step is not saved.
            left = records.newest_checkpoint(self._run)
            raise self._ending(
                failures.NO_CHECKPOINT
                if left is None
                else f"A checkpoint holds step {records.step_of(left)}; the same command goes on "
                "from there."
            )
        if self._signal is not None:
            # It came after the last step, so the run completes first.
            name = signal.Signals(self._signal).name
            _log.warning("%s has come after the last step; the run is completed.", name)
            failures.late.append(self._ending())

    def _ending(self, told: str = "") -> BaseException:
        # None if another rank received the signal.
        number = self._signal or signal.SIGTERM
        is_typed = number == signal.SIGINT
        return KeyboardInterrupt(told) if is_typed else failures.Terminated(number, told)

    def _receive(self, number: int, frame: object) -> None:
        now = time.monotonic()
        # A launcher forwards Ctrl-C too.
        is_passed_on = number != signal.SIGINT or ranks.size() > 1
        is_echo = is_passed_on and now - self._received_at <= ECHO_SECONDS
        if self._signal is None:
            self._signal, self._received_at = number, now
        elif not is_echo:
            # A second signal ends the run at once.
            self._signal = number
            raise self._ending()

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **__: Any
    ) -> None:
        """Save and stop if any rank has received a signal."""
        is_stopping = self._signal is not None if self._group is None else self._any_rank_received()
        if is_stopping and state.global_step < state.max_steps:
            self._is_stopped = True
            control.should_save = control.should_training_stop = True

    def _any_rank_received(self) -> bool:
        """Whether any rank had received a signal by the previous step; equal on all ranks."""
        before = self._reduction
        told = torch.tensor([int(self._signal is not None)])
        self._reduction = dist.all_reduce(told, group=self._group, async_op=True), told
        if before is None:
            return False
        work, sum_of_ranks = before
        work.wait()
        return bool(sum_of_ranks.item())


class LostSteps:
    """Counts lost steps on the device: skipped, or with a loss that is not finite.

    A run survives up to `most` - 1 lost steps in a row.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self.most = most
        self._is_near = device.type == "cpu"
        # Lost steps in a row now, and the longest such row.
        self._row, self._longest = torch.zeros(2, dtype=torch.int64, device=device)

    def add(self, is_lost: Tensor) -> None:
        """Count a step; `is_lost` is a bool scalar on the device. Does not wait for it."""
        self._row = (self._row + 1) * is_lost
        self._longest = torch.maximum(self._longest, self._row)

    def in_a_row(self) -> int:
        """Number of lost steps in a row up to now; waits for the device."""
        return int(self._row)

    def too_many(self, step: int) -> int:
        """The longest row of lost steps if it is too long, else 0; the same on all ranks.

        Checks every step on a CPU, every `LOOK_EVERY` steps elsewhere, and waits for the device.
        """
        if not self._is_near and step % LOOK_EVERY:
            return 0
        longest = int(self._longest)
        return longest if longest >= self.most else 0


def not_finite(values: Mapping[str, float]) -> list[str]:
    """Names whose value is infinite or NaN."""
    return [name for name, value in values.items() if not math.isfinite(value)]


def _diverged(run: Path, what: str) -> Diverged:
    """The error for a diverged run; `what` states the evidence."""
    return Diverged(
        f"{run} has diverged: {what}. Its records are kept, and no result is written. Name another "
        "directory, and lower learning_rate (--learning-rate) or lengthen the warm-up "
        "(--warmup-steps)."
    )


class Recorder(TrainerCallback):
    """Writes metrics.jsonl, completes checkpoints, moves the progress bar, ends a lost run."""

    def __init__(self, trainer: RecordedTrainer) -> None:
        self.trainer, self.run = trainer, trainer.config.out
        patience = trainer.config.training.max_skipped_steps
        self.lost = LostSteps(patience, trainer.args.device)
        self._bar: Any = None
        # Text after the bar: tokens per second, and the domain with the largest weight.
        self._speed: dict[str, str] = {}
        self._largest: dict[str, str] = {}
        # Lines for metrics.jsonl; the next flush reads their tensors.
        self._pending: list[dict[str, Any]] = []
        self._last_flush = self._last_line = time.monotonic()
        self._last_step = 0
        self._clock = progress.StepClock()

    def close(self) -> None:
        """Close the bar, so that the next message starts on a new line."""
        if self._bar is not None:
            self._bar.close()

    def flush(self) -> None:
        """Write the pending lines; waits for the device."""
        trainer, pending = self.trainer, self._pending
        self._pending, self._last_flush = [], time.monotonic()
        if not pending or not trainer.args.should_save:
            return
        for line in pending:
            plain: dict[str, Any] = {
                key: value.read() if isinstance(value, ByName) else value
                for key, value in line.items()
            }
            if "alpha" in plain and plain["step"] > 0:
                mean = plain["alpha_mean"]
                largest = max(mean, key=mean.__getitem__)
                self._largest = {visible(largest): f"{mean[largest]:.3f}"}
            records.append_metrics(self.run, plain)

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Record the weights before the first step; start the bar."""
        if state.global_step == 0 and (weights := self.trainer.first_weights()) is not None:
            # Before the first step the average is the weights themselves.
            both = {"alpha": weights, "alpha_mean": weights}
            self._pending.append({"step": 0, "kind": "train", **both})
            self.flush()
        self._last_line, self._last_step = time.monotonic(), state.global_step
        self._bar = progress.bar(state.max_steps, self.run.name, "step", initial=state.global_step)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **__: Any
    ) -> None:
        """Record the step, evaluate if due, and end the run if too many steps were lost."""
        trainer, step = self.trainer, state.global_step
        is_last = step >= state.max_steps
        self._tell_time(state.max_steps - step)
        self.lost.add(trainer.is_lost())
        if too_many := self.lost.too_many(step):
            self._add_line(step)
            names = trainer.lost_domains()
            whose = f" of {first_few(names)}" if names else ""
            self._end_as_lost(
                f"up to step {step}, {too_many} steps in a row were lost, for the loss or the "
                f"gradient{whose} is not finite"
            )
        if step % trainer.config.log_every == 0 or is_last:
            self._add_line(step)
        every = trainer.config.training.eval_every
        if is_last or (every is not None and step % every == 0):
            self._evaluate(step, is_last=is_last)
        if control.should_save and (is_last or self.lost.in_a_row()):
            # A run resumed after the last step would train one step more; one resumed after a lost
            # step would count the lost steps from zero.
            control.should_save = False
        # On a CPU a flush waits for nothing.
        waited = time.monotonic() - self._last_flush
        if is_last or trainer.args.device.type == "cpu" or waited > FLUSH_SECONDS:
            self.flush()
            assert trainer.step_loss is not None
            loss = {"loss": f"{float(trainer.step_loss):.3f}"}
            self._bar.set_postfix(loss | self._speed | self._largest, refresh=False)
        self._bar.update()

    def on_save(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Flush metrics.jsonl and complete the checkpoint, once every rank has written it."""
        self.flush()
        # Wait until every rank has written the state of its random generators.
        self.trainer.accelerator.wait_for_everyone()
        from_first(functools.partial(records.complete_checkpoint, self.run, state.global_step))

    def on_train_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Raise Diverged if more than `MOST_SKIPPED` of the run's steps were lost."""
        lost = self.trainer.num_lost()
        if state.global_step >= state.max_steps and lost > MOST_SKIPPED * state.max_steps:
            raise _diverged(
                self.run,
                f"{lost} of its {state.max_steps} steps were lost, for a gradient is not finite in "
                "them",
            )

    def _evaluate(self, step: int, *, is_last: bool) -> None:
        """Record the held-out losses; end the run if one is not finite."""
        losses = self.trainer.evaluate_domains()
        self._pending.append({"step": step, "kind": "eval", "loss": losses})
        if names := not_finite(losses):
            where = "" if is_last else f"at step {step} "
            lost = first_few(names)
            self._end_as_lost(f"{where}the held-out loss of {lost} is not finite")
        # The time of an evaluation is not part of a step's.
        self._last_line, self._last_step = time.monotonic(), step

    def _end_as_lost(self, what: str) -> None:
        """Flush metrics.jsonl and raise `Diverged`, on every rank."""
        self.flush()
        # A launcher kills the other ranks as soon as one has exited.
        self.trainer.accelerator.wait_for_everyone()
        raise _diverged(self.run, what)

    def _tell_time(self, left: int) -> None:
        """Log the remaining time once it is known, if it is more than a minute."""
        seconds = self._clock.add()
        if seconds is not None and seconds * left > 60:
            to_go = timedelta(seconds=round(seconds * left))
            _log.info("%s: %s to go, at %.3g s a step", self.run, to_go, seconds)

    def _add_line(self, step: int) -> None:
        now = time.monotonic()
        seconds = (now - self._last_line) / (step - self._last_step)
        line = {
            "step": step,
            "kind": "train",
            "lr": self.trainer.step_lr,
            **self.trainer.line(step),
            "seconds": seconds,
        }
        self._pending.append(line)
        tokens_per_step = sum(self.trainer.tokens(step).values()) / step
        self._speed = {"tokens/s": f"{tokens_per_step / max(seconds, 1e-9):.3g}"}
        self._last_line, self._last_step = now, step


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
        model: a causal language model; its training mode is restored.
        domains: {name: data set with a column `input_ids` of blocks of one length, at least one}.
        what: label of the progress bar.
        num_blocks: blocks per domain, evenly spaced and always the same; None: all.
        batch_size: blocks in a forward pass.

    Returns:
        ({name: nats per token}, {name: blocks measured}).
    """
    counts = {name: min(num_blocks or len(blocks), len(blocks)) for name, blocks in domains.items()}
    if not all(counts.values()):
        raise UserError(f"A held-out loss needs at least one block of every domain; got {counts}.")
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
        # Each rank measures some chunks and leaves zeros for the others, so the sum is exact.
        for index, (name, chunk) in enumerate(chunks):
            if index % num_ranks == rank:
                tokens_BL = torch.as_tensor(np.stack(domains[name][chunk]["input_ids"]))
                tokens_BL = tokens_BL.to(device, torch.long)
                means_C[index] = model(input_ids=tokens_BL, labels=tokens_BL).loss
            bar.update(len(chunk))
    model.train(was_training)
    if num_ranks > 1:
        means_C = reduce(means_C, "sum")
    # Python floats: the sums are in float64.
    sums = dict.fromkeys(domains, 0.0)
    for (name, chunk), mean in zip(chunks, means_C.tolist(), strict=True):
        sums[name] += mean * len(chunk)
    return {name: total / counts[name] for name, total in sums.items()}, counts
