"""New weights for the workers of a stream, which run ahead of the loop that sets the weights.

They travel in a small file: a header with the workers' progress, then one line per change. Each
process locks the file to read or write it. So either a worker reads a change before it makes the
first batch concerned, or the change comes too late and is refused.
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
    """The header of the file."""

    end: int
    """No batch from this step on has been begun."""
    num_workers: int
    """Processes that make the batches; 0 before the first batch."""
    pass_seed: int
    """Identifies the workers' pass over the loader."""


_HEADER = struct.Struct("<qqq")


class WorkerFile:
    """The file of one pass, shared by the training process and its workers; can be pickled.

    `seek` replaces it by a new file. Workers that still run then find their file deleted.
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
            # Opened anew: forked processes would share the descriptor and its lock.
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
        """The workers' progress; locks the file."""
        with self.locked() as file:
            return self.progress_in(file)

    def progress_in(self, file: int) -> WorkerProgress:
        """The workers' progress, from the locked file."""
        return WorkerProgress(*_HEADER.unpack(os.pread(file, _HEADER.size, 0)))

    def post(self, file: int, change: Change) -> None:
        """Append a change to the locked file."""
        line = (json.dumps(change) + "\n").encode()
        end = os.lseek(file, 0, os.SEEK_END)
        os.write(file, line)
        # This process has the change already, and so have workers that it forks later.
        self._read_up_to = end + len(line)

    def take(self, step: int, *, num_workers: int, pass_seed: int) -> list[Change]:
        """Begin batch `step` in a worker.

        Returns:
            The changes since this worker began its last batch.

        Raises:
            RuntimeError: another pass has begun, `seek` was called after these workers started, or
                this system has no file locks.
        """
        if fcntl is None:
            raise RuntimeError(
                "Workers of a stream read new weights from a locked file, and this system has no "
                "file locks. Use DataLoader(num_workers=0) or DomainMixture.batches()."
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
    """The message that refuses a second pass."""
    return (
        f"There was a pass over this mixture already. Its loader has taken the batches up to step "
        f"{end}, and the loop may have used fewer. Call mixture.seek(step) with the step at which "
        "another pass begins."
    )


def _remove(path: str, process: int) -> None:
    # A forked worker discards its copy of the object at its end, but the parent owns the file.
    if os.getpid() == process and os.path.exists(path):
        os.unlink(path)
