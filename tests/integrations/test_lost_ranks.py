"""A rank that ends or hangs: the others end too, within the timeout, in words that name it."""

import os
import time
from multiprocessing.queues import Queue

import pytest
import torch
from torch import multiprocessing, nn
from torch.distributed.fsdp import fully_shard

from doge_fast import DoGEOptimizer
from tests.integrations.test_ranks_that_differ import enter
from tests.integrations.test_several_processes import small_model
from tests.ranks import group

TIMEOUT_SECONDS = 8.0
LOST = 1
# Of starting processes that import FSDP2, on a busy machine.
PATIENCE_SECONDS = 120


def run_rank(
    rank: int,
    num_ranks: int,
    kind: str,
    how: str,
    store: str,
    answers: "Queue[tuple[int, float, str]]",
) -> None:
    torch.set_num_threads(1)
    with group(rank, num_ranks, store, TIMEOUT_SECONDS):
        model: nn.Module = small_model()
        if kind == "shards":
            model = fully_shard(model)
        names = "ab" if kind == "shards" else "abcdefgh"
        here = names if kind == "shards" else (names[rank], names[rank + num_ranks])
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DoGEOptimizer(inner, domains=list(names), mu=5.0, micro_batches=None)
        start = 0.0
        try:
            for step in range(3):
                is_lost = rank == LOST and step == 1
                enter(model, optimizer, here[0])
                if is_lost and how == "ends":
                    os._exit(3)
                start = time.monotonic()
                enter(model, optimizer, here[1])
                if is_lost:
                    time.sleep(60)
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError as error:
            said = [*getattr(error, "__notes__", ()), str(error)]
            answers.put((rank, time.monotonic() - start, said[0]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["ends", "hangs"])
@pytest.mark.parametrize(("kind", "num_ranks"), [("columns", 4), ("shards", 2)])
def test_a_lost_rank_is_named(tmp_path, kind, num_ranks, how):
    context = multiprocessing.get_context("spawn")
    answers: Queue[tuple[int, float, str]] = context.Queue()
    shared = (num_ranks, kind, how, str(tmp_path / "store"), answers)
    processes = [
        context.Process(target=run_rank, args=(rank, *shared)) for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        found = sorted(answers.get(timeout=PATIENCE_SECONDS) for _ in range(num_ranks - 1))
    finally:
        for process in processes:
            process.kill()
    assert [rank for rank, _, _ in found] == [rank for rank in range(num_ranks) if rank != LOST]
    # Where a rank of a sharded model ends: in a collective of the model, and to tell the others.
    num_timeouts = 2 if (kind, how) == ("shards", "ends") else 1
    for _, seconds, said in found:
        assert seconds < num_timeouts * TIMEOUT_SECONDS + 5
        assert said.startswith(f"rank {LOST} did not answer")
