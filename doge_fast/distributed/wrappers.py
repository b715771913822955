"""DistributedDataParallel, which reduces gradients over ranks, switched off inside a domain."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from doge_fast.distributed.process_group import default_group


def bare(model: nn.Module) -> nn.Module:
    """The model inside torch's DistributedDataParallel, or the model."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def without_reduction() -> AbstractContextManager[None]:
    """Keep DistributedDataParallel from reducing the gradients of backward passes inside.

    RuntimeError if a model with `static_graph` runs inside.
    """
    return nullcontext() if default_group() is None else _without_reduction()


@contextmanager
def _without_reduction() -> Iterator[None]:
    before: dict[DistributedDataParallel, bool] = {}

    def switch_off(module: nn.Module, _: object) -> None:
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
