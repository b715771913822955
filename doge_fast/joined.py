"""Several torch optimizers that step one model, presented as one.

torch.optim.Muon takes only matrices, so its users step the rest of the model with AdamW. Their
parameter groups are concatenated. The state_dict has torch's format and numbers the parameters of
all optimizers consecutively, so schedulers and checkpoints see one optimizer.
"""

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

NAME = "doge_optimizer"
"""The key of a parameter group with the class name of the optimizer that steps it."""


class JoinedOptimizer(Optimizer):
    """Two or more optimizers of disjoint parameters as one.

    Raises:
        ValueError: two of them share a parameter, or a state_dict has keys other than `state` and
            `param_groups`.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        owners: dict[int, Optimizer] = {}
        for optimizer in self.optimizers:
            for param in _params_of(optimizer):
                owner = owners.setdefault(id(param), optimizer)
                if owner is not optimizer:
                    raise ValueError(
                        f"a parameter of shape {list(param.shape)} is in {type(owner).__name__} "
                        f"and in {type(optimizer).__name__}, which would both step it. Give it to "
                        "one."
                    )
            if further := set(optimizer.state_dict()) - {"state", "param_groups"}:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {sorted(further)} in its state_dict, which "
                    "has no place in that of several optimizers. Wrap it alone."
                )
        # Only what all have: OneCycleLR looks here whether every group has momentum.
        first, *others = (optimizer.defaults for optimizer in self.optimizers)
        self.defaults = {
            name: value for name, value in first.items() if all(name in each for each in others)
        }
        # Not super().__init__, which would copy the parameter groups.
        self.__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in a new list."""
        # Looked up at each access: an optimizer's load_state_dict replaces its groups.
        groups = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                # In the optimizer's own groups too: torch.distributed.checkpoint reads back only
                # the keys that it finds there.
                group[NAME] = type(optimizer).__name__
                groups.append(group)
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        for optimizer, own in zip(self.optimizers, self._by_optimizer(groups), strict=True):
            optimizer.param_groups = own

    @property  # type: ignore[override]
    def state(self) -> Mapping[Any, Any]:
        """The states of all optimizers; a view that cannot be written to."""
        states = (each.state.items() for each in self.optimizers)
        return MappingProxyType(dict(itertools.chain.from_iterable(states)))

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        for optimizer in self.optimizers:
            own = {param: state[param] for param in _params_of(optimizer) if param in state}
            optimizer.state = defaultdict(dict, own)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each optimizer; the closure is called once, before the first steps."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            step_with(optimizer, loss)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: it is not known which optimizer should step the parameters."""
        names = [type(optimizer).__name__ for optimizer in self.optimizers]
        raise ValueError(
            f"add_param_group() cannot tell which of {names} should step the parameters. Call "
            "it on that optimizer; the parameters count from the next step on."
        )

    def state_dict(self) -> dict[str, Any]:
        """In torch's format; each group names its optimizer's class."""
        return saved(self, self._joined_state)

    def _joined_state(self) -> dict[str, Any]:
        state_dict: dict[str, Any] = {"state": {}, "param_groups": []}
        start = 0
        for index, optimizer in enumerate(self.optimizers):
            theirs, name = optimizer.state_dict(), type(optimizer).__name__
            numbers = range(sum(len(group["params"]) for group in theirs["param_groups"]))
            for key, value in theirs["state"].items():
                # Some optimizers keep state that belongs to no parameter: its key gets their index.
                state_dict["state"][start + key if key in numbers else (index, key)] = value
            for group in theirs["param_groups"]:
                params = [start + number for number in group["params"]]
                state_dict["param_groups"].append(group | {"params": params, NAME: name})
            start += len(numbers)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore each optimizer from its part; ValueError if others wrote it."""
        with loading(self, state_dict) as state_dict:
            refuse_other_optimizers(state_dict["param_groups"], self)
            state = state_dict["state"]
            parts = self._by_optimizer(state_dict["param_groups"])
            for index, (optimizer, groups) in enumerate(zip(self.optimizers, parts, strict=True)):
                keys = [key for group in groups for key in group["params"]]
                numbers = {key: number for number, key in enumerate(keys)}
                own = {number: state[key] for key, number in numbers.items() if key in state}
                for key in state:
                    if isinstance(key, tuple) and key[0] == index:
                        own[key[1]] = state[key]
                renumbered = [
                    group | {"params": [numbers[key] for key in group["params"]]}
                    for group in groups
                ]
                optimizer.load_state_dict({"state": own, "param_groups": renumbered})

    def _by_optimizer(self, groups: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        rest = iter(groups)
        return [list(itertools.islice(rest, len(each.param_groups))) for each in self.optimizers]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the hooks, which torch optimizers do not pickle either."""
        return {"optimizers": self.optimizers, "defaults": self.defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes, and add hooks and the `train` and `eval` that the optimizers have."""
        for name, value in state.items():
            setattr(self, name, value)
        super().__setstate__({})
        for name in ("train", "eval"):
            methods = [getattr(each, name, None) for each in self.optimizers]
            if found := [method for method in methods if callable(method)]:
                setattr(self, name, lambda found=found: [method() for method in found])

    def __repr__(self) -> str:
        """The joined optimizers."""
        return f"{type(self).__name__}({', '.join(map(repr, self.optimizers))})"


def saved(optimizer: Optimizer, save: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `save` returns, with the optimizer's hooks run around it."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    state_dict = save()
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        state_dict = post_hook(optimizer, state_dict) or state_dict
    return state_dict


@contextmanager
def loading(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A copy of `state_dict` to load inside, with the optimizer's hooks run around it."""
    state_dict = dict(state_dict)
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict
    yield state_dict
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def step_with(optimizer: Optimizer, loss: Any) -> None:
    """Step an optimizer; if the loss is known and its step takes a closure, pass one.

    RuntimeError if it calls the closure after it has moved the parameters or cleared the
    gradients, as SAM does.
    """
    if loss is None or not takes_closure(optimizer):
        optimizer.step()
        return
    params = [param for param in _params_of(optimizer) if param.grad is not None]
    versions = [param._version for param in params]

    def closure() -> Any:
        if versions != [p._version for p in params] or any(p.grad is None for p in params):
            raise RuntimeError(
                f"{type(optimizer).__name__} evaluates the loss again within a step, at other "
                "parameters, while the domain weights move once, with one gradient of each domain. "
                "Wrap an optimizer that takes one gradient a step, such as torch.optim.AdamW."
            )
        return loss

    optimizer.step(closure)


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether the first argument of its step is a closure, whatever its name."""
    # A scheduler's patch of `step` shows `self`.
    parameters = inspect.signature(optimizer.step).parameters.values()
    first = next((each for each in parameters if each.name != "self"), None)
    # `step(*args)` hands on what it is given.
    return first is not None and (
        "closure" in first.name or first.kind is inspect.Parameter.VAR_POSITIONAL
    )


def refuse_other_optimizers(groups: Sequence[dict[str, Any]], optimizer: Optimizer) -> None:
    """Raise ValueError if other optimizers have written the parameter groups of a checkpoint."""
    is_joined = isinstance(optimizer, JoinedOptimizer)
    name = type(optimizer).__name__
    there = [(group.get(NAME), len(group["params"])) for group in groups]
    here = [(group.get(NAME, name), len(group["params"])) for group in optimizer.param_groups]
    if there != here if is_joined else {written for written, _ in there} - {name, None}:
        raise ValueError(
            f"the parameter groups of the checkpoint are of {_in_words(there)}; those of this "
            f"optimizer are of {_in_words(here)}. Wrap the optimizers that wrote it, in the same "
            "order. To load the checkpoint of a single optimizer, load it before wrapping."
        )


def _in_words(groups: Sequence[tuple[str | None, int]]) -> str:
    return ", ".join(f"{name or 'one optimizer'} ({size} parameters)" for name, size in groups)


def _params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])
