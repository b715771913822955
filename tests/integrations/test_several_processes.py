"""torch.distributed: one process trains as without it, several are refused in words."""

from pathlib import Path

import pytest
import torch
from torch import multiprocessing

from tests.integrations.small import loss_of, train, wrapped


def run_rank(rank: int, size: int, store: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    try:
        model, optimizer = wrapped()
        if size == 1:
            train(model, optimizer, range(2))
            assert optimizer.num_steps == 2
            return
        entered = (optimizer.domain("a"), optimizer.stacked(model, {"a": 5}))
        for context in entered:
            with pytest.raises(RuntimeError, match=rf"one process; torch.distributed has {size}"):
                context.__enter__()
        # Nothing has happened: what steps on gradients of its own still does.
        loss_of(model, 0).backward()
        optimizer.zero_grad()
        assert optimizer.num_steps == 0
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_one_process_trains_and_several_are_refused(size: int, tmp_path: Path) -> None:
    multiprocessing.start_processes(
        run_rank, args=(size, str(tmp_path / "store")), nprocs=size, start_method="spawn"
    )
