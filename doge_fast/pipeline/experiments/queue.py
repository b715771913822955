"""One queue for an experiment, and its workers: each runs the same loop over the same runs.

Nobody schedules. A worker takes the first run that is not made, whose inputs are there and that it
can lock; the lock goes when its process dies, so the next worker takes over what a dead one has
left. Workers meet in a directory alone: a lock for every run, and a file for every run that failed.
Whoever starts them, here or through submitit, ends them where it is interrupted, and prints the
lines that they leave; all else that a worker says goes to a file of its own.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from filelock import BaseFileLock, FileLock, SoftFileLease, Timeout

from doge_fast import failures
from doge_fast.failures import one_line

# What a worker runs; it is told who it is.
Loop = Callable[[str], None]
EVENTS = "events.log"
# Between looks for a run that can be taken, and for what workers have told.
_PAUSE_S = 1.0
_SHOW_S = 0.2

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
        is_made: Callable[[str], bool],
        worker: str = "",
    ) -> None:
        """Make runs until each is made, here or by another worker, or has failed.

        Args:
            runs: {name: names of the runs that it reads}.
            make: makes a run, goes on with one, or finds it complete.
            is_made: whether nothing is left to do for a run, so that others can read it.
            worker: who this is, for the events.
        """
        numbers = {name: f"run {n} of {len(runs)}: {name}" for n, name in enumerate(runs, start=1)}
        # Kept, for a lease is over when its heartbeat has been seen to stand still.
        locks = {name: self.lock(name) for name in runs}

        def is_settled(name: str) -> bool:
            if is_made(name) or self._failed(name).exists():
                return True
            return any(not is_made(each) and is_settled(each) for each in runs.get(name, ()))

        def make_whole(name: str) -> None:
            make(name)
            assert is_made(name), f"{name} was made and is not complete"

        def is_tried(name: str) -> bool:
            if not all(map(is_made, runs[name])):
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


class Worker(NamedTuple):
    """A worker, seen from here."""

    is_running: Callable[[], bool]
    stop: Callable[[], object]


def run_workers(loop: Loop, count: int, folder: Path, submitit: Sequence[str] | None) -> None:
    """Start workers, print their events, and return when all have ended.

    Args:
        loop: what each runs; can be pickled.
        count: of workers.
        folder: the queue's, for events and what the workers print.
        submitit: None: processes of this machine. Otherwise NAME=VALUE, parameters of submitit's
            AutoExecutor, and `cluster`.

    Raises:
        ValueError: submitit does not take a parameter.
        RuntimeError: submitit finds no such cluster.
    """
    events = folder / EVENTS
    events.touch()
    with events.open(encoding="utf-8") as lines:
        lines.seek(0, os.SEEK_END)
        crew: list[Worker] = []
        try:
            if submitit is None:
                # One by one: those that have been started are ended, come what may.
                crew.extend(_started(loop, count, folder))
            else:
                crew.extend(_submitted(loop, count, folder, submitit))
            while any([worker.is_running() for worker in crew]):
                _show(lines)
                time.sleep(_SHOW_S)
        finally:
            for worker in crew:
                worker.stop()
            _show(lines)


def _show(lines: Any) -> None:
    for line in lines:
        _log.info("%s", line.rstrip("\n"))


def _started(loop: Loop, count: int, folder: Path) -> Iterator[Worker]:
    """Processes of this machine, which share its cores and its GPUs."""
    context = multiprocessing.get_context("spawn")
    _log.info("%d workers; what they print is in %s", count, folder / "worker-*.log")
    for number in range(1, count + 1):
        process = context.Process(target=_process, args=(loop, number, count, folder))
        process.start()
        yield _watched(process, number)


def _watched(process: Any, number: int) -> Worker:
    told: list[str] = []

    def is_running() -> bool:
        if process.exitcode and not told:
            told.append(f"worker {number} ended with exit code {process.exitcode}")
            _log.warning("%s: its run is left to the others", told[0])
        return bool(process.is_alive())

    def stop() -> None:
        process.terminate()
        process.join()

    return Worker(is_running, stop)


def _process(loop: Loop, number: int, count: int, folder: Path) -> None:
    """The whole life of a worker of this machine."""
    # Ctrl-C reaches all processes of a terminal; the one that started them ends them, and each
    # leaves a checkpoint.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, failures.raise_terminated)
    threading.Thread(target=_follow_parent, daemon=True).start()
    log = os.open(folder / f"worker-{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    devices = devices_of(number, torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    try:
        _begin(loop, f"worker {number} (process {os.getpid()})")
    except failures.Terminated as end:
        _log.info("Ended by SIGTERM. %s", end)
        sys.exit(failures.TERMINATED)


def devices_of(number: int, there: int, visible: str | None) -> str | None:
    """CUDA_VISIBLE_DEVICES of a worker, from 1: of the GPUs that torch sees, dealt one by one."""
    names = visible.split(",") if visible else [str(each) for each in range(there)]
    return names[(number - 1) % there] if there else None


def _follow_parent() -> None:
    """End with the process that started this one, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _begin(loop: Loop, worker: str) -> None:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    _log.setLevel(logging.INFO)
    loop(worker)


class Turn:
    """A worker as submitit takes it: a job that is preempted, or out of time, asks for another."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def __call__(self, number: int) -> None:
        """Work."""
        from submitit import JobEnvironment

        job = JobEnvironment()
        _begin(self.loop, f"worker {number} (job {job.job_id} on {job.hostname}, {os.getpid()})")

    def checkpoint(self, number: int) -> Any:
        """What the next job does: the same, for the runs keep their own checkpoints."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, number)


def _submitted(loop: Loop, count: int, folder: Path, words: Sequence[str]) -> list[Worker]:
    """Jobs of a cluster."""
    from submitit import AutoExecutor

    told = {"cluster": "slurm", "name": "doge-fast"}
    pairs = (word.partition("=") for word in words)
    try:
        told |= {name: yaml.safe_load(value) for name, _, value in pairs}
        executor = AutoExecutor(folder=folder / "jobs", cluster=told.pop("cluster"))
        executor.update_parameters(**told)
    except RuntimeError as error:
        raise RuntimeError(
            f"submitit cannot start jobs here: {one_line(error)}. Start this where jobs are "
            "submitted from, or give --workers."
        ) from error
    except (NameError, AssertionError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"submitit does not take these parameters: {error}") from error
    jobs = executor.map_array(Turn(loop), range(1, count + 1))
    _log.info(
        "jobs %s; what they print is in %s", ", ".join(j.job_id for j in jobs), jobs[0].paths.folder
    )
    return [_job(each) for each in jobs]


def _job(job: Any) -> Worker:
    def stop() -> None:
        if not job.done():
            job.cancel(check=False)

    return Worker(lambda: not job.done(), stop)
