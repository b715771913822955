"""The directory of finished folders, each under a digest of what it depends on.

Whatever is dear to make is made in a scratch folder and moved to its name when it is whole, so
a run that is killed leaves nothing half made. Each has a manifest, and what no longer agrees with
it is made again. Processes that want the same folder at the same time, the ranks of a run for
example, wait for the first of them.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock, Timeout

from doge_fast.kernels.build import cache_dir
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.failures import FileFailure, one_line
from doge_fast.pipeline.records.manifest import read_manifest, write_manifest

_log = logging.getLogger("doge_fast")

_SCRATCH = ".making-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def made(config: CorpusConfig, kind: str, key: str, make: Callable[[Path], object]) -> Path:
    """The path of one folder; `make` is told where to make it where it is absent."""
    return made_together(config, kind, {kind: key}, lambda paths: make(paths[kind]))[kind]


def made_together(
    config: CorpusConfig,
    kind: str,
    keys: Mapping[str, str],
    make: Callable[[Mapping[str, Path]], object],
) -> dict[str, Path]:
    """{name: path} of the folders with these {name: key}; `make` makes all that are absent.

    One that no longer holds what was written is taken for absent.
    """
    folder = (Path(config.cache_dir).expanduser() if config.cache_dir else cache_dir()) / kind
    paths = {name: folder / key for name, key in keys.items()}
    if all(map(_is_whole, paths.values())):
        return paths
    with _refused(folder):
        # By default for this user alone: compiled operators are loaded from there.
        mode = 0o777 if config.cache_dir else 0o700
        folder.parent.mkdir(mode=mode, parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
    lock = f"{kind}-{digest(dict(keys))}"
    with _one_at_a_time(folder.parent / "locks", lock) as is_alone:
        absent = [name for name in paths if not _is_whole(paths[name])]
        if not absent:
            return paths
        _log.info("Making %s in %s.", ", ".join(absent), folder)
        if is_alone:
            _sweep(folder, lock)
        with _refused(folder):
            # On the file system that folders are moved on.
            scratch = TemporaryDirectory(
                dir=folder, prefix=f"{_SCRATCH}{lock}-", ignore_cleanup_errors=True
            )
        with scratch as scratch_name, _refused_where_full(folder):
            written = {name: Path(scratch_name, str(n)) for n, name in enumerate(absent)}
            make(written)
            for name, path in written.items():
                write_manifest(path)
                _keep(path, paths[name], Path(scratch_name))
    return paths


@contextmanager
def _refused(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileFailure(
            f"The cache must be writable; {folder} is not: {one_line(error)}. "
            "Name another with cache_dir (--cache-dir) or $DOGE_FAST_CACHE."
        ) from error


@contextmanager
def _refused_where_full(folder: Path) -> Iterator[None]:
    """As `_refused`, for those who write there and do not say which file."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        with _refused(folder):
            raise OSError(error.errno, os.strerror(error.errno)) from error


def _sweep(folder: Path, lock: str) -> None:
    """Remove what killed processes were making: nobody holds the lock that it is named by."""
    for left in folder.glob(f"{_SCRATCH}*"):
        other = left.name.removeprefix(_SCRATCH).rpartition("-")[0]
        with suppress(OSError, Timeout), ExitStack() as held:
            if other != lock:
                held.enter_context(FileLock(folder.parent / "locks" / other).acquire(timeout=0))
            shutil.rmtree(left)


def _is_whole(folder: Path) -> bool:
    """Whether it holds what was written, and no other file."""
    try:
        written = read_manifest(folder)["files"]
    except ValueError:
        return False
    # The manifest itself is the one more.
    return sum(each.is_file() for each in folder.rglob("*")) == len(written) + 1


@contextmanager
def _one_at_a_time(folder: Path, name: str) -> Iterator[bool]:
    """Whoever comes second waits for the first, and finds its work; a killed one is not waited for.

    Where a file system has no locks, which is what is yielded, both make the same.
    """
    lock = FileLock(folder / name, fallback_to_soft=False)
    with suppress(OSError, NotImplementedError):
        folder.mkdir(exist_ok=True)
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _keep(written: Path, path: Path, scratch: Path) -> None:
    """Move it to its name, unless another process has; what is damaged makes way."""
    if _is_whole(path):
        return
    if os.path.lexists(path):
        _log.warning("%s is damaged, or without its manifest: it was made again.", path)
        # Moved, not removed: who has it open reads on.
        path.rename(scratch / f"old-{path.name}")
    written.rename(path)


def digest(value: Any) -> str:
    """SHA-256 of a value that JSON can hold, shortened to what names a folder."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def text_hash(text: str) -> int:
    """64 bits of a text, the same everywhere, by which files and documents are drawn."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
