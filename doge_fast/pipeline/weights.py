"""Domain weights as a product: looked at, compared, averaged.

Every function takes records as `records.read_weights` returns them, matches domains by name, and
returns a plain object; none writes a file. `bounds` keeps weights within bounds, `warm_start`
carries them to other domains.
"""

import html
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from doge_fast.pipeline import baselines, records
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.mixtures import effective_domains
from doge_fast.pipeline.tables import Table, table_of
from doge_fast.pipeline.weight_texts import figure_text, tokens_text, weight_text
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
    """Weights with what they mean. A notebook shows them as a table with a bar for each weight."""

    domains: tuple[Share, ...]
    effective_domains: float
    """exp(H): K at uniform weights, 1 where one domain takes all."""

    def table(self, *, largest_first: bool = False) -> Table:
        """A row for each domain; a column for each quantity that is known of some domain."""
        shares = list(self.domains)
        if largest_first:
            shares.sort(key=lambda share: -share.weight)
        columns = {
            "weight": [weight_text(share.weight) for share in shares],
            "std": [weight_text(share.std) for share in shares],
            "last": [weight_text(share.last) for share in shares],
            "prior": [weight_text(share.prior) for share in shares],
            "ratio": [figure_text(share.ratio) for share in shares],
            "tokens": [tokens_text(share.tokens) for share in shares],
            "epochs": [figure_text(share.epochs) for share in shares],
        }
        known = {title: texts for title, texts in columns.items() if any(texts)}
        names = [share.name for share in shares]
        return table_of(["domain", *known], list(zip(names, *known.values(), strict=True)))

    def _repr_html_(self) -> str:
        table = self.table()
        most = max(share.weight for share in self.domains) or 1.0
        lines = [_html_cells("th", [table.corner, *(label for label, _ in table.columns), ""])]
        for row, share in zip(table.rows, self.domains, strict=True):
            bar = f"<td>{_BAR.format(width=9 * share.weight / most)}</td>"
            lines.append(_html_cells("td", [row.label, *(cell.text for cell in row.cells)]) + bar)
        rows = "\n".join(f"<tr>{line}</tr>" for line in lines)
        total = f"Effective domains: {self.effective_domains:.2f} of {len(self.domains)}."
        return f"<table>\n{rows}\n</table>\n<p>{total}</p>"


# The bar of a weight; the colour is read on light pages and on dark ones.
_BAR = '<div style="width:{width:.2f}em;height:.7em;background:#3f7fd0"></div>'


def _html_cells(tag: str, texts: Sequence[str]) -> str:
    """Cells of a row, the first of them, a name, to the left."""
    first, *others = (html.escape(text) for text in texts)
    cells = "".join(f"<{tag}>{text}</{tag}>" for text in others)
    return f'<{tag} style="text-align:left">{first}</{tag}>{cells}'


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
    check_budget(budget_tokens)
    weights = records.weights_by_name(record)
    given = known_names(tokens or {}, weights, "tokens")
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


def check_budget(budget_tokens: float | None) -> None:
    """Raise ValueError unless it is a number > 0, or None."""
    if budget_tokens is not None and not 0 < budget_tokens < math.inf:
        raise ValueError(
            f"budget_tokens must be a number of tokens greater than zero; got {budget_tokens:g}."
        )


def known_names(
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
