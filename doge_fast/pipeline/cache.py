"""The folder in which finished things are kept, each under a digest of what it depends on.

Whatever is dear to make is made in a scratch folder and moved to its name when it is whole, so
a run that is killed leaves nothing half made. Processes that want the same thing at the same time,
the ranks of a run for example, wait for the first of them.
"""

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from doge_fast.kernels.build import cache_dir
from doge_fast.pipeline.config import CorpusConfig

_log = logging.getLogger("doge_fast")


def made(config: CorpusConfig, kind: str, key: str, make: Callable[[Path], object]) -> Path:
    """The path of one thing; `make` is told where to write it where it is absent."""
    return made_together(config, kind, {kind: key}, lambda paths: make(paths[kind]))[kind]


def made_together(
    config: CorpusConfig,
    kind: str,
    keys: Mapping[str, str],
    make: Callable[[Mapping[str, Path]], object],
) -> dict[str, Path]:
    """{name: path} of the things with these {name: key}; `make` writes all that are absent.

    Raises:
        ValueError: the cache cannot be written.
    """
    folder = (Path(config.cache_dir).expanduser() if config.cache_dir else cache_dir()) / kind
    paths = {name: folder / key for name, key in keys.items()}
    absent = [name for name, path in paths.items() if not path.exists()]
    if not absent:
        return paths
    try:
        # By default for this user alone: compiled operators are loaded from there.
        mode = 0o777 if config.cache_dir else 0o700
        folder.parent.mkdir(mode=mode, parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        # On the file system that things are moved on.
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".making-"))
    except OSError as error:
        raise ValueError(
            f"The cache must be writable; {folder} is not: {one_line(error)}. "
            "Name another with cache_dir (--cache-dir) or $DOGE_FAST_CACHE."
        ) from error
    try:
        with _one_at_a_time(folder.parent / "locks", f"{kind}-{digest(dict(keys))}"):
            absent = [name for name in absent if not paths[name].exists()]
            if absent:
                _log.info("Making %s in %s.", ", ".join(absent), folder)
                written = {name: scratch / str(index) for index, name in enumerate(absent)}
                make(written)
                for name, path in written.items():
                    _keep(path, paths[name])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return paths


@contextmanager
def _one_at_a_time(folder: Path, name: str) -> Iterator[None]:
    """Whoever comes second waits for the first, and finds its work; a killed one is not waited for.

    Where a file system has no locks, both make the same.
    """
    lock = FileLock(folder / name)
    with suppress(OSError, NotImplementedError):
        folder.mkdir(exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _keep(written: Path, path: Path) -> None:
    """Move it to its name, unless somebody was first: of the same key, that one is as good."""
    try:
        written.rename(path)
    except OSError:
        if not path.exists():
            raise


def digest(value: Any) -> str:
    """SHA-256 of a value that JSON can hold, shortened to what names a folder."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def one_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
