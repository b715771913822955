"""manifest.json: what a finished folder holds, written into it last.

After a kill, a full disk or a loss of power a folder with half of its files looks finished, and a
flipped bit looks like any other. The manifest has the size and SHA-256 of every file, so a reader
can tell. A run writes `model/` last, so a whole `model/` means that the run is complete.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from doge_fast import atomic_file
from doge_fast.pipeline.failures import FileFailure, UserError
from doge_fast.pipeline.records.schema import (
    MANIFEST,
    Json,
    ManifestRecord,
    check_shape,
    read_json,
)
from doge_fast.weights.weights_file import SCHEMA_VERSION, write_json

MODEL = "model"
# A folder has one or two large files; each is hashed by one thread and synced by another.
_THREADS = 4


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
