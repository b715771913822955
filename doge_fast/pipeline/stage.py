"""Functions shared by the training stages, in the order in which a stage calls them.

Settings are checked before anything is read, model and corpus before anything is written, and the
file that marks a run as complete is written last. So a run with an error leaves nothing, the same
call resumes a killed run, and a complete run stays unchanged.
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
from doge_fast.pipeline import baselines, domains, ranks, records
from doge_fast.pipeline.config import StageConfig
from doge_fast.pipeline.config.ranges import check_paths
from doge_fast.pipeline.domains import Corpus
from doge_fast.pipeline.failures import FileFailure, UserError
from doge_fast.pipeline.model import build_model, check_model, without_bars
from doge_fast.pipeline.progress import tell_once
from doge_fast.pipeline.records import ConfigRecord
from doge_fast.pipeline.reporting.proxies import warnings_on
from doge_fast.pipeline.sizes import settings_of
from doge_fast.pipeline.trainer import (
    RecordedTrainer,
    device_of,
    from_first,
    wait_for_ranks,
)

Config = TypeVar("Config", bound=StageConfig)

_log = logging.getLogger("doge_fast")


def is_finished(config: StageConfig) -> bool:
    """Whether a run is complete: its last output exists.

    Raises:
        UserError: the output exists and is damaged.
    """
    run = config.out
    if config.stage == "select":
        return (run / records.CANCELLATION).exists() and bool(records.load_cancellation(run))
    return records.has_model(run, is_hashed=False) and bool(records.read_weights(run))


def resolved(config: Config) -> Config:
    """Replace the dtype `auto`, so that the record holds the actual dtype.

    Raises:
        UserError: the device is absent.
    """
    told = config.training
    if told.dtype != "auto":
        return config
    is_gpu = device_of(told.device).type != "cpu"
    dtype = settings_of(config.model.model).gpu_dtype if is_gpu else "float32"
    return replace(config, training=replace(told, dtype=dtype))


class ExistingRun(NamedTuple):
    """State of a stage's run directory."""

    record: ConfigRecord | None
    """config.json of the run to resume; None: a new run."""
    is_complete: bool


def existing_run(config: StageConfig) -> ExistingRun:
    """Check the settings and the run directory; reads no corpus and starts no run.

    Raises:
        UserError: a setting is invalid, the device is absent, or the directory holds another run.
    """
    if getattr(config, "dry_run", False):
        raise UserError("A dry run trains nothing: call rehearsal.rehearse, or leave out dry_run.")
    check_paths(config)
    device_of(config.training.device)
    if getattr(config, "batch_size", 0) % ranks.size():
        raise UserError(
            f"batch_size (--batch-size) must be a multiple of the {ranks.size()} processes that "
            f"share it; got {cast(Any, config).batch_size}."
        )
    record = records.check_run(config)
    is_complete = record is not None and is_finished(config)
    if is_complete:
        _log.info("%s: complete already, nothing to do", config.out)
        if ranks.is_first():
            # A run killed after its last step may have left them.
            shutil.rmtree(config.out / records.CHECKPOINTS, ignore_errors=True)
    return ExistingRun(record, is_complete)


def corpus_and_model(
    config: StageConfig,
    existing: ExistingRun,
    *,
    check: Callable[[PreTrainedModel, Sequence[str], PreTrainedTokenizerFast], object],
    followed: Sequence[str] = (),
) -> tuple[Corpus, PreTrainedModel]:
    """Build the model, then pack the corpus, which may take hours; return (corpus, model).

    Args:
        config: settings of the stage.
        existing: state of its directory.
        check: called before the corpus is packed, with the model, the names of the training
            domains and the tokenizer; may raise.
        followed: further domains to measure and not to train on, if the corpus has them.

    Raises:
        UserError: as `load_corpus` and `build_model`; or a resumed run began with another corpus.
    """
    made: list[PreTrainedModel] = []

    def make(names: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> None:
        tell_once(f"building the model {config.model.model}")
        # Initial weights depend on the seed alone.
        set_seed(config.training.seed)
        size = config.corpus.block_size
        made.append(build_model(config.model, tokenizer, block_size=size))
        check(made[0], names, tokenizer)

    check_model(config.model, block_size=config.corpus.block_size)
    tell_once(f"reading {config.corpus.data}")
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
    """Lock the run directory for this launch, and write config.json in a new one.

    Yields the checkpoint to resume from, None if there is none; removes all checkpoints at the
    end. For `resolved` see `records.open_run`.

    Raises:
        FileFailure: another launch has begun or completed the run, or every checkpoint is damaged.
    """
    config, corpus, out = trainer.config, trainer.corpus, trainer.config.out
    # Every rank must have read the directory before the first one writes.
    wait_for_ranks(trainer.args.device)
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
    """Write model/, the last output of a run, atomically: `is_finished` looks for it."""
    out = trainer.config.out
    # The metrics must be on the disk before model/ marks the run as complete.
    records.keep_metrics(out)
    beside = out / f".{records.MODEL}"
    shutil.rmtree(beside, ignore_errors=True)
    model = cast(PreTrainedModel, trainer.model)
    # Trainer switches the cache off for training; generation needs it.
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


def leave_weights(
    trainer: RecordedTrainer,
    columns: Mapping[str, Mapping[str, float]],
    *,
    warnings: Sequence[str] = (),
    **fields: Any,
) -> None:
    """Write weights.json from {field: {domain: number}}, with corpus and settings of the run.

    The file alone tells a reader on which text and how the weights were learned.
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


def leave_learned_weights(
    trainer: RecordedTrainer, average: Mapping[str, float], last_K: Tensor, **fields: Any
) -> None:
    """Write weights.json with the average weights over the run and the last weights."""
    corpus = trainer.corpus
    columns = {
        "weight": average,
        "weight_last": dict(zip(corpus.names, last_K.tolist(), strict=True)),
        **fields.pop("columns", {}),
        # Natural weights of the training domains; held-out targets have no share.
        "prior": baselines.natural(corpus.tokens),
    }
    leave_weights(trainer, columns, warnings=warnings_on(trainer.config.out), **fields)
