"""Tensor parallelism, alone and under FSDP2: placements say what is whose, and what is a copy."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch import distributed as dist
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

from tests.integrations.test_ranks_that_differ import raised
from tests.integrations.test_several_processes import check, shares, trained

SIZES = {"a": 8, "b": 8, "c": 8}
OPTIONS = {"max_grad_norm": 0.5, "domain_max_grad_norm": 2.0}


def as_copies(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[DTensor]:
    return (DTensor.from_local(inputs[0], mesh, [Replicate()]),)


def as_local(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.to_local()


def parallel(model: nn.Sequential, how: str) -> nn.Module:
    """The model over pairs of ranks, each pair with a shard where there are two.

    Args:
        model: two linear layers, with a norm between them.
        how: "copies": the norm is, and its gradients; "sequence": each rank has some of the
            examples there, so that gradients of the norm are partial sums; "plain": the norm is
            left as it is.
    """
    names = ("data", "tensors")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=names)
    between = Shard(0) if how == "sequence" else Replicate()
    plan: dict[str, ParallelStyle] = {
        "0": ColwiseParallel(output_layouts=between),
        "3": RowwiseParallel(input_layouts=between),
    }
    if how == "sequence":
        plan["2"] = SequenceParallel(sequence_dim=0)
    parallelize_module(model, mesh["tensors"], plan)
    if how == "copies":
        distribute_module(model[2], mesh["tensors"], input_fn=as_copies, output_fn=as_local)
    if mesh["data"].size() > 1:
        for layer in (model[0], model[2], model[3], model):
            fully_shard(layer, mesh=mesh["data"])
    return model


def shares_of_pairs(
    sizes: Mapping[str, int], rank: int, num_ranks: int
) -> list[tuple[str, int, int]]:
    """Both ranks of a pair have the same examples."""
    return shares(sizes, rank // 2, max(1, num_ranks // 2))


on_ranks = pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])


@pytest.mark.parametrize("how", ["copies", "sequence"])
@on_ranks
def test_placements_give_what_one_process_trains(ranks, num_ranks, how):
    wrap = partial(parallel, how=how)
    check(ranks, num_ranks, wrap, SIZES, False, OPTIONS, "", shares_of_pairs)


def refused() -> str:
    plain = partial(parallel, how="plain")
    return raised(lambda: trained(plain, SIZES, False, OPTIONS, "", shares_of_pairs))


@on_ranks
def test_what_has_no_place_on_the_mesh_is_refused(ranks, num_ranks):
    for said in ranks.run(num_ranks, refused):
        assert said.startswith("the optimizer's parameters must all be sharded or replicated")
