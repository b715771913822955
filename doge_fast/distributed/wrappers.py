"""What else reduces gradients over ranks, and is kept from it inside a domain."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def bare(model: nn.Module) -> nn.Module:
    """The model inside torch's DistributedDataParallel, or the model."""
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


@contextmanager
def without_reduction() -> Iterator[None]:
    """Have DistributedDataParallel leave the gradients of backward passes inside alone.

    Raises:
        RuntimeError: a model with `static_graph`, or FSDP1, runs inside.
    """
    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    before: dict[DistributedDataParallel, bool] = {}

    def switch_off(module: nn.Module, _: object) -> None:
        if type(module).__name__ == "FullyShardedDataParallel":
            raise RuntimeError(
                "FullyShardedDataParallel (FSDP1) cuts parameters into flat pieces that have no "
                "gradient of their own. Use torch.distributed.fsdp.fully_shard(model) instead."
            )
        if not isinstance(module, DistributedDataParallel) or module in before:
            return
        if module.static_graph:
            raise RuntimeError(
                "DistributedDataParallel(static_graph=True) reduces gradients in every backward "
                "pass; inside a domain they must stay where they are. Leave static_graph out."
            )
        before[module] = module.require_backward_grad_sync
        module.require_backward_grad_sync = False
        # Else the first forward pass sends buffers, and a rank without a domain has none.
        module.require_forward_param_sync = False

    handle = nn.modules.module.register_module_forward_pre_hook(switch_off)
    try:
        yield
    finally:
        handle.remove()
        for module, was_on in before.items():
            module.require_backward_grad_sync = was_on
