"""Ranks that each have some domains: their pieces, what they hold, and what they compare."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from doge_fast import DoGEOptimizer
from doge_fast.distributed.columns import _checksum
from doge_fast.distributed.shards import ranks_of_mesh
from doge_fast.sampling import pieces
from tests import scale
from tests.models import KeepsGradient, enter


def steps_that_changed_a_kept_gradient() -> list[int]:
    """Steps that wrote into what an optimizer has kept of `p.grad` since an earlier one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    inner = KeepsGradient(model.parameters())
    optimizer = DoGEOptimizer(inner, domains=["a", "b"], mu=1.0)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    changed = []
    for step in range(4):
        for name in ("a", "b"):
            with optimizer.domain(name):
                model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not all(torch.equal(held, before) for held, before in kept):
            changed.append(step)
        kept += [(held, held.clone()) for held in (s["last_grad"] for s in inner.state.values())]
    return changed


def test_a_gradient_that_the_optimizer_keeps_is_not_overwritten(ranks):
    assert ranks.run(2, steps_that_changed_a_kept_gradient) == [[], []]


def skipped_where_pieces_cancel() -> int:
    """Of twenty steps in which the ranks' gradients of one domain add up to zero."""
    torch.manual_seed(0)
    rank, theta_N = dist.get_rank(), nn.Parameter(torch.zeros(9, dtype=torch.float64))
    # Of another dtype, so in a message of its own, which is empty.
    empty = nn.Parameter(torch.zeros(0))
    inner = torch.optim.SGD([theta_N, empty], lr=0.1)
    optimizer = DoGEOptimizer(inner, domains=["a", "b"], mu=1.0)
    for _ in range(20):
        a_N, b_N = torch.randn(2, 9, dtype=torch.float64)
        with optimizer.domain("a", count=(4, 6)[rank]):
            ((1, -2 / 3)[rank] * a_N * theta_N).sum().backward()
        with optimizer.domain("b"):
            ((b_N * theta_N).sum() + empty.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return int(optimizer.num_skipped)


def test_a_gradient_whose_pieces_cancel_skips_no_step(ranks):
    """The square of its norm, from the products of the pieces, may be -1e-17."""
    assert ranks.run(2, skipped_where_pieces_cancel) == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_ranks_compare_every_bit_of_their_parameters_in_any_order(dtype):
    values = torch.randn(6, 5).to(dtype)
    checksum = _checksum(values)
    assert _checksum(values.T) == checksum
    values[2, 3] = torch.nextafter(values[2, 3], torch.tensor(9.0, dtype=dtype))
    assert _checksum(values) != checksum


def test_sharded_parameters_are_on_the_same_ranks_and_no_partial_sums():
    def param(first_rank: int, placement: Any) -> Any:
        mesh = mock.Mock(mesh=torch.arange(first_rank, first_rank + 2))
        return mock.Mock(device_mesh=mesh, placements=(placement,))

    assert ranks_of_mesh([param(0, Shard(0)), param(0, Replicate())]) == [0, 1]
    for other in (param(2, Shard(0)), param(0, Partial()), torch.ones(1)):
        with pytest.raises(RuntimeError, match="over the same ranks"):
            ranks_of_mesh([param(0, Shard(0)), other])


def test_pieces_of_few_examples_leave_ranks_without_any():
    found = [pieces({"a": 1, "b": 0, "c": 2}, rank, 4) for rank in range(4)]
    assert found == [{}, {"a": (0, 1)}, {"c": (0, 1)}, {"c": (1, 2)}]


@pytest.mark.parametrize(("sizes", "rank"), [({"a": -1}, 0), ({"a": 1}, 2), ({"a": 1}, -1)])
def test_pieces_refuse_what_is_no_rank_or_size(sizes, rank):
    with pytest.raises(ValueError, match=r"(rank|sizes) must be"):
        pieces(sizes, rank, 2)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 12, 64])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 50])
def test_pieces_are_counted_as_they_are_dealt(num_rows, num_ranks):
    # So large that n pieces are equal.
    sizes = {str(row): num_ranks for row in range(num_rows)}
    dealt = [len(pieces(sizes, rank, num_ranks)) for rank in range(num_ranks)]
    assert max(dealt) == scale.most_rows(num_rows, num_ranks)
    assert sum(dealt) == scale.num_pieces(num_rows, num_ranks)


def test_memory_of_one_process_is_as_documented():
    model = nn.Linear(256, 255, bias=False)
    num_params = model.weight.numel()
    optimizer = DoGEOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1), domains=list("abcde"), mu=1.0
    )
    enter(optimizer, "abcde", lambda _: model(torch.ones(2, 256)).square().mean())
    optimizer.step()
    (state,) = optimizer.state.values()
    held = {
        "parameters": model.weight.nbytes,
        "gradients": model.weight.grad.nbytes,
        "AdamW": sum(value.nbytes for value in state.values() if value.dim()),
    }
    assert held == scale.training_bytes(num_params)
    assert optimizer.buffer.num_bytes == scale.rows_bytes(num_params, 5, 4)
    assert scale.exchanged_bytes(num_params, 5, 1, 4) == 0
    assert scale.data_parallel_bytes(num_params, 5, 1, 4) == 0
