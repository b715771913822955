"""A record and paths -> a `Blend`: everything that an exporter relies on is checked here, once."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from doge_fast.pipeline.exports.blend import (
    Blend,
    PathParts,
    Paths,
    Phase,
    Rows,
    Settings,
    Split,
    Target,
    by_document,
    by_token,
    normalised,
)
from doge_fast.pipeline.named import visible
from doge_fast.pipeline.records.weights import check_fields, is_weight

Plan = list[tuple[int, dict[str, float]]]
"""[(first step, {domain: weight})]."""


def build(
    weights: Mapping[str, Any],
    target: Target,
    paths: Mapping[Split, Paths],
    settings: Settings,
) -> tuple[Blend, list[str]]:
    """A checked mixture as the target counts it, and in words what was left out.

    Raises:
        ValueError: a field is not what it should be, a path belongs to no domain, a domain has no
            path, or the mean length of a document is needed and not known.
    """
    record = _record(weights)
    rows = rows_of(target, settings)
    entries = {entry["name"]: entry for entry in record["domains"]}
    planned, notes = _plan(record, target, settings)
    exact = [(first, normalised(shares)) for first, shares in planned]
    lengths: dict[str, float] = {}
    if rows == "documents":
        needed = {name for _, parts in exact for name, part in parts.items() if part}
        lengths = _lengths(sorted(needed), entries, settings.mean_doc_tokens)
        exact = [(first, by_document(parts, lengths)) for first, parts in exact]
    blend = Blend(
        phases=tuple(Phase(first, parts) for first, parts in exact),
        entries=entries,
        paths={split: _path_parts(split, given, entries) for split, given in paths.items()},
        rows=rows,
        settings=settings,
        mean_doc_tokens=lengths,
    )
    kept = blend.names()
    missing = [name for name in kept if name not in blend.paths["train"]]
    if target.needs_paths and missing:
        raise ValueError(
            f"Every domain with a weight needs a path; there is none for {', '.join(missing)}. "
            "Give them as paths={name: path} (--paths NAME=PATH ..., or a JSON or YAML file)."
        )
    return blend, [*_dropped(entries, planned, kept, settings), *notes]


def rows_of(target: Target, settings: Settings) -> Rows:
    """What the target's numbers count: as asked, or its default; ValueError where it cannot."""
    asked = settings.rows
    if asked is not None and asked not in target.rows:
        raise ValueError(
            f"{target.name} counts {' or '.join(target.rows)}, by its own decision; rows={asked!r} "
            "cannot change that. Leave it out."
        )
    return asked or target.rows[0]


def token_shares(weights: Mapping[str, float], rows: Rows, settings: Settings) -> dict[str, float]:
    """Shares of tokens, from those of what a framework counts; ValueError where these are
    documents, and their mean length is not known.
    """
    parts = normalised(weights)
    if rows == "documents":
        needed = [name for name, part in parts.items() if part]
        entries: dict[str, Mapping[str, Any]] = {name: {} for name in parts}
        parts = by_token(parts, _lengths(needed, entries, settings.mean_doc_tokens))
    return {name: float(part) for name, part in parts.items()}


def _record(weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record; a plain {domain: weight} becomes one."""
    record = weights
    if not isinstance(weights.get("domains"), Sequence):
        record = {"domains": [{"name": name, "weight": value} for name, value in weights.items()]}
    if not record["domains"]:
        raise ValueError("A mixture needs at least one domain; the weights have none.")
    for entry in record["domains"]:
        if not is_weight(entry["weight"]):
            raise ValueError(
                f"A domain weight must be a finite number >= 0; that of {entry['name']} is "
                f"{entry['weight']!r}."
            )
    names = [entry["name"] for entry in record["domains"]]
    if len(set(names)) < len(names):
        raise ValueError(f"A domain has one weight; the names are {', '.join(names)}.")
    check_fields(record, "The weights")
    return record


def _plan(record: Mapping[str, Any], target: Target, settings: Settings) -> tuple[Plan, list[str]]:
    """The phases that are written, and what is said about them or about those that are not."""
    # A base run writes them as "stages".
    given = record.get("phases") or record.get("stages") or []
    found = [(int(each["first_step"]), dict(each["weights"])) for each in given]
    if found and target.has_phases and not settings.is_constant:
        return _stretched(found, record.get("steps"), settings.total_steps())
    constant = [(0, {entry["name"]: float(entry["weight"]) for entry in record["domains"]})]
    # They may be the phases' mean, their last, or of another file altogether.
    note = (
        f"Left out: {len(found)} phases. These are the weights that the record has beside them, "
        "constant throughout."
    )
    return constant, [note] if found else []


def _stretched(phases: Plan, recorded: int | None, asked: int | None) -> tuple[Plan, list[str]]:
    """Phases at the like parts of a training that is longer or shorter than the recorded one."""
    notes = []
    if recorded and recorded != asked and len(phases) > 1:
        if not asked:
            return phases, [
                f"Phases begin at steps of the recorded run, which has {recorded}. Give the steps "
                "of yours (steps), and they begin at the like parts of it."
            ]
        phases = [(first * asked // recorded, weights) for first, weights in phases]
        if len({first for first, _ in phases}) < len(phases):
            raise ValueError(
                f"{len(phases)} phases of a run of {recorded} steps do not fit in one of {asked}: "
                "some would begin at one step. Give more steps, or fewer phases."
            )
        notes = [f"Phases of a run of {recorded} steps, at the like parts of {asked}."]
    last = phases[-1][0]
    if asked is not None and last >= asked:
        raise ValueError(
            f"The last phase begins at step {last}, and the training has {asked}: it would never "
            "come. Give the steps of the whole training, or fewer phases."
        )
    return phases, notes


def _lengths(
    needed: Sequence[str],
    entries: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, float],
) -> dict[str, float]:
    """{domain: mean tokens of a document}: as given, else as the record says."""
    _check_known(given, entries, "mean_doc_tokens names")
    found: dict[str, float] = {}
    for name in needed:
        entry = entries[name]
        length = given.get(name) or entry.get("mean_doc_tokens")
        if not length and entry.get("documents"):
            length = (entry.get("tokens") or 0) / entry["documents"]
        found[name] = float(length or 0)
    missing = [name for name, length in found.items() if not length]
    if missing:
        raise ValueError(
            "This framework draws documents, and learned weights are shares of tokens: to convert "
            "them it takes the mean tokens of a document, which the file does not have for "
            f"{', '.join(missing)}. Give mean_doc_tokens (--mean-doc-tokens NAME=NUMBER ...), or "
            "rows='blocks' (--rows blocks) if every row of the data holds equally many tokens."
        )
    return found


def _check_known(given: Mapping[str, Any], entries: Mapping[str, Any], what: str) -> None:
    unknown = sorted(set(given) - set(entries))
    if unknown:
        raise ValueError(
            f"{what} {', '.join(unknown)}, which the weights do not have; their domains are "
            f"{', '.join(sorted(entries))}."
        )


def _dropped(
    entries: Mapping[str, Any], planned: Plan, kept: Sequence[str], settings: Settings
) -> list[str]:
    """Which domains are left out, and why."""
    names = sorted(set(entries) - set(kept))
    zeros = [name for name in names if not any(weights[name] for _, weights in planned)]
    small = [name for name in names if name not in zeros]
    notes = [f"Left out, for the weight is 0: {', '.join(zeros)}."] if zeros else []
    if small:
        notes.append(
            f"Left out, for the share rounds to 0 at {settings.decimals} decimals: "
            f"{', '.join(small)}. More decimals keep them."
        )
    return notes


def _path_parts(split: Split, given: Paths, entries: Mapping[str, Any]) -> PathParts:
    _check_known(given, entries, "paths name")
    parts = {name: _parts_of(name, paths) for name, paths in given.items()}
    owners: dict[str, str] = {}
    for name, listed in parts.items():
        for path in listed:
            owner = owners.setdefault(path.rstrip("/"), name)
            # It would count for both.
            if owner != name:
                raise ValueError(
                    f"A path belongs to one domain; {path} is given to {owner}, {name} ({split})."
                )
    return parts


def _parts_of(name: str, given: Any) -> dict[str, Fraction | None]:
    """{path: its part of the domain, or None where unknown}."""
    paths = [given] if isinstance(given, str) else given
    is_listed = isinstance(paths, Sequence | Mapping) and len(paths) > 0
    if not is_listed or not all(isinstance(path, str) and path for path in paths):
        raise ValueError(f"A domain needs a path, or a list of them; {name} has {given!r}.")
    for path in paths:
        if visible(path) != path:
            raise ValueError(
                f"A path must be of characters that are written; {name} has {path!a}. Rename it."
            )
    if isinstance(paths, Mapping):
        if not all(is_weight(part) and part for part in paths.values()):
            raise ValueError(f"The parts of {name}'s paths must be above 0; they are {paths}.")
        return dict(normalised(paths))
    if len(set(paths)) < len(paths):
        raise ValueError(f"The paths of {name} name one twice: {', '.join(paths)}.")
    return {path: Fraction(1) if len(paths) == 1 else None for path in paths}
