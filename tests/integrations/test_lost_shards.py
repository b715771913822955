"""A rank of a sharded model that ends: the others say which, in what its collectives raise."""

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


def run_rank(rank: int, store: str, answers: "Queue[tuple[float, str]]") -> None:
    torch.set_num_threads(1)
    with group(rank, 2, store, TIMEOUT_SECONDS):
        model = fully_shard(small_model())
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DoGEOptimizer(inner, domains=["a", "b"], mu=5.0)
        enter(model, optimizer, "a")
        if rank == 1:
            os._exit(3)
        start = time.monotonic()
        try:
            enter(model, optimizer, "b")
        except RuntimeError as error:
            answers.put((time.monotonic() - start, "\n".join(error.__notes__)))


@pytest.mark.exhaustive
def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers: Queue[tuple[float, str]] = context.Queue()
    arguments = [(rank, str(tmp_path / "store"), answers) for rank in range(2)]
    processes = [context.Process(target=run_rank, args=each) for each in arguments]
    for process in processes:
        process.start()
    try:
        seconds, said = answers.get(timeout=PATIENCE_SECONDS)
    finally:
        for process in processes:
            process.kill()
    # In the model's collective, and once more to tell the others.
    assert seconds < 2 * TIMEOUT_SECONDS + 5
    assert said.startswith("rank 1 did not answer")
