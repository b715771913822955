"""Writing a file so that a reader sees the old one or the new one, and never half of one."""

import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

_ENDING = ".writing"
# What is older was left by a process that was killed.
_ABANDONED_SECONDS = 3600.0


def write(path: Path, content: str | bytes) -> None:
    """Write a file beside `path`, on the disk, and rename it over `path`.

    The file's mode is that of any new file. A link at `path` is followed, as by `open`.

    Args:
        path: in a directory that exists; a pipe or a device is written to directly.
        content: text is written as UTF-8.

    Raises:
        OSError: it cannot be written; `path` is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    _sweep(path)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_ENDING}")
    try:
        # Exclusive: nobody can have put a link there.
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(beside)
        if isinstance(error, OSError) and error.errno:
            # Not the name of the file beside it, or none.
            error.filename = str(path)
        raise
    keep_names(path.parent)


def open_as_new(folder: Path) -> None:
    """Give every file in a folder the mode that a new one has; safetensors' are their owner's."""
    probe = folder / f".{secrets.token_hex(8)}{_ENDING}"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)


def keep_names(directory: Path) -> None:
    """Have the names in a directory survive a loss of power, where the system can."""
    # Windows opens no directories, and some network file systems do not sync them.
    with suppress(OSError):
        keep(directory)


def keep(path: Path) -> None:
    """Have what a file or a directory holds survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(path: Path) -> None:
    """Remove what killed processes left of this file."""
    start = f".{path.name}."
    # Another process may sweep them too.
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.startswith(start) and entry.name.endswith(_ENDING):
                age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if age > _ABANDONED_SECONDS:
                    os.unlink(entry.path)
