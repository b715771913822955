"""The folder in which finished things are kept, each under a digest of what it depends on.

Whatever is dear to make is made in a scratch folder and moved to its name when it is whole, so
a run that is killed leaves nothing half made, and runs side by side need no lock.
"""

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from doge_fast.kernels.build import cache_dir
from doge_fast.pipeline.config import CorpusConfig


def directory(config: CorpusConfig) -> Path:
    """Where packed blocks are kept."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else cache_dir()


def made(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, which `make` writes under another name where it is absent."""
    if not path.exists():
        with scratch(path.parent) as folder:
            make(folder / path.name)
            keep(folder / path.name, path)
    return path


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder to make things in, on the file system they are to be moved on; then deleted."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=".making-"))
    except OSError as error:
        raise ValueError(
            f"The cache must be writable; {parent} is not: {one_line(error)}. "
            "Name another with cache_dir (--cache-dir) or $DOGE_FAST_CACHE."
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def keep(made: Path, path: Path) -> None:
    """Move what was made to its name in the cache, unless somebody else was first.

    The name is a digest of what the content depends on, so the first one's is as good.
    """
    try:
        made.rename(path)
    except OSError:
        if not path.exists():
            raise


def digest(value: Any) -> str:
    """SHA-256 of a value that JSON can hold, shortened to what names a folder."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def one_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
