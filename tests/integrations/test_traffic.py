"""What ranks send and hold in a step, counted at the collectives: the formulas of `scale`."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from doge_fast import DoGEOptimizer
from doge_fast.distributed import columns
from doge_fast.distributed.process_group import Communicator
from doge_fast.sampling import pieces
from tests import scale
from tests.integrations.over_ranks import values

# A multiple of 64 columns for 2, 3 and 4 ranks: nothing is padded.
WIDTH = 96
N = WIDTH * WIDTH


def data_parallel_steps(num_domains: int, dtype: torch.dtype) -> tuple[list[Counter[str]], int]:
    """Bytes of each of two steps, by what they are, and those of the rows."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.eye_(model.weight)
    names = [f"d{row}" for row in range(num_domains)]
    optimizer = DoGEOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), domains=names, mu=1.0, buffer_dtype=dtype
    )
    found: Counter[str] = Counter()
    exchange, gather, add = dist.all_to_all_single, columns.all_gather, Communicator.sum

    def count_rows(there: Tensor, here: Tensor, *splits: Any, **options: Any) -> Any:
        found["sent"] += here.nbytes - here.itemsize * splits[1][rank]
        found["exchanged"] += here.nbytes + there.nbytes
        return exchange(there, here, *splits, **options)

    def count_sums(there: Tensor, here: Tensor, **options: Any) -> Any:
        found["sent"] += here.nbytes * (num_ranks - 1)
        return gather(there, here, **options)

    def count_gram(ranks: Communicator, part: Tensor) -> Tensor:
        found["sent"] += part.nbytes * (num_ranks - 1)
        found["gram"] += part.nbytes * num_ranks
        return add(ranks, part)

    steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", count_rows)
        patch.setattr(columns, "all_gather", count_sums)
        patch.setattr(Communicator, "sum", count_gram)
        for _ in range(2):
            found.clear()
            for name, (first, last) in pieces(dict.fromkeys(names, 12), rank, num_ranks).items():
                with optimizer.domain(name, count=last - first):
                    model(torch.ones(last - first, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(Counter(found))
    return steps, optimizer.buffer.num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_ranks", "num_domains", "over_plain"),
    [
        *((2, 2, 1.0), (4, 4, 1.0), (4, 2, 1.0), (3, 3, 1.0)),
        *((2, 3, 1.5), (3, 4, 1.5), (4, 3, 1.25), (4, 6, 1.5)),
    ],
)
def test_traffic_and_memory_of_data_parallel_ranks_are_as_documented(
    ranks, num_ranks, num_domains, over_plain, dtype
):
    answers = ranks.run(num_ranks, data_parallel_steps, num_domains, dtype)
    said = scale.data_parallel_bytes(N, num_domains, num_ranks, dtype.itemsize)
    gram = scale.gathered_gram_bytes(num_domains, num_ranks)
    if dtype == torch.float32:
        sent_of_columns = said - gram * (num_ranks - 1) / num_ranks
        over = sent_of_columns / scale.ddp_bytes(N, num_ranks)
        assert over == pytest.approx(over_plain, rel=1e-12)
    for step in zip(*(steps for steps, _ in answers), strict=True):
        assert sum(each["sent"] for each in step) / num_ranks == pytest.approx(said, rel=1e-12)
        most = scale.exchanged_bytes(N, num_domains, num_ranks, dtype.itemsize)
        assert max(each["exchanged"] for each in step) == most
        assert {each["gram"] for each in step} == {gram}
    own = scale.rows_bytes(N, scale.most_rows(num_domains, num_ranks), dtype.itemsize)
    # Rows begin 64 elements further on where they would share their cache sets.
    assert own <= max(rows for _, rows in answers) <= own * (1 + 64 / N)


# FSDP2's collectives by the names of torch 2.13 and of those before, and how much of its input a
# rank sends.
OF_SHARDS = {
    "all_gather_single": lambda n: n - 1,
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_single": lambda n: (n - 1) / n,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
}
BATCH, STEPS = 8, 3


def counted(sent: list[float], name: str, collective: Any) -> Any:
    """The collective; it appends how many elements this rank sends."""

    def count(*tensors: Tensor, **options: Any) -> Any:
        given = options.get("input", options.get("input_tensor"))
        given = tensors[1] if given is None else given
        sent.append(OF_SHARDS[name](dist.get_world_size()) * given.numel())
        return collective(*tensors, **options)

    return count


def run(model: Any, optimizer: DoGEOptimizer, batch: dict[str, Tensor], how: str) -> None:
    """This rank's share of every domain in a batch of all ranks.

    With "kept", parameters stay until the last pass; with "in parts", a domain has two backward
    passes, reduced together.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    num_parts = 2 if how == "in parts" else 1
    if how == "kept" and num_ranks > 1:
        model.set_reshard_after_forward(False)
    for name, x in batch.items():
        here = x.chunk(num_ranks)[dist.get_rank() if num_ranks > 1 else 0]
        if how == "kept" and num_ranks > 1:
            model.set_reshard_after_backward(name == list(batch)[-1])
        with optimizer.domain(name):
            for number, part in enumerate(here.chunk(num_parts), 1):
                if num_ranks > 1:
                    model.set_requires_gradient_sync(number == num_parts)
                ((model(part) - part.sin()).square().mean() / num_parts).backward()


def trained(how: str, num_domains: int) -> tuple[Tensor, Tensor, float, int]:
    """The parameters, the weights, elements that a rank sends in a step, and bytes of its rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).double()
    if dist.is_initialized():
        for module in (model[0], model[2], model):
            fully_shard(module)
    names = [f"d{row}" for row in range(num_domains)]
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = DoGEOptimizer(inner, domains=names, mu=0.1, domain_max_grad_norm=None)
    sent: list[float] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = {
            name: row + torch.randn(BATCH, 16, generator=generator, dtype=torch.float64)
            for row, name in enumerate(names)
        }
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in OF_SHARDS if hasattr(dist, name)]:
                patch.setattr(dist, name, counted(sent, name, getattr(dist, name)))
            run(model, optimizer, batch, how)
        optimizer.step()
        optimizer.zero_grad()
    num_bytes = optimizer.buffer.num_bytes
    return values(model), optimizer.alpha_mean, sum(sent) / STEPS, num_bytes


@pytest.mark.parametrize(
    ("num_ranks", "num_domains", "how", "units"),
    [
        (2, 3, "", 9),
        (2, 3, "kept", 4),
        pytest.param(4, 2, "kept", 3, marks=pytest.mark.exhaustive),
        # Parameters are gathered for each backward pass: (2 * 2 + 1) * 2.
        (2, 2, "in parts", 10),
    ],
)
def test_traffic_and_memory_of_shards_are_as_documented(ranks, num_ranks, num_domains, how, units):
    theta_N, alpha_K, _, _ = trained("", num_domains)
    assert alpha_K.max() - alpha_K.min() > 1e-5
    unit = (num_ranks - 1) / num_ranks * len(theta_N)
    if how != "in parts":
        said = scale.sharded_bytes(len(theta_N), 0, num_ranks, num_domains, are_kept=how == "kept")
        assert said == pytest.approx(units * unit * scale.FLOAT32)
    own = scale.rows_bytes(len(theta_N), num_domains, 8) / num_ranks
    answers = ranks.run(num_ranks, trained, how, num_domains)
    for theirs_N, weights_K, sent, rows in answers:
        torch.testing.assert_close(theirs_N, theta_N, rtol=0, atol=1e-12)
        torch.testing.assert_close(weights_K, alpha_K, rtol=0, atol=1e-12)
        assert torch.equal(weights_K, answers[0][1])
        assert sent == pytest.approx(units * unit, rel=1e-12)
        # Each of four parameters is padded to 64 elements, with a page's width between rows.
        assert own <= rows <= own + num_domains * 4 * 2 * 64 * 8
