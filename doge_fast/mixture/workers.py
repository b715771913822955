"""How new weights reach the workers of a stream, which run ahead of the loop that sets them.

A small file: how far the workers are, then one line per change. A process locks the file while it
reads or writes. So a worker has read a change before it makes the batch, or the change is refused.
"""

import json
import os
import struct
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

Change = tuple[int, list[float]]
"""First step, and weights in the order of the domains."""


class WorkerProgress(NamedTuple):
    """How far the workers are."""

    end: int
    """No batch from this step on has been begun."""
    num_workers: int
    """Processes that make the batches; 0: none has begun."""
    pass_seed: int
    """Which pass over the loader the workers belong to."""


_HEADER = struct.Struct("<qqq")


class WorkerFile:
    """Written by the process that trains, read by its workers; may be pickled to them.

    It serves one pass: where the next one begins elsewhere, there is a new file, and workers that
    still run find theirs gone.
    """

    def __init__(self, start: int) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="doge_fast_weights_")
        os.write(descriptor, _HEADER.pack(*WorkerProgress(start, 0, 0)))
        os.close(descriptor)
        self._read_up_to = _HEADER.size
        weakref.finalize(self, _remove, self.path, os.getpid())

    @contextmanager
    def locked(self) -> Iterator[int]:
        """The file, opened and locked.

        Raises:
            RuntimeError: `seek` or `load_state_dict` was called since the file was made.
        """
        try:
            # Each process opens it: a fork would share the lock.
            file = os.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            raise RuntimeError(
                "seek() and load_state_dict() do not reach workers that are running. Begin "
                "another pass over the loader after them, and leave persistent_workers off."
            ) from None
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def progress(self) -> WorkerProgress:
        """How far the workers are now."""
        with self.locked() as file:
            return self.progress_in(file)

    def progress_in(self, file: int) -> WorkerProgress:
        """How far the workers are. While `file` is locked they wait."""
        return WorkerProgress(*_HEADER.unpack(os.pread(file, _HEADER.size, 0)))

    def post(self, file: int, change: Change) -> None:
        """Append a change to the locked file."""
        line = (json.dumps(change) + "\n").encode()
        end = os.lseek(file, 0, os.SEEK_END)
        os.write(file, line)
        # The process that posts has the change, and so have workers forked from it later.
        self._read_up_to = end + len(line)

    def take(self, step: int, *, num_workers: int, pass_seed: int) -> list[Change]:
        """Begin batch `step` in a worker.

        Returns:
            The changes since this worker began its last batch.

        Raises:
            RuntimeError: another pass has begun before, `seek` was called after these workers
                started, or this system has no file locks.
        """
        if fcntl is None:
            raise RuntimeError(
                "Workers of a stream learn new weights through a locked file, which this system "
                "does not support. Use DataLoader(num_workers=0) or DomainMixture.batches()."
            )
        with self.locked() as file:
            progress = self.progress_in(file)
            if progress.num_workers and progress.pass_seed != pass_seed:
                raise RuntimeError(already_begun(progress.end))
            progress = WorkerProgress(max(progress.end, step + 1), num_workers, pass_seed)
            os.pwrite(file, _HEADER.pack(*progress), 0)
            size = os.fstat(file).st_size
            lines = os.pread(file, size - self._read_up_to, self._read_up_to).splitlines()
            self._read_up_to = size
            return [(first_step, weights) for first_step, weights in map(json.loads, lines)]


def already_begun(end: int) -> str:
    """Why a second pass is refused, and what to do."""
    return (
        f"This mixture was passed over already, and gave its batches up to step {end} to the "
        "loader, which may have used fewer. Call mixture.seek(step) before another pass, with the "
        "step at which it begins."
    )


def _remove(path: str, process: int) -> None:
    # A forked worker that ends discards its copy of the object; the file is the parent's.
    if os.getpid() == process and os.path.exists(path):
        os.unlink(path)
