"""The targets, and how weights go to one and come back.

export(weights, to=name, paths=...)  ->  what the framework takes, as text
import_weights(text, source=name)    ->  a record like weights.json
"""

import difflib
import functools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from doge_fast.pipeline.exports import configs, loaders, megatron, tables
from doge_fast.pipeline.exports.blend import Blend, Found, Paths, Phases, Settings, Target
from doge_fast.pipeline.exports.building import build, rows_of, token_shares
from doge_fast.pipeline.records.weights import check_fields

GROUP = "doge_fast.exporters"
# Domains named in a sentence; more are counted.
_NAMED = 8
_UNITS = {"blocks": "tokens", "documents": "documents"}


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
    found = dict(_ours())
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
def _ours() -> dict[str, Target]:
    """Those of targets.yaml, each with what writes and reads its text."""
    about = yaml.safe_load(Path(__file__).with_name("targets.yaml").read_text(encoding="utf-8"))
    families = (megatron, configs, loaders, tables)
    formats = {name: both for family in families for name, both in family.FORMATS.items()}
    return {
        name: Target(name, write=formats[name][0], read=formats[name][1], **fields)
        for name, fields in about.items()
    }


@functools.cache
def _points() -> tuple[EntryPoint, ...]:
    """Asked once: it reads the metadata of every installed package."""
    return tuple(entry_points(group=GROUP))


def _find(name: str) -> Target:
    known = targets()
    if name in known:
        return known[name]
    near = [each for each in known if each.startswith(name)]
    near = near or difflib.get_close_matches(name, known, n=3)
    way = (
        f"did you mean {' or '.join(near)}? doge-fast export --list names all."
        if near
        else f"there are {', '.join(known)}."
    )
    raise ValueError(f"There is no target {name!r}; {way}")


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
    blend, warnings = build(
        weights,
        target,
        {"train": paths or {}, "valid": valid_paths or {}, "test": test_paths or {}},
        replace(settings or Settings(), **changes),
    )
    notes = (_unit(target, blend), *target.traps)
    return Exported(
        text=_commented(target, [*warnings, *notes]) + target.write(blend),
        warnings=tuple(warnings),
        notes=notes,
        has_comments=target.comment is not None,
    )


def _unit(target: Target, blend: Blend) -> str:
    """What the numbers are shares of, and what they would be otherwise."""
    is_open = len(target.rows) > 1
    if blend.rows == "blocks":
        way = ": all rows are taken to hold equally many (else --rows documents)" if is_open else ""
        return f"Weights are shares of tokens{way}."
    lengths = [f"{name} {tokens:.6g}" for name, tokens in sorted(blend.mean_doc_tokens.items())]
    more = f" and {len(lengths) - _NAMED} more" if len(lengths) > _NAMED else ""
    way = "; --rows blocks where all rows hold equally many" if is_open else ""
    return (
        "Weights are shares of documents, made from the learned shares of tokens by the mean "
        f"tokens of a document: {', '.join(lengths[:_NAMED])}{more}{way}."
    )


def _commented(target: Target, lines: Sequence[str]) -> str:
    if target.comment is None:
        return ""
    wrap = textwrap.TextWrapper(
        88,
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
    rows = rows_of(target, settings)
    names = {
        _clean(path): name
        for name, given in (paths or {}).items()
        for path in ([given] if isinstance(given, str) else given)
    }
    found = _parsed(target, text)
    unit = 1 if target.phases_in == "steps" else settings.tokens_per_step()
    if unit is None and len(found) > 1:
        raise ValueError(
            f"The phases of {target.name} begin after so many tokens, and weights.json counts "
            "steps: give seq_length and batch_size."
        )
    phases = [
        (round(first / (unit or 1)), token_shares(_sums(shares, names), rows, settings))
        for first, shares in found
    ]
    ordered = dict.fromkeys(name for _, sums in phases for name in sums)
    unknown = sorted(set(paths or {}) - set(ordered))
    if unknown:
        raise ValueError(
            f"paths name {', '.join(unknown)}, and the file holds none of their paths; it holds "
            f"{', '.join(ordered)}."
        )
    none = dict.fromkeys(ordered, 0.0)
    # How long the last phase lasts is not known, so there is no mean to take.
    last = none | phases[-1][1]
    record: dict[str, Any] = {
        "schema_version": 1,
        "method": "imported",
        "source": source,
        "domains": [{"name": name, "weight": weight} for name, weight in last.items()],
    }
    if len(phases) > 1:
        record["phases"] = [{"first_step": first, "weights": none | sums} for first, sums in phases]
    check_fields(record, f"The mixture in the text of {source}")
    return record


def _parsed(target: Target, text: str) -> Phases:
    """What `read` finds; a text of another structure is not the format, wherever it shows."""
    assert target.read is not None
    try:
        found = target.read(text)
        if not all(shares for _, shares in found) or not found:
            raise ValueError("it holds no weights")
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise ValueError(f"The text must be {target.title}, and is not: {reason}.") from error
    return found


def _clean(path: str) -> str:
    """A path as the formats agree on it."""
    return path.rstrip("/").removesuffix(".bin").removesuffix(".idx")


def _sums(shares: Sequence[Found], names: Mapping[str, str]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for share in shares:
        path = _clean(share.path or "")
        name = str(names.get(path) or share.name or PurePosixPath(path).name)
        if not name:
            raise ValueError(f"A share of {share.weight} has neither a name nor a path.")
        if not 0 <= share.weight < float("inf"):
            raise ValueError(f"A weight must be a finite number >= 0; {name} has {share.weight}.")
        sums[name] = sums.get(name, 0.0) + share.weight
    return sums


def listing() -> str:
    """Every target, what it writes, what a path is, what its numbers count: lines for people."""
    lines = []
    for target in targets().values():
        default, *others = target.rows
        counts = [_UNITS[default], *(f"{_UNITS[rows]} with --rows {rows}" for rows in others)]
        able = [*["phases"] * target.has_phases, *["--from"] * (target.read is not None)]
        told = {
            "path": target.takes,
            "counts": ", or ".join(counts),
            "also": ", ".join(able),
            "checked": target.checked,
        }
        lines.append(f"{target.name}: {target.title}")
        lines += [f"    {what:<7} {words}" for what, words in told.items() if words]
    return "\n".join(lines)
