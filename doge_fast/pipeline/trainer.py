"""Trainer over ready-made batches, and the callbacks that record it and end it in order.

Batch t is a function of (seed, t), so a resumed run starts its data at the checkpoint's step and
replays nothing. Checkpoints are in Trainer's own format; `records.checkpoints` makes generations of
them.
"""

import functools
import logging
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
    set_seed,
)
from transformers.trainer_callback import PrinterCallback

from doge_fast.mixture.counts import Phase
from doge_fast.pipeline import domains, failures, health, progress, ranks, records, training
from doge_fast.pipeline.config import StageConfig
from doge_fast.pipeline.domains import Batch, Batches, BlockSampler, Corpus
from doge_fast.pipeline.failures import FileFailure, UserError
from doge_fast.pipeline.named import visible
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.wording import count_text, first_few
from doge_fast.weights.diagnosis import MOST_SKIPPED

# A line waits this long on the device at most: reading it makes the host wait for the step.
FLUSH_SECONDS = 1.0
# A cluster may signal torchrun and its processes, and torchrun passes its signal on: two within
# this time count as one.
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


class RecordedTrainer(Trainer):
    """Trainer over ready-made batches, and what a step of it leaves in the records.

    A stage's own trainer gives `batch`, `tokens` and `line`, and where it has them the domain
    weights that it learns and a state of its own for the checkpoints.
    """

    state_file: ClassVar[str] = ""
    """What a checkpoint holds beside Trainer's own files; empty: nothing."""

    def __init__(
        self, config: StageConfig, corpus: Corpus, model: PreTrainedModel, **kwargs: Any
    ) -> None:
        self.config, self.corpus = config, corpus
        with training.own_settings():
            arguments = training.training_arguments(config.training, config.out)
        # A checkpoint holds a shared matrix once; Trainer takes the other name for missing and
        # says so.
        model._keys_to_ignore_on_save = set(model.all_tied_weights_keys)
        # Trainer makes its directory at once, and this one is made when the run begins.
        out, arguments.output_dir = arguments.output_dir, tempfile.gettempdir()
        with training.own_settings():
            super().__init__(model=model, args=arguments, **kwargs)
        arguments.output_dir = out
        # One micro-batch is the whole step: the model's own mean is the loss, and Trainer need
        # not count targets for it (some versions count one too many in every block).
        self.model_accepts_loss_kwargs = False
        # Where the run goes on from, until its first step.
        self._checkpoint: str | None = None
        self.step_loss: Tensor | None = None
        self.step_lr = 0.0
        self.remove_callback(PrinterCallback)

    def go_on(self, checkpoint: Path | None) -> None:
        """Train to the end, from a checkpoint or from the beginning.

        Raises:
            Diverged: the training computes no numbers any more.
            Terminated, KeyboardInterrupt: a signal has ended it, at a checkpoint.
        """
        start, out = 0, self.config.out
        if checkpoint is not None:
            start, self._checkpoint = records.step_of(checkpoint), str(checkpoint)
            _log.info("%s: resuming at step %d of %d", out, start, self.args.max_steps)
        last, of_step = self.args.max_steps, sum(self.tokens(1).values())
        _log.info(
            "%s: %d steps of %d tokens, %s in all, on %s in %s",
            *(out, last, of_step, count_text(of_step * last)),
            *(self.args.device.type, self.config.training.dtype),
        )
        self.train_dataset = Batches(self.batch, start)
        stop = StopOnSignal(out)
        recorder = Recorder(self)
        self.add_callback(stop)
        self.add_callback(recorder)
        set_seed(self.args.seed)
        with closing(recorder), stop.watching(), training.own_settings():
            self.train(resume_from_checkpoint=self._checkpoint)

    # What a stage says of itself.

    def batch(self, step: int) -> Any:
        """The batch of a step (0 is the first), whatever was asked for before."""
        raise NotImplementedError

    def tokens(self, steps: int) -> dict[str, int]:
        """{domain: tokens of it in the first steps}."""
        raise NotImplementedError

    def line(self, step: int) -> Json:
        """Fields of the last step's line in metrics.jsonl; tensors and `ByName` are read later."""
        raise NotImplementedError

    def first_weights(self) -> Mapping[str, float] | None:
        """Domain weights before the first step, where they are learned."""
        return None

    def is_lost(self) -> Tensor:
        """Whether the last step lost its numbers; bool scalar, the same on all ranks."""
        assert self.step_loss is not None
        return ~self.step_loss.isfinite()

    def num_lost(self) -> int:
        """Steps of the whole run that moved nothing; a checkpoint keeps their number."""
        return 0

    def lost_domains(self) -> list[str]:
        """Domains whose loss or gradient is not finite in the last step, where that is known."""
        return []

    def own_state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors and text that a checkpoint keeps in `state_file`."""
        raise NotImplementedError

    def load_own_state(self, state: dict[str, Tensor], text: dict[str, str]) -> None:
        """Go on with what `own_state` gave."""
        raise NotImplementedError

    # What Trainer calls.

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

    def _prepare_input(self, data: Any) -> Any:
        """Trainer's; the host does not wait for the copy of a tensor to a GPU."""
        if isinstance(data, Tensor) and data.is_pinned():
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def mean_of_ranks(self, loss: Tensor) -> Tensor:
        """Of a number that every rank has."""
        return loss if self.args.world_size == 1 else self.accelerator.reduce(loss, "mean")

    def evaluate_domains(self) -> dict[str, float]:
        """Held-out loss of every domain that is followed, in nats per token."""
        model, count = cast(PreTrainedModel, self.model), self.config.training.eval_blocks
        return held_out_losses(model, self.corpus.validation, num_blocks=count)[0]


class MixtureTrainer(RecordedTrainer):
    """RecordedTrainer whose batches mix the domains at weights that are known, phase by phase."""

    has_domain_ids: ClassVar[bool] = False
    """Whether a batch says of which domain each of its rows is."""

    def __init__(
        self, config: StageConfig, corpus: Corpus, model: PreTrainedModel, phases: Sequence[Phase]
    ) -> None:
        self.phases = phases
        num_blocks = {name: len(corpus.train[name]) for name in corpus.names}
        size = cast(Any, config).batch_size
        self.mixture = BlockSampler(config.training.seed, phases, size, num_blocks)
        super().__init__(config, corpus, model)

    def batch(self, step: int) -> Batch:
        """Blocks drawn at the weights, of which each rank has its own."""
        batch = domains.mixed_batch(self.corpus, self.mixture.blocks(step), ranks.place())
        if not self.has_domain_ids:
            del batch["domain_ids"]
        return batch

    def tokens(self, steps: int) -> dict[str, int]:
        """As the mixture rounds them."""
        drawn = zip(self.corpus.names, self.mixture.drawn(steps).tolist(), strict=True)
        return {name: blocks * self.corpus.block_size for name, blocks in drawn}

    def line(self, step: int) -> Json:
        """Loss of the step, and tokens of each domain in all steps so far."""
        return {"loss": self.step_loss, "tokens": self.tokens(step)}


class StopOnSignal(TrainerCallback):
    """Ends a training at the next step after SIGTERM, SIGHUP or Ctrl-C, with a checkpoint of it.

    A cluster sends SIGTERM before it takes a machine away, and waits for some seconds; a terminal
    that is closed sends SIGHUP. The command line has a handler of these, which this one takes the
    place of while `watching`. Where there is none, or another, nothing is done: signals belong to
    whoever handles them.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        # Which signal, and when it came by the clock that goes on.
        self._signal: int | None = None
        self._received_at = 0.0
        self._is_stopped = False
        # Of several ranks: the sum of what they received, on its way since the step before.
        self._reduction: tuple[Any, torch.Tensor] | None = None
        self._group: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Train within; raises `Terminated` or KeyboardInterrupt where the training was ended."""
        ours = failures.raise_terminated
        ending = [each for each in failures.ENDING_SIGNALS if signal.getsignal(each) is ours]
        if not ending:
            yield
            return
        if ranks.number() > 1:
            # Of the host alone, so that no step waits for the device.
            self._group = dist.new_group(backend="gloo")
        failures.late.clear()
        before = {each: signal.signal(each, self._receive) for each in (*ending, signal.SIGINT)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
        if self._is_stopped:
            # That of a lost step is not written.
            left = records.newest_checkpoint(self._run)
            raise self._ending(
                failures.NO_CHECKPOINT
                if left is None
                else f"A checkpoint holds step {records.step_of(left)}; the same command goes on "
                "from there."
            )
        if self._signal is not None:
            # It came too late to stop anything: the run is closed in a moment.
            name = signal.Signals(self._signal).name
            _log.warning("%s has come after the last step; the run is completed.", name)
            failures.late.append(self._ending())

    def _ending(self, told: str = "") -> BaseException:
        # Another rank may have received it.
        number = self._signal or signal.SIGTERM
        is_typed = number == signal.SIGINT
        return KeyboardInterrupt(told) if is_typed else failures.Terminated(number, told)

    def _receive(self, number: int, frame: object) -> None:
        now = time.monotonic()
        # A launcher passes on Ctrl-C too.
        is_passed_on = number != signal.SIGINT or ranks.number() > 1
        is_echo = is_passed_on and now - self._received_at <= ECHO_SECONDS
        if self._signal is None:
            self._signal, self._received_at = number, now
        elif not is_echo:
            # Somebody does not want to wait.
            self._signal = number
            raise self._ending()

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **__: Any
    ) -> None:
        """Stop where this rank, or any of several, has received a signal."""
        is_stopping = self._signal is not None if self._group is None else self._any_rank_received()
        if is_stopping and state.global_step < state.max_steps:
            self._is_stopped = True
            control.should_save = control.should_training_stop = True

    def _any_rank_received(self) -> bool:
        """Whether a rank had received one by the step before this; the same on every rank."""
        before = self._reduction
        told = torch.tensor([int(self._signal is not None)])
        self._reduction = dist.all_reduce(told, group=self._group, async_op=True), told
        if before is None:
            return False
        work, sum_of_ranks = before
        work.wait()
        return bool(sum_of_ranks.item())


class Recorder(TrainerCallback):
    """Keeps metrics.jsonl, whole checkpoints and the progress bar, and ends a run that is lost."""

    def __init__(self, trainer: RecordedTrainer) -> None:
        self.trainer, self.run = trainer, trainer.config.out
        patience = trainer.config.training.max_skipped_steps
        self.lost = health.LostSteps(patience, trainer.args.device)
        self._bar: Any = None
        # What stands behind the bar: tokens a second, and the domain that has most of the weight.
        self._speed: dict[str, str] = {}
        self._largest: dict[str, str] = {}
        # Lines for metrics.jsonl, whose tensors are read at the next flush.
        self._pending: list[dict[str, Any]] = []
        self._last_flush = self._last_line = time.monotonic()
        self._last_step = 0
        self._clock = progress.StepClock()

    def close(self) -> None:
        """No bar any more, so that what is said next has a line of its own."""
        if self._bar is not None:
            self._bar.close()

    def flush(self) -> None:
        """Write the lines that wait. Waits for the device."""
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
        """Weights before the first step, and the bar."""
        if state.global_step == 0 and (weights := self.trainer.first_weights()) is not None:
            # Their average too.
            both = {"alpha": weights, "alpha_mean": weights}
            self._pending.append({"step": 0, "kind": "train", **both})
            self.flush()
        self._last_line, self._last_step = time.monotonic(), state.global_step
        self._bar = progress.bar(state.max_steps, self.run.name, "step", initial=state.global_step)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **__: Any
    ) -> None:
        """The step's line, held-out losses where they are due, and whether the run is lost."""
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
            # The run is closed at once; a checkpoint of the last step would start one step more.
            # And what goes on from a lost step would count anew how many there are.
            control.should_save = False
        # Nothing waits for a CPU.
        waited = time.monotonic() - self._last_flush
        if is_last or trainer.args.device.type == "cpu" or waited > FLUSH_SECONDS:
            self.flush()
            assert trainer.step_loss is not None
            loss = {"loss": f"{float(trainer.step_loss):.3f}"}
            self._bar.set_postfix(loss | self._speed | self._largest, refresh=False)
        self._bar.update()

    def on_save(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """The checkpoint becomes one, whole, with the lines that it remembers."""
        self.flush()
        # Every rank writes the state of its random generators.
        self.trainer.accelerator.wait_for_everyone()
        from_first(functools.partial(records.complete_checkpoint, self.run, state.global_step))

    def on_train_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """A result that would mean nothing is none."""
        lost = self.trainer.num_lost()
        if state.global_step >= state.max_steps and lost > MOST_SKIPPED * state.max_steps:
            raise health.diverged(
                self.run,
                f"{lost} of its {state.max_steps} steps were lost, for a gradient is not finite in "
                "them",
            )

    def _evaluate(self, step: int, *, is_last: bool) -> None:
        """A line of held-out losses; the run ends where they are not finite."""
        losses = self.trainer.evaluate_domains()
        self._pending.append({"step": step, "kind": "eval", "loss": losses})
        if names := health.not_finite(losses):
            where = "" if is_last else f"at step {step} "
            lost = first_few(names)
            self._end_as_lost(f"{where}the held-out loss of {lost} is not finite")
        # Not part of what a step costs.
        self._last_line, self._last_step = time.monotonic(), step

    def _end_as_lost(self, what: str) -> None:
        """Keep the lines up to here, and raise `Diverged`; every rank does."""
        self.flush()
        # A launcher ends the others as soon as one has ended.
        self.trainer.accelerator.wait_for_everyone()
        raise health.diverged(self.run, what)

    def _tell_time(self, left: int) -> None:
        """How long the other steps take, once it is known and is more than a minute."""
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
        model: a causal language model; its mode is put back.
        domains: {name: data set with a column `input_ids` of blocks of one length, at least one}.
        what: stands before the progress bar.
        num_blocks: of each domain, evenly spaced ones, always the same; None: all.
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
    # Added in float64.
    sums = dict.fromkeys(domains, 0.0)
    for (name, chunk), mean in zip(chunks, means_C.tolist(), strict=True):
        sums[name] += mean * len(chunk)
    return {name: total / counts[name] for name, total in sums.items()}, counts
