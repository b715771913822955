"""The domain weights in a checkpoint, in two forms, since some formats drop one of them.

The first form is a dict of tensors and names, under a key of its own in the optimizer's state dict.
torch.distributed.checkpoint saves only `state` and `param_groups` of an optimizer. So every
parameter group holds the same numbers again as a tuple of floats: version, fingerprint of the
names, number of the draw, the vectors and counts, mu. If a checkpoint has both forms the dict is
read, since its parts are named and a user may edit them.

The groups of a live optimizer hold an empty tuple under that key. The key is needed because
torch.distributed.checkpoint reads back only the keys that the live groups have. The tuple is empty
because the weights are on the device, and a copy would be out of date after one step.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from doge_fast.tracing import warn
from doge_fast.weights.objective import Objective
from doge_fast.weights.rule import COUNTS, VECTORS
from doge_fast.weights.weights_file import fingerprint_of

KEY = "doge"
VERSION = 3


def as_dict(state: Mapping[str, Any], objective: Objective, *, draws: int) -> dict[str, Any]:
    """The dict of a checkpoint, from what `DomainWeights.state` returns."""
    return {
        "version": VERSION,
        "domains": list(objective.domains),
        "names": list(objective.names),
        "draws": draws,
        **state,
    }


def as_tuple(state: Mapping[str, Any], objective: Objective) -> tuple[float, ...]:
    """The tuple of a checkpoint: 6 + 3 K floats and the rule's memory. Waits for the device."""
    # One vector, to wait for the device only once.
    parts = (*VECTORS, *COUNTS, *(("memory",) if "memory" in state else ()))
    values_S = torch.cat([state[name].double().view(-1) for name in parts])
    head = (state["version"], _fingerprint(objective), state["draws"])
    return (*map(float, head), *values_S.tolist(), float(state["mu"]))


def from_tuple(values: tuple[float, ...], objective: Objective) -> dict[str, Any]:
    """The dict from its tuple; tensors on the CPU.

    ValueError if the tuple is of another version, other domains or another target.
    """
    version, fingerprint, draws, *numbers, mu = values
    if (version, fingerprint) != (VERSION, _fingerprint(objective)):
        raise ValueError(
            "the checkpoint's parameter groups are of another version, other domains or another "
            f"target: version {version:g}, where this optimizer has {VERSION} and the names "
            f"{list(objective.names)}. Build it with the same ones in the same order."
        )
    sizes = [len(objective.domains)] * len(VECTORS) + [1] * len(COUNTS)
    sizes.append(len(numbers) - sum(sizes))
    pieces = torch.split(torch.tensor(numbers, dtype=torch.float64), sizes)
    parts = dict(zip((*VECTORS, *COUNTS, "memory"), pieces, strict=True))
    if not parts["memory"].numel():
        del parts["memory"]
    parts |= {name: parts[name].long().view(()) for name in COUNTS}
    return as_dict({"mu": mu, **parts}, objective, draws=int(draws))


def _fingerprint(objective: Objective) -> float:
    return fingerprint_of([objective.domains, objective.names])


def add_empty_key(groups: list[dict[str, Any]]) -> None:
    """Give every group of a live optimizer the key of the weights, with an empty tuple."""
    for group in groups:
        group[KEY] = ()


def add(state_dict: dict[str, Any], state: dict[str, Any], objective: Objective) -> dict[str, Any]:
    """An optimizer's state dict with the domain weights in both forms; `state` is their dict."""
    values = as_tuple(state, objective)
    groups = [group | {KEY: values} for group in state_dict["param_groups"]]
    # Only for readers of the file: the rate of the first group, by which the weights move.
    lr = float(groups[0]["lr"])
    return state_dict | {"param_groups": groups, KEY: state | {"lr": lr}}


def separate(
    state_dict: Mapping[str, Any], objective: Objective, num_memory: int = 0
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The dict of the domain weights in an optimizer's state dict, or None; and the rest of it.

    ValueError as `check`, or if the groups hold different weights.
    """
    rest = dict(state_dict)
    state: dict[str, Any] | None = rest.pop(KEY, None)
    groups = rest.get("param_groups", ())
    tuples = {tuple(group[KEY]) for group in groups if group.get(KEY)}
    if state is None and tuples:
        # All groups hold the same one.
        (values,) = tuples
        state = from_tuple(values, objective)
    if state is not None:
        check(state, objective, num_memory)
    return state, rest


def check(state: Mapping[str, Any], objective: Objective, num_memory: int = 0) -> None:
    """Refuse the dict of another version, other names or another rule; and weights off the simplex.

    `num_memory` is the size of the rule's memory. ValueError for these. A part that is missing is a
    KeyError.
    """
    # Another version may have other keys.
    theirs = state["version"], [*state["domains"]], [*state.get("names", ())]
    ours = VERSION, [*objective.domains], [*objective.names]
    if theirs != ours:
        raise ValueError(
            "the checkpoint is of another version, other domains or another target: it has "
            f"{theirs}, and this optimizer {ours}. Build it with the same domains in the same "
            "order, and the same target."
        )
    for name in ("alpha", "alpha_mean"):
        alpha_K = state[name]
        # A long run's rounding is far below 1e-9, an edited file's far above; NaN fails both.
        if not ((alpha_K >= 0).all() and abs(float(alpha_K.sum()) - 1) < 1e-9):
            raise ValueError(
                f"the checkpoint's {name} must be weights >= 0 that sum to 1; it is {alpha_K!r}."
            )
    # All that a load reads, so that it fails before anything has changed.
    saved = state["memory"].numel() if "memory" in state else 0
    if saved != num_memory:
        raise ValueError(
            f"the checkpoint's domain weights moved by another rule, which keeps {saved} numbers "
            f"of its own; this one keeps {num_memory}. Pass the score= that it was saved with."
        )
    numbers = as_tuple(state, objective)
    length = 6 + 3 * len(objective.domains) + num_memory
    if len(numbers) != length or not all(map(math.isfinite, numbers)):
        raise ValueError(
            f"the checkpoint's domain weights must be finite, {len(objective.domains)} in each "
            f"vector; they are {dict(state)}."
        )


def warn_of_loading_in_place(optimizer: Optimizer) -> None:
    """Warn if the wrapped optimizer's state holds numbers before its first step.

    torch.distributed.checkpoint.load() writes into the tensors of a state dict. Those of the
    optimizer's state are its own; the domain weights are numbers in the dict, and reach the
    optimizer by load_state_dict() alone. Waits for the device.
    """
    # A shard by attribute: importing DTensor takes as long as importing doge_fast.
    tensors = (
        value.to_local() if hasattr(value, "to_local") else value
        for state in optimizer.state.values()
        if isinstance(state, Mapping)
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() > 0
    )
    if any(bool(tensor.any()) for tensor in tensors):
        warn(
            "the wrapped optimizer's state was loaded in its place, and the domain weights were "
            "not: they begin anew. Pass the loaded dict to load_state_dict() or set_state_dict() "
            "as well, or keep optimizer.doge in the checkpoint."
        )
