"""Tensor parallelism, alone and under FSDP2: placements say what is whose, and what is a copy."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from doge_fast import DoGEOptimizer
from tests.integrations.test_ranks_that_differ import raised
from tests.integrations.test_several_processes import assert_ranks_are, values
from tests.ranks import Ranks

DOMAINS = ["a", "b", "c"]
WIDTH, BATCH, STEPS = 4, 8, 5

Trained = tuple[Tensor, Tensor, Tensor]


def norm_and_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    mlp = (nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
    return nn.Sequential(nn.LayerNorm(WIDTH), *mlp, nn.LayerNorm(WIDTH)).double()


def parallel(model: nn.Module, mesh: DeviceMesh, how: str) -> None:
    """The layers over the mesh.

    Args:
        model: as `norm_and_mlp`.
        mesh: of one dimension.
        how: "copies": the norms are, and their gradients; "sequence": each rank has some of the
            examples between the layers, so that gradients of the norms are partial sums;
            "plain": the norms are left as they are.
    """
    plan: dict[str, ParallelStyle] = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    if how == "sequence":
        plan = {
            "0": SequenceParallel(sequence_dim=0),
            "1": ColwiseParallel(input_layouts=Shard(0)),
            "3": RowwiseParallel(output_layouts=Shard(0)),
            "4": SequenceParallel(sequence_dim=0),
        }
    parallelize_module(model, mesh, plan)
    if how == "copies":
        for norm in (model[0], model[4]):
            distribute_module(norm, mesh, input_fn=as_copies, output_fn=as_local)


def as_copies(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[DTensor]:
    return (DTensor.from_local(inputs[0], mesh, [Replicate()]),)


def as_local(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.to_local()


def loss_of(model: nn.Module, x: Tensor, tensors: DeviceMesh | None, how: str) -> Tensor:
    here = x
    if tensors is not None and how == "sequence":
        here = x.chunk(tensors.size())[tensors.get_local_rank()]
    output = model(here)
    if isinstance(output, DTensor):
        output = output.full_tensor()
    return (output - 2 * x.sin()).square().mean()


def trained(mesh_shape: tuple[int, ...], how: str) -> Trained:
    """The parameters, the weights and the last norm.

    Args:
        mesh_shape: of tensor parallelism, or of FSDP2 and tensor parallelism; none: one process.
        how: as `parallel`.
    """
    model, tensors, copy, num_copies = norm_and_mlp(), None, 0, 1
    if mesh_shape:
        mesh = init_device_mesh(
            "cpu", mesh_shape, mesh_dim_names=("data", "tensors")[-len(mesh_shape) :]
        )
        tensors = mesh["tensors"]
        parallel(model, tensors, how)
        if len(mesh_shape) == 2:
            copy, num_copies = mesh.get_local_rank("data"), mesh_shape[0]
            for layer in [model[0], model[1], model[3], model[4], model]:
                fully_shard(layer, mesh=mesh["data"])
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = DoGEOptimizer(
        inner, domains=DOMAINS, mu=0.1, max_grad_norm=0.5, domain_max_grad_norm=2.0
    )
    for step in range(STEPS):
        for row, name in enumerate(DOMAINS):
            generator = torch.Generator().manual_seed(10 * step + row)
            x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64) + row
            with optimizer.domain(name):
                loss_of(model, x.chunk(num_copies)[copy], tensors, how).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.last is not None
    return values(model), optimizer.alpha_mean, optimizer.last.combined_norm


@pytest.mark.parametrize("how", ["copies", "sequence"])
@pytest.mark.parametrize(
    "mesh_shape", [(2,), pytest.param((2, 2), marks=pytest.mark.exhaustive)], ids=str
)
def test_placements_give_what_one_process_trains(
    ranks: Ranks, mesh_shape: tuple[int, ...], how: str
) -> None:
    one = trained((), how)
    assert_ranks_are(one, ranks.run(2 ** len(mesh_shape), trained, mesh_shape, how))


def refused(mesh_shape: tuple[int, ...]) -> str:
    return raised(lambda: trained(mesh_shape, "plain"))


@pytest.mark.parametrize(
    "mesh_shape", [(2,), pytest.param((2, 2), marks=pytest.mark.exhaustive)], ids=str
)
def test_what_has_no_place_on_the_mesh_is_refused(
    ranks: Ranks, mesh_shape: tuple[int, ...]
) -> None:
    for said in ranks.run(2 ** len(mesh_shape), refused, mesh_shape):
        assert said.startswith("the optimizer's parameters must all be sharded or replicated")
