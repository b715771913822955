"""Which exchange there is between the processes that train a model."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from doge_fast.distributed.company import Company
from doge_fast.distributed.data_parallel import DataParallel
from doge_fast.distributed.sharded import Sharded
from doge_fast.exchange import Alone, Exchange
from doge_fast.flat_buffer import local_of


def default_group() -> object:
    """The group of all processes; None where torch.distributed has none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def num_processes() -> int:
    """Of the group of all processes; 1 where torch.distributed has none."""
    return 1 if default_group() is None else dist.get_world_size()


def exchange_of(group: ProcessGroup | None, params: Sequence[Tensor]) -> Exchange:
    """What the processes are to each other.

    Args:
        group: None: the default group, where torch.distributed has one.
        params: that are trained; DTensors bring the processes of their mesh.

    Raises:
        RuntimeError: some parameters are sharded and others are not, or over other processes.
    """
    if default_group() is None:
        return Alone()
    if all(local_of(param) is param for param in params):
        group = dist.group.WORLD if group is None else group
        assert group is not None
        is_alone = dist.get_world_size(group) == 1
        return Alone() if is_alone else DataParallel(Company(group))
    ranks = _ranks_of(params)
    return Sharded(Company(dist.new_group(ranks, use_local_synchronization=True)))


def _ranks_of(params: Sequence[Any]) -> list[int]:
    """The processes over which DTensors are sharded or replicated, all alike."""
    meshes: set[Any] = {getattr(param, "device_mesh", None) for param in params}
    if None not in meshes:
        ranks = {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
        placements = {placement for param in params for placement in param.placements}
        if len(ranks) == 1 and all(each.is_shard() or each.is_replicate() for each in placements):
            return list(ranks.pop())
    raise RuntimeError(
        "the optimizer's parameters must all be sharded or replicated over the same ranks, as "
        "fully_shard(model) leaves them; some are plain tensors or lie on another mesh. Shard the "
        "whole model, or give what is left out an optimizer of its own."
    )
