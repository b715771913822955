"""What else reduces gradients over ranks, and is kept from it inside a domain."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Classes that own the gradients of what they wrap, {(start of the module, start of the name):
# what a message says of them}. A base class counts.
_OWNERS = {
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): (
        "FullyShardedDataParallel (FSDP1) cuts parameters into flat pieces that have no gradient "
        "of their own. Use torch.distributed.fsdp.fully_shard(model) instead."
    ),
    ("deepspeed.", "DeepSpeedEngine"): (
        "DeepSpeed's engine reduces and keeps the gradients by itself, so no domain's gradient "
        "ever exists. Use torch.distributed.fsdp.fully_shard(model) instead, or learn the weights "
        "with a proxy outside of DeepSpeed."
    ),
    ("megatron.core.distributed", ""): (
        "Megatron's wrappers collect the gradients in buffers of their own, so no domain's "
        "gradient ever exists. Use torch.distributed.fsdp.fully_shard(model) instead, or learn the "
        "weights with a proxy outside of Megatron."
    ),
}


@cache
def _refusal_of(kind: type[nn.Module]) -> str | None:
    """Why modules of a class cannot run inside a domain; None where they can."""
    for base in kind.__mro__:
        for (package, name), sentence in _OWNERS.items():
            if base.__module__.startswith(package) and base.__name__.startswith(name):
                return sentence
    return None


def bare(model: nn.Module) -> nn.Module:
    """The model inside torch's DistributedDataParallel, or the model."""
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


@contextmanager
def without_reduction() -> Iterator[None]:
    """Have DistributedDataParallel leave the gradients of backward passes inside alone.

    Raises:
        RuntimeError: a model with `static_graph`, FSDP1, DeepSpeed's engine or one of Megatron's
            wrappers runs inside.
    """
    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    before: dict[DistributedDataParallel, bool] = {}

    def switch_off(module: nn.Module, _: object) -> None:
        kind: Any = type(module)
        if (refusal := _refusal_of(kind)) is not None:
            raise RuntimeError(refusal)
        if not isinstance(module, DistributedDataParallel) or module in before:
            return
        if module.static_graph:
            raise RuntimeError(
                "DistributedDataParallel(static_graph=True) reduces gradients in every backward "
                "pass; inside a domain they must not be reduced. Leave static_graph out."
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
