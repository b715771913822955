"""One queue for an experiment: every worker runs the same loop over the same runs.

Nobody schedules. A worker takes the first run that is not made, whose inputs are there and that it
can lock; the lock goes when its process dies, so the next worker takes over what a dead one has
left. Workers meet in a directory alone: a lock for every run, and a file for every run that failed.
"""

import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLease, Timeout

from doge_fast.failures import one_line

EVENTS = "events.log"
_PAUSE_S = 1.0

_log = logging.getLogger("doge_fast")


class Queue:
    """What workers of an experiment know of each other.

    Args:
        folder: for locks, failures and events; made where absent.
        lease: None: a run is claimed by flock. A number: by a lease with a heartbeat that ends this
            many seconds after the last beat, for file systems whose flock another machine does not
            see. A worker that finds its lease taken ends at once.
    """

    def __init__(self, folder: Path, lease: float | None = None) -> None:
        self.folder, self.lease = folder, lease
        folder.mkdir(parents=True, exist_ok=True)

    def lock(self, name: str) -> BaseFileLock:
        """The claim of a run."""
        path = self.folder / f"{name}.lock"
        if self.lease is None:
            # A marker instead of flock would outlive a process of another machine.
            return FileLock(path, fallback_to_soft=False)
        return SoftFileLease(path, lease_duration=self.lease, on_compromise=_end)

    def tell(self, event: str) -> None:
        """A line for whoever watches."""
        _log.info("%s", event)
        with (self.folder / EVENTS).open("a", encoding="utf-8") as file:
            file.write(event + "\n")

    def failure(self, name: str) -> str | None:
        """Why a run failed, in a sentence, if it did."""
        file = self._failed(name)
        return file.read_text(encoding="utf-8").split("\n")[0] if file.exists() else None

    def forget_failures(self) -> None:
        """Let runs that failed be tried again."""
        for file in self.folder.glob("*.failed"):
            file.unlink(missing_ok=True)

    def work(
        self,
        runs: Mapping[str, Collection[str]],
        make: Callable[[str], None],
        *,
        is_there: Callable[[str], bool],
        is_made: Callable[[str], bool],
        worker: str = "",
    ) -> None:
        """Make runs until each is made, here or by another worker, or has failed.

        Args:
            runs: {name: names of the runs that it reads}.
            make: makes a run, goes on with one, or finds it complete.
            is_there: whether a run can be read.
            is_made: whether nothing is left to do for a run.
            worker: who this is, for the events.
        """
        numbers = {name: f"run {n} of {len(runs)}: {name}" for n, name in enumerate(runs, start=1)}
        # Kept, for a lease is over when its heartbeat has been seen to stand still.
        locks = {name: self.lock(name) for name in runs}

        def is_settled(name: str) -> bool:
            if is_made(name) or self._failed(name).exists():
                return True
            return any(is_settled(each) and not is_there(each) for each in runs.get(name, ()))

        def make_whole(name: str) -> None:
            make(name)
            assert is_made(name), f"{name} was made and is not complete"

        def is_tried(name: str) -> bool:
            if not all(map(is_there, runs[name])):
                return False
            try:
                claim = locks[name].acquire(timeout=0)
            except Timeout:
                return False
            with claim:
                # Another worker may have been here since.
                if not is_settled(name):
                    self._try(name, make_whole, numbers[name], worker)
            return True

        left = list(runs)
        while left := [name for name in left if not is_settled(name)]:
            if not any(map(is_tried, left)):
                time.sleep(_PAUSE_S)

    def _try(self, name: str, make: Callable[[str], None], told: str, worker: str) -> None:
        self.tell(f"{told} begins{worker and f' on {worker}'}")
        start = time.monotonic()
        try:
            make(name)
        except Exception as error:
            sentence = one_line(error)
            self._failed(name).write_text(f"{sentence}\n\n{traceback.format_exc()}", "utf-8")
            self.tell(f"{told} failed: {sentence}")
        else:
            self.tell(f"{told} done in {time.monotonic() - start:.0f} s")

    def _failed(self, name: str) -> Path:
        return self.folder / f"{name}.failed"


def _end(_: object) -> None:
    """Another worker has this one's run: not a byte more may be written."""
    os.kill(os.getpid(), signal.SIGKILL)
