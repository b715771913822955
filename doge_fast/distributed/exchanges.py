"""Which exchange there is between the processes that train a model."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import distributed as dist
from torch.distributed import ProcessGroup

from doge_fast.distributed.company import Company, group_of
from doge_fast.distributed.data_parallel import DataParallel
from doge_fast.distributed.exchange import Alone, Exchange
from doge_fast.distributed.sharded import Sharded
from doge_fast.flat_buffer import local_of


def default_group() -> object:
    """The group of all processes; None where torch.distributed has none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def num_processes() -> int:
    """Of the group of all processes; 1 where torch.distributed has none."""
    return 1 if default_group() is None else dist.get_world_size()


class Ranks(NamedTuple):
    """Which processes learn together."""

    group: ProcessGroup | None = None
    """None: the default group, where torch.distributed has one."""

    def __deepcopy__(self, memo: object) -> "Ranks":
        """The same processes."""
        return self

    def check(self) -> "Ranks":
        """Refuse a group without this process.

        Raises:
            ValueError: of `process_group`.
        """
        if not (self.group is None or isinstance(self.group, ProcessGroup)):
            raise ValueError(
                "process_group must be a group of torch.distributed that this process is in; got "
                f"{self.group!r}. Build the optimizer on the group's ranks alone."
            )
        return self


def exchange_of(ranks: Ranks, params: Sequence[Any]) -> Exchange:
    """What the processes are to each other.

    Args:
        ranks: that learn together.
        params: that are trained; DTensors bring the processes of their mesh.

    Raises:
        RuntimeError: some parameters are sharded and others are not, or over other processes.
    """
    if default_group() is None:
        return Alone()
    assert dist.group.WORLD is not None
    if all(local_of(param) is param for param in params):
        group = ranks.group or dist.group.WORLD
        return DataParallel(Company(group)) if dist.get_world_size(group) > 1 else Alone()
    return Sharded(Company(group_of(_ranks_of(params), dist.group.WORLD)))


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
        "fully_shard(model) leaves them; some are plain tensors or on another mesh. Shard the "
        "whole model (with tensor parallelism use distribute_module for replicated parameters), or "
        "give the other parameters an optimizer of their own."
    )
