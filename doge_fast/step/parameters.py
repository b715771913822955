"""The parameters that the wrapped optimizer trains: groups, names, selection, gradient hooks.

Groups are looked up when a step begins, since they change: a torch optimizer's `load_state_dict`
replaces the list, and a layer may be frozen.

On a CPU a hook passes each gradient on as soon as autograd has finished it, while it is in the
cache. On a GPU one Python call for each parameter and domain would take longer than the device's
work. There the hook is the `append` of a deque of length one, which runs no Python and notes only
that a gradient has come. Gradients stay in `p.grad` until `take` collects them all.
"""

import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import compress
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from doge_fast.tracing import outside_graphs
from doge_fast.weights.rule import LastStep

Receive = Callable[[Tensor], None]

# Whether a parameter's gradient is taken during the backward pass.
takes_at_once: Callable[[Tensor], bool] = attrgetter("is_cpu")
_grad_of: Callable[[Tensor], Any] = attrgetter("grad")
# Hook handles of all living DoGEOptimizers.
_handles: weakref.WeakSet[Any] = weakref.WeakSet()


class TrackedParameters:
    """Parameters of an optimizer that require a gradient, and the hooks on them.

    `selection` is that of `DoGEOptimizer`: the parameters whose columns enter W.
    """

    def __init__(
        self, optimizer: Optimizer, selection: Collection[str] | Collection[Tensor] | None
    ) -> None:
        self.optimizer = optimizer
        self._start()
        self.params: list[Tensor] = self.look_up()
        """The tracked parameters, as `scan` found them last."""
        self._check()
        self.selected_ids: set[int] | None = None
        """The ids of the parameters whose columns enter W; None: all."""
        self._selection: list[str | Tensor] = []
        if selection is not None:
            selected = resolve(selection, self.params, self._by_name())
            self.selected_ids = set(map(id, selected))
            # By name where there is one, since the tensors may be replaced, as by fully_shard().
            names = {id(param): name for name, param in self._by_name().items()}
            self._selection = [names.get(id(param), param) for param in selected]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the hooks, which cannot be pickled."""
        lasting = ("optimizer", "_selection", "params", "selected_ids")
        return {name: getattr(self, name) for name in lasting}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The same parameters, without hooks."""
        self.__dict__.update(state)
        self._start()

    def _start(self) -> None:
        # {id: (parameter, hook)}; holding the parameter keeps its id unique.
        self._hooks: dict[int, tuple[Tensor, Any]] = {}
        weakref.finalize(self, _remove, self._hooks).atexit = False
        # {id of a parameter with a hook: the function that it calls}
        self._hooked: dict[int, Receive | None] = {}
        self.receive: Receive | None = None
        """Called with each tracked parameter on a CPU when its gradient is complete."""
        self._noted: deque[Tensor] = deque(maxlen=1)
        self.note: Receive = self._noted.append
        """Notes that a gradient is in `p.grad`."""

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer; not a copy."""
        return self.optimizer.param_groups

    @property
    def lr(self) -> float | Tensor:
        """eta: the learning rate of the first group."""
        lr: float | Tensor = self.groups[0]["lr"]
        return lr

    @property
    def peak_lr(self) -> float:
        """The largest learning rate that a scheduler has noted in the first group, else `lr`."""
        group = self.groups[0]
        # OneCycleLR notes its lowest rate as `initial_lr`, its peak as `max_lr`.
        return max(float(group.get(name, 0)) for name in ("lr", "initial_lr", "max_lr"))

    @outside_graphs
    def refuse_other_lr(self, last: LastStep) -> None:
        """Raise RuntimeError if the learning rate has changed since the weights moved by it.

        A rate on a device is not compared: the host would wait for it.
        """
        lr, used = on_host(self.lr), on_host(last.lr)
        if lr is None or used is None or math.isnan(used) or math.isclose(lr, used, rel_tol=1e-6):
            return
        raise RuntimeError(
            f"the learning rate has changed from {used:g} to {lr:g} since the domain weights moved "
            "by it. Set it before the end of the last domain of the step, or pass "
            "micro_batches=None, so that step() combines."
        )

    def scan(self) -> list[Tensor]:
        """Look the parameters up again, and keep a hook on each of them only."""
        self.params = self.look_up()
        wanted = {
            id(param): self.receive if takes_at_once(param) else self.note for param in self.params
        }
        for param, handle in list(self._hooks.values()):
            if wanted.get(id(param)) is self.receive and _last_hook(param) != handle.id:
                # A hook that was added after ours would find p.grad empty.
                self._hooks.pop(id(param))[1].remove()
                del self._hooked[id(param)]
        if wanted != self._hooked:
            # A parameter that has moved to another device needs the other kind of hook.
            for key, known in self._hooked.items():
                if wanted.get(key) is not known:
                    self._hooks.pop(key)[1].remove()
            for param in self.params:
                if id(param) not in self._hooks:
                    handle = param.register_post_accumulate_grad_hook(wanted[id(param)])  # type: ignore[no-untyped-call]
                    self._hooks[id(param)] = (param, handle)
                    _handles.add(handle)
            self._hooked = wanted
            if self.selected_ids is not None:
                by_name = self._by_name()
                found = (by_name.get(x) if isinstance(x, str) else x for x in self._selection)
                self.selected_ids = set(map(id, found)) & set(map(id, self.params))
                if self.params and not self.selected_ids:
                    raise RuntimeError(
                        "the optimizer trains none of the parameters of the selection any more: "
                        "they were frozen, or replaced by others. Build the wrapped optimizer from "
                        "model.named_parameters(), so that the selection is found by name."
                    )
        return self.params

    @property
    def has_noted(self) -> bool:
        """Whether a gradient was noted since the last `take` or `forget`."""
        return bool(self._noted)

    @property
    def has_foreign(self) -> bool:
        """Whether a `p.grad` is set whose gradient was taken during the backward pass."""
        return any(
            param.grad is not None and self._hooked.get(id(param)) is self.receive
            for param in self.params
        )

    def take(self) -> tuple[list[Tensor], list[Tensor]]:
        """Take all gradients out of `p.grad`: their parameters, and the gradients."""
        self.forget()
        params, grads = self.params, list(map(_grad_of, self.params))
        have_one = [grad is not None for grad in grads]
        if not all(have_one):
            params, grads = list(compress(params, have_one)), list(compress(grads, have_one))
        for param in params:
            param.grad = None
        return params, grads

    def forget(self) -> None:
        """Forget that gradients have come."""
        self._noted.clear()

    def release(self) -> None:
        """Remove all hooks."""
        _remove(self._hooks)
        self._hooked = {}
        self.forget()

    def name_of(self, param: Tensor) -> str:
        """A parameter's name for a message."""
        for name, known in self._by_name().items():
            if known is param:
                return f"the parameter {name}"
        return f"a parameter of shape {list(param.shape)}"

    def look_up(self, others: Collection[int] = ()) -> list[Tensor]:
        """The parameters that require a gradient now, and those with the ids `others`."""
        every = (param for group in self.groups for param in group["params"])
        return [param for param in every if param.requires_grad or id(param) in others]

    def _by_name(self) -> dict[str, Tensor]:
        """{name: parameter} of the groups that hold names."""
        return {
            name: param
            for group in self.groups
            for name, param in zip(group.get("param_names", ()), group["params"], strict=False)
        }

    def _check(self) -> None:
        if any(param.is_complex() for param in self.params):
            raise ValueError(
                "domain gradients must be real; the wrapped optimizer has complex parameters. "
                "Train them with an optimizer of their own."
            )


def have_other_hooks(params: Iterable[Any]) -> bool:
    """Whether one of these has a post-accumulate hook beside ours."""
    several = [param for param in params if len(param._post_accumulate_grad_hooks or ()) > 1]
    ours = {handle.id for handle in _handles} if several else set()
    return any(param._post_accumulate_grad_hooks.keys() - ours for param in several)


def _last_hook(param: Any) -> int:
    last: int = next(reversed(param._post_accumulate_grad_hooks))
    return last


def on_host(value: object) -> float | None:
    """A number that can be read without waiting for a device; else None."""
    is_elsewhere = isinstance(value, Tensor) and not value.is_cpu
    return None if value is None or is_elsewhere else float(value)  # type: ignore[arg-type]


def resolve(
    selection: Collection[str] | Collection[Tensor],
    params: Iterable[Tensor],
    by_name: Mapping[str, Tensor],
) -> list[Tensor]:
    """The parameters of `params` that a selection names.

    Raises:
        ValueError: it is empty or names something that is not trained.
    """
    items: list[Any] = [] if isinstance(selection, str) else list(selection)
    if not items:
        raise ValueError(
            f"selection must be a non-empty collection of parameters or names; "
            f"got {selection!r}. Pass None for all parameters."
        )
    tracked = {id(param) for param in params}
    selected: list[Tensor] = []
    for item in items:
        param = by_name.get(item) if isinstance(item, str) else item
        if param is None or id(param) not in tracked:
            raise ValueError(
                f"selection names {item if isinstance(item, str) else 'a tensor'!r}, which is not "
                "a parameter the wrapped optimizer trains. Build it from model.named_parameters() "
                f"for names to be known; it knows {sorted(by_name)[:8]} ..."
            )
        selected.append(param)
    return selected


def weak_hook(method: Callable[[Any], None]) -> Callable[..., None]:
    """A hook that calls a method with its first argument, and does not keep the owner alive."""
    ref, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def hook(argument: Any, *_: Any) -> None:
        if (owner := ref()) is not None:
            function(owner, argument)

    return hook


def _remove(hooks: dict[int, tuple[Tensor, Any]]) -> None:
    for _, handle in hooks.values():
        handle.remove()
    hooks.clear()
