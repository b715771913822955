"""FSDP2 and tensor parallelism: a rank has its shard of every domain's gradient.

Rows, combined gradient and optimizer state stay sharded. The Gram matrix is the sum over shards.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from doge_fast.distributed.exchange import Columns, Exchange
from doge_fast.distributed.process_group import Agreement, Entry, Report
from doge_fast.flat_buffer import Block, local_of
from doge_fast.metric import Metric


class ShardExchange(Exchange):
    """Ranks of a sharded model: all run the same domains, each with its share of their examples."""

    has_shards = True

    def agree(self, names: Sequence[str], report: Report) -> Agreement:
        """As `Exchange.agree`; also refuse ranks that differ in domains, order or counts."""
        order = {name: entry.places for name, entry in report.entries.items()}
        # Not of halves: ranks have different shares of these.
        counts = {
            f"how often or with which count they entered {name!r}": sum(
                report.entries.get(name, Entry()).counts
            )
            for name in names
        }
        settings = {**report.settings, "the order of their domains": order, **counts}
        _, agreement = self._communicator.agree(names, report._replace(settings=settings))
        return agreement

    def complete(self, blocks: Sequence[Block], apart: Collection[int]) -> Columns:
        """This rank's shards."""
        # Parameters that this rank adds to the Gram matrix: a replicated one is added by one rank
        # only.
        self._counted: set[int] = set()
        for block in blocks:
            param: Any = block.param
            coordinates = zip(param.placements, param.device_mesh.get_coordinate(), strict=True)
            # Whether this rank is the first of those that hold the same part.
            if not any(placement.is_replicate() and at for placement, at in coordinates):
                self._counted.add(id(block.param))
        return super().complete(blocks, apart)

    def gram(
        self, columns: Columns, metric: Metric | None = None, mixture_B: Tensor | None = None
    ) -> Tensor:
        """The sum over shards; replicated columns count once."""
        own, others = columns.split(self._counted)
        if own.rows:
            matrices = super().gram(own, metric, mixture_B)
        else:
            # Of no columns: zeros.
            matrices = super().gram(Columns([], [columns.rows[0][:, :0]]))
        if mixture_B is not None and others.rows:
            super().deliver(others, mixture_B.repeat_interleave(self._num_halves))
        return self._communicator.sum(matrices)

    def norm(self, blocks: Sequence[Block]) -> Tensor:
        """Over all shards; replicated gradients count once."""
        own = [block for block in blocks if id(block.param) in self._counted]
        square = super().norm(own) ** 2 if own else torch.zeros((), dtype=torch.float64)
        device = local_of(blocks[0].param).device
        return self._communicator.sum(square.to(device)).sqrt()

    def share(self, state_S: Tensor) -> None:
        """A broadcast."""
        self._communicator.broadcast(state_S)


def ranks_of_mesh(params: Sequence[Any]) -> list[int]:
    """The ranks of the mesh that all DTensors share; RuntimeError if they do not share one."""
    meshes: set[Any] = {getattr(param, "device_mesh", None) for param in params}
    if None not in meshes:
        ranks = {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
        placements = {placement for param in params for placement in param.placements}
        # Not is_shard(): FSDP2 over tensor parallelism has a placement class of its own.
        if len(ranks) == 1 and not any(each.is_partial() for each in placements):
            return list(ranks.pop())
    raise RuntimeError(
        "the optimizer's parameters must all be sharded or replicated over the same ranks, as "
        "fully_shard(model) leaves them; some are plain tensors or on another mesh. Shard the "
        "whole model (with tensor parallelism use distribute_module for replicated parameters), or "
        "give the other parameters an optimizer of their own."
    )
