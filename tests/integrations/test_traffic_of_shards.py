"""FSDP2: what a step sends, in the ways there are to run its domains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from doge_fast import DoGEOptimizer, scale
from tests.integrations.test_several_processes import shares, values
from tests.ranks import Ranks

WIDTH, BATCH, STEPS = 16, 8, 3

Loop = Callable[[nn.Module, DoGEOptimizer, dict[str, Tensor]], None]
Trained = tuple[Tensor, Tensor, float]

# Collectives by the names of torch 2.13 and of those before, and what of its input a rank sends.
SENT = {
    "all_gather_single": lambda n: n - 1,
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_single": lambda n: (n - 1) / n,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / n,
}


@contextmanager
def counted(sent: list[float]) -> Iterator[None]:
    """Append what this rank sends in each collective, in elements."""
    before = {name: getattr(dist, name) for name in SENT if hasattr(dist, name)}

    def counting(name: str, collective: Any) -> Any:
        def count(*tensors: Tensor, **options: Any) -> Any:
            given = options.get("input", options.get("input_tensor"))
            given = tensors[1] if given is None else given
            sent.append(SENT[name](dist.get_world_size()) * given.numel())
            return collective(*tensors, **options)

        return count

    for name, collective in before.items():
        setattr(dist, name, counting(name, collective))
    try:
        yield
    finally:
        for name, collective in before.items():
            setattr(dist, name, collective)


def mine(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's share of every domain."""
    sizes = {name: len(x) for name, x in rows.items()}
    dealt = shares(sizes, dist.get_rank(), dist.get_world_size())
    return {name: rows[name][first:last] for name, first, last in dealt}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """[len(x)] of each example."""
    return (model(x) - x.sin()).square().mean(1)


def one_after_another(model: nn.Module, optimizer: DoGEOptimizer, batch: dict[str, Tensor]) -> None:
    for name, x in (mine(batch) if dist.is_initialized() else batch).items():
        with optimizer.domain(name):
            loss_of(model, x).mean().backward()


def with_kept_parameters(
    model: nn.Module, optimizer: DoGEOptimizer, batch: dict[str, Tensor]
) -> None:
    model.set_reshard_after_forward(False)
    for name, x in mine(batch).items():
        model.set_reshard_after_backward(name == list(batch)[-1])
        with optimizer.domain(name):
            loss_of(model, x).mean().backward()


def in_parts(model: nn.Module, optimizer: DoGEOptimizer, batch: dict[str, Tensor]) -> None:
    """Two backward passes for a domain, reduced together."""
    for name, x in mine(batch).items():
        first, last = x.chunk(2)
        with optimizer.domain(name):
            model.set_requires_gradient_sync(False)
            (loss_of(model, first).sum() / len(x)).backward()
            model.set_requires_gradient_sync(True)
            (loss_of(model, last).sum() / len(x)).backward()


def trained(loop: Loop, num_domains: int) -> Trained:
    """The parameters, the weights, and what a rank sends in a step over (n - 1) / n N."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers).double()
    if dist.is_initialized():
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
    names = [f"d{row}" for row in range(num_domains)]
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"domains": names, "mu": 0.1, "domain_max_grad_norm": None}
    optimizer = DoGEOptimizer(inner, **options)
    sent: list[float] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = {
            name: row + torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
            for row, name in enumerate(names)
        }
        with counted(sent):
            loop(model, optimizer, batch)
        optimizer.step()
        optimizer.zero_grad()
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    unit = (num_ranks - 1) / num_ranks * sum(param.numel() for param in model.parameters())
    return values(model), optimizer.alpha_mean, sum(sent) / STEPS / unit if sent else 0.0


@pytest.mark.parametrize(
    ("num_ranks", "num_domains", "loop", "units"),
    [
        (2, 3, one_after_another, 9.0),
        (2, 3, with_kept_parameters, 4.0),
        pytest.param(4, 2, with_kept_parameters, 3.0, marks=pytest.mark.exhaustive),
        # Parameters are gathered for each backward pass: (2 * 2 + 1) * 2.
        (2, 2, in_parts, 10.0),
    ],
)
def test_traffic_is_that_of_the_formula(
    ranks: Ranks, num_ranks: int, num_domains: int, loop: Loop, units: float
) -> None:
    theta_N, alpha_K, _ = trained(one_after_another, num_domains)
    assert alpha_K.max() - alpha_K.min() > 1e-5
    answers = ranks.run(num_ranks, trained, loop, num_domains)
    for theirs_N, weights_K, sent in answers:
        torch.testing.assert_close(theirs_N, theta_N, rtol=0, atol=1e-12)
        torch.testing.assert_close(weights_K, alpha_K, rtol=0, atol=1e-12)
        assert torch.equal(weights_K, answers[0][1])
        assert sent == pytest.approx(units, rel=1e-12)


@pytest.mark.parametrize(
    ("num_ranks", "num_domains", "are_kept", "units"),
    [(2, 3, False, 9.0), (2, 3, True, 4.0), (4, 2, True, 3.0)],
)
def test_the_formula_says_what_is_counted_above(
    num_ranks: int, num_domains: int, are_kept: bool, units: float
) -> None:
    sent = scale.sharded_bytes(num_ranks, 0, num_ranks, num_domains, are_kept=are_kept)
    assert sent == pytest.approx(units * (num_ranks - 1) * scale.FLOAT32)
