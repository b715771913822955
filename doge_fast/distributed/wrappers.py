"""Model wrappers that reduce gradients over ranks: switched off or refused inside a domain."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from doge_fast.distributed.process_group import default_group

# Wrappers that keep gradients in their own buffers: prefixes of module and class name, and the name
# for messages. Base classes are compared too.
_OWNERS = (
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "FSDP1"),
    ("deepspeed.", "DeepSpeedEngine", "DeepSpeed's engine"),
    ("megatron.core.distributed", "", "Megatron's wrapper"),
)


@cache
def _owner(kind: type[nn.Module]) -> str | None:
    """The name, for messages, of a wrapper that keeps gradients; None for other classes."""
    for base in kind.__mro__:
        for package, name, owner in _OWNERS:
            if base.__module__.startswith(package) and base.__name__.startswith(name):
                return owner
    return None


def bare(model: nn.Module) -> nn.Module:
    """The model inside torch's DistributedDataParallel, or the model."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def without_reduction() -> Iterator[None]:
    """Keep DistributedDataParallel from reducing the gradients of backward passes inside.

    RuntimeError if a model with `static_graph`, FSDP1, DeepSpeed's engine or one of Megatron's
    wrappers runs inside.
    """
    if default_group() is None:
        yield
        return
    before: dict[DistributedDataParallel, bool] = {}

    def switch_off(module: nn.Module, _: object) -> None:
        kind: Any = type(module)
        if (owner := _owner(kind)) is not None:
            raise RuntimeError(
                f"{owner} reduces gradients into buffers of its own, so no domain's gradient ever "
                "exists. Use torch.distributed.fsdp.fully_shard(model) instead, or learn the "
                "weights with a proxy outside of it."
            )
        if not isinstance(module, DistributedDataParallel):
            return
        if module.static_graph:
            raise RuntimeError(
                "DistributedDataParallel(static_graph=True) reduces gradients in every backward "
                "pass; inside a domain they must not be reduced. Leave static_graph out."
            )
        # In every forward pass, since a no_sync() inside the domain switches it on when it ends.
        before[module] = before.get(module, False) or module.require_backward_grad_sync
        module.require_backward_grad_sync = False
        # Otherwise the first forward pass broadcasts buffers, and waits for a rank that runs none.
        module.require_forward_param_sync = False

    handle = nn.modules.module.register_module_forward_pre_hook(switch_off)
    try:
        yield
    finally:
        handle.remove()
        for module, was_on in before.items():
            module.require_backward_grad_sync |= was_on
