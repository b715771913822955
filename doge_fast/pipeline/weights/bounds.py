"""Domain weights kept within floors, caps and a number of epochs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from doge_fast.pipeline import named, records
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.wording import listed
from doge_fast.pipeline.weights.summary import check_budget, tokens_of
from doge_fast.weights.projection import BOUNDS_TOLERANCE, kl, project


@dataclass(frozen=True)
class Constrained:
    """Weights within bounds, and what that took."""

    record: Json
    """As `records.write_weights` takes it; `constraints` says where it comes from."""
    bound: Mapping[str, str]
    """{domain: "floor", "cap" or "max_epochs"} of those that a bound holds."""
    kl: float
    """KL(new || old) in nats; infinite where a floor lifts a weight of zero."""


def constrain(
    record: Mapping[str, Any],
    *,
    floor: float | Mapping[str, float] = 0.0,
    cap: float | Mapping[str, float] = 1.0,
    max_epochs: float | Mapping[str, float] = math.inf,
    budget_tokens: float | None = None,
    tokens: Mapping[str, float] | None = None,
    source: str = "",
) -> Constrained:
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
        The bounded weights. Deviations over seeds and schedules of weights were those of other
        weights, and are left out of the record.

    Raises:
        ValueError: a domain is unknown; a bound is out of its range or a floor above a cap, the
            domain named; tokens or the budget are not known; or no point of the simplex lies
            within the bounds, saying how much is missing.
    """
    check_budget(budget_tokens)
    weights = records.weights_by_name(record)
    names = list(weights)
    floors = _bounds(floor, names, "floor", 0.0)
    caps = _bounds(cap, names, "cap", 1.0)
    limits = _bounds(max_epochs, names, "max_epochs", math.inf)
    epoch_caps = _epoch_caps(limits, tokens_of(record, tokens), budget_tokens)
    highest = {name: min(caps[name], epoch_caps[name]) for name in names}
    _check_feasible(weights, floors, caps, highest)
    total = math.fsum(weights.values())
    before = [weight / total for weight in weights.values()]
    after = project(before, floors=list(floors.values()), caps=list(highest.values()))
    moved = dict(zip(names, after, strict=True))
    bound = {}
    for name, weight in moved.items():
        if weight == highest[name] < 1:
            bound[name] = "cap" if caps[name] <= epoch_caps[name] else "max_epochs"
        elif weight == floors[name] > 0:
            bound[name] = "floor"
    constraints: Json = {
        "source": source,
        "floor": {name: value for name, value in floors.items() if value > 0},
        "cap": {name: value for name, value in caps.items() if value < 1},
        "max_epochs": {name: value for name, value in limits.items() if value < math.inf},
        "budget_tokens": budget_tokens,
        "bound": bound,
        "weights": weights,
    }
    entries = [dict(entry) | {"weight": moved[entry["name"]]} for entry in record["domains"]]
    for entry in entries:
        entry.pop("weight_std", None)
    kept = {key: value for key, value in record.items() if key != "stages"}
    return Constrained(
        record=kept | {"domains": entries, "constraints": constraints},
        bound=bound,
        kl=kl(after, before),
    )


def _bounds(
    bound: float | Mapping[str, float], names: Sequence[str], what: str, none: float
) -> dict[str, float]:
    """A bound for every domain: a share between 0 and 1, or epochs > 0."""
    given = bound if isinstance(bound, Mapping) else dict.fromkeys(names, bound)
    named.check(what, given, names, "the weights")
    values = dict.fromkeys(names, none) | dict(given)
    rule = "greater than zero" if what == "max_epochs" else "between 0 and 1"
    for name, value in values.items():
        if not (value > 0 if what == "max_epochs" else 0 <= value <= 1):
            raise ValueError(f"{what} must be {rule}; that of {name} is {value:g}.")
    return values


def _epoch_caps(
    limits: Mapping[str, float], available: Mapping[str, Any], budget_tokens: float | None
) -> dict[str, float]:
    """weight <= max_epochs * tokens / budget; 1 where that is no bound."""
    limited = {name: limit for name, limit in limits.items() if limit < math.inf}
    if not limited:
        return dict.fromkeys(limits, 1.0)
    if budget_tokens is None:
        raise ValueError(
            "max_epochs needs the length of the training; pass its tokens as budget_tokens "
            "(--budget-tokens)."
        )
    unknown = [name for name in limited if available[name] is None]
    if unknown:
        raise ValueError(
            "max_epochs needs the number of tokens of each domain; the file has none for "
            f"{listed(unknown)}. Pass tokens (--tokens NAME=NUMBER)."
        )
    shares = {name: limit * available[name] / budget_tokens for name, limit in limited.items()}
    return {name: min(1.0, shares.get(name, 1.0)) for name in limits}


def _check_feasible(
    weights: Mapping[str, float],
    floors: Mapping[str, float],
    caps: Mapping[str, float],
    highest: Mapping[str, float],
) -> None:
    """What `projection.project` would refuse, in terms of domains."""
    for name, floor in floors.items():
        if floor > highest[name]:
            is_epochs = highest[name] < caps[name]
            raise ValueError(
                f"The floor of {name}, {floor:g}, is "
                f"{'more than max_epochs allows' if is_epochs else 'above the cap'}, "
                f"{highest[name]:.4g}. Lower it, or allow more{' epochs' if is_epochs else ''}."
            )
    least = math.fsum(floors.values())
    if least > 1 + BOUNDS_TOLERANCE:
        raise ValueError(
            f"Floors must leave room for all domains; they sum to {least:.6g}, {least - 1:.4g} too "
            "much. Lower them."
        )
    # A floor lifts a zero, and to the floor only.
    most = math.fsum(value if weights[name] else floors[name] for name, value in highest.items())
    if most < 1 - BOUNDS_TOLERANCE:
        is_epochs = any(highest[name] < caps[name] for name in weights)
        out = "Allow more epochs, a smaller budget or more tokens" if is_epochs else "Raise caps"
        held = [name for name, weight in weights.items() if weight == 0 and not floors[name]]
        zero = f"; {listed(held)} has weight zero and takes none without a floor" if held else ""
        raise ValueError(
            "The bounds must leave room for the whole training; together domains may take "
            f"{most:.6g} of it, {1 - most:.4g} is missing{zero}. {out}."
        )
