"""What the stages that train have in common, in the order in which a stage calls it.

Settings are checked before anything is read, the model and the corpus before anything is written,
and what says that a run is complete is written last. So a refused run leaves nothing, a killed one
is resumed by the same call, and a complete one is left as it is.
"""

import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, set_seed

from doge_fast import atomic_file
from doge_fast.pipeline import baselines, domains, ranks, records, training
from doge_fast.pipeline.config import StageConfig
from doge_fast.pipeline.config.ranges import check
from doge_fast.pipeline.domains import Corpus
from doge_fast.pipeline.failures import FileFailure, UserError
from doge_fast.pipeline.model import build_model, check_model, without_bars
from doge_fast.pipeline.records import ConfigRecord
from doge_fast.pipeline.reporting.study import warnings_on
from doge_fast.pipeline.sizes import settings_of
from doge_fast.pipeline.trainer import RecordedTrainer, from_first

Config = TypeVar("Config", bound=StageConfig)

_log = logging.getLogger("doge_fast")


def is_finished(config: StageConfig) -> bool:
    """Whether a run came to its end; looks at what it left in its directory, last of all.

    Raises:
        UserError: it did, and what it left is damaged.
    """
    # A result that is damaged is no result.
    run = config.out
    if config.stage == "select":
        return (run / records.CANCELLATION).exists() and bool(records.load_cancellation(run))
    return records.has_model(run, is_hashed=False) and bool(records.read_weights(run))


def resolved(config: Config) -> Config:
    """With a dtype in the place of `auto`, so that the record has the one that was computed in.

    Raises:
        UserError: the device is absent.
    """
    told = config.training
    if told.dtype != "auto":
        return config
    is_gpu = training.device_of(told.device).type != "cpu"
    dtype = settings_of(config.model.model).gpu_dtype if is_gpu else "float32"
    return replace(config, training=replace(told, dtype=dtype))


class ExistingRun(NamedTuple):
    """What a stage finds in its directory."""

    record: ConfigRecord | None
    """config.json of this very run; None: a new run."""
    is_complete: bool


def existing_run(config: StageConfig) -> ExistingRun:
    """Look for the inputs, and at the directory; reads no corpus and writes nothing.

    Raises:
        UserError: an input is not there, or the directory holds another run.
    """
    if getattr(config, "dry_run", False):
        raise UserError("A dry run trains nothing: call rehearsal.rehearse, or leave out dry_run.")
    check(config)
    training.device_of(config.training.device)
    if getattr(config, "batch_size", 0) % ranks.number():
        raise UserError(
            f"batch_size must be a multiple of the {ranks.number()} processes that share it; got "
            f"{cast(Any, config).batch_size}."
        )
    record = records.check_run(config)
    is_complete = record is not None and is_finished(config)
    if is_complete:
        _log.info("%s: complete already, nothing to do", config.out)
        if ranks.is_first():
            # A kill may have left them after the last step.
            shutil.rmtree(config.out / records.CHECKPOINTS, ignore_errors=True)
    return ExistingRun(record, is_complete)


def corpus_and_model(
    config: StageConfig,
    existing: ExistingRun,
    *,
    check: Callable[[PreTrainedModel, Sequence[str], PreTrainedTokenizerFast], object],
    followed: Sequence[str] = (),
) -> tuple[Corpus, PreTrainedModel]:
    """The corpus, and the fresh or pretrained model, which is made first: packing may take hours.

    Args:
        config: of the stage.
        existing: what its directory holds.
        check: called before the corpus is packed, with the model, the names of the domains and the
            tokenizer; may refuse.
        followed: domains that are measured and not trained on, where the corpus has them.

    Raises:
        UserError: as `load_corpus` and `build_model`; or a run that is resumed began with
            another corpus.
    """
    made: list[PreTrainedModel] = []

    def make(names: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> None:
        _log.info("%s: building the model %s", config.out, config.model.model)
        # A run of this seed always begins with the same numbers.
        set_seed(config.training.seed)
        size = config.corpus.block_size
        made.append(build_model(config.model, tokenizer, block_size=size))
        check(made[0], names, tokenizer)

    check_model(config.model, block_size=config.corpus.block_size)
    _log.info("%s: reading %s", config.out, config.corpus.data)
    corpus = domains.load_corpus(
        config.corpus, targets=config.targets, followed=followed, before_packing=make
    )
    if existing.record is not None:
        records.check_corpus(config.out, existing.record.corpus, corpus.describe())
    return corpus, made[0]


@contextmanager
def directory(
    trainer: RecordedTrainer,
    existing: ExistingRun,
    *,
    resolved: Mapping[str, float] | None = None,
) -> Iterator[Path | None]:
    """Have the run directory for this launch alone, with config.json in it.

    Yields the checkpoint to go on from; None: there is none. Checkpoints are removed in the end.
    `resolved` as `records.open_run` takes it.

    Raises:
        FileFailure: another launch has begun or ended the run, or no checkpoint is whole.
    """
    config, corpus, out = trainer.config, trainer.corpus, trainer.config.out
    # Every rank has read what there is, before the first one writes.
    training.wait_for_ranks(trainer.args.device)
    with ExitStack() as held, without_bars():

        def begin() -> Path | None:
            held.enter_context(records.alone(out))
            now = records.check_run(config)
            if now != existing.record or is_finished(config):
                done = "begun" if now != existing.record else "completed"
                raise FileFailure(
                    f"Another process has just {done} {out}. Repeat the command, or name another "
                    "directory."
                )
            if now is None:
                records.open_run(
                    config,
                    corpus=corpus.describe(),
                    parameters=cast(PreTrainedModel, trainer.model).num_parameters(),
                    warnings=corpus.warnings,
                    resolved=resolved,
                )
            return records.resume_checkpoint(out)

        yield from_first(begin)
        from_first(lambda: shutil.rmtree(out / records.CHECKPOINTS, ignore_errors=True))


def leave_model(trainer: RecordedTrainer) -> None:
    """Leave model/, the last thing of a run: it is what `is_finished` looks at, whole or absent."""
    out = trainer.config.out
    # On the disk before what says that the run is complete.
    records.keep_metrics(out)
    beside = out / f".{records.MODEL}"
    shutil.rmtree(beside, ignore_errors=True)
    model = cast(PreTrainedModel, trainer.model)
    # Trainer switches it off for training; whoever generates wants it.
    model.config.use_cache = True
    model.save_pretrained(beside)
    trainer.corpus.tokenizer.save_pretrained(beside)
    _open_as_new(beside)
    records.write_manifest(beside)
    os.replace(beside, out / records.MODEL)
    atomic_file.sync_directory(out)


def _open_as_new(folder: Path) -> None:
    """Give every file in a folder the mode of a new file."""
    # safetensors writes files that only their owner can read.
    probe = folder / ".new"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)


def write_weights(
    trainer: RecordedTrainer,
    columns: Mapping[str, Mapping[str, float]],
    *,
    warnings: Sequence[str] = (),
    **fields: Any,
) -> None:
    """weights.json of {field: {domain: number}}, and of the run as far as a reader needs it.

    Whoever gets the file alone reads in it on what text and how the weights were learned.
    """
    config, corpus = trainer.config, trainer.corpus
    begun = records.load(config.out, ConfigRecord)
    entries = [
        {"name": name, **{field: each[name] for field, each in columns.items()}}
        | corpus.sizes(name)
        for name in corpus.names
    ]
    record = fields | {
        "domains": entries,
        "corpus": begun.config["corpus"]["data"],
        "date": begun.created[:10],
        "model": config.model.model,
        "parameters": begun.parameters,
        "learning_rate": config.training.learning_rate,
        "steps": config.training.steps,
        "seed": config.training.seed,
        "tokens": sum(trainer.tokens(config.training.steps).values()),
        "tokenizer_sha256": corpus.tokenizer_sha256,
        "block_size": corpus.block_size,
        "versions": records.versions(),
        "warnings": [*corpus.warnings, *warnings],
    }
    records.write_weights(config.out, record)


def write_learned(
    trainer: RecordedTrainer, average: Mapping[str, float], last_K: Tensor, **fields: Any
) -> None:
    """weights.json of what was learned: the average over the run, and the last weights."""
    corpus = trainer.corpus
    columns = {
        "weight": average,
        "weight_last": dict(zip(corpus.names, last_K.tolist(), strict=True)),
        **fields.pop("columns", {}),
        # Of what is trained on: targets have tokens too, and no share.
        "prior": baselines.natural(corpus.tokens),
    }
    write_weights(trainer, columns, warnings=warnings_on(trainer.config.out), **fields)
