"""How new domain weights reach the workers of a stream, which run ahead of the loop that sets them.

A small file: who has taken which step, then one line per change. Whoever reads or writes holds its
lock, so a change is either known to a worker before it makes a batch or refused to the loop.
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


class Taken(NamedTuple):
    """How far the workers are."""

    end: int
    """No batch from this step on has been begun."""
    num_workers: int
    """Processes that make them; 0: nobody has begun."""
    loading: int
    """Which pass over the loader they belong to."""
    lineage: int
    """How often the mixture was told where to begin."""


_HEADER = struct.Struct("<qqqq")


class Changes:
    """Written by the process that trains, read by its workers; may be pickled to them."""

    def __init__(self, start: int) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="doge_fast_weights_")
        os.close(descriptor)
        weakref.finalize(self, _remove, self.path, os.getpid())
        self._lineage = 0
        self.rewind(start)

    def rewind(self, start: int) -> None:
        """Nobody has begun anything; the next pass begins at this step, knowing all changes."""
        self._lineage += 1
        with self.locked() as file:
            os.ftruncate(file, 0)
            _write_header(file, Taken(start, 0, 0, self._lineage))
        self._read_up_to = _HEADER.size

    @contextmanager
    def locked(self) -> Iterator[int]:
        """The file, opened and held. Each process opens it: a fork would share the lock."""
        file = os.open(self.path, os.O_RDWR)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def taken(self, file: int) -> Taken:
        """How far the workers are, of the held file."""
        return Taken(*_HEADER.unpack(os.pread(file, _HEADER.size, 0)))

    def post(self, file: int, change: Change) -> None:
        """Append a change to the held file."""
        line = (json.dumps(change) + "\n").encode()
        end = os.lseek(file, 0, os.SEEK_END)
        os.write(file, line)
        # Whoever posts knows what was posted, and so do the workers forked from it later.
        self._read_up_to = end + len(line)

    def take(self, step: int, *, num_workers: int, loading: int) -> list[Change]:
        """A worker begins batch `step`: what has changed since it began one before.

        Raises:
            RuntimeError: another pass has begun before, the mixture was told to begin elsewhere
                after these workers started, or this system has no file locks.
        """
        if fcntl is None:
            raise RuntimeError(
                "Workers of a stream learn new weights through a locked file, which this system "
                "does not have. Use DataLoader(num_workers=0) or DomainMixture.batches()."
            )
        with self.locked() as file:
            taken = self.taken(file)
            self.check_lineage(taken)
            if taken.num_workers and taken.loading != loading:
                raise RuntimeError(already_begun(taken.end))
            end = max(taken.end, step + 1)
            _write_header(file, Taken(end, num_workers, loading, self._lineage))
            return self._unread(file)

    def check_lineage(self, taken: Taken) -> None:
        """Raise RuntimeError where the mixture was told to begin elsewhere since this copy."""
        if taken.lineage != self._lineage:
            raise RuntimeError(
                "seek() and load_state_dict() do not reach workers that are running. Begin "
                "another pass over the loader after them, and leave persistent_workers off."
            )

    def _unread(self, file: int) -> list[Change]:
        size = os.fstat(file).st_size
        lines = os.pread(file, size - self._read_up_to, self._read_up_to).decode().splitlines()
        self._read_up_to = size
        return [(first_step, weights) for first_step, weights in map(json.loads, lines)]


def already_begun(end: int) -> str:
    """What to say to a second pass."""
    return (
        f"This mixture was passed over already, and gave its batches up to step {end} to the "
        "loader, which may have used fewer. Say mixture.seek(step) before another pass, with the "
        "step at which it begins."
    )


def _write_header(file: int, taken: Taken) -> None:
    os.pwrite(file, _HEADER.pack(*taken), 0)


def _remove(path: str, process: int) -> None:
    # A forked worker that ends takes its copy with it, not the file.
    if os.getpid() == process and os.path.exists(path):
        os.unlink(path)
