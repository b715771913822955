"""Weights beside natural ones, as epochs and in words; and their mean over runs.

Records are as `records.read_weights` returns them; domains are matched by name.
"""

import html
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doge_fast.pipeline import baselines, named, records
from doge_fast.pipeline.failures import UserError
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.tables import Table, table_of, text
from doge_fast.pipeline.wording import as_ascii, count_text, listed, plural
from doge_fast.weights.projection import effective_domains


def weight_text(value: float | None, sign: str = "") -> str:
    """Four decimals, or a power of ten where these would all be zero; `sign` "+" for a change."""
    if value is None:
        return ""
    return f"{value:{sign}{'.0e' if 0 < abs(value) < 5e-5 else '.4f'}}"


def figure_text(value: float | None) -> str:
    """Three digits, and those of a whole number; nothing for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if 100 <= value < 1e7 else f"{value:#.3g}"


def tokens_text(value: float | None) -> str:
    """3000000 -> 3 M; nothing for None."""
    return "" if value is None else as_ascii(count_text(value))


def by_domain(names: Iterable[str], columns: Mapping[str, Iterable[str]]) -> Table:
    """A row for each domain; a column for each title that has a text for some of them."""
    known = {title: texts for title, each in columns.items() if any(texts := list(each))}
    return table_of(["domain", *known], list(zip(names, *known.values(), strict=True)))


@dataclass(frozen=True)
class DomainShare:
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


_COLUMNS = {
    **dict.fromkeys(("weight", "std", "last", "prior"), weight_text),
    **{"ratio": figure_text, "tokens": tokens_text, "epochs": figure_text},
}
"""Of a table of shares: which field, and how it is written."""


@dataclass(frozen=True)
class WeightsSummary:
    """Weights with what they mean; a notebook shows the table."""

    domains: tuple[DomainShare, ...]

    @property
    def effective_domains(self) -> float:
        """exp(H): K at uniform weights, 1 where one domain takes all."""
        return effective_domains(share.weight for share in self.domains)

    def table(self) -> Table:
        """A row for each domain; a column for each quantity that is known of some domain."""
        columns = {
            field: [as_text(getattr(share, field)) for share in self.domains]
            for field, as_text in _COLUMNS.items()
        }
        return by_domain([share.name for share in self.domains], columns)

    @property
    def effective_text(self) -> str:
        """How many domains the weights amount to, in a sentence."""
        count = f"{self.effective_domains:.2f} of {len(self.domains)}"
        return f"Effective domains, exp of the entropy: {count}."

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(text(self.table()))}\n{self.effective_text}</pre>"


def read_all(paths: Sequence[Path]) -> dict[str, Json]:
    """{path: record}, in order; UserError where there is none, or a file is named twice."""
    if not paths:
        raise UserError("Name a weights.json, or a run directory that holds one.")
    files = [records.weights_path(path) for path in paths]
    twice = [str(path) for path, file in zip(paths, files, strict=True) if files.count(file) > 1]
    if twice:
        raise UserError(f"A file is named once; {twice[0]} is named twice.")
    return {str(path): records.read_weights(path) for path in paths}


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
        UserError: the budget is not > 0, a number of tokens not >= 1, or `tokens` names a domain
            that the record does not have.
    """
    check_budget(budget_tokens)
    weights, available = records.weights_by_name(record), tokens_of(record, tokens)
    priors = {entry["name"]: entry.get("prior") for entry in record["domains"]}
    is_told = tokens is not None and tokens.keys() == weights.keys()
    is_unknown = all(prior is None for prior in priors.values())
    if all(available.values()) and (is_told or is_unknown):
        priors |= baselines.natural(available)
    shares = []
    for entry in record["domains"]:
        name, weight = entry["name"], float(entry["weight"])
        held, prior, passes = available[name], priors[name], None
        if budget_tokens is not None and held is not None:
            passes = baselines.epochs(weight, held, budget_tokens)
        shares.append(
            DomainShare(
                name=name,
                weight=weight,
                std=entry.get("weight_std"),
                last=entry.get("weight_last"),
                prior=prior,
                ratio=weight / prior if prior else None,
                tokens=None if held is None else int(held),
                epochs=passes,
            )
        )
    return WeightsSummary(tuple(shares))


def check_budget(budget_tokens: float | None) -> None:
    """Raise UserError unless it is a number > 0, or None."""
    if budget_tokens is not None and not 0 < budget_tokens < math.inf:
        raise UserError(
            f"budget_tokens must be a number of tokens greater than zero; got {budget_tokens:g}."
        )


def tokens_of(record: Mapping[str, Any], given: Mapping[str, float] | None) -> dict[str, Any]:
    """{domain: tokens there are}: those given, or those that the record knows, or None."""
    recorded = {entry["name"]: entry.get("tokens") for entry in record["domains"]}
    named.check_known("tokens", given or {}, recorded, "the weights")
    for name, value in (given or {}).items():
        if not 1 <= value < math.inf:
            raise UserError(f"tokens of a domain must be a number >= 1; {name} has {value:g}.")
    return recorded | dict(given or {})


_METHODS = {"doge": "proxy", "doremi": "proxy of DoReMi", "given": "weights of a base model"}


def story(record: Mapping[str, Any]) -> str:
    """proxy, target universal, 300 steps, seed 0; or: search, 1/T = 2, undecided, ..."""
    known = {key: value for key, value in record.items() if value is not None}
    method, score, target = (known.get(key) for key in ("method", "score", "target"))
    if isinstance(target, Mapping):
        shares = (name if tau == 1 else f"{tau:g} {name}" for name, tau in target.items())
        target = " + ".join(shares)
    kind = [_METHODS.get(method, method) if method else "method not known"]
    seeds = known.get("seeds", [known["seed"]] if "seed" in known else [])
    # Bounded weights of a search lie at no temperature.
    if "proxy" in known:
        kind = ["search"]
    if "inverse_temperature" in known:
        decided = ("undecided", "decided")[known["is_decided"]] if "is_decided" in known else ""
        kind = ["search", f"1/T = {known['inverse_temperature']:g}", decided]
    if average := known.get("average"):
        kind = [f"mean of {plural(average['count'], 'file')}", *kind]
        seeds = [each["seed"] for each in average.get("of", ()) if each.get("seed") is not None]
    parts = [
        *kind,
        "" if score in (None, "paper") else f"score {score}",
        f"target {target}" if target else "",
        plural(known["steps"], "step") if "steps" in known else "",
        f"seed{'s' * (len(seeds) > 1)} {listed(map(str, seeds))}" if seeds else "",
        "constrained" if known.get("constraints") else "",
    ]
    return ", ".join(filter(None, parts))


def origin(record: Mapping[str, Any]) -> str:
    """On which text the weights were learned, when, and with which model; what is known of it."""
    known = {key: value for key, value in record.items() if value is not None}
    parts = [
        f"corpus {known['corpus']}" if "corpus" in known else "",
        known.get("date", ""),
        f"{tokens_text(known['tokens'])} tokens seen" if "tokens" in known else "",
        f"model {known['model']}" if "model" in known else "",
        f"{tokens_text(known['parameters'])} parameters" if "parameters" in known else "",
        f"learning rate {known['learning_rate']:g}" if "learning_rate" in known else "",
    ]
    sentence = ", ".join(filter(None, parts))
    return f"{sentence[:1].upper()}{sentence[1:]}." if sentence else ""


def average(mixtures: Mapping[str, Mapping[str, Any]]) -> Json:
    """Mean over runs, with the standard deviation of every weight.

    weight_j      =  mean_s weight_sj
    weight_std_j  =  sqrt( sum_s (weight_sj - weight_j)^2 / (S - 1) )

    The standard error of the mean is weight_std / sqrt(S). Other fields are kept where all records
    agree, of the whole and of each domain; a schedule of weights is not averaged. A record warns of
    different scores.

    Args:
        mixtures: {where it was read: record}, at least two, of the same domains in any order.

    Returns:
        A record: the common fields, `domains` in the order of the first, and `average`, the
        sources with seed, steps and weights of each.

    Raises:
        UserError: fewer than two records, other domains in one of them, or another target or
            tokenizer.
    """
    all_records = list(mixtures.values())
    if len(all_records) < 2:
        raise UserError(
            f"An average needs two weight files or more; got {len(all_records)}. Name one for each "
            "seed."
        )
    weights = {source: records.weights_by_name(record) for source, record in mixtures.items()}
    _check_comparable(mixtures, weights)
    entries = []
    for name in weights[next(iter(weights))]:
        each = [e for record in all_records for e in record["domains"] if e["name"] == name]
        values = [float(entry["weight"]) for entry in each]
        lasts = [entry.get("weight_last") for entry in each]
        entry = {"name": name, "weight": statistics.fmean(values)}
        entry["weight_std"] = statistics.stdev(values)
        if None not in lasts:
            entry["weight_last"] = statistics.fmean(lasts)
        entries.append(entry | _common(each, ("name", "weight", "weight_std", "weight_last")))
    members = [
        {"source": source, "seed": record.get("seed"), "steps": record.get("steps"), "weights": by}
        for (source, record), by in zip(mixtures.items(), weights.values(), strict=True)
    ]
    of_each = ("domains", "seed", "average", "constraints", "stages", "is_decided", "warnings")
    kept = _common(all_records, of_each)
    warnings = [text for record in all_records for text in record.get("warnings") or ()]
    scores = {r["score"]: source for source, r in mixtures.items() if r.get("score") is not None}
    if len(scores) > 1:
        told = listed(f"{score} in {source}" for score, source in scores.items())
        warnings.append(f"The mean is over weights of different scores: {told}.")
    made = {"domains": entries, "warnings": [*dict.fromkeys(warnings)]}
    return {**kept, **made, "average": {"count": len(all_records), "of": members}}


def _common(dicts: Sequence[Mapping[str, Any]], left_out: Collection[str]) -> Json:
    """Fields on which all agree."""
    first, *others = dicts
    return {
        key: value
        for key, value in first.items()
        if key not in left_out and all(key in other and other[key] == value for other in others)
    }


def _check_comparable(
    mixtures: Mapping[str, Mapping[str, Any]], weights: Mapping[str, Mapping[str, float]]
) -> None:
    """The same domains, target and tokenizer; what a record does not say differs from nothing."""
    (first, expected), *others = weights.items()
    for source, by_name in others:
        if by_name.keys() != expected.keys():
            raise UserError(
                "An average is over weights of the same domains; they are "
                f"{', '.join(sorted(expected))} in {first} and {', '.join(sorted(by_name))} in "
                f"{source}. Leave one out, or train on the same domains."
            )
    for field in ("target", "tokenizer_sha256"):
        known = [(source, r[field]) for source, r in mixtures.items() if r.get(field) is not None]
        for source, value in known:
            if value != known[0][1]:
                raise UserError(
                    f"An average needs weights with the same {field}; it is {known[0][1]!r} in "
                    f"{known[0][0]} and {value!r} in {source}. Average those that agree."
                )
