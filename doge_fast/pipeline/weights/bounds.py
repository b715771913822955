"""Domain weights kept within floors, caps and a number of epochs."""

import math
from collections.abc import Mapping
from typing import Any

from doge_fast.pipeline import named, records
from doge_fast.pipeline.failures import UserError
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.weights.summary import check_budget, tokens_of
from doge_fast.pipeline.wording import listed
from doge_fast.weights.projection import BOUNDS_TOLERANCE, project

# {bound: (what its numbers must be, the number that binds nothing)}.
_BOUNDS = {
    "floor": ("between 0 and 1", 0.0),
    "cap": ("between 0 and 1", 1.0),
    "max_epochs": ("greater than zero", math.inf),
}
# Fields that are true of the weights before, and not of the bounded ones.
_OF_OTHER_WEIGHTS = ("stages", "temperature", "inverse_temperature", "is_decided", "points")
Bound = float | Mapping[str, float] | None


def constrain(
    record: Mapping[str, Any],
    *,
    floor: Bound = None,
    cap: Bound = None,
    max_epochs: Bound = None,
    budget_tokens: float | None = None,
    tokens: Mapping[str, float] | None = None,
    source: str = "",
) -> Json:
    """The weights nearest in KL that lie within bounds; see `projection.project`.

    floor_j  <=  weight_j  <=  min(cap_j, max_epochs_j tokens_j / budget_tokens)

    Args:
        record: as `records.read_weights` returns it.
        floor, cap: one number for all domains, or {domain: number}; domains not named have none.
        max_epochs: likewise: passes over a domain's tokens that the training may make.
        budget_tokens: > 0; tokens of that training. Needed where `max_epochs` is given.
        tokens: {domain: tokens there are to train on}, where these are others than the record's.
        source: where the record was read, for `constraints`.

    Returns:
        The record with bounded weights, and `constraints`: the bounds, the weights before, and
        which bound holds whom. Deviations over seeds, schedules of weights and the points of a
        temperature are those of other weights, and are left out.

    Raises:
        UserError: a domain is unknown; a bound is out of its range or a floor above a cap, the
            domain named; tokens or the budget are not known; or no point of the simplex lies
            within the bounds, saying how much is missing.
    """
    check_budget(budget_tokens)
    weights = records.weights_by_name(record)
    given = {"floor": floor, "cap": cap, "max_epochs": max_epochs}
    bounds = {what: _bounds(bound, weights, what) for what, bound in given.items()}
    floors, caps, limits = bounds.values()
    epoch_caps = _epoch_caps(limits, tokens_of(record, tokens), budget_tokens)
    highest = {name: min(caps[name], epoch_caps[name]) for name in weights}
    _check_feasible(weights, floors, highest)
    after = project(
        list(weights.values()), floors=list(floors.values()), caps=list(highest.values())
    )
    moved = dict(zip(weights, after, strict=True))
    held = {}
    for name, weight in moved.items():
        if weight == highest[name] < 1:
            held[name] = "cap" if caps[name] <= epoch_caps[name] else "max_epochs"
        elif weight == floors[name] > 0:
            held[name] = "floor"
    constraints: Json = {"source": source, "budget_tokens": budget_tokens, "bound": held}
    constraints["weights"] = weights
    for what, numbers in bounds.items():
        nothing = _BOUNDS[what][1]
        constraints[what] = {name: value for name, value in numbers.items() if value != nothing}
    entries = [dict(entry) | {"weight": moved[entry["name"]]} for entry in record["domains"]]
    for entry in entries:
        entry.pop("weight_std", None)
    kept = {key: value for key, value in record.items() if key not in _OF_OTHER_WEIGHTS}
    return kept | {"domains": entries, "constraints": constraints}


def _bounds(bound: Bound, names: Mapping[str, float], what: str) -> dict[str, float]:
    """A bound for every domain."""
    (rule, nothing), option = _BOUNDS[what], f"{what} (--{what.replace('_', '-')})"
    given = bound if isinstance(bound, Mapping) else dict.fromkeys(names, bound)
    named.check_known(option, given, names, "the weights")
    numbers = {name: value for name, value in given.items() if value is not None}
    for name, value in numbers.items():
        if not (value > 0 if what == "max_epochs" else 0 <= value <= 1):
            raise UserError(f"{option} must be {rule}; that of {name} is {value:g}.")
    return dict.fromkeys(names, nothing) | numbers


def _epoch_caps(
    limits: Mapping[str, float], available: Mapping[str, Any], budget_tokens: float | None
) -> dict[str, float]:
    """weight <= max_epochs * tokens / budget; 1 where that is no bound."""
    limited = {name: limit for name, limit in limits.items() if limit < math.inf}
    if limited and budget_tokens is None:
        raise UserError(
            "max_epochs (--max-epochs) needs the length of the training; pass its tokens as "
            "budget_tokens (--budget-tokens)."
        )
    if unknown := [name for name in limited if available[name] is None]:
        raise UserError(
            "max_epochs (--max-epochs) needs the number of tokens of each domain; the file has "
            f"none for {listed(unknown)}. Pass tokens (--tokens NAME=NUMBER)."
        )
    shares = {name: limit * available[name] / budget_tokens for name, limit in limited.items()}
    return {name: min(1.0, shares.get(name, 1.0)) for name in limits}


def _check_feasible(
    weights: Mapping[str, float], floors: Mapping[str, float], highest: Mapping[str, float]
) -> None:
    """What `projection.project` would refuse, in terms of domains."""
    for name, floor in floors.items():
        if floor > highest[name]:
            raise UserError(
                f"The floor of {name}, {floor:g}, is above {highest[name]:.4g}, the most that its "
                "cap and epochs allow. Lower it, or raise --cap or --max-epochs."
            )
    least = math.fsum(floors.values())
    if least > 1 + BOUNDS_TOLERANCE:
        raise UserError(
            f"Floors must leave room for all domains; they sum to {least:.6g}, {least - 1:.4g} too "
            "much. Lower them."
        )
    # A floor lifts a zero, and to the floor only.
    most = math.fsum(value if weights[name] else floors[name] for name, value in highest.items())
    if most < 1 - BOUNDS_TOLERANCE:
        empty = [name for name, weight in weights.items() if weight == 0 and not floors[name]]
        zero = f"; {listed(empty)} has weight zero and takes none without a floor" if empty else ""
        raise UserError(
            "The bounds must leave room for the whole training; together domains may take "
            f"{most:.6g} of it, {1 - most:.4g} is missing{zero}. Raise --cap or --max-epochs, or "
            "give more --tokens or a smaller --budget-tokens."
        )
