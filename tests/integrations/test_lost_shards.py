"""A rank of a sharded model that ends or hangs: the others say which one, within the timeout."""

import os
import time
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch
from torch import multiprocessing
from torch.distributed.fsdp import fully_shard

from doge_fast import DoGEOptimizer
from tests.integrations.test_ranks_that_differ import enter
from tests.integrations.test_several_processes import small_model
from tests.ranks import group

TIMEOUT_SECONDS = 8.0
# Of starting processes that import FSDP2, on a busy machine.
PATIENCE_SECONDS = 120


def run_rank(rank: int, store: str, how: str, answers: "Queue[tuple[float, str]]") -> None:
    torch.set_num_threads(1)
    with group(rank, 2, store, TIMEOUT_SECONDS):
        model = fully_shard(small_model())
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DoGEOptimizer(inner, domains=["a", "b"], mu=5.0, micro_batches=None)
        enter(model, optimizer, "a")
        if rank == 1 and how == "ends":
            os._exit(3)
        start = time.monotonic()
        try:
            enter(model, optimizer, "b")
            if rank == 1:
                time.sleep(60)
            start = time.monotonic()
            optimizer.step()
        except RuntimeError as error:
            said = [*getattr(error, "__notes__", ()), str(error)]
            answers.put((time.monotonic() - start, said[0]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["ends", "hangs"])
def test_a_lost_rank_is_named(tmp_path: Path, how: str) -> None:
    context = multiprocessing.get_context("spawn")
    answers: Queue[tuple[float, str]] = context.Queue()
    arguments = [(rank, str(tmp_path / "store"), how, answers) for rank in range(2)]
    processes = [context.Process(target=run_rank, args=each) for each in arguments]
    for process in processes:
        process.start()
    try:
        seconds, said = answers.get(timeout=PATIENCE_SECONDS)
    finally:
        for process in processes:
            process.kill()
    # Where a rank ends: in the model's collective, and once more to tell the others.
    assert seconds < (2 if how == "ends" else 1) * TIMEOUT_SECONDS + 5
    assert said.startswith("rank 1 did not answer")
