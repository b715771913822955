"""Runs of a plan: what is done is left alone, what was killed goes on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from doge_fast.pipeline import failures, named, records, stage
from doge_fast.pipeline.base import train_base
from doge_fast.pipeline.config import (
    BaseConfig,
    DoReMiConfig,
    EvaluateConfig,
    ProxyConfig,
    SelectConfig,
    StageConfig,
)
from doge_fast.pipeline.doremi import learn_by_excess_loss
from doge_fast.pipeline.evaluation import evaluate
from doge_fast.pipeline.proxy import learn_weights
from doge_fast.pipeline.selection import measure_cancellation

_STAGES: dict[type, Callable[[Any], object]] = {
    ProxyConfig: learn_weights,
    BaseConfig: train_base,
    DoReMiConfig: learn_by_excess_loss,
    SelectConfig: measure_cancellation,
}


@dataclass(frozen=True)
class Job:
    """A run, and whether its model is measured on held-out text afterwards."""

    config: StageConfig
    is_measured: bool
    eval_blocks: int | None
    """Of each domain; None: all."""

    @property
    def name(self) -> str:
        """Of its directory."""
        return self.config.out.name

    def is_trained(self) -> bool:
        """Whether it came to its end, and what it left is whole."""
        try:
            return stage.is_finished(self.config)
        except ValueError:
            # Its stage says what is wrong with it.
            return False

    def is_made(self) -> bool:
        """Whether nothing is left to do."""
        return next(self._left(), None) is None

    def make(self) -> None:
        """Train and measure, where that is still to do."""
        for do in self._left():
            do()
            failures.raise_late()

    def train(self) -> None:
        """Begin it or go on with it."""
        _STAGES[type(self.config)](self.config)

    def _left(self) -> Iterator[Callable[[], object]]:
        out, device = self.config.out, self.config.training.device
        if not self.is_trained() or (out / records.CHECKPOINTS).exists():
            yield self.train
        if self.is_measured and not records.is_measured(out, self.eval_blocks):
            asked = EvaluateConfig(run=out, blocks=self.eval_blocks, device=device)
            yield partial(evaluate, asked)

    def command(self, typed: str, about: str) -> str:
        """The line of `--plan` that makes this run; `typed` is the verb with its other options."""
        steps = f"{self.config.training.steps} steps"
        return f"{typed} --only {self.name}  # {about}, {self.config.model.model}, {steps}"


def chosen(jobs: Sequence[Job], only: Sequence[str]) -> list[Job]:
    """The runs that `--only` names, or all; ValueError where it names none of them."""
    names = [job.name for job in jobs]
    for name in (name for name in only if name not in names):
        raise ValueError(
            f"only must name runs of the plan, which --plan lists; {name} is none. "
            f"{named.nearest(name, names, f'The first is {names[0]}.')}"
        )
    return [job for job in jobs if not only or job.name in only]
