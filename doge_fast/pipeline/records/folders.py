"""Folders of a run that are written whole: model/, and checkpoints/ while it trains.

After a kill, a full disk or a loss of power a folder with half of its files looks finished, and a
flipped bit looks like any other. So each has a manifest.json, written last, with the size and
SHA-256 of every file. A run writes `model/` last: a whole `model/` means that the run is complete.

A checkpoint is such a folder in Trainer's format; its manifest also has the digest of metrics.jsonl
at its step. It is written under another name and renamed. Two are kept, so a damaged one costs the
steps between them and no more. A lock lets one launch at a time work in a run's directory.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from doge_fast import atomic_file
from doge_fast.pipeline.failures import FileFailure, UserError
from doge_fast.pipeline.records.runs import keep_metrics, resume_metrics
from doge_fast.pipeline.records.schema import (
    CHECKPOINTS,
    MANIFEST,
    METRICS,
    WRITING,
    Json,
    ManifestRecord,
    check_shape,
    read_json,
)
from doge_fast.weights.weights_file import SCHEMA_VERSION, write_json

MODEL = "model"
# How many checkpoints stay.
GENERATIONS = 2
_PREFIX = "checkpoint-"
# A folder has one or two large files; each is hashed by one thread and synced by another.
_THREADS = 4

_log = logging.getLogger("doge_fast")


def write_manifest(folder: Path, **fields: Any) -> None:
    """Have every file of a folder on the disk, and then say in manifest.json what they are.

    `fields` are further fields of it. Files are hashed while the disk writes them.
    """
    files = _files(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        kept = pool.map(atomic_file.sync, files)
        digests = list(pool.map(_digest, files))
        list(kept)
    for directory in {file.parent for file in files}:
        atomic_file.sync_directory(directory)
    held = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256}
        for file, sha256 in zip(files, digests, strict=True)
    }
    write_json(folder / MANIFEST, {"schema_version": SCHEMA_VERSION, "files": held, **fields})


def read_manifest(folder: Path, *, is_hashed: bool = True) -> Json:
    """The manifest of a folder that is whole: every file that it names is as it was written.

    `is_hashed=False` looks at sizes alone, which takes no time.

    Raises:
        UserError: what is wrong with which file.
    """
    try:
        record = read_json(folder / MANIFEST)
        for name, entry in check_shape(record, ManifestRecord, folder / MANIFEST).files.items():
            _check_file(folder / name, name, entry, is_hashed=is_hashed)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None
    return record


def has_model(run: Path, *, is_hashed: bool = True) -> bool:
    """Whether a run has a model; an empty folder is none. `is_hashed` as for `read_manifest`.

    Raises:
        FileFailure: it has one, which is damaged.
    """
    folder = run / MODEL
    if not any(folder.glob("*")):
        return False
    try:
        read_manifest(folder, is_hashed=is_hashed)
    except ValueError as error:
        raise FileFailure(
            f"{folder} is damaged: {str(error).rstrip('.')}. Restore it, or remove the folder and "
            "repeat the command that began the run."
        ) from None
    return True


def check_finished(run: Path) -> None:
    """Raise UserError where a run has no model yet, or a damaged one; reads all of it."""
    if not has_model(run):
        raise UserError(
            f"{run} has no {MODEL}/: its run is not complete. Repeat the command that began it; it "
            "resumes. Runs of select leave none."
        )


def _check_file(file: Path, name: str, entry: Json, *, is_hashed: bool) -> None:
    if not file.is_file():
        raise UserError(f"{name} is missing")
    size, expected = file.stat().st_size, entry.get("bytes")
    if size != expected:
        raise UserError(f"{name} has {size} bytes, and {expected} were written")
    if is_hashed and _digest(file) != entry.get("sha256"):
        raise UserError(f"{name} is not what was written: its sha256 differs")


def _files(folder: Path) -> list[Path]:
    """All but the manifest itself, the largest first: the others are done beside it."""
    files = [each for each in folder.rglob("*") if each.is_file() and each.name != MANIFEST]
    return sorted(files, key=lambda file: (-file.stat().st_size, file))


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


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
