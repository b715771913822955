"""Write files so that a reader sees the old content or the new, never a part of it."""

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

_ENDING = ".writing"
# Older temporary files were left by killed processes.
_ABANDONED_SECONDS = 3600.0


def write(path: Path, content: str | bytes) -> None:
    """Write a temporary file in the directory of `path`, sync it, and rename it to `path`.

    The file gets the mode of a new file; text is UTF-8. A link at `path` is followed, as by `open`;
    a pipe or a device is written to directly.

    Raises:
        OSError: the file cannot be written; `path` is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    _remove_abandoned(path)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_ENDING}")
    try:
        # O_EXCL refuses a link that somebody has put there.
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(beside)
        if isinstance(error, OSError) and error.errno:
            # Otherwise the message names the temporary file, or none.
            error.filename = str(path)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Sync a directory's list of names to disk, if the system can."""
    # Windows opens no directories, and some network file systems do not sync them.
    with suppress(OSError):
        sync(directory)


def sync(path: Path) -> None:
    """Sync a file or a directory to disk, so that it survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of `path` that killed processes have left."""
    start = f".{path.name}."
    # OSError: another process may remove them at the same time.
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.startswith(start) and entry.name.endswith(_ENDING):
                age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if age > _ABANDONED_SECONDS:
                    os.unlink(entry.path)
