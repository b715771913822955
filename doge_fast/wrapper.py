"""The part of `DoGEOptimizer` that any wrapper of a torch optimizer needs.

A wrapper shares parameter groups and state with the wrapped optimizer. It keeps nothing of its own
in that state: optimizers initialise a parameter's state when they find it empty.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from doge_fast.joined import JoinedOptimizer, step_with
from doge_fast.tracing import between_graphs, outside_graphs

_HOOKS = tuple(
    f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
# Methods that torch's optimizers do not have, and that are handed on: schedule-free optimizers
# switch between the weights that are trained and those that are evaluated.
_MODES = ("train", "eval")


def _shared(name: str) -> Any:
    """An attribute that is the wrapped optimizer's own."""
    # Looked up each time: the wrapped optimizer's load_state_dict replaces the object.
    return property(
        lambda wrapper: getattr(wrapper.inner, name),
        lambda wrapper, value: setattr(wrapper.inner, name, value),
    )


class OptimizerWrapper(Optimizer):
    """A torch optimizer around another one, or around several, which `doge_fast.joined` joins."""

    param_groups: list[dict[str, Any]] = _shared("param_groups")
    state: Any = _shared("state")
    defaults: dict[str, Any] = _shared("defaults")
    # False: a GradScaler unscales p.grad itself and skips step() on overflow.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        if isinstance(optimizer, list | tuple):
            optimizer = JoinedOptimizer(optimizer) if len(optimizer) > 1 else optimizer[0]
        self._inner: Optimizer = optimizer  # type: ignore[assignment]
        # Not super().__init__, which would copy the parameter groups.
        self._set_up()

    @property
    def inner(self) -> Optimizer:
        """The wrapped optimizer; of several, a `JoinedOptimizer`."""
        return self._inner

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the hooks, which torch optimizers do not pickle either."""
        # Schedulers patch `step` on the instance; the class has the real one.
        left = ("step", *_HOOKS)
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the given attributes, all or some of them."""
        # With setattr: some libraries replace `state` and `param_groups` this way, and both
        # belong to the wrapped optimizer.
        for name, value in state.items():
            setattr(self, name, value)
        self._set_up()

    def _set_up(self) -> None:
        for name in _HOOKS:
            if name not in self.__dict__:
                setattr(self, name, OrderedDict())
        self._patch_step_function()

    # Hidden from the type checker, for which any name would then be an attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A public attribute that only the wrapped optimizer has; of functions, `_MODES`.

            Another one may step the parameters, as SAM's `first_step` does, past the domains.
            """
            inner = self.__dict__.get("_inner")
            if inner is not None and not name.startswith("_"):
                for owner in (inner, *optimizers_of(inner)):
                    value = getattr(owner, name, None)
                    if hasattr(owner, name) and (name in _MODES or not callable(value)):
                        return value
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def __setattr__(self, name: str, value: Any) -> None:
            """Set a public name on the wrapped optimizers that have it; else on all, and here."""
            # Trainers set what the optimizer's step reads, such as the latest loss. If none of the
            # optimizers has the attribute yet, all get it. So does the wrapper, since a copy of a
            # torch optimizer loses such attributes.
            inner = self.__dict__.get("_inner")
            is_ours = name.startswith("_") or hasattr(type(self), name)
            others = () if is_ours or inner is None else optimizers_of(inner)
            owners = [owner for owner in others if hasattr(owner, name)]
            if not owners or name in self.__dict__:
                super().__setattr__(name, value)
            for owner in owners or others:
                setattr(owner, name, value)


def skip_reader(skipped: Tensor, inner: Optimizer) -> Callable[[], bool]:
    """A function that returns whether the step is skipped, to be called by the host later.

    If the host must know, the copy of the flag begins here. The function then waits for this copy
    alone, and not for what the device was given to do since.
    """
    is_needed = skipped.device.type == "cuda" and _needing_the_host(inner)
    if not is_needed or torch.cuda.is_current_stream_capturing():
        return partial(_read, skipped, None)
    # torch takes pinned memory for a non-blocking copy.
    on_host = skipped.to("cpu", non_blocking=True)
    return partial(_read, on_host, torch.cuda.current_stream(skipped.device).record_event())


@outside_graphs
def _read(flag: Tensor, arrival: torch.cuda.Event | None) -> bool:
    if arrival is not None:
        arrival.synchronize()
    return bool(flag)


@outside_graphs
def _needing_the_host(inner: Optimizer) -> list[str]:
    """Class names of the wrapped optimizers whose step the host skips."""
    return [type(each).__name__ for each in optimizers_of(inner) if not _is_skipped_on_device(each)]


def _is_skipped_on_device(optimizer: Optimizer) -> bool:
    """Whether the device can skip its step: it is fused, and not the first of SGD with momentum.

    That one makes the momentum of uninitialised memory, and keeps it if the device skips the step.
    """
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    is_first = isinstance(optimizer, torch.optim.SGD) and any(
        optimizer.state.get(param, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"]
        if group["momentum"] and param.grad is not None
    )
    return getattr(optimizer, "_step_supports_amp_scaling", False) and is_fused and not is_first


def optimizers_of(inner: Optimizer) -> Sequence[Optimizer]:
    """The torch optimizers: those that are joined, or the one."""
    return inner.optimizers if isinstance(inner, JoinedOptimizer) else (inner,)


@between_graphs
def step_unless(
    skipped: Tensor,
    found_inf: Tensor,
    inner: Optimizer,
    is_skipped: Callable[[], bool],
    loss: Any = None,
) -> None:
    """Step the wrapped optimizer unless the bool `skipped`, in float32 `found_inf`, is true.

    A fused optimizer on a GPU reads the flag there. Any other one is skipped by the host, which
    a CUDA graph that is being captured cannot do: RuntimeError.
    """
    needing = _needing_the_host(inner)
    if not needing and skipped.device.type != "cpu":
        fused: Sequence[Any] = optimizers_of(inner)
        for each in fused:
            each.grad_scale, each.found_inf = None, found_inf
        try:
            step_with(inner, loss)
        finally:
            for each in fused:
                del each.grad_scale, each.found_inf
    elif skipped.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a step that is captured in a CUDA graph cannot be skipped by the host; "
            f"{' and '.join(needing)} needs fused=True (and capturable=True where it has that "
            "argument), which lets the device skip it."
        )
    elif not is_skipped():
        step_with(inner, loss)
