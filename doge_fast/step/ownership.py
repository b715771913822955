"""Mistakes with several optimizers that would otherwise pass in silence.

Two DoGEOptimizers inside one `with` each learn a mixture from a part of the gradient: refused. A loop that steps the wrapper and the wrapped
optimizer moves the parameters twice: refused.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from doge_fast.step.parameters import weakly
from doge_fast.tracing import outside_graphs

# `owner` is the Step whose domain is open on this thread. Two threads may train two models.
_open = threading.local()


def refuse_second(owner: object) -> None:
    """Raise RuntimeError if another DoGEOptimizer has a domain open on this thread."""
    if getattr(_open, "owner", None) not in (None, owner):
        raise RuntimeError(
            "a domain of another DoGEOptimizer is open; the two would learn separate mixtures, "
            "each from a part of the gradient. Pass both optimizers to one: "
            "DoGEOptimizer([muon, adamw], domains=...)."
        )


@contextmanager
def opened(owner: object) -> Iterator[None]:
    """Mark `owner` as having a domain open, for `refuse_second`."""
    _open.owner = owner
    try:
        yield
    finally:
        _open.owner = None


class OneStep:
    """Refuses a second step of a wrapped optimizer with one combined gradient, and notes the first.

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
                optimizer.register_step_pre_hook(weakly(self._enter))
                optimizer.register_step_post_hook(weakly(self._leave))

    def begin(self) -> None:
        """A new gradient is in `p.grad`."""
        self._stepped: set[int] = set()
        self.is_ours = False
        """Whether the step ended as one of the DoGEOptimizer."""
        # A step may call that of its base class, whose hooks run too.
        self._depth = 0

    def ended_alone(self) -> bool:
        """Whether wrapped optimizers have stepped with the last gradient by themselves; once."""
        is_alone, self.is_ours = bool(self._stepped) and not self.is_ours, True
        return is_alone

    @outside_graphs
    def _enter(self, optimizer: Optimizer) -> None:
        if not self._depth and id(optimizer) in self._stepped and self._is_given(optimizer):
            raise RuntimeError(
                f"{type(optimizer).__name__} has stepped with this combined gradient already, and "
                "would move the parameters twice. Call step() of the DoGEOptimizer alone, which "
                "steps the optimizer that it wraps, and then zero_grad()."
            )
        self._depth += 1

    @outside_graphs
    def _leave(self, optimizer: Optimizer) -> None:
        self._depth -= 1
        if not self._depth and self._is_given(optimizer):
            self._stepped.add(id(optimizer))

    def _is_given(self, optimizer: Optimizer) -> bool:
        """Whether `p.grad` of its parameters is the combined gradient."""
        params = (param for group in optimizer.param_groups for param in group["params"])
        return any(map(self._is_combined, params))
