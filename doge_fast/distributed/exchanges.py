"""Which exchange there is between the processes that train a model."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from doge_fast.distributed.company import Company, group_of
from doge_fast.distributed.data_parallel import DataParallel
from doge_fast.distributed.exchange import Alone, Exchange
from doge_fast.distributed.fragments import Fragments, Group
from doge_fast.distributed.sharded import Sharded
from doge_fast.distributed.sharded_step import ShardedStep
from doge_fast.flat_buffer import local_of

# torch's; of others nobody knows.
LOOK_AT_SHAPES = ("Adafactor", "Muon")


def default_group() -> object:
    """The group of all processes; None where torch.distributed has none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def num_processes() -> int:
    """Of the group of all processes; 1 where torch.distributed has none."""
    return 1 if default_group() is None else dist.get_world_size()


class Ranks(NamedTuple):
    """Which processes learn together, and what each of them steps."""

    group: Group | None = None
    """None: the default group, where torch.distributed has one."""
    shard_optimizer: bool = False
    """Whether a rank steps its columns alone."""

    def __deepcopy__(self, memo: object) -> "Ranks":
        """The same processes."""
        return self

    def check(self, optimizer: Optimizer, scaler: GradScaler | None) -> "Ranks":
        """Refuse a group without this process, and what cannot be stepped in pieces.

        Raises:
            ValueError: of `process_group` or `shard_optimizer`.
        """
        if not (self.group is None or isinstance(self.group, Group)):
            raise ValueError(
                "process_group must be a group of torch.distributed that this process is in, or "
                f"Fragments(model); got {self.group!r}. Build the optimizer on the group's ranks "
                "alone."
            )
        name = type(optimizer).__name__
        if self.shard_optimizer and (name in LOOK_AT_SHAPES or scaler is not None):
            who = name if scaler is None else "GradScaler"
            why = "looks at the shapes of parameters" if scaler is None else "reads p.grad"
            raise ValueError(
                "shard_optimizer=True divides parameters into vectors and leaves p.grad None; "
                f"{who} {why}. Use an optimizer that treats all elements alike, such as "
                "torch.optim.AdamW, without a GradScaler, or leave shard_optimizer out."
            )
        return self


def exchange_of(ranks: Ranks, params: Sequence[Any]) -> Exchange:
    """What the processes are to each other.

    Args:
        ranks: that learn together.
        params: that are trained; DTensors bring the processes of their mesh.

    Raises:
        RuntimeError: some parameters are sharded and others are not, or over other processes; or
            there are fragments and the parameters have a mesh of several dimensions; or the
            optimizer is to be sharded as well.
    """
    if default_group() is None:
        return Alone()
    group, shard_optimizer = ranks
    fragments = group if isinstance(group, Fragments) else None
    if fragments is None and all(local_of(param) is param for param in params):
        assert not isinstance(group, Fragments)
        group = dist.group.WORLD if group is None else group
        assert group is not None
        if dist.get_world_size(group) == 1:
            return Alone()
        return ShardedStep(Company(group)) if shard_optimizer else DataParallel(Company(group))
    if shard_optimizer:
        raise RuntimeError(
            "shard_optimizer=True needs whole parameters; fully_shard(model) has sharded these "
            "already, and so the optimizer's state. Leave shard_optimizer out."
        )
    mesh = _ranks_of(params)
    if fragments is not None and any(param.device_mesh.ndim > 1 for param in params):
        raise RuntimeError(
            "Fragments need parameters on a mesh of one dimension; these have a mesh of several "
            "dimensions. Leave Fragments out, and run the same domains on all ranks."
        )
    assert dist.group.WORLD is not None
    return Sharded(Company(group_of(mesh, dist.group.WORLD)), fragments)


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
