"""Several optimizers on one model: mistakes that would otherwise give wrong numbers in silence.

Two DoGEOptimizers inside one `with` would each learn a mixture from a part of the gradient. A loop
that steps the wrapper and the wrapped optimizer would move the parameters twice.
"""

import threading
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.optim import Optimizer

from doge_fast.step.parameters import weak_hook
from doge_fast.tracing import outside_graphs


class _ThisThread(threading.local):
    owner: object = None
    """The `Step` whose domain is open on this thread: two threads may train two models."""


this_thread = _ThisThread()


def refuse_second(owner: object) -> None:
    """Raise RuntimeError if another DoGEOptimizer has a domain open on this thread."""
    if this_thread.owner not in (None, owner):
        raise RuntimeError(
            "a domain of another DoGEOptimizer is open; the two would learn separate mixtures, "
            "each from a part of the gradient. Pass both optimizers to one: "
            "DoGEOptimizer([muon, adamw], domains=...)."
        )


class OneStep:
    """Refuses a second step of a wrapped optimizer with one combined gradient.

    Args:
        optimizers: the wrapped ones.
        is_combined: whether a parameter's `p.grad` is the combined gradient.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer], is_combined: Callable[[Tensor], bool]
    ) -> None:
        self._is_combined = is_combined
        self.begin()
        for optimizer in optimizers:
            # A class that does not call torch's __init__ has no hooks.
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):
                optimizer.register_step_pre_hook(weak_hook(self._enter))
                optimizer.register_step_post_hook(weak_hook(self._leave))

    def begin(self) -> None:
        """A step begins, which will put a new combined gradient into `p.grad`."""
        self.stepped: set[int] = set()
        """The ids of the optimizers that have stepped with it."""
        self.is_ours = False
        """Whether the DoGEOptimizer has stepped them."""
        # A step may call that of its base class, whose hooks run too.
        self._depth = 0

    @property
    def is_alone(self) -> bool:
        """Whether a wrapped optimizer has stepped, and the DoGEOptimizer has not."""
        return bool(self.stepped) and not self.is_ours

    @outside_graphs
    def _enter(self, optimizer: Optimizer) -> None:
        if not self._depth and id(optimizer) in self.stepped and self._has_combined(optimizer):
            raise RuntimeError(
                f"{type(optimizer).__name__} has stepped with this combined gradient already, and "
                "would move the parameters twice. Call step() of the DoGEOptimizer alone, which "
                "steps the optimizer that it wraps, and then zero_grad()."
            )
        self._depth += 1

    @outside_graphs
    def _leave(self, optimizer: Optimizer) -> None:
        self._depth -= 1
        if not self._depth and self._has_combined(optimizer):
            self.stepped.add(id(optimizer))

    def _has_combined(self, optimizer: Optimizer) -> bool:
        """Whether `p.grad` of its parameters is the combined gradient."""
        params = (param for group in optimizer.param_groups for param in group["params"])
        return any(map(self._is_combined, params))
