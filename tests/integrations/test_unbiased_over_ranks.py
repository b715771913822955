"""An unbiased score over ranks: the halves of a domain are those of all ranks together."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from doge_fast import DoGEOptimizer
from tests.ranks import Ranks

DOMAINS, STEPS, SIZE = ["a", "b", "c"], 4, 2


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def half(name: str, step: int, rank: int, number: int) -> Tensor:
    """[SIZE, 3]: what a rank has of a half of a domain's batch."""
    seed = ord(name) + 100 * (step + 10 * rank + 100 * number)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(SIZE, 3, dtype=torch.float64, generator=generator)
    return rows * {"a": 0.5, "b": 1.0, "c": 3.0}[name]


def loss_of(model: nn.Module, rows: Tensor, name: str) -> Tensor:
    return (model(rows) - (ord(name) - ord("a"))).square().mean()


def learned(num_pieces: int, kind: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """What training leaves: `num_pieces` ranks, or one process with the pieces of as many."""
    is_one = not dist.is_initialized()
    pieces = range(num_pieces) if is_one else [dist.get_rank()]
    model = model_of()
    if kind == "sharded" and not is_one:
        fully_shard(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    told = {"mu": 0.5, "score": "unbiased"} | options
    is_stacked = kind == "stacked" and not is_one
    micro_batches = 1 if is_stacked else 2
    optimizer = DoGEOptimizer(inner, domains=DOMAINS, micro_batches=micro_batches, **told)
    for step in range(STEPS):
        whole = {
            name: [torch.cat([half(name, step, r, number) for r in pieces]) for number in (0, 1)]
            for name in DOMAINS
        }
        if is_stacked:
            sizes = dict.fromkeys(DOMAINS, 2 * SIZE)
            with optimizer.stacked(model, sizes):
                outputs = model(torch.cat([rows for name in DOMAINS for rows in whole[name]]))
                parts = zip(DOMAINS, outputs.split(2 * SIZE), strict=True)
                aims = [(part - (ord(name) - ord("a"))).square().mean() for name, part in parts]
                sum(aims).backward()
        else:
            for name in DOMAINS:
                for rows in whole[name]:
                    with optimizer.domain(name):
                        (loss_of(model, rows, name) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole_params = [
        param.full_tensor() if hasattr(param, "full_tensor") else param
        for param in model.parameters()
    ]
    assert optimizer.last is not None
    return {
        "parameters": torch.cat([param.detach().flatten() for param in whole_params]),
        "alpha": optimizer.alpha_mean,
        "difficulty": optimizer.last.difficulty,
        "norms": optimizer.doge.state_dict()["norms"],
    }


@pytest.mark.parametrize(
    ("num_ranks", "kind"), [(2, "whole"), (3, "whole"), (2, "stacked"), (2, "sharded")]
)
def test_ranks_learn_what_one_process_does(ranks: Ranks, num_ranks: int, kind: str) -> None:
    alone = learned(num_ranks, kind, {})
    for found in ranks.run(num_ranks, learned, num_ranks, kind, {}):
        for name, expected in alone.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-12)
    assert (alone["alpha"] - 1 / 3).abs().max() > 1e-3


def norms_by_counts(score: str) -> Tensor:
    """Of a step in which the halves of one rank have different counts."""
    model, rank = model_of(), dist.get_rank()
    optimizer = DoGEOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        **{"domains": DOMAINS, "mu": 0.5, "score": score, "micro_batches": 2},
    )
    for name in DOMAINS:
        for number, count in enumerate([(1, 3), (2, 5)][rank]):
            with optimizer.domain(name, count=count):
                (loss_of(model, half(name, 0, rank, number), name) / 2).backward()
    optimizer.step()
    assert optimizer.last is not None
    return optimizer.last.grad_norms


def test_a_gradient_is_the_mean_of_the_ranks_by_the_counts_of_both_halves(ranks: Ranks) -> None:
    for found, expected in zip(
        ranks.run(2, norms_by_counts, "unbiased"),
        ranks.run(2, norms_by_counts, "paper"),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def odd() -> str:
    optimizer = DoGEOptimizer(
        torch.optim.SGD((model := model_of()).parameters(), lr=0.1),
        **{"domains": DOMAINS, "mu": 0.5, "score": "unbiased", "micro_batches": None},
    )
    for name in DOMAINS:
        for number in range(1 if dist.get_rank() and name == "b" else 2):
            with optimizer.domain(name):
                loss_of(model, half(name, 0, dist.get_rank(), number), name).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_one_half_on_one_rank_is_told_to_all(ranks: Ranks) -> None:
    told, itself = ranks.run(2, odd)
    assert "['b'] were entered an odd number of times" in itself
    assert "dropped on all ranks, since rank 1 raised" in told
