"""Trainer over ready-made batches: records, held-out losses, whole checkpoints, progress.

Checkpoints are in Trainer's own format; `records.checkpoints` makes generations of them. Batch t is
a function of (seed, t), so a resumed run starts its data at the checkpoint's step and replays
nothing.
"""

import copy
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
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
)
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback

from doge_fast.pipeline import failures, health, progress, ranks, records
from doge_fast.pipeline.failures import FileFailure
from doge_fast.weights import weights_file

TENSORBOARD = "tensorboard"
# A line waits this long on the device at most: reading it makes the host wait for the step.
FLUSH_SECONDS = 1.0
# A second SIGTERM within this time is the first one again: torchrun passes on what a cluster has
# sent to its processes too.
ECHO_SECONDS = 5.0

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


class StopWhenTold(TrainerCallback):
    """Ends a training at the next step after SIGTERM, with a checkpoint of it.

    A cluster sends it before it takes a machine away, and waits for some seconds. The command line
    has a handler of it, which this one takes the place of while `watching`. Where there is none, or
    another, nothing is done: it belongs to whoever set it.
    """

    def __init__(self) -> None:
        # When it came, by the clock that goes on.
        self._told_at: float | None = None
        self._is_stopped = False
        self.saved: int | None = None
        """The step of the last checkpoint that is whole."""
        # Of several ranks: what they heard in the step before, while it is on its way.
        self._heard: tuple[Any, torch.Tensor] | None = None
        self._group: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Train within; raises `Terminated` where the training was ended."""
        if signal.getsignal(signal.SIGTERM) is not failures.raise_terminated:
            yield
            return
        if ranks.number() > 1:
            # Of the host alone, so that no step waits for the device.
            self._group = dist.new_group(backend="gloo")
        signal.signal(signal.SIGTERM, self._hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, failures.raise_terminated)
        if self._is_stopped:
            # That of a lost step is not written.
            raise failures.Terminated(
                "No checkpoint has been written; the same command begins anew."
                if self.saved is None
                else f"A checkpoint holds step {self.saved}; the same command goes on from there."
            )
        if self._told_at is not None:
            # It came too late to stop anything: the run is closed in a moment.
            _log.warning("SIGTERM has come after the last step; the run is completed.")

    def _hear(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self._told_at is None:
            self._told_at = now
        elif now - self._told_at > ECHO_SECONDS:
            # Somebody does not want to wait.
            raise failures.Terminated

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **__: Any
    ) -> None:
        """Stop where this rank, or any of several, has heard of it."""
        is_stopping = self._told_at is not None if self._group is None else self._have_all_heard()
        if is_stopping and state.global_step < state.max_steps:
            self._is_stopped = True
            control.should_save = control.should_training_stop = True

    def _have_all_heard(self) -> bool:
        """Whether a rank had heard by the step before this one; the same answer on every rank."""
        before = self._heard
        told = torch.tensor([int(self._told_at is not None)])
        self._heard = dist.all_reduce(told, group=self._group, async_op=True), told
        if before is None:
            return False
        work, sum_of_ranks = before
        work.wait()
        return bool(sum_of_ranks.item())


class RecordedTrainer(Trainer, TrainerCallback):
    """Trainer over ready-made batches that keeps metrics.jsonl and whole checkpoints only.

    `stage` is a `Stage`. It follows its own steps: lines, held-out losses, lost steps, whole
    checkpoints, progress bar.
    """

    state_file = ""
    """What a checkpoint holds beside Trainer's own files; empty: nothing."""

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
        self.lost = health.LostSteps(stage.config.training.max_skipped_steps, self.args.device)
        self.bar: Any = None
        # Lines for metrics.jsonl, whose tensors are read at the next flush.
        self._pending: list[dict[str, Any]] = []
        self._last_flush = self._last_line = time.monotonic()
        self._last_step = 0
        self.remove_callback(PrinterCallback)
        for callback in self.callback_handler.callbacks:
            # Its own choice lies among the checkpoints, which are removed in the end.
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = str(stage.config.out / TENSORBOARD)
        self._stop = StopWhenTold()
        self.add_callback(self._stop)
        self.add_callback(self)

    def go_on(self, checkpoint: Path | None) -> None:
        """Train to the end, from a checkpoint or from the beginning; `Terminated` by SIGTERM."""
        if checkpoint is not None:
            self._checkpoint, self._stop.saved = str(checkpoint), records.step_of(checkpoint)
        with self._stop.watching():
            self.train(resume_from_checkpoint=self._checkpoint)

    def own_state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors and text that a checkpoint keeps in `state_file`."""
        raise NotImplementedError

    def load_own_state(self, state: dict[str, Tensor], text: dict[str, str]) -> None:
        """Go on with what `own_state` gave."""
        raise NotImplementedError

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.state_file and self.args.should_save:
            state, text = self.own_state()
            state = {key: value.cpu() for key, value in state.items()}
            save_file(state, Path(str(output_dir), self.state_file), metadata=text or None)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.state_file and checkpoint is not None:
            # On the CPU: of several processes each has a device like cpu:0, which it refuses.
            with safe_open(Path(checkpoint, self.state_file), framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                self.load_own_state(tensors, file.metadata() or {})

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

    def flush(self) -> None:
        """Write the lines that wait. Waits for the device."""
        is_writing = bool(self._pending) and self.args.should_save
        if is_writing:
            records.check_alone(self.stage.config.out)
        for line in self._pending if is_writing else ():
            plain: dict[str, Any] = {
                key: value.read() if isinstance(value, ByName) else value
                for key, value in line.items()
            }
            is_learned = "alpha" in plain and plain["step"] > 0
            limits = {"mu": self.stage.mu, "high": self.stage.most_score}
            if is_learned and (found := health.warnings_of(plain, **limits)):
                plain["warnings"] = found
                self._warn(plain["step"], found)
            records.append_metrics(self.stage.config.out, plain)
            if self.args.report_to:
                told = weights_file.plain(plain)
                # At the line's own step.
                state = copy.copy(self.state)
                state.global_step = told["step"]
                self.callback_handler.on_log(self.args, state, self.control, scalars_of(told))
        self._pending.clear()
        self._last_flush = time.monotonic()

    def _warn(self, step: int, found: Mapping[str, list[str]]) -> None:
        """Say on the terminal what is found of the weights, each once in a run."""
        for what in found.keys() - self.warned:
            told = f"{health.domains_told(found[what])} {health.TOLD[what]}"
            _log.warning("%s, step %d: %s.", self.stage.config.out, step, told)
        self.warned |= found.keys()

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Weights before the first step, and the bar."""
        stage = self.stage
        if state.global_step == 0 and stage.start is not None:
            # Their average too.
            weights = {"alpha": stage.start, "alpha_mean": stage.start}
            self._pending.append({"step": 0, "kind": "train", **weights})
            self.flush()
        self._last_line, self._last_step = time.monotonic(), state.global_step
        self.bar = progress.bar(
            state.max_steps, stage.config.out.name, "step", initial=state.global_step
        )

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **__: Any
    ) -> None:
        """The step's line, held-out losses where they are due, and whether the run is lost."""
        step, config = state.global_step, self.stage.config
        is_last = step >= state.max_steps
        self.lost.add(self.stage.is_lost(self))
        if too_many := self.lost.too_many(step):
            self._add_line(step)
            self._end_as_lost(self._lost_in_a_row(step, too_many))
        if step % config.log_every == 0 or is_last:
            self._add_line(step)
        every = config.training.eval_every
        if is_last or (every is not None and step % every == 0):
            losses = self.evaluate_domains()
            self._pending.append({"step": step, "kind": "eval", "loss": losses})
            # At the end the stage looks at it.
            if not is_last and (names := health.not_finite(self.held_out)):
                told = health.domains_told(names)
                self._end_as_lost(f"at step {step} the held-out loss of {told} is not finite")
            # Not part of what a step costs.
            self._last_line, self._last_step = time.monotonic(), step
        if control.should_save and (is_last or self.lost.in_a_row()):
            # The run is closed at once; a checkpoint of the last step would start one step more.
            # And what goes on from a lost step would count anew how many there are.
            control.should_save = False
        # Nothing waits for a CPU.
        waited = time.monotonic() - self._last_flush
        if is_last or self.args.device.type == "cpu" or waited > FLUSH_SECONDS:
            self.flush()
            assert self.step_loss is not None
            self.bar.set_postfix(loss=f"{float(self.step_loss):.3f}", refresh=False)
        self.bar.update()

    def on_save(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """The checkpoint becomes one, whole, with the lines that it remembers."""
        self.flush()
        # Every rank writes the state of its random generators.
        self.accelerator.wait_for_everyone()
        run, step = self.stage.out, state.global_step
        from_first(lambda: records.complete_checkpoint(run, step))
        self._stop.saved = step

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """No bar any more."""
        self.bar.close()

    def _end_as_lost(self, what: str) -> None:
        """Keep the lines up to here, and raise `Diverged`; every rank does."""
        self.flush()
        self.bar.close()
        # A launcher ends the others as soon as one has ended.
        self.accelerator.wait_for_everyone()
        raise health.diverged(self.stage.out, what)

    def _lost_in_a_row(self, step: int, number: int) -> str:
        """How many steps were lost up to this one, and whose; else, in which batches."""
        names = self.stage.lost_domains(self)
        whose = f" of {health.domains_told(names)}" if names else ""
        first = step - self.lost.in_a_row() + 1
        # Of a row that has ended since somebody looked, the first step is not known.
        is_known = first <= step + 1 - number
        return (
            f"up to step {step}, {number} steps in a row were lost, for the loss or the "
            f"gradient{whose} is not finite"
            f"{self.stage.batches_told(first) if is_known and not names else ''}"
        )

    def _add_line(self, step: int) -> None:
        now = time.monotonic()
        line = {
            "step": step,
            "kind": "train",
            "lr": self.step_lr,
            **self.stage.measure(self, step),
            "seconds": (now - self._last_line) / (step - self._last_step),
        }
        self._pending.append(line)
        self._last_line, self._last_step = now, step


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
