"""SIGTERM during a training: the step is finished, a checkpoint written, and the verb ends.

A cluster sends it before it takes a machine away, and waits for some seconds.
"""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from doge_fast import failures
from doge_fast.pipeline import ranks

_log = logging.getLogger("doge_fast")


class StopWhenTold(TrainerCallback):
    """Ends a training at the next step after SIGTERM, with a checkpoint of it.

    The command line has a handler of SIGTERM, which this one takes the place of while `watching`.
    Where there is none, or another, nothing is done: it belongs to whoever set it.
    """

    def __init__(self) -> None:
        self._is_told = False
        self._stopped_at: int | None = None
        # Of several ranks: what they heard in the step before, while it is on its way.
        self._heard: tuple[Any, torch.Tensor] | None = None
        self._group: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Train within.

        Raises:
            Terminated: the training was ended.
        """
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
        if self._stopped_at is not None:
            raise failures.Terminated(
                f"A checkpoint holds step {self._stopped_at}; the same command goes on from there."
            )
        if self._is_told:
            # It came too late to stop anything: the run is closed in a moment.
            _log.warning("SIGTERM has come after the last step; the run is completed.")

    def _hear(self, number: int, frame: object) -> None:
        if self._is_told:
            # Somebody does not want to wait.
            raise failures.Terminated
        self._is_told = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop where this rank, or any of several, has heard of it."""
        is_stopping = self._is_told if self._group is None else self._have_all_heard()
        if is_stopping and state.global_step < state.max_steps:
            self._stopped_at = state.global_step
            control.should_save = control.should_training_stop = True

    def _have_all_heard(self) -> bool:
        """Whether a rank had heard by the step before this one; the same answer on every rank."""
        before = self._heard
        told = torch.tensor([int(self._is_told)])
        self._heard = dist.all_reduce(told, group=self._group, async_op=True), told
        if before is None:
            return False
        work, sum_of_ranks = before
        work.wait()
        return bool(sum_of_ranks.item())
