"""Domain weights as a product: looked at, compared, averaged, bounded, carried to other domains.

Every function takes records as `records.read_weights` returns them, matches domains by name, and
returns a plain object; none writes a file. Arithmetic is in float64.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from doge_fast import simplex
from doge_fast.pipeline import baselines, records
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.mixtures import effective_domains
from doge_fast.pipeline.reporting.wording import listed
from doge_fast.pipeline.weights_fields import SCHEDULES

# What weights must agree in for their average to mean something.
SAME_TARGET, SAME_TOKENIZER = "target", "tokenizer_sha256"

# What describes a run's weights and not those made of them.
_OF_ONE_RUN = ("weight_std", "weight_last")


@dataclass(frozen=True)
class Share:
    """One domain of a mixture; None is what the record does not say."""

    name: str
    weight: float
    std: float | None
    """Over seeds, of an average."""
    last: float | None
    """After the last step."""
    prior: float | None
    """Its share of the tokens."""
    ratio: float | None
    """Weight over prior: how much more often than in its natural place."""
    tokens: int | None
    epochs: float | None
    """Passes over its tokens that a training of the given budget makes."""


@dataclass(frozen=True)
class WeightsSummary:
    """Weights with what they mean."""

    domains: tuple[Share, ...]
    effective_domains: float
    """exp(H): K at uniform weights, 1 where one domain takes all."""


def describe(
    record: Mapping[str, Any],
    *,
    budget_tokens: float | None = None,
    tokens: Mapping[str, float] | None = None,
) -> WeightsSummary:
    """What the weights of a record mean.

    ratio_j   =  weight_j / prior_j
    epochs_j  =  weight_j T / tokens_j       with T the budget

    Args:
        record: as `records.read_weights` returns it.
        budget_tokens: T > 0, tokens of the training the weights are for; None: no epochs.
        tokens: {domain: tokens there are to train on}, where these are others than the record's.
            Given for all domains, they decide the priors too.

    Raises:
        ValueError: the budget is not > 0, a number of tokens not >= 1, or `tokens` names a domain
            that the record does not have.
    """
    _check_budget(budget_tokens)
    weights = records.weights_by_name(record)
    given = _known_names(tokens or {}, weights, "tokens")
    entries = {entry["name"]: entry for entry in record["domains"]}
    available = {name: given.get(name, entry.get("tokens")) for name, entry in entries.items()}
    priors = {name: entry.get("prior") for name, entry in entries.items()}
    if set(given) == set(entries) or all(prior is None for prior in priors.values()):
        priors |= _priors(available)
    shares = tuple(
        Share(
            name=name,
            weight=weight,
            std=entries[name].get("weight_std"),
            last=entries[name].get("weight_last"),
            prior=priors[name],
            ratio=_ratio(weight, priors[name]),
            tokens=None if available[name] is None else int(available[name]),
            epochs=_epochs(weight, budget_tokens, available[name]),
        )
        for name, weight in weights.items()
    )
    return WeightsSummary(shares, effective_domains(weights))


def _priors(tokens: Mapping[str, float | None]) -> dict[str, float]:
    """Shares of the tokens, where all are known."""
    counts = {name: count for name, count in tokens.items() if count}
    if len(counts) < len(tokens):
        return {}
    return baselines.natural({name: int(count) for name, count in counts.items()})


def _ratio(weight: float, prior: float | None) -> float | None:
    return weight / prior if prior else None


def _epochs(weight: float, budget: float | None, tokens: float | None) -> float | None:
    if budget is None or tokens is None:
        return None
    return weight * budget / tokens if tokens else math.inf if weight else 0.0


def _check_budget(budget_tokens: float | None) -> None:
    if budget_tokens is not None and not 0 < budget_tokens < math.inf:
        raise ValueError(
            f"budget_tokens must be a number of tokens greater than zero; got {budget_tokens:g}."
        )


def _known_names(
    values: Mapping[str, float], names: Collection[str], what: str
) -> Mapping[str, float]:
    """`values`, if they are of these domains and, where they are tokens, each at least one."""
    unknown = [name for name in values if name not in names]
    if unknown:
        raise ValueError(
            f"{what} must name domains of the weights, which are {', '.join(names)}; "
            f"{', '.join(unknown)} is not among them."
        )
    wrong = {name: value for name, value in values.items() if not 1 <= value < math.inf}
    if what == "tokens" and wrong:
        name, value = next(iter(wrong.items()))
        raise ValueError(f"tokens of a domain must be a number >= 1; {name} has {value:g}.")
    return values


@dataclass(frozen=True)
class Difference:
    """How far two mixtures are apart; a domain that one lacks counts as weight zero there."""

    before: Mapping[str, float]
    after: Mapping[str, float]
    change: Mapping[str, float]
    """after - before, of every domain of either."""
    ratio: Mapping[str, float | None]
    """after / before; None where a domain was added or had weight zero."""
    added: tuple[str, ...]
    dropped: tuple[str, ...]
    total_variation: float
    """(1/2) sum |change|: the share of the training that goes elsewhere."""
    mean_absolute: float
    """Mean of |change| over the domains of either."""
    settings: Mapping[str, tuple[Any, Any]]
    """What else the two records say differently of how the weights came about."""


_SETTINGS = (
    *("method", "score", "target", "model", "tokenizer_sha256", "block_size", "mu", "average_from"),
    *("steps", "seed", "variant"),
)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference:
    """The difference of two records, by name; domains in the order of the first, then new ones."""
    old, new = records.weights_by_name(before), records.weights_by_name(after)
    names = tuple(dict.fromkeys((*old, *new)))
    change = {name: new.get(name, 0.0) - old.get(name, 0.0) for name in names}
    distance = math.fsum(map(abs, change.values()))
    return Difference(
        before=old,
        after=new,
        change=change,
        ratio={name: _ratio(new.get(name, 0.0), old.get(name)) for name in names},
        added=tuple(name for name in new if name not in old),
        dropped=tuple(name for name in old if name not in new),
        total_variation=distance / 2,
        mean_absolute=distance / len(names),
        settings={
            key: (before.get(key), after.get(key))
            for key in _SETTINGS
            if before.get(key) != after.get(key)
        },
    )


def average(mixtures: Mapping[str, Mapping[str, Any]], *, different: Collection[str] = ()) -> Json:
    """Mean over runs, with the standard deviation of every weight.

    weight_j      =  mean_s weight_sj
    weight_std_j  =  sqrt( sum_s (weight_sj - weight_j)^2 / (S - 1) )

    The standard error of the mean is weight_std / sqrt(S). Other fields are kept where all records
    agree, of the whole and of each domain; a schedule of weights is not averaged.

    Args:
        mixtures: {where it was read: record}, at least two, of the same domains in any order.
        different: what may differ all the same: "target", "tokenizer_sha256".

    Returns:
        A record: the common fields, `domains` in the order of the first, and `average`, the
        sources with seed, steps and weights of each.

    Raises:
        ValueError: fewer than two records, other domains in one of them, or another target or
            tokenizer without being told that this is meant.
    """
    sources, found = list(mixtures), list(mixtures.values())
    if len(found) < 2:
        raise ValueError(
            f"An average needs two weight files or more; got {len(found)}. Name one for each seed."
        )
    weights = [records.weights_by_name(record) for record in found]
    names = list(weights[0])
    for source, other in zip(sources[1:], weights[1:], strict=True):
        _check_same_domains(names, other, sources[0], source)
    for field in (SAME_TARGET, SAME_TOKENIZER):
        if field not in different:
            _check_same_field(field, mixtures)
    entries = []
    for name in names:
        each = [_entry(record, name) for record in found]
        values = [by_name[name] for by_name in weights]
        lasts = [entry["weight_last"] for entry in each if entry.get("weight_last") is not None]
        entry = {"name": name, "weight": statistics.fmean(values)}
        entry["weight_std"] = statistics.stdev(values)
        if len(lasts) == len(each):
            entry["weight_last"] = statistics.fmean(lasts)
        entries.append(entry | _common(each, ("name", "weight", *_OF_ONE_RUN)))
    members = [
        {"source": source, "seed": record.get("seed"), "steps": record.get("steps"), "weights": by}
        for source, record, by in zip(sources, found, weights, strict=True)
    ]
    kept = _common(found, ("domains", "seed", "drift", "average", "constraints", *SCHEDULES))
    return {**kept, "domains": entries, "average": {"count": len(found), "of": members}}


def standard_errors(record: Mapping[str, Any]) -> dict[str, float]:
    """{domain: weight_std / sqrt(S)} of a record that `average` made; empty of another."""
    count = (record.get("average") or {}).get("count", 0)
    deviations = {entry["name"]: entry.get("weight_std") for entry in record["domains"]}
    if count < 2 or None in deviations.values():
        return {}
    return {name: std / math.sqrt(count) for name, std in deviations.items()}


def _entry(record: Mapping[str, Any], name: str) -> Json:
    return next(dict(entry) for entry in record["domains"] if entry["name"] == name)


def _common(found: Sequence[Mapping[str, Any]], left_out: Collection[str]) -> Json:
    """Fields on which all agree."""
    first, *others = found
    return {
        key: value
        for key, value in first.items()
        if key not in left_out and all(key in other and other[key] == value for other in others)
    }


def _check_same_domains(
    names: Collection[str], other: Collection[str], source: str, other_source: str
) -> None:
    missing = [name for name in names if name not in other]
    extra = [name for name in other if name not in names]
    if missing or extra:
        parts = [f"no {', '.join(missing)}"] if missing else []
        parts += [f"{', '.join(extra)} besides"] if extra else []
        raise ValueError(
            f"An average is over weights of the same domains; {other_source} has "
            f"{' and '.join(parts)}, compared with {source}. Leave it out, or train on the same "
            "domains."
        )


def _check_same_field(field: str, mixtures: Mapping[str, Mapping[str, Any]]) -> None:
    """What some records do not say differs from nothing."""
    known = {
        source: record[field]
        for source, record in mixtures.items()
        if record.get(field) is not None
    }
    for source, value in known.items():
        first_source, first = next(iter(known.items()))
        if value != first:
            raise ValueError(
                f"An average is over weights learned for one {field}; it is {first!r} in "
                f"{first_source} and {value!r} in {source}. Average those that agree, or say that "
                f"it is meant with different={field}."
            )


@dataclass(frozen=True)
class Constrained:
    """Weights within bounds, and what that took."""

    record: Json
    """As `records.write_weights` takes it; `constraints` says where it comes from."""
    bound: Mapping[str, str]
    """{domain: "floor", "cap" or "max_epochs"} of those that a bound holds."""
    kl: float
    """KL(new || old) in nats; infinite where a floor lifts a weight of zero."""
    total_variation: float


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
    """The weights nearest in KL that lie within bounds; see `simplex.project`.

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
    _check_budget(budget_tokens)
    weights = records.weights_by_name(record)
    names = list(weights)
    floors = _bounds(floor, names, "floor", 0.0)
    caps = _bounds(cap, names, "cap", 1.0)
    limits = _bounds(max_epochs, names, "max_epochs", math.inf)
    epoch_caps = _epoch_caps(record, limits, budget_tokens, tokens or {})
    highest = {name: min(caps[name], epoch_caps[name]) for name in names}
    _check_feasible(weights, floors, caps, highest)
    alpha_K, floor_K, cap_K = (
        torch.tensor([values[name] for name in names], dtype=torch.float64)
        for values in (weights, floors, highest)
    )
    alpha_K = alpha_K / alpha_K.sum()
    moved_K = simplex.project(alpha_K, floor_K=floor_K, cap_K=cap_K)
    moved = dict(zip(names, moved_K.tolist(), strict=True))
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
    return Constrained(
        record=_with_weights(record, moved) | {"constraints": constraints},
        bound=bound,
        kl=float(simplex.kl(moved_K, alpha_K)),
        total_variation=float((moved_K - alpha_K).abs().sum()) / 2,
    )


def _with_weights(record: Mapping[str, Any], weights: Mapping[str, float]) -> Json:
    entries = [
        {key: value for key, value in entry.items() if key != "weight_std"}
        | {"weight": weights[entry["name"]]}
        for entry in record["domains"]
    ]
    kept = {key: value for key, value in record.items() if key not in SCHEDULES}
    return kept | {"domains": entries}


def _bounds(
    bound: float | Mapping[str, float], names: Sequence[str], what: str, none: float
) -> dict[str, float]:
    """A bound for every domain: a share between 0 and 1, or epochs > 0."""
    values = dict.fromkeys(names, none)
    if isinstance(bound, Mapping):
        values |= _known_names(bound, names, what)
    else:
        values = dict.fromkeys(names, bound)
    for name, value in values.items():
        is_right = value > 0 if what == "max_epochs" else 0 <= value <= 1
        if not is_right:
            rule = "greater than zero" if what == "max_epochs" else "between 0 and 1"
            raise ValueError(f"{what} must be {rule}; that of {name} is {value:g}.")
    return values


def _epoch_caps(
    record: Mapping[str, Any],
    limits: Mapping[str, float],
    budget_tokens: float | None,
    given: Mapping[str, float],
) -> dict[str, float]:
    """weight <= max_epochs * tokens / budget; 1 where that is no bound."""
    available = {entry["name"]: entry.get("tokens") for entry in record["domains"]}
    available |= _known_names(given, available, "tokens")
    limited = [name for name, limit in limits.items() if limit < math.inf]
    if limited and budget_tokens is None:
        raise ValueError(
            "max_epochs needs to know how long the training is; pass budget_tokens "
            "(--budget-tokens), its tokens."
        )
    unknown = [name for name in limited if available[name] is None]
    if unknown:
        raise ValueError(
            "max_epochs needs the tokens there are of each domain; those of "
            f"{listed(unknown)} are not in the file. Pass tokens (--tokens NAME=NUMBER)."
        )
    caps = dict.fromkeys(limits, 1.0)
    for name in limited:
        assert budget_tokens is not None
        caps[name] = min(1.0, limits[name] * available[name] / budget_tokens)
    return caps


def _check_feasible(
    weights: Mapping[str, float],
    floors: Mapping[str, float],
    caps: Mapping[str, float],
    highest: Mapping[str, float],
) -> None:
    """What `simplex.project` would refuse, in terms of domains."""
    crossed = [name for name, floor in floors.items() if floor > highest[name]]
    if crossed:
        name, *others = crossed
        is_epochs = highest[name] < caps[name]
        what = "more than max_epochs allows" if is_epochs else "above the cap"
        too = f" (and {listed(others)} likewise)" if others else ""
        raise ValueError(
            f"The floor of {name}, {floors[name]:g}, is {what}, {highest[name]:.4g}"
            f"{too}. Lower it, or allow {'more epochs' if is_epochs else 'more'}."
        )
    least = math.fsum(floors.values())
    if least > 1 + simplex.BOUNDS_TOLERANCE:
        raise ValueError(
            f"Floors must leave room for all domains; they sum to {least:.6g}, {least - 1:.4g} too "
            "much. Lower them."
        )
    held = [name for name, weight in weights.items() if weight == 0 and not floors[name]]
    # A floor lifts a zero, and to the floor only.
    most = math.fsum(value if weights[name] else floors[name] for name, value in highest.items())
    if most >= 1 - simplex.BOUNDS_TOLERANCE:
        return
    is_epochs = any(highest[name] < caps[name] for name in weights)
    out = "Allow more epochs, a smaller budget or more tokens" if is_epochs else "Raise caps"
    zero = f"; {listed(held)} has weight zero and takes none without a floor" if held else ""
    raise ValueError(
        f"The bounds must leave room for the whole training; together domains may take {most:.6g} "
        f"of it, {1 - most:.4g} is missing{zero}. {out}."
    )


@dataclass(frozen=True)
class WarmStart:
    """Weights that a run may begin with, made of those of other domains."""

    weights: Mapping[str, float]
    """Of exactly the new domains, in their order; sums to one."""
    kept: tuple[str, ...]
    added: Mapping[str, float]
    """Domains that the file does not have, and their share."""
    dropped: Mapping[str, float]
    """Domains of the file that are gone, and the weight they had."""
    split: Mapping[str, Mapping[str, float]]
    """{old name: {new name: its share of the old weight}}."""

    @property
    def zeros(self) -> tuple[str, ...]:
        """Domains that begin with weight zero, and which the mirror step leaves there."""
        return tuple(name for name, weight in self.weights.items() if weight == 0)


def warm_start(
    record: Mapping[str, Any],
    tokens: Mapping[str, float],
    *,
    split: Mapping[str, Sequence[str]] | None = None,
    added_share: str | float = "uniform",
) -> WarmStart:
    """Weights of a file, carried by name to the domains of another corpus.

    A domain of the same name keeps its weight relative to the others. The weight of one that is
    gone is renormalised away; that of one that was split goes to its parts by their tokens. A new
    one, of which the file knows nothing, gets a share of its own, and the others what is left:
    1/K, with which Algorithm 1 would begin it, by default.

    Args:
        record: as `records.read_weights` returns it.
        tokens: {domain: training tokens} of the K new domains, in order.
        split: {old domain: the new ones made of it}; one of them may have the old name.
        added_share: of each new domain: "uniform", 1/K; "natural", its share of the tokens; or a
            number in (0, 1).

    Raises:
        ValueError: a split of a domain that the file lacks, into domains that the corpus lacks, or
            that have a weight of their own; an added share that leaves nothing to the others; or
            nothing that the file gives weight to is left.
    """
    old = records.weights_by_name(record)
    parts = {name: tuple(new) for name, new in (split or {}).items()}
    _check_split(parts, old, tokens)
    shares = {name: _priors_of({part: tokens[part] for part in new}) for name, new in parts.items()}
    kept = tuple(name for name in tokens if name in old and name not in parts)
    carried = {name: old[name] for name in kept}
    for name, by_part in shares.items():
        carried |= {part: old[name] * share for part, share in by_part.items()}
    new = [name for name in tokens if name not in carried]
    added = _added(new, tokens, added_share)
    total = math.fsum(carried.values())
    if not total > 0:
        raise ValueError(
            f"A start needs domains that the file gives weight to; it knows {', '.join(old)}, the "
            f"corpus is {', '.join(tokens)}. Name the files' domains alike, or say with split what "
            "became of them."
        )
    rest = 1 - math.fsum(added.values())
    weights = {
        name: added[name] if name in added else rest * carried[name] / total for name in tokens
    }
    gone = {name: old[name] for name in old if name not in kept and name not in parts}
    return WarmStart(weights, kept, added, gone, shares)


def _priors_of(tokens: Mapping[str, float]) -> dict[str, float]:
    return baselines.natural({name: int(count) for name, count in tokens.items()})


def _check_split(
    parts: Mapping[str, Sequence[str]], old: Mapping[str, float], new: Collection[str]
) -> None:
    taken: set[str] = set()
    for name, into in parts.items():
        if name not in old:
            raise ValueError(
                f"split must name a domain of the file, which are {', '.join(old)}; {name} is not "
                "among them."
            )
        unknown = [part for part in into if part not in new]
        if unknown or not into:
            raise ValueError(
                f"split must divide {name} into domains of the corpus, which are {', '.join(new)}; "
                f"{', '.join(unknown) or 'nothing'} is not among them."
            )
        own = [part for part in into if part in taken or (part in old and part != name)]
        if own or len(set(into)) < len(into):
            raise ValueError(
                f"A part of a split domain has no other weight; {', '.join(own) or into[0]}, named "
                f"as a part of {name}, has one already. Name every new domain once."
            )
        taken |= set(into)


def _added(
    names: Sequence[str], tokens: Mapping[str, float], added_share: str | float
) -> dict[str, float]:
    if added_share == "uniform":
        return dict.fromkeys(names, 1 / len(tokens))
    if added_share == "natural":
        priors = _priors_of(tokens)
        return {name: priors[name] for name in names}
    share = _number(added_share)
    if not 0 < share < 1 or share * len(names) >= 1:
        raise ValueError(
            "added_share must be uniform, natural, or a number greater than zero that leaves "
            f"something to the others; got {added_share} for {len(names)} added domains."
        )
    return dict.fromkeys(names, share)


def _number(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
