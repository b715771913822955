"""What every stage that trains does, in order; a stage is a `Stage` with what is its own.

Settings are checked before anything is read, the corpus and the model before anything is written,
and what says that a run is complete is written last. So a refused run leaves nothing, a killed one
is resumed by the same call, and a complete one is left as it is.
"""

import functools
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, set_seed

from doge_fast import atomic_file
from doge_fast.mixture.counts import Phase
from doge_fast.pipeline import baselines, domains, health, memory, ranks, records, training
from doge_fast.pipeline.config import BaseConfig, DoReMiConfig, SelectConfig, StageConfig
from doge_fast.pipeline.config.ranges import check as check_ranges
from doge_fast.pipeline.domains import Batch, Batches, BlockSampler, Corpus
from doge_fast.pipeline.failures import FileFailure
from doge_fast.pipeline.model import build_model, check_model, without_bars
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.records.movement import movement_of
from doge_fast.pipeline.trainer import RecordedTrainer, from_first

Config = TypeVar("Config", bound=StageConfig)
Mixed = TypeVar("Mixed", bound=BaseConfig | DoReMiConfig | SelectConfig)

_log = logging.getLogger("doge_fast")


class Stage(Generic[Config]):
    """What is a stage's own; `run` calls the methods from top to bottom."""

    name: ClassVar[records.Stage]
    needs_float64: ClassVar[bool] = True
    """Whether float64 is computed on the device."""
    further: ClassVar[str] = ""
    """The command that starts from a complete run, up to its directory; empty: there is none."""
    trainer: ClassVar[type[RecordedTrainer]] = RecordedTrainer
    corpus: Corpus

    def __init__(self, config: Config) -> None:
        self.config: Config = config
        self.out: Path = config.out
        self.rows: Sequence[str] = ()
        """Domains and targets of which a step keeps a gradient each."""
        self.start: Mapping[str, float] | None = None
        """Domain weights before the first step, where they are to be learned."""
        self.mu, self.most_score = 1.0, math.inf
        """How scores move these weights: the Bregman coefficient, and what scores are cut to."""
        self.options: Json = {}
        """What the trainer is told beside what every stage's is."""
        self.resolved: Json = {}
        """What config.json keeps beside settings and corpus: "initial" and "resolved"."""
        self.outline: list[tuple[str, str]] = []
        """(what, value) of the stage's own settings, for a dry run."""

    @property
    def device(self) -> torch.device:
        """That it trains on."""
        name = self.config.training.device
        return training.device_of(name, needs_float64=self.needs_float64)

    def check(self) -> None:
        """Raise ValueError where a setting of the stage is out of its range."""
        raise NotImplementedError

    def prepare(self, recorded: Json) -> None:
        """Keep what training needs of the corpus; refuse, with a ValueError, what does not fit it.

        `recorded` is config.json of a run that is resumed.
        """
        raise NotImplementedError

    def fit(self, model: PreTrainedModel) -> None:
        """Likewise of the fresh model, which is left as it is."""

    def begin(self) -> None:
        """Write what stands in the run directory before the first step."""

    def batch(self, step: int) -> Any:
        """The batch of a step (0 is the first), whatever was asked for before."""
        raise NotImplementedError

    def tokens(self, steps: int) -> dict[str, int]:
        """{domain: tokens of it in the first steps}."""
        raise NotImplementedError

    def measure(self, trainer: Any, step: int) -> Json:
        """Fields of a step's line in metrics.jsonl; tensors and `ByName` are read later."""
        raise NotImplementedError

    def is_lost(self, trainer: Any) -> Tensor:
        """Whether the step under way lost its numbers; bool scalar, the same on all ranks."""
        loss: Tensor = trainer.step_loss
        return ~loss.isfinite()

    def lost_domains(self, trainer: Any) -> list[str]:
        """Domains whose loss or gradient is not finite in this step, where that is known."""
        return []

    def batches_told(self, step: int) -> str:
        """What to know of the batches up to the first lost step (1 is the run's first)."""
        return ""

    def num_lost(self, trainer: Any) -> int:
        """Steps of the whole run that moved nothing."""
        return 0

    def check_outcome(self, trainer: Any) -> None:
        """Raise `health.Diverged`, on all ranks, where the result would mean nothing."""
        steps, lost = self.config.training.steps, self.num_lost(trainer)
        if names := health.not_finite(trainer.held_out):
            what = f"the held-out loss of {health.domains_told(names)} is not finite"
        elif lost > health.MOST_LOST * steps:
            what = f"{lost} of its {steps} steps were lost, for a gradient is not finite in them"
        else:
            return
        raise health.diverged(self.out, what)

    def is_finished(self) -> bool:
        """Whether the run in the directory came to its end; looks at what it left.

        Raises:
            ValueError: it did, and what it left is damaged.
        """
        if not records.check_model(self.out, is_hashed=False):
            return False
        try:
            records.read_weights(self.out)
        except ValueError as error:
            raise ValueError(
                f"{self.out} is complete, and its result is damaged: {error} Restore it, or remove "
                f"{self.out / records.MODEL} to have it trained again."
            ) from None
        return True

    def end(self, trainer: Any) -> None:
        """Leave the results; the last one is what `is_finished` looks at, whole or not there."""
        beside = self.out / f".{records.MODEL}"
        shutil.rmtree(beside, ignore_errors=True)
        model = cast(PreTrainedModel, trainer.model)
        # Trainer switches it off for training; whoever generates wants it.
        model.config.use_cache = True
        model.save_pretrained(beside)
        self.corpus.tokenizer.save_pretrained(beside)
        atomic_file.open_as_new(beside)
        records.write_manifest(beside)
        os.replace(beside, self.out / records.MODEL)
        atomic_file.keep_names(self.out)

    def write_weights(self, columns: Mapping[str, Mapping[str, float]], **fields: Any) -> None:
        """weights.json of {field: {domain: number}} and fields of the whole."""
        corpus = self.corpus
        domains = [
            {"name": name, **{field: each[name] for field, each in columns.items()}}
            | corpus.sizes(name)
            for name in corpus.names
        ]
        record = fields | {
            "domains": domains,
            "tokenizer_sha256": corpus.tokenizer_sha256,
            "block_size": corpus.block_size,
            "versions": records.versions(),
        }
        records.write_weights(self.out, record)

    def write_learned(
        self, average: Mapping[str, float], last_K: Tensor, columns: Json, **fields: Any
    ) -> None:
        """weights.json of what was learned: the average over the run, and the last weights."""
        config, names = self.config, self.corpus.names
        lines = records.read_metrics(self.out, kind="train")
        steps_T = np.array([line["step"] for line in lines], dtype=np.float64)
        means_TK = np.array([list(line["alpha_mean"].values()) for line in lines], np.float64)
        moved = movement_of(steps_T, means_TK[None], fields.get("average_from", 0.0))
        self.write_weights(
            {
                "weight": average,
                "weight_last": dict(zip(names, last_K.tolist(), strict=True)),
                **columns,
                # Of what is trained on: targets have tokens too, and no share.
                "prior": baselines.natural(self.corpus.tokens),
            },
            model=config.model.model,
            steps=config.training.steps,
            seed=config.training.seed,
            drift=float(moved.drift[-1]),
            **fields,
        )


class MixtureStage(Stage[Mixed]):
    """A stage whose batches mix the domains at given weights, which `prepare` puts down."""

    weights: Mapping[str, float] | Sequence[Phase]
    domain_ids: ClassVar[bool] = False
    """Whether a batch says which domain each of its rows is of."""

    def batch(self, step: int) -> Batch:
        """Blocks drawn at the weights, of which each rank has its own."""
        batch = domains.mixed_batch(self.corpus, self._mixture.blocks(step), ranks.place())
        if not self.domain_ids:
            del batch["domain_ids"]
        return batch

    @functools.cached_property
    def _mixture(self) -> BlockSampler:
        num_blocks = {name: len(self.corpus.train[name]) for name in self.corpus.names}
        seed = self.config.training.seed
        return BlockSampler(seed, self.weights, self.config.batch_size, num_blocks)

    def batches_told(self, step: int) -> str:
        """Of which domains they were."""
        told = f"; the first, step {step}, had a batch of {self._drawn_told(step)}"
        # The weights are what the gradient of the step before has made of them.
        return told + (f", after one of {self._drawn_told(step - 1)}" if step > 1 else "")

    def _drawn_told(self, step: int) -> str:
        drawn = self._mixture.blocks(step - 1)
        return health.domains_told([name for name, blocks in drawn.items() if len(blocks)])

    def tokens(self, steps: int) -> dict[str, int]:
        """As the mixture rounds them."""
        drawn = zip(self.corpus.names, self._mixture.drawn(steps).tolist(), strict=True)
        return {name: blocks * self.corpus.block_size for name, blocks in drawn}

    def measure(self, trainer: Any, step: int) -> Json:
        """Loss of the step, and tokens of each domain in all steps so far."""
        return {"loss": trainer.step_loss, "tokens": self.tokens(step)}


def run(stage: Stage[Any]) -> Path:
    """Make a stage's run, go on with it, or find it complete; returns its directory.

    Raises:
        ValueError: a setting is out of its range, the corpus or the model is not what it should
            be, or the directory holds another run; nothing has been written. Or its checkpoints
            are damaged.
        Diverged: the training computes no numbers any more; the records are kept.
    """
    out = stage.out
    if getattr(stage.config, "dry_run", False):
        raise ValueError("A dry run trains nothing: call rehearsal.rehearse, or leave out dry_run.")
    recorded = check(stage)
    if recorded is not None and stage.is_finished():
        if ranks.is_first():
            # A kill may have left them after the last step.
            shutil.rmtree(out / records.CHECKPOINTS, ignore_errors=True)
        _log.info("%s: complete already, nothing to do", out)
        return out
    model = prepare(stage, recorded)
    # Every rank has read what there is, before the first one writes.
    training.meet(stage.device)
    with ExitStack() as held, without_bars():

        def begin() -> Path | None:
            held.enter_context(records.alone(out))
            _check_unchanged(stage, recorded)
            if recorded is None:
                records.open_run(
                    out,
                    stage=stage.name,
                    config=stage.config,
                    corpus=stage.corpus.describe(),
                    warnings=stage.corpus.warnings,
                    **stage.resolved,
                )
            stage.begin()
            return records.resume_checkpoint(out)

        trainer = train(stage, model, from_first(begin))
        stage.check_outcome(trainer)

        def end() -> None:
            # On the disk before what says that the run is complete.
            records.keep_metrics(out)
            stage.end(trainer)
            shutil.rmtree(out / records.CHECKPOINTS, ignore_errors=True)

        from_first(end)
    return out


def _check_unchanged(stage: Stage[Any], recorded: Json | None) -> None:
    """Raise FileFailure where another process has made the run since this one read its state."""
    is_begun = records.check_run(stage.out, stage=stage.name, config=stage.config) != recorded
    if is_begun or stage.is_finished():
        raise FileFailure(
            f"Another process has just {'begun' if is_begun else 'completed'} {stage.out}. Repeat "
            "the command, or name another directory."
        )


def check(stage: Stage[Any]) -> Json | None:
    """config.json of this very run, where the directory holds it already.

    Raises:
        ValueError: a setting is out of its range, or the directory holds another run.
    """
    config = stage.config
    check_ranges(config)
    training.check(config.training, needs_float64=stage.needs_float64)
    if getattr(config, "batch_size", 0) % ranks.number():
        raise ValueError(
            f"batch_size must be a multiple of the {ranks.number()} processes that share it; got "
            f"{config.batch_size}."
        )
    stage.check()
    try:
        return records.check_run(stage.out, stage=stage.name, config=config)
    except ValueError:
        _refuse_more_steps(stage)
        raise


def _refuse_more_steps(stage: Stage[Any]) -> None:
    """Say why a complete run cannot have more steps, where that is what is asked for."""
    config, out = stage.config, stage.out
    if not stage.is_finished():
        return
    done, asked = records.read_config(out)["config"]["training"]["steps"], config.training.steps
    shorter = replace(config, training=replace(config.training, steps=done))
    try:
        records.check_run(out, stage=stage.name, config=shorter)
    except ValueError:
        # Something else differs too.
        return
    if asked < done:
        return
    model = out / records.MODEL
    further = (
        " Or train its model further, with a learning rate that starts anew and the other settings "
        f"as they were: {stage.further} {out} --model {model} --pretrained --tokenizer {model} "
        f"--steps {asked - done} --seed {config.training.seed + 1} --out NEW"
    )
    raise ValueError(
        f"{out} is complete after {done} steps, and {asked} are asked for. Its learning rate has "
        f"come to its end and its optimizer's state is gone, so it cannot become a run of {asked} "
        f"steps. Name another directory to make one.{further if stage.further else ''}"
    )


def prepare(stage: Stage[Any], recorded: Json | None) -> PreTrainedModel:
    """Read the corpus, build the model, and give both to the stage; `recorded` is of `check`.

    Raises:
        ValueError: as `run`.
    """
    config = stage.config
    # Before a corpus is packed, which may take hours.
    check_model(config.model, block_size=config.corpus.block_size)
    _log.info("%s: reading %s", stage.out, config.corpus.data)
    stage.corpus = domains.load_corpus(config.corpus, targets=config.targets)
    if recorded is not None:
        records.check_corpus(stage.out, recorded, stage.corpus.describe())
    stage.prepare(recorded or {})
    _log.info("%s: building the model %s", stage.out, config.model.model)
    # A run of this seed always begins with the same numbers.
    set_seed(config.training.seed)
    model = build_model(
        config.model,
        stage.corpus.tokenizer,
        block_size=stage.corpus.block_size,
        told_size=functools.partial(_check_memory, stage),
    )
    stage.fit(model)
    return model


def _check_memory(stage: Stage[Any], num_parameters: int) -> None:
    advice = "Take a smaller model (--model, --num-layers, --embed-dim)"
    if stage.rows:
        advice += ", fewer domains, or share them among processes (torchrun)"
    needed = memory.needed(num_parameters, len(stage.rows))
    memory.refuse_what_cannot_fit(needed, stage.device, advice=f"{advice}.")


def train(
    stage: Stage[Any],
    model: PreTrainedModel,
    checkpoint: Path | None = None,
    *,
    callbacks: Sequence[TrainerCallback] = (),
) -> RecordedTrainer:
    """Run a prepared stage's steps, from a checkpoint where there is one."""
    config, out = stage.config.training, stage.out
    arguments = training.training_arguments(config, out, needs_float64=stage.needs_float64)
    start = 0 if checkpoint is None else records.step_of(checkpoint)
    if checkpoint is not None:
        _log.info("%s: resuming at step %d of %d", out, start, config.steps)
    set_seed(config.seed)
    # A checkpoint holds a shared matrix once; Trainer takes the other name for missing and says so.
    model._keys_to_ignore_on_save = set(model.all_tied_weights_keys)
    trainer = stage.trainer(
        model=model,
        args=arguments,
        train_dataset=Batches(stage.batch, start),
        callbacks=list(callbacks),
        stage=stage,
        **stage.options,
    )
    trainer.go_on(checkpoint)
    return trainer
