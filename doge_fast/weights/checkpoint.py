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
from doge_fast.weights.reweight import WeightsState

KEY = "doge"
# Version 1 had no mu.
VERSION = 2

# version, fingerprint, draws
_HEAD = 3
_COUNTS = ("num_steps", "num_skipped")
# What earlier versions wrote behind the parts: weights of targets that moved, and the running norms
# of a score that was removed; [R] each.
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
    values_S = torch.cat([state[name].double().view(-1) for name in WeightsState._fields])
    head = (state["version"], fingerprint(objective), state["draws"])
    return (*map(float, head), *values_S.tolist(), float(state["mu"]))


def unpacked(values: tuple[float, ...], objective: Objective) -> dict[str, Any]:
    """What `named` gave, from its tuple; tensors on the CPU.

    Raises:
        ValueError: it was written by a later version, for other names, or by a removed method.
    """
    check_version(values[0])
    head, mu = values[:_HEAD], values[-1:] if values[0] > 1 else ()
    numbers = values[_HEAD : len(values) - len(mu)]
    num_domains, num_rows = len(objective.domains), len(objective.rows)
    sizes = [num_domains] * (len(WeightsState._fields) - len(_COUNTS)) + [1] * len(_COUNTS)
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
    parts = dict(zip(WeightsState._fields, pieces, strict=True))
    counts = {name: parts[name].long().view(()) for name in _COUNTS}
    return named(parts | counts, objective, draws=int(head[2]), mu=mu[0] if mu else None)


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


def check_version(version: float) -> None:
    """Refuse what a later version has written."""
    if version > VERSION:
        raise ValueError(
            f"the checkpoint's DoGE state has version {version:g}; this library reads "
            f"up to {VERSION}. Update doge_fast."
        )


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
    _check_kinds({"draws": 0, **ours})
    check_version(ours["version"])
    for name in filter(ours.__contains__, _REMOVED):
        _refuse_removed(name)
    _check_names(ours, objective)
    shape = (len(objective.domains),)
    for name in ("alpha", "alpha_mean"):
        total = float(ours[name].sum())
        # A NaN or an infinity anywhere fails the comparison as well.
        is_negative = bool((ours[name] < 0).any())
        if ours[name].shape != shape or is_negative or not abs(total - 1) < 1e-9:
            raise ValueError(
                f"the checkpoint's {name} must be {shape[0]} weights that sum to "
                f"one; it is {ours[name].tolist()}. The run that wrote it has diverged."
            )
    if "mu" in ours:
        simplex.check_mu(ours["mu"])
    gain_K = ours["gain"]
    if gain_K.shape != shape or not bool(gain_K.isfinite().all()):
        raise ValueError(
            f"the checkpoint's gain must be {shape[0]} finite scores; it is {gain_K.tolist()}."
        )


def check_is_dict(state_dict: object) -> None:
    """Raise TypeError unless it is a mapping."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"load_state_dict() takes what state_dict() gave; got {state_dict!r}.")


def _check_kinds(ours: Mapping[str, Any]) -> None:
    """Refuse parts that are missing, or of another kind than `named` gives."""
    parts = ("domains", "rows", *WeightsState._fields)
    if missing := [name for name in parts if name not in ours]:
        raise ValueError(
            f"the checkpoint's DoGE state lacks {missing}; it was not written by state_dict()."
        )
    for name in ("version", "draws"):
        if isinstance(ours[name], bool) or not isinstance(ours[name], int) or ours[name] < 0:
            raise ValueError(f"the checkpoint's {name} must be a count; it is {ours[name]!r}.")
    for name in ("domains", "rows"):
        if not isinstance(ours[name], list | tuple):
            raise ValueError(f"the checkpoint's {name} must be names; it is {ours[name]!r}.")
    for name in WeightsState._fields:
        if not isinstance(ours[name], Tensor):
            raise ValueError(f"the checkpoint's {name} must be a tensor; it is {ours[name]!r}.")
    for name in _COUNTS:
        if ours[name].numel() != 1 or not float(ours[name]) >= 0:
            raise ValueError(f"the checkpoint's {name} must be a count; it is {ours[name]!r}.")


def _refuse_removed(name: str) -> NoReturn:
    raise ValueError(removed.refusal(f"the checkpoint's DoGE state: {name!r}"))


def _check_names(ours: Mapping[str, Any], objective: Objective) -> None:
    if tuple(ours["domains"]) != objective.domains:
        raise ValueError(
            f"the checkpoint holds weights of domains {list(ours['domains'])}; this optimizer "
            f"has {list(objective.domains)}. Build it with the same domains in the same order."
        )
    if tuple(ours["rows"]) != objective.rows:
        raise ValueError(
            f"the checkpoint has the domains and targets {list(ours['rows'])}; this optimizer has "
            f"{list(objective.rows)}. Build it with the same target."
        )
