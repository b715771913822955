"""checkpoints/ of a run: the last two, of which the newest whole one is resumed from.

A checkpoint is a folder in Trainer's format with a manifest, which also has the digest of
metrics.jsonl at its step. It is written under another name and renamed. Two are kept, so a damaged
one costs the steps between them and no more. A lock lets one launch at a time work in the folder.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from doge_fast import atomic_file
from doge_fast.pipeline.failures import FileFailure, UserError
from doge_fast.pipeline.records.manifest import read_manifest, write_manifest
from doge_fast.pipeline.records.runs import keep_metrics, resume_metrics
from doge_fast.pipeline.records.schema import CHECKPOINTS, METRICS, WRITING

# How many stay.
GENERATIONS = 2
_PREFIX = "checkpoint-"

_log = logging.getLogger("doge_fast")


@contextmanager
def alone(run: Path) -> Iterator[None]:
    """Hold the run directory's lock; the system releases it when this process ends.

    Raises:
        FileFailure: another launch has it.
    """
    folder = run / CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True)
    # A marker instead of flock would outlive a process of another machine.
    lock = FileLock(folder / ".lock", fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FileFailure(
            f"Another process is at work in {run}. Wait for its end, or name another directory."
        ) from None
    except (OSError, NotImplementedError):
        _log.warning("%s: its file system has no locks; start one launch at a time", folder)
    try:
        yield
    finally:
        lock.release()


def step_of(checkpoint: Path) -> int:
    """The step after which it was written."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def complete_checkpoint(run: Path, step: int) -> None:
    """Give what has been written in checkpoints/.writing its name, and remove the oldest.

    When this returns, the checkpoint and the lines of metrics.jsonl up to it are on the disk.

    Raises:
        OSError: the disk is full, or cannot be read or written.
    """
    folder, name = run / CHECKPOINTS, f"{_PREFIX}{step}"
    written = folder / WRITING / name
    # A pickle; config.json has the same settings.
    (written / "training_args.bin").unlink(missing_ok=True)
    write_manifest(written, step=step, **{METRICS: keep_metrics(run)})
    # A checkpoint of this step that is there already is equal, or damaged.
    shutil.rmtree(folder / name, ignore_errors=True)
    os.replace(written, folder / name)
    atomic_file.sync_directory(folder)
    for older in _generations(run)[GENERATIONS:]:
        shutil.rmtree(older)


def newest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint, unchecked; None: there is none."""
    return next(iter(_generations(run)), None)


def resume_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint that is whole, with metrics.jsonl cut back to its step.

    Damaged ones are named on the terminal. Without a checkpoint metrics.jsonl is emptied.

    Returns:
        Its folder; None: the run begins at its first step.

    Raises:
        FileFailure: there are checkpoints, and none is whole.
    """
    shutil.rmtree(run / CHECKPOINTS / WRITING, ignore_errors=True)
    generations = _generations(run)
    damaged: list[str] = []
    for checkpoint in generations:
        try:
            written = read_manifest(checkpoint)
            if written.get("step") != step_of(checkpoint):
                raise UserError(f"its manifest is not of step {step_of(checkpoint)}")
            resume_metrics(run, written.get(METRICS))
        except ValueError as error:
            damaged.append(f"{checkpoint.name} is damaged: {str(error).rstrip('.')}")
            continue
        for each in damaged:
            _log.warning("%s: %s. %s is used.", run, each, checkpoint.name)
        return checkpoint
    if damaged:
        raise FileFailure(
            f"{run} cannot go on, for no checkpoint is whole ({'; '.join(damaged)}). Restore one, "
            f"or remove {run / CHECKPOINTS} to begin again at the first step."
        )
    if (run / METRICS).exists():
        _log.warning("%s: there is no checkpoint; it begins again at the first step.", run)
    resume_metrics(run, None)
    return None


def _generations(run: Path) -> list[Path]:
    """Checkpoints, the newest first, whole or not."""
    names = (run / CHECKPOINTS).glob(f"{_PREFIX}*")
    folders = [each for each in names if each.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(folders, key=step_of, reverse=True)
