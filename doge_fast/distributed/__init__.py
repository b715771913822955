"""Communication between ranks: the only package that calls torch.distributed.

A step uses one `Exchange`. There are three kinds: `Exchange` for one process; `ColumnExchange` for
data parallelism, with or without DistributedDataParallel; `ShardExchange` for FSDP2 and tensor
parallelism.
"""

from collections.abc import Sequence

from torch import Tensor

from doge_fast.distributed.columns import ColumnExchange
from doge_fast.distributed.exchange import Exchange
from doge_fast.distributed.process_group import Communicator, GroupArgument, default_group, group_of
from doge_fast.distributed.shards import ShardExchange, ranks_of_mesh
from doge_fast.flat_buffer import local_of


def exchange_of(argument: GroupArgument, params: Sequence[Tensor], num_halves: int) -> Exchange:
    """The exchange that these parameters need; that of DTensors is over the ranks of their mesh.

    `num_halves` is the number of rows of each domain.
    """
    world = default_group()
    if world is None:
        return Exchange(num_halves)
    if any(local_of(param) is not param for param in params):
        return ShardExchange(num_halves, Communicator(group_of(ranks_of_mesh(params), world)))
    group = argument.group or world
    if group.size() == 1:
        return Exchange(num_halves)
    return ColumnExchange(num_halves, Communicator(group))
