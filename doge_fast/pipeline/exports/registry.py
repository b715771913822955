"""The targets, and how weights go to one and come back.

export(weights, to=name, paths=...)  ->  what the framework takes, as text
import_weights(text, source=name)    ->  a record like weights.json
"""

import functools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import PurePosixPath
from typing import Any

from doge_fast.pipeline.exports import configs, loaders, megatron, mixture, mosaic, tables
from doge_fast.pipeline.exports.mixture import Paths, Rows, Settings, Split
from doge_fast.pipeline.exports.shares import by_token, normalised
from doge_fast.pipeline.exports.target import Found, Phases, Target
from doge_fast.pipeline.weights_fields import check_fields, is_weight

GROUP = "doge_fast.exporters"
_WIDTH = 88
# Domains named in a sentence; more are counted.
_NAMED = 8
_SPLITS: tuple[Split, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class Exported:
    """What `export` made."""

    text: str
    """What the framework takes, with comments where its format has them."""
    warnings: tuple[str, ...]
    """What was left out or changed."""
    notes: tuple[str, ...]
    """What the numbers mean and what goes wrong with the target."""
    has_comments: bool
    """Whether `text` holds warnings and notes too."""

    def __str__(self) -> str:
        """The text."""
        return self.text


def targets() -> dict[str, Target]:
    """{name: target}: ours, then those of installed packages (entry points `doge_fast.exporters`).

    Raises:
        ValueError: an entry point is not a `Target`, or takes a name that is taken.
    """
    families = (megatron, mosaic, configs, loaders, tables)
    found = {target.name: target for family in families for target in family.TARGETS}
    for point in _points():
        target = point.load()
        if not isinstance(target, Target):
            raise ValueError(
                f"An entry point of {GROUP} must load a Target; {point.name} ({point.value}) loads "
                f"a {type(target).__name__}."
            )
        if target.name in found:
            raise ValueError(f"{point.value} adds the target {target.name}, which there is.")
        found[target.name] = target
    return found


@functools.cache
def _points() -> tuple[EntryPoint, ...]:
    """Asked once: it reads the metadata of every installed package."""
    return tuple(entry_points(group=GROUP))


def export(
    weights: Mapping[str, Any],
    *,
    to: str,
    paths: Paths | None = None,
    valid_paths: Paths | None = None,
    test_paths: Paths | None = None,
    settings: Settings | None = None,
    **changes: Any,
) -> Exported:
    """Write domain weights as a training framework takes them.

    A pure function of its arguments, but for the sizes of a domain's several files where their
    parts are not given. Domains are in the order of their names. Numbers are rounded by largest
    remainder, so as decimals they sum to exactly 1.

    Args:
        weights: a record as `records.read_weights` returns it, or {domain: weight}, each >= 0.
        to: a name of `targets()`.
        paths: {domain: path, list of paths, or {path: its relative part}}.
        valid_paths: likewise of validation data, for the targets that take it.
        test_paths: likewise of test data.
        settings: what else the target is told.
        changes: fields of `Settings`, in place of those.

    Returns:
        The text, what was left out, and what the numbers mean.

    Raises:
        ValueError: there is no such target, a domain has no path, a path no domain, or the target
            would not take what it was given; the text says what to do.
    """
    target = _find(to)
    settings = replace(settings or Settings(), **changes)
    given = dict(zip(_SPLITS, (paths, valid_paths, test_paths), strict=True))
    record = _record(weights)
    made, warnings = mixture.build(
        record,
        rows=_rows(target, settings),
        has_phases=target.has_phases,
        paths={split: dict(found or {}) for split, found in given.items()},
        needs_paths=target.needs_paths,
        settings=settings,
    )
    notes = (*_meaning(target, made), *target.traps)
    return Exported(
        text=_commented(target, [*warnings, *notes]) + target.write(made),
        warnings=tuple(warnings),
        notes=notes,
        has_comments=target.comment is not None,
    )


def _find(name: str) -> Target:
    known = targets()
    if name not in known:
        raise ValueError(f"There is no target {name!r}; there are {', '.join(known)}.")
    return known[name]


def _record(weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record; a plain {domain: weight} becomes one.

    Raises:
        ValueError: there is no domain, or a weight is not a finite number >= 0.
    """
    record = weights
    if not isinstance(weights.get("domains"), Sequence):
        named = [{"name": name, "weight": value} for name, value in weights.items()]
        record = {"domains": named}
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
    return record


def _rows(target: Target, settings: Settings) -> Rows:
    """What the numbers count: as the target decides, as asked, or documents."""
    asked = settings.rows
    if asked is None and target.cuts_blocks and settings.seq_length:
        return "blocks"
    if asked is not None and asked not in target.rows:
        raise ValueError(
            f"{target.name} counts {' or '.join(target.rows)}, by its own decision; rows={asked!r} "
            "cannot change that. Leave it out."
        )
    return asked or target.default_rows or "documents"


def _meaning(target: Target, made: mixture.Mixture) -> list[str]:
    """The unit, where the target leaves it open."""
    if made.rows == "documents":
        lengths = [f"{name} {tokens:.6g}" for name, tokens in sorted(made.mean_doc_tokens.items())]
        more = len(lengths) - _NAMED
        ending = f" and {more} more" if more > 0 else ""
        return [
            "Weights are shares of documents, made from the learned shares of tokens by the mean "
            f"tokens of a document: {', '.join(lengths[:_NAMED])}{ending}."
        ]
    if len(target.rows) > 1:
        return ["Weights are shares of tokens: all rows are taken to hold equally many."]
    return []


def _commented(target: Target, lines: Sequence[str]) -> str:
    if target.comment is None:
        return ""
    wrap = textwrap.TextWrapper(
        _WIDTH,
        initial_indent=target.comment,
        subsequent_indent=f"{target.comment}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "".join(f"{wrap.fill(line)}\n" for line in lines)


def import_weights(
    text: str,
    *,
    source: str,
    paths: Paths | None = None,
    settings: Settings | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The mixture in a framework's file, as a record like weights.json.

    A domain is known by the name that the file gives it; where it has only paths, by the domain
    that `paths` gives that path, or else by the last part of the path. The shares of paths of one
    domain are added. Numbers are normalised.

    Args:
        text: what the file holds.
        source: the target whose format it is; one that is read back.
        paths: as for `export`.
        settings: of these, `rows` and `mean_doc_tokens` count, and where the format's phases are
            tokens long `seq_length` and `batch_size`.
        changes: fields of `Settings`, in place of those.

    Returns:
        {"method": "imported", "source", "domains", ...}; with "phases" where the weights change,
        and then the last of them as the domains' weights.

    Raises:
        ValueError: there is no such target or it is not read back, the text is not its format, the
            weights are not numbers >= 0 with one above 0, or `paths` has a domain that it has not.
    """
    target = _find(source)
    if target.read is None:
        readable = [name for name, each in targets().items() if each.read]
        raise ValueError(f"{source} is not read back; these are: {', '.join(readable)}.")
    settings = replace(settings or Settings(), **changes)
    names = {path: name for name, given in (paths or {}).items() for path in _list(given)}
    found = _parsed(target, text)
    phases = [
        (_step(target, first, settings), _as_tokens(target, _sums(shares, names), settings))
        for first, shares in found
    ]
    ordered = dict.fromkeys(name for _, sums in phases for name in sums)
    _check_named(ordered, paths or {})
    # How long the last phase lasts is not known, so there is no mean to take.
    constant = phases[-1][1]
    record: dict[str, Any] = {
        "schema_version": 1,
        "method": "imported",
        "source": source,
        "domains": [{"name": name, "weight": constant.get(name, 0.0)} for name in ordered],
    }
    if len(phases) > 1:
        record["phases"] = [
            {"first_step": first, "weights": {name: sums.get(name, 0.0) for name in ordered}}
            for first, sums in phases
        ]
    check_fields(record, f"The mixture in the text of {source}")
    return record


def _parsed(target: Target, text: str) -> Phases:
    """What `read` finds; a text of another structure is not the format, wherever it shows."""
    assert target.read is not None
    try:
        found = target.read(text)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"The text must be {target.title}, and is not: {error}.") from error
    if not found:
        raise ValueError(f"The text must be {target.title}; it holds no weights.")
    return found


def _step(target: Target, first: int, settings: Settings) -> int:
    """The optimizer step at which a phase begins, from what the format counts."""
    if target.phases_in == "steps" or not first:
        return first
    length, batch = settings.seq_length, settings.batch_size
    if not (length and batch):
        raise ValueError(
            f"The phases of {target.name} begin after so many tokens, and weights.json counts "
            "steps: give seq_length and batch_size."
        )
    return round(first / (length * batch))


def _check_named(found: Mapping[str, Any], paths: Paths) -> None:
    unknown = sorted(set(paths) - set(found))
    if unknown:
        raise ValueError(
            f"paths name {', '.join(unknown)}, and the file holds none of their paths; it holds "
            f"{', '.join(found)}."
        )


def _list(paths: str | Sequence[str] | Mapping[str, float]) -> list[str]:
    return [_clean(path) for path in ([paths] if isinstance(paths, str) else paths)]


def _clean(path: str) -> str:
    """A path as the formats agree on it."""
    return path.rstrip("/").removesuffix(".bin").removesuffix(".idx")


def _sums(shares: Sequence[Found], names: Mapping[str, str]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for share in shares:
        path = _clean(share.path or "")
        name = names.get(path) or share.name or PurePosixPath(path).name
        if not name:
            raise ValueError(f"A share of {share.weight} has neither a name nor a path.")
        if not 0 <= share.weight < float("inf"):
            raise ValueError(f"A weight must be a finite number >= 0; {name} has {share.weight}.")
        sums[str(name)] = sums.get(str(name), 0.0) + share.weight
    return sums


def _as_tokens(target: Target, sums: Mapping[str, float], settings: Settings) -> dict[str, float]:
    """Shares of tokens, from those of what the framework counts."""
    parts = normalised(sums)
    if _rows(target, settings) == "documents":
        named: dict[str, Mapping[str, Any]] = {name: {} for name in parts}
        lengths = mixture.mean_doc_tokens(
            [name for name, part in parts.items() if part], named, settings.mean_doc_tokens
        )
        parts = by_token({name: part for name, part in parts.items() if part}, lengths) | {
            name: part for name, part in parts.items() if not part
        }
    return {name: float(part) for name, part in parts.items()}


def listing() -> str:
    """Every target, what it writes, what a path is, what its numbers count: lines for people."""
    lines = []
    for target in targets().values():
        lines.append(f"{target.name}: {target.title}")
        if target.has_paths:
            lines.append(f"    path   {target.takes}")
        lines.append(f"    counts {_counts(target)}")
        able = ["phases"] if target.has_phases else []
        able += ["--from"] if target.read else []
        if able:
            lines.append(f"    also   {', '.join(able)}")
    return "\n".join(lines)


def _counts(target: Target) -> str:
    words = {"blocks": "tokens", "documents": "documents"}
    default: Rows = target.default_rows or "documents"
    others = [rows for rows in target.rows if rows != default]
    return ", or ".join([words[default], *(f"{words[rows]} with --rows {rows}" for rows in others)])
