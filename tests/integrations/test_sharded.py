"""FSDP2: rows and weighted gradient in shards, and what one process trains."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from doge_fast import DoGEOptimizer
from tests.integrations.test_several_processes import STEPS, examples, losses, small_model
from tests.ranks import Ranks

SIZES = {"a": 4, "b": 8, "c": 4}


def sharded(model: nn.Module, mesh_shape: tuple[int, ...]) -> None:
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def trained(mesh_shape: tuple[int, ...] | None, options: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The parameters, the weights and the last norms after some steps."""
    rank, num_ranks = 0, 1
    model = small_model()
    if mesh_shape is not None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        sharded(model, mesh_shape)
    arguments: dict[str, Any] = {"domains": list(SIZES), "mu": 5.0} | dict(options)
    inner = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    optimizer = DoGEOptimizer(inner, **arguments)
    for step in range(STEPS):
        # Not in the order of the domains: rows are told apart by name.
        for name, size in reversed(SIZES.items()):
            part = size // num_ranks
            with optimizer.domain(name):
                here = examples(name, step, size)[rank * part : (rank + 1) * part]
                losses(model(here), name).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [
        getattr(param, "full_tensor", param.clone)().detach().flatten()
        for param in model.parameters()
    ]
    assert optimizer.last is not None
    return torch.cat(whole), optimizer.alpha_mean, optimizer.last.combined_norm


OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "clips": {"max_grad_norm": 0.5, "domain_max_grad_norm": 0.3},
    "selection": {
        "selection": ["0.weight"],
        "domain_max_grad_norm": None,
        "max_grad_norm": 0.5,
    },
    "a target": {"domains": ["a", "b"], "target": "c"},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)], ids=str)
def test_shards_train_what_one_process_trains(
    ranks: Ranks, mesh_shape: tuple[int, ...], name: str
) -> None:
    one = trained(None, OPTIONS[name])
    num_ranks = 2 if mesh_shape == (2,) else 4
    answers = ranks.run(num_ranks, trained, mesh_shape, OPTIONS[name])
    for found in answers:
        for value, expected, first in zip(found, one, answers[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
            assert torch.equal(value, first)
