"""FSDP2 with other domains on other ranks: gradients travel as pieces of rows, not as a mean.

Where all ranks run the same K domains, each domain costs a pass over the sharded model: its
parameters are gathered and its gradient is reduced. Here a pass has one domain on each rank. In
place of the reduce-scatter is an all-to-all of the same size, after which a rank has its columns of
every rank's gradient, and adds them to the rows of their domains. K = n domains cost what a plain
step costs.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup

from doge_fast.flat_buffer import local_of


class Fragments:
    """Lets each rank of a model under `fully_shard` run domains of its own::

        model = fully_shard(model)
        optimizer = DoGEOptimizer(
            inner, domains=sizes, micro_batches=None, process_group=Fragments(model)
        )
        for name, first, last in sampling.rounds(sizes, rank, world_size):
            with optimizer.domain(name):
                (losses_of(model, batch[name][first:last]).sum() / sizes[name]).backward()
        optimizer.step()

    All ranks enter equally many domains, and run one backward pass in each. A domain's gradient is
    the sum of what all ranks give it, so its loss is divided by its examples in the whole batch,
    and `count` is left out. Outside of domains the model's gradients are sums over ranks as well.

    Args:
        model: sharded over one dimension, all of it; this replaces what `fully_shard` reduces with.

    Raises:
        ValueError: no module of the model is sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        # By the method, as the class takes as long to import as the rest of us.
        modules: list[Any] = [
            module for module in model.modules() if hasattr(module, "set_custom_reduce_scatter")
        ]
        if not modules:
            raise ValueError(
                "Fragments need a model that torch.distributed.fsdp.fully_shard has sharded; "
                f"{type(model).__name__} is not. Call fully_shard(model) first."
            )
        for module in modules:
            module.set_custom_reduce_scatter(self)
            module.set_gradient_divide_factor(1.0)
        self.rows: Sequence[int] = ()
        """The row of the domain that each rank has entered."""
        self._received: list[tuple[int, Tensor]] = []

    # What FSDP2 asks of a reduce-scatter.

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of what is sent, and of the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: object = None,
        async_op: bool = False,
    ) -> None:
        """Reduce by a sum, and keep what each row gets until the next call."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        received_nC = received.view(dist.get_world_size(group), -1)
        torch.sum(received_nC, 0, out=output_tensor)
        self._received = []
        for row in dict.fromkeys(self.rows):
            ranks = [rank for rank, other in enumerate(self.rows) if other == row]
            # Summed only where there is something to add.
            part_C = received_nC[ranks].sum(0) if len(ranks) > 1 else received_nC[ranks[0]]
            self._received.append((row, part_C))

    # What a step asks.

    def begin(self, rows: Sequence[int]) -> None:
        """Note the row of each rank's domain."""
        self.rows, self._received = rows, []

    def parts(self, grad: Tensor) -> Iterator[tuple[int, Tensor]]:
        """What each row gets of a parameter, right after its gradient has been reduced.

        Raises:
            RuntimeError: it was not reduced here.
        """
        local = local_of(grad)
        if not self._received or self._received[0][1].device != local.device:
            raise RuntimeError(
                "a gradient was not reduced by Fragments, or was moved to another device "
                "afterwards (CPUOffloadPolicy does so). Call Fragments(model) after fully_shard, "
                "on the model that you train, and leave gradients on their device."
            )
        for row, part_C in self._received:
            # FSDP2 cuts a parameter's gradient out of what it has reduced; the parts are alike.
            start = part_C.storage_offset() + local.storage_offset()
            part = part_C.as_strided(local.shape, local.stride(), start)
            yield row, part.to(local.dtype)


Group = ProcessGroup | Fragments
