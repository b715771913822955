"""The domain weights in a checkpoint, in two forms, since some formats drop one of them.

The first form is a dict of tensors and names, under a key of its own in the optimizer's state dict.
torch.distributed.checkpoint saves only `state` and `param_groups` of an optimizer. So every
parameter group holds the same numbers again as a tuple of floats: version, fingerprint of the
names, number of the draw, the vectors and counts, mu. If a checkpoint has both forms the dict is
read, since its parts are named and a user may edit them.

The groups of a live optimizer hold an empty tuple under that key. The key is needed because
torch.distributed.checkpoint reads back only the keys that it finds there. The tuple is empty
because the weights are on the device, and a copy would be out of date after one step.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from doge_fast.tracing import warn
from doge_fast.weights import simplex
from doge_fast.weights.objective import Objective
from doge_fast.weights.reweight import COUNTS, VECTORS
from doge_fast.weights.weights_file import refusal_of_removed

KEY = "doge"
VERSION = 2

# Vectors [R] that earlier versions appended: moving target weights, and the running norms of a
# score; both methods were removed.
_REMOVED = ("tau", "norms")


def named(
    parts: Mapping[str, Tensor], objective: Objective, *, draws: int, mu: float
) -> dict[str, Any]:
    """The dict of a checkpoint: what `DomainWeights.state` returns, and names and numbers."""
    return {
        "version": VERSION,
        "domains": list(objective.domains),
        "names": list(objective.names),
        "draws": draws,
        "mu": mu,
        **parts,
    }


def packed(state: Mapping[str, Any], objective: Objective) -> tuple[float, ...]:
    """The tuple of a checkpoint: 6 + 3 K floats, from the dict of `named`. Waits for the device."""
    # One vector, to wait for the device only once.
    values_S = torch.cat([state[name].double().view(-1) for name in (*VECTORS, *COUNTS)])
    head = (state["version"], fingerprint(objective), state["draws"])
    return (*map(float, head), *values_S.tolist(), float(state["mu"]))


def unpacked(values: tuple[float, ...], objective: Objective) -> dict[str, Any]:
    """The dict of `named` from its tuple; tensors on the CPU.

    ValueError if another version or a removed method wrote it, or it is for other names.
    """
    _check_version(values[0])
    head, numbers, mu = values[:3], values[3:-1], values[-1]
    num_domains, num_rows = len(objective.domains), len(objective.names)
    sizes = [num_domains] * len(VECTORS) + [1] * len(COUNTS)
    is_ours = head[1:2] == (fingerprint(objective),) and all(map(math.isfinite, head))
    num_further = len(numbers) - sum(sizes)
    if is_ours and num_further in (num_rows, 2 * num_rows):
        _refuse_removed(_REMOVED[num_further // num_rows - 1])
    if not is_ours or num_further:
        raise ValueError(
            "the parameter groups of the checkpoint hold weights of other domains or another "
            f"target than those of this optimizer, {list(objective.domains)} with the rows "
            f"{list(objective.names)}. Build it with the same ones in the same order."
        )
    pieces = torch.split(torch.tensor(numbers, dtype=torch.float64), sizes)
    parts = dict(zip((*VECTORS, *COUNTS), pieces, strict=True))
    parts |= {name: parts[name].long().view(()) for name in COUNTS}
    return named(parts, objective, draws=int(head[2]), mu=mu)


def fingerprint(objective: Objective) -> float:
    """A hash of the names in their order: 48 bits, which a float holds exactly."""
    names = json.dumps([objective.domains, objective.names])
    return float(int.from_bytes(hashlib.sha256(names.encode()).digest()[:6], "big"))


def mark(groups: list[dict[str, Any]]) -> None:
    """Give every group of a live optimizer the key of the weights, with an empty tuple."""
    for group in groups:
        group[KEY] = ()


def put_into(
    state_dict: dict[str, Any], ours: dict[str, Any], objective: Objective
) -> dict[str, Any]:
    """An optimizer's state dict with the dict `ours` of `named`, in both forms."""
    values = packed(ours, objective)
    groups = [group | {KEY: values} for group in state_dict["param_groups"]]
    # Only for readers of the file: the rate of the first group, by which the weights move.
    eta = float(groups[0]["lr"])
    return state_dict | {"param_groups": groups, KEY: ours | {"lr": eta}}


def taken_from(
    state_dict: Mapping[str, Any], objective: Objective
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Divide an optimizer's state dict: the dict of `named`, None if there is none; and the rest.

    ValueError if it is for other domains or of another version, or its groups differ.
    """
    rest = dict(state_dict)
    ours: dict[str, Any] | None = rest.pop(KEY, None)
    groups = rest.get("param_groups", [])
    in_groups = {tuple(group[KEY]) for group in groups if group.get(KEY)}
    if ours is None and len(in_groups) > 1:
        raise ValueError(
            f"the parameter groups of the checkpoint hold {len(in_groups)} different states of the "
            "domain weights; all should hold the same. Load those of one optimizer."
        )
    if ours is None and in_groups:
        ours = unpacked(in_groups.pop(), objective)
    if ours is not None:
        check(ours, objective)
    return ours, rest


def warn_of_loading_in_place(optimizer: Optimizer) -> None:
    """Warn if the wrapped optimizer's state holds numbers before its first step.

    torch.distributed.checkpoint.load() writes into the tensors of a state dict. Those of the
    optimizer's state are its own; the domain weights are numbers in the dict, and reach the
    optimizer by load_state_dict() alone. Waits for the device.
    """
    # A shard by attribute: importing DTensor takes as long as importing the rest of us.
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


def check_is_dict(state_dict: object) -> None:
    """Raise TypeError unless it is a mapping."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"load_state_dict() needs what state_dict() returned; got {state_dict!r}.")


def check(ours: Mapping[str, Any], objective: Objective) -> None:
    """Refuse a dict with other names, or with values that a run cannot produce.

    TypeError if `ours` is no dict. ValueError if another version or a removed method wrote it; it
    is for other domains or rows; parts are missing; weights are off the simplex; or a score is not
    finite.
    """
    check_is_dict(ours)
    needed = ("version", "domains", "names", "draws", "mu", *VECTORS, *COUNTS)
    if missing := [name for name in needed if name not in ours]:
        raise ValueError(
            f"the checkpoint's DoGE state lacks {missing}; it was not written by state_dict()."
        )
    for name in ("version", "draws"):
        value = ours[name]
        # Not a tensor: a draw's number is part of a random key as text.
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        _require(is_integer and value >= 0, name, "a count", value)
    _check_version(ours["version"])
    for name in filter(ours.__contains__, _REMOVED):
        _refuse_removed(name)
    for name, expected in (("domains", objective.domains), ("names", objective.names)):
        value = ours[name]
        if not isinstance(value, list | tuple) or tuple(value) != expected:
            raise ValueError(
                f"the checkpoint has the {name} {value!r}; this optimizer has {list(expected)}. "
                "Build it with the same domains in the same order, and the same target."
            )
    for name in COUNTS:
        value = ours[name]
        is_one = isinstance(value, Tensor) and value.numel() == 1
        is_count = is_one and float(value) >= 0 and float(value).is_integer()
        _require(is_count, name, "a count, as a tensor", value)
    for name in VECTORS:
        value = ours[name]
        is_finite = (
            isinstance(value, Tensor)
            and value.shape == (len(objective.domains),)
            and bool(value.isfinite().all())
        )
        _require(is_finite, name, f"{len(objective.domains)} finite numbers, as a tensor", value)
        if name != "gain":
            is_point = abs(float(value.sum()) - 1) < 1e-9 and bool((value >= 0).all())
            _require(is_point, name, "weights >= 0 that sum to one", value)
    simplex.check_mu(ours["mu"])


def _require(is_right: bool, name: str, rule: str, value: object) -> None:
    if not is_right:
        raise ValueError(
            f"the checkpoint's {name} must be {rule}; it is {value!r}. Load what state_dict() "
            "returned in a run that did not diverge."
        )


def _check_version(version: float) -> None:
    if version != VERSION:
        later = ", or a later one" if version > VERSION else ""
        raise ValueError(
            f"the checkpoint's DoGE state has version {version:g}; this library reads version "
            f"{VERSION}. Take the doge_fast that wrote it{later}."
        )


def _refuse_removed(name: str) -> NoReturn:
    raise ValueError(refusal_of_removed(f"the checkpoint's DoGE state: {name!r}"))
