"""A rank that ends or hangs: the others end too, in words that name it."""

import os
import time
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch
from torch import multiprocessing

from tests.integrations.test_ranks_that_differ import built, enter
from tests.ranks import Ranks, group

TIMEOUT_SECONDS = 8.0
NUM_RANKS, LOST = 4, 1


def run_rank(rank: int, store: str, how: str, answers: "Queue[tuple[int, float, str]]") -> None:
    torch.set_num_threads(1)
    with group(rank, NUM_RANKS, store, TIMEOUT_SECONDS):
        model, optimizer = built(domains=list("abcdefgh"))
        for step in range(5):
            enter(model, optimizer, "abcd"[rank])
            if rank == LOST and step == 3:
                if how == "ends":
                    os._exit(3)
                time.sleep(60)
            enter(model, optimizer, "efgh"[rank])
            start = time.monotonic()
            try:
                optimizer.step()
            except RuntimeError as error:
                answers.put((rank, time.monotonic() - start, str(error)))
                return
            optimizer.zero_grad()


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["ends", "hangs"])
def test_a_lost_rank_is_named(tmp_path: Path, how: str) -> None:
    context = multiprocessing.get_context("spawn")
    answers: Queue[tuple[int, float, str]] = context.Queue()
    arguments = [(rank, str(tmp_path / "store"), how, answers) for rank in range(NUM_RANKS)]
    processes = [context.Process(target=run_rank, args=each) for each in arguments]
    for process in processes:
        process.start()
    try:
        found = sorted(answers.get(timeout=60) for _ in range(NUM_RANKS - 1))
    finally:
        for process in processes:
            process.kill()
    assert [rank for rank, _, _ in found] == [0, 2, 3]
    for _, seconds, said in found:
        print(seconds, said)
        assert seconds < TIMEOUT_SECONDS + 5
        assert said.startswith(f"rank {LOST} did not answer")


def die() -> None:
    os._exit(3)


def test_a_test_whose_rank_dies_fails_alone(ranks: Ranks) -> None:
    """And at once: the harness of these tests."""
    with pytest.raises(AssertionError, match=r"A rank has died; exit codes: \[3, 3"):
        ranks.run(2, die)
    assert ranks.run(2, os.getpgrp) == [os.getpgrp()] * 2
