"""Which exchange there is between the processes that train a model."""

from collections.abc import Sequence
from typing import Any

from torch import distributed as dist
from torch.distributed import ProcessGroup

from doge_fast.distributed.company import Company
from doge_fast.distributed.data_parallel import DataParallel
from doge_fast.distributed.fragments import Fragments
from doge_fast.distributed.sharded import Sharded
from doge_fast.exchange import Alone, Exchange
from doge_fast.flat_buffer import local_of


def default_group() -> object:
    """The group of all processes; None where torch.distributed has none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def exchange_of(group: ProcessGroup | Fragments | None, params: Sequence[Any]) -> Exchange:
    """What the processes are to each other.

    Args:
        group: None: the default group, where torch.distributed has one.
        params: that are trained; DTensors bring the processes of their mesh.

    Raises:
        RuntimeError: some parameters are sharded and others are not, or over other processes; or
            there are fragments and the parameters have a mesh of several dimensions.
    """
    if default_group() is None:
        return Alone()
    fragments = group if isinstance(group, Fragments) else None
    if fragments is None and all(local_of(param) is param for param in params):
        assert not isinstance(group, Fragments)
        group = dist.group.WORLD if group is None else group
        assert group is not None
        is_alone = dist.get_world_size(group) == 1
        return Alone() if is_alone else DataParallel(Company(group))
    ranks = _ranks_of(params)
    if fragments is not None and any(param.device_mesh.ndim > 1 for param in params):
        raise RuntimeError(
            "Fragments need parameters that are sharded over all ranks alike; these have a mesh of "
            "several dimensions. Leave Fragments out, and run the same domains on all ranks."
        )
    return Sharded(Company(dist.new_group(ranks, use_local_synchronization=True)), fragments)


def _ranks_of(params: Sequence[Any]) -> list[int]:
    """The processes over which DTensors are sharded or replicated, all alike."""
    meshes: set[Any] = {getattr(param, "device_mesh", None) for param in params}
    if None not in meshes:
        ranks = {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
        placements = {placement for param in params for placement in param.placements}
        # FSDP2 over tensor parallelism has a placement of its own, which is none of torch's shards.
        if len(ranks) == 1 and not any(each.is_partial() for each in placements):
            return list(ranks.pop())
    raise RuntimeError(
        "the optimizer's parameters must all be sharded or replicated over the same ranks, as "
        "fully_shard(model) leaves them; some are plain tensors or lie on another mesh. Shard the "
        "whole model, with tensor parallelism also what it replicates (distribute_module), or give "
        "what is left out an optimizer of its own."
    )
