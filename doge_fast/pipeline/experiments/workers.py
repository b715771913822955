"""Starts an experiment's workers, here or through submitit, and shows what they tell.

Workers are equals and need nobody: what is here starts them, ends them where it is interrupted, and
prints the lines that they leave. All else that a worker says goes to a file of its own.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from doge_fast import failures
from doge_fast.failures import one_line
from doge_fast.pipeline.experiments.queue import EVENTS

# What a worker runs; it is told who it is.
Loop = Callable[[str], None]
_PAUSE_S = 0.2

_log = logging.getLogger("doge_fast")


class Worker(NamedTuple):
    """A worker, seen from here."""

    is_running: Callable[[], bool]
    stop: Callable[[], object]


def run(loop: Loop, count: int, folder: Path, submitit: Sequence[str] | None) -> None:
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
                time.sleep(_PAUSE_S)
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
    """CUDA_VISIBLE_DEVICES of a worker: the GPUs are dealt in turn, one each.

    Args:
        number: of the worker, from 1.
        there: GPUs that torch sees.
        visible: the variable as it is.
    """
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
    told |= {name: yaml.safe_load(value) for name, _, value in (w.partition("=") for w in words)}
    try:
        executor = AutoExecutor(folder=folder / "jobs", cluster=told.pop("cluster"))
    except RuntimeError as error:
        raise RuntimeError(
            f"submitit cannot start jobs here: {one_line(error)}. Start this where jobs are "
            "submitted from, or give --workers."
        ) from error
    try:
        executor.update_parameters(**told)
    except (NameError, AssertionError) as error:
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
