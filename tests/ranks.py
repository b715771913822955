"""Processes that are the ranks of a torch.distributed group, kept for all tests of a session."""

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing

MOST = 4
# What is imported once, before ranks are forked. None of it looks for a GPU.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    ["pytest", "torch", "doge_fast.cli", "doge_fast.pipeline.proxy", "doge_fast.pipeline.base"]
)
# Of a collective; tests of ranks that are lost say less.
TIMEOUT_SECONDS = 30.0

Work = Callable[..., Any]


class Ranks:
    """Up to `MOST` processes that wait for work; what they import takes seconds, once."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self, num_ranks: int) -> None:
        """Have that many, at least."""
        for rank in range(len(self._pipes), num_ranks):
            here, there = FORKSERVER.Pipe()
            process = FORKSERVER.Process(target=_serve, args=(rank, there), daemon=True)
            process.start()
            # Its own end alone is open: a process that dies is heard.
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, num_ranks: int, work: Work, *args: Any) -> list[Any]:
        """What `work(*args)` returns on each of `num_ranks` ranks of a new gloo group.

        Args:
            num_ranks: at most `MOST`.
            work: a function of a module, which each process imports.
            args: that can be pickled.
        """
        self._start(num_ranks)
        try:
            answers = self._answers(num_ranks, work, args)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            for process in self._processes:
                process.join(1)
            codes = [process.exitcode for process in self._processes]
            # The next test has others.
            self.close()
            raise AssertionError(f"A rank has died; exit codes: {codes}.") from None
        failures = [f"rank {rank}:\n{text}" for rank, (text, _) in enumerate(answers) if text]
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def _answers(self, num_ranks: int, work: Work, args: tuple[Any, ...]) -> list[Any]:
        pipes = self._pipes[:num_ranks]
        with tempfile.TemporaryDirectory() as folder:
            for pipe in pipes:
                pipe.send((num_ranks, str(Path(folder, "store")), work, args))
            # Some have imported the work before, and would wait for the others in the group.
            for pipe in pipes:
                pipe.recv()
            for pipe in pipes:
                pipe.send("go")
            return [pipe.recv() for pipe in pipes]

    def close(self) -> None:
        """End the processes: they keep nothing, so nobody waits for what torch clears."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._pipes.clear()
        self._processes.clear()


@contextmanager
def group(
    rank: int, num_ranks: int, store: str, timeout_seconds: float = TIMEOUT_SECONDS
) -> Iterator[None]:
    """Be a rank of the default group."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        # gloo ends a process whose partner leaves while it still connects.
        dist.barrier()
        yield
    finally:
        dist.destroy_process_group()


def as_launched() -> None:
    """Set what torchrun sets, for hosts that look there; the group is there already."""
    # Not all tests need it, and it takes seconds.
    from accelerate.state import AcceleratorState

    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
    os.environ |= names | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    # It remembers the group of the test before.
    AcceleratorState._reset_state(reset_partial_state=True)


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        num_ranks, store, work, args = pipe.recv()
        pipe.send("ready")
        pipe.recv()
        try:
            with group(rank, num_ranks, store):
                answer = ("", work(*args))
        except BaseException:
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
