"""The formulas of `doge_fast.scale` against what ranks send and hold."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from doge_fast import DoGEOptimizer, scale
from doge_fast.distributed import company, data_parallel
from doge_fast.sampling import pieces
from tests.ranks import Ranks

# A multiple of 64 columns for 2, 3 and 4 ranks: nothing is padded.
WIDTH = 96
N = WIDTH * WIDTH


class Counted:
    """Bytes of the collectives while it is entered, by what they carry."""

    def __init__(self) -> None:
        self.sent = self.leaving = self.come = self.gram = 0

    def __enter__(self) -> "Counted":
        self._kept = dist.all_to_all_single, company.all_gather
        to_all, gather = self._kept
        rank, num_ranks = dist.get_rank(), dist.get_world_size()

        def counted_rows(there: Tensor, here: Tensor, *splits: Any, **options: Any) -> Any:
            self.sent += here.nbytes - here.itemsize * splits[1][rank]
            self.leaving += here.nbytes
            self.come += there.nbytes
            return to_all(there, here, *splits, **options)

        def counted_sums(there: Tensor, here: Tensor, **options: Any) -> Any:
            is_gram = here.dtype == torch.float64
            # The message in which ranks agree, of float64 on the CPU too, has another length.
            if is_gram and here.numel() == self.num_rows**2:
                self.gram += there.nbytes
            if not is_gram or here.numel() == self.num_rows**2:
                self.sent += here.nbytes * (num_ranks - 1)
            return gather(there, here, **options)

        dist.all_to_all_single = counted_rows
        company.all_gather = data_parallel.all_gather = counted_sums
        return self

    def of(self, num_rows: int) -> "Counted":
        """Of steps with so many rows."""
        self.num_rows = num_rows
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single = self._kept[0]
        company.all_gather = data_parallel.all_gather = self._kept[1]


def counted_step(num_domains: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Bytes of a step with pieces of a batch: sent, leaving and come, of Gram matrices, of rows."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.eye_(model.weight)
    names = [f"d{row}" for row in range(num_domains)]
    optimizer = DoGEOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), domains=names, mu=1.0, buffer_dtype=dtype
    )
    with Counted().of(num_domains) as counted:
        for name, (first, last) in pieces(dict.fromkeys(names, 12), rank, num_ranks).items():
            with optimizer.domain(name, count=last - first):
                model(torch.ones(last - first, WIDTH)).square().mean().backward()
        optimizer.step()
    held = (counted.leaving + counted.come, counted.gram)
    return (counted.sent, *held, optimizer.buffer.num_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_ranks", "num_domains"), [(2, 2), (2, 3), (3, 4), (4, 3), (4, 6), (4, 4)]
)
def test_data_parallel_sends_and_holds_what_is_said(
    ranks: Ranks, num_ranks: int, num_domains: int, dtype: torch.dtype
) -> None:
    found = ranks.run(num_ranks, counted_step, num_domains, dtype)
    sent, exchanged, gram, rows = (max(each) for each in zip(*found, strict=True))
    mean = sum(each[0] for each in found) / num_ranks
    size = dtype.itemsize
    said = scale.data_parallel_bytes(N, num_domains, num_ranks, size)
    assert mean == pytest.approx(said, rel=1e-12)
    assert sent >= said * (1 - 1e-12)
    assert exchanged == scale.exchanged_bytes(N, num_domains, num_ranks, size)
    assert gram == scale.gathered_gram_bytes(num_domains, num_ranks)
    own = scale.rows_bytes(N, scale.most_rows(num_domains, num_ranks), size)
    # Rows begin 64 elements further on where they would share their cache sets.
    assert own <= rows <= own * (1 + 64 / N)


@pytest.mark.parametrize("num_domains", [3, 4, 5])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_traffic_of_equal_pieces_is_plain_where_the_domains_divide_the_ranks(
    num_ranks: int, num_domains: int
) -> None:
    plain = scale.ddp_bytes(N, num_ranks)
    gram = (num_ranks - 1) * 8 * num_domains**2
    ours = scale.data_parallel_bytes(N, num_domains, num_ranks, 4) - gram
    assert (ours == pytest.approx(plain, rel=1e-12)) == (num_ranks % num_domains == 0)


# Collectives by the names of torch 2.13 and of those before, and what of its input a rank sends.
OF_SHARDS = {
    "all_gather_single": lambda n: n - 1,
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_single": lambda n: (n - 1) / n,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
}


def shards_step(num_domains: int, are_kept: bool) -> tuple[float, int]:
    """Bytes that this rank sends in a step of FSDP2, and those of its rows."""
    num_ranks = dist.get_world_size()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    fully_shard(model[0])
    fully_shard(model)
    sent = [0.0]
    before = {name: getattr(dist, name) for name in OF_SHARDS if hasattr(dist, name)}

    def counting(name: str, collective: Any) -> Any:
        def count(*tensors: Tensor, **options: Any) -> Any:
            given = options.get("input", options.get("input_tensor"))
            given = tensors[1] if given is None else given
            sent[0] += OF_SHARDS[name](num_ranks) * given.nbytes
            return collective(*tensors, **options)

        return count

    optimizer = None
    names = [f"d{row}" for row in range(num_domains)]
    if num_domains:
        optimizer = DoGEOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), domains=names, mu=1.0
        )
    if are_kept:
        model.set_reshard_after_forward(False)  # type: ignore[operator]
    for name, collective in before.items():
        setattr(dist, name, counting(name, collective))
    try:
        for name in names or [None]:
            if are_kept:
                model.set_reshard_after_backward(name == names[-1])  # type: ignore[operator]
            loss = model(torch.ones(2, WIDTH)).square().mean()
            if optimizer is None:
                loss.backward()
                continue
            with optimizer.domain(name):  # type: ignore[arg-type]
                loss.backward()
    finally:
        for name, collective in before.items():
            setattr(dist, name, collective)
    return sent[0], 0 if optimizer is None else optimizer.buffer.num_bytes


@pytest.mark.parametrize(
    ("num_ranks", "num_domains", "are_kept"),
    [(2, 0, False), (2, 3, False), (2, 3, True), (4, 2, True)],
)
def test_shards_send_and_hold_what_is_said(
    ranks: Ranks, num_ranks: int, num_domains: int, are_kept: bool
) -> None:
    for sent, rows in ranks.run(num_ranks, shards_step, num_domains, are_kept):
        passes = max(num_domains, 1)
        # The Gram matrices go another way, as above.
        said = scale.sharded_bytes(N, 0, num_ranks, passes, are_kept=are_kept)
        assert sent == pytest.approx(said, rel=1e-12)
        own = scale.rows_bytes(N, num_domains, 4) / num_ranks
        assert own <= rows <= own * (1 + 64 * num_ranks / N)
