"""What a checkpoint keeps of the domain weights, in two forms, since some formats drop one of them.

As a dict of tensors and names it stands under a key of its own in the optimizer's state dict.
torch.distributed.checkpoint and what is built on it carry nothing of an optimizer but `state` and
`param_groups`, so the same numbers stand in every parameter group once more, as one tuple of
floats: version, fingerprint of the names, number of the draw, the parts one after another, mu.
Where both are there the dict is read: its parts are named, and people may edit it.

The groups of a living optimizer hold an empty tuple in that place. It has to be there, since a
flattened state dict is taken apart by the keys of the living groups; and it has to be empty, since
the weights are on the device and a copy would be out of date after one step.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from doge_fast.weights import removed, simplex
from doge_fast.weights.objective import Objective
from doge_fast.weights.simplex import is_integer

KEY = "doge"
# Version 1 had no mu.
VERSION = 2

_VECTORS = ("alpha", "alpha_mean", "gain")
_COUNTS = ("num_steps", "num_skipped")
# What earlier versions wrote behind these: weights of targets that moved, and running norms of a
# score that was removed; [R] each.
_REMOVED = ("tau", "norms")


def named(
    parts: Mapping[str, Tensor], objective: Objective, *, draws: int, mu: float | None
) -> dict[str, Any]:
    """The dict: tensors, numbers and names only, so that `weights_only=True` reads it.

    Args:
        parts: as `DomainWeights.state`: vectors [K] float64 and counts.
        objective: whose names go with them.
        draws: number of the draw, `Subset.draws`.
        mu: the Bregman coefficient; None: not known.
    """
    return {
        "version": VERSION,
        "domains": list(objective.domains),
        "rows": list(objective.rows),
        "draws": draws,
        **({} if mu is None else {"mu": mu}),
        **parts,
    }


def packed(state: Mapping[str, Any], objective: Objective) -> tuple[float, ...]:
    """The tuple of what `named` gave; [6 + 3 K] floats. Waits for the device."""
    # One vector, so that the device is waited for once.
    values_S = torch.cat([state[name].double().view(-1) for name in (*_VECTORS, *_COUNTS)])
    head = (state["version"], fingerprint(objective), state["draws"])
    return (*map(float, head), *values_S.tolist(), float(state["mu"]))


def unpacked(values: tuple[float, ...], objective: Objective) -> dict[str, Any]:
    """What `named` gave, from its tuple; tensors on the CPU.

    Raises:
        ValueError: it was written by a later version, for other names, or by a removed method.
    """
    _check_version(values[0])
    head, numbers = values[:3], values[3:]
    # Version 1 had no mu.
    mu = numbers[-1:] if values[0] > 1 else ()
    numbers = numbers[: len(numbers) - len(mu)]
    num_domains, num_rows = len(objective.domains), len(objective.rows)
    sizes = [num_domains] * len(_VECTORS) + [1] * len(_COUNTS)
    is_ours = head[1:2] == (fingerprint(objective),) and all(map(math.isfinite, head))
    num_further = len(numbers) - sum(sizes)
    if is_ours and num_further in (num_rows, 2 * num_rows):
        _refuse_removed(_REMOVED[num_further // num_rows - 1])
    if not is_ours or num_further:
        raise ValueError(
            "the parameter groups of the checkpoint hold weights of other domains or another "
            f"target than those of this optimizer, {list(objective.domains)} with the rows "
            f"{list(objective.rows)}. Build it with the same ones in the same order."
        )
    pieces = torch.split(torch.tensor(numbers, dtype=torch.float64), sizes)
    parts = dict(zip((*_VECTORS, *_COUNTS), pieces, strict=True))
    parts |= {name: parts[name].long().view(()) for name in _COUNTS}
    return named(parts, objective, draws=int(head[2]), mu=mu[0] if mu else None)


def fingerprint(objective: Objective) -> float:
    """A number for the names in their order: 48 bits, which a float holds exactly."""
    names = json.dumps([objective.domains, objective.rows])
    return float(int.from_bytes(hashlib.sha256(names.encode()).digest()[:6], "big"))


def mark(groups: list[dict[str, Any]]) -> None:
    """Give every group of a living optimizer the weights' place, empty."""
    for group in groups:
        group[KEY] = ()


def put_into(
    state_dict: dict[str, Any], ours: dict[str, Any], objective: Objective
) -> dict[str, Any]:
    """An optimizer's state dict with `ours`, as `named` gave it, in both forms."""
    values = packed(ours, objective)
    groups = [group | {KEY: values} for group in state_dict["param_groups"]]
    # For who reads the file: eta, the rate of the first group, by which the weights move.
    eta = float(groups[0]["lr"])
    return state_dict | {"param_groups": groups, KEY: ours | {"lr": eta}}


def taken_from(
    state_dict: Mapping[str, Any], objective: Objective
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Take the domain weights out of an optimizer's state dict.

    Returns:
        What `named` gave, None where there is none; and the wrapped optimizer's state dict,
        in whose groups the tuple still is.

    Raises:
        TypeError: it is no dict.
        ValueError: it belongs to other domains or a later version; or the groups differ.
    """
    check_is_dict(state_dict)
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


def warn_of_none() -> None:
    """Warn the caller of `load_state_dict` of a state dict that `taken_from` found nothing in."""
    warnings.warn(
        "the checkpoint holds the wrapped optimizer's state and no domain weights; they stay as "
        "they are. If this is intended, load it before wrapping the optimizer.",
        stacklevel=3,
    )


def check_is_dict(state_dict: object) -> None:
    """Raise TypeError unless it is a mapping."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"load_state_dict() takes what state_dict() gave; got {state_dict!r}.")


def check(ours: Mapping[str, Any], objective: Objective) -> None:
    """Refuse a state of other names, or values that a run cannot produce.

    Raises:
        TypeError: it is no dict.
        ValueError: a later version, a removed method, other domains or rows, missing parts, weights
            off the simplex or scores that are not finite.
    """
    check_is_dict(ours)
    if "version" not in ours:
        raise ValueError("the checkpoint's DoGE state was not written by state_dict().")
    needed = ("domains", "rows", *_VECTORS, *_COUNTS)
    if missing := [name for name in needed if name not in ours]:
        raise ValueError(
            f"the checkpoint's DoGE state lacks {missing}; it was not written by state_dict()."
        )
    for name in ("version", "draws"):
        value = ours.get(name, 0)
        _require(is_integer(value) and value >= 0, name, "a count", value)
    _check_version(ours["version"])
    for name in filter(ours.__contains__, _REMOVED):
        _refuse_removed(name)
    for name, expected in (("domains", objective.domains), ("rows", objective.rows)):
        value = ours[name]
        _require(isinstance(value, list | tuple), name, "names", value)
        if tuple(value) != expected:
            raise ValueError(
                f"the checkpoint has the {name} {list(value)}; this optimizer has "
                f"{list(expected)}. Build it with the same domains in the same order, and the same "
                "target."
            )
    for name in (*_VECTORS, *_COUNTS):
        _require(isinstance(ours[name], Tensor), name, "a tensor", ours[name])
    for name in _COUNTS:
        value = ours[name]
        _require(value.numel() == 1 and float(value) >= 0, name, "a count", value)
    num_domains = len(objective.domains)
    for name in _VECTORS:
        vector_K = ours[name]
        is_right = vector_K.shape == (num_domains,) and bool(vector_K.isfinite().all())
        if name == "gain":
            _require(is_right, name, f"{num_domains} finite scores", vector_K.tolist())
        else:
            is_point = abs(float(vector_K.sum()) - 1) < 1e-9 and bool((vector_K >= 0).all())
            rule = f"{num_domains} weights that sum to one"
            _require(is_right and is_point, name, rule, vector_K.tolist())
    if "mu" in ours:
        simplex.check_mu(ours["mu"])


def _require(is_right: bool, name: str, rule: str, value: object) -> None:
    if not is_right:
        raise ValueError(
            f"the checkpoint's {name} must be {rule}; it is {value!r}. Load what state_dict() gave "
            "of a run that did not diverge."
        )


def _check_version(version: float) -> None:
    """Refuse what a later version has written."""
    if version > VERSION:
        raise ValueError(
            f"the checkpoint's DoGE state has version {version:g}; this library reads "
            f"up to {VERSION}. Update doge_fast."
        )


def _refuse_removed(name: str) -> NoReturn:
    raise ValueError(removed.refusal(f"the checkpoint's DoGE state: {name!r}"))
