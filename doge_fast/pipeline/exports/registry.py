"""The targets, and how weights go to one and come back.

export(weights, to=name, paths=...)  ->  what the framework takes, as text
import_weights(text, source=name)    ->  a record like weights.json
"""

import difflib
import functools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from doge_fast.pipeline.exports import configs, loaders, megatron
from doge_fast.pipeline.exports.blend import (
    Blend,
    Found,
    Parts,
    Paths,
    Phase,
    Phases,
    Rows,
    Settings,
    Split,
    Target,
    by_document,
    by_token,
    check_known,
    normalised,
    path_parts,
)
from doge_fast.pipeline.records.weights import check_fields, is_weight

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
    formats = {**megatron.FORMATS, **configs.FORMATS, **loaders.FORMATS}
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
    **settings: Any,
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
        settings: fields of `Settings`: what else the target is told.

    Returns:
        The text, what was left out, and what the numbers mean.

    Raises:
        ValueError: there is no such target, a domain has no path, a path no domain, or the target
            would not take what it was given; the text says what to do.
    """
    target, asked, record = _find(to), Settings(**settings), _record(weights)
    rows = _rows(target, asked)
    entries = {entry["name"]: entry for entry in record["domains"]}
    planned, warnings = _plan(record, target, asked)
    phases = [Phase(first, normalised(shares)) for first, shares in planned]
    lengths: dict[str, float] = {}
    if rows == "documents":
        lengths = _lengths(phases, entries, asked)
        phases = [Phase(each.first_step, by_document(each.parts, lengths)) for each in phases]
    given: dict[Split, Paths | None] = {"train": paths, "valid": valid_paths, "test": test_paths}
    blend = Blend(
        phases=phases,
        entries=entries,
        paths={split: path_parts(split, each or {}, entries) for split, each in given.items()},
        rows=rows,
        settings=asked,
        mean_doc_tokens=lengths,
    )
    kept = blend.names()
    missing = [name for name in kept if name not in blend.paths["train"]]
    if target.needs_paths and missing:
        raise ValueError(
            f"Every domain with a weight needs a path; there is none for {', '.join(missing)}. "
            "Give them as paths={name: path} (--paths NAME=PATH ..., or a JSON or YAML file)."
        )
    warnings = [*_left_out(planned, kept, asked.decimals), *warnings]
    notes = (_unit(target, blend), *target.traps)
    return Exported(
        text=_commented(target, [*warnings, *notes]) + target.write(blend),
        warnings=tuple(warnings),
        notes=notes,
        has_comments=target.comment is not None,
    )


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


def _rows(target: Target, settings: Settings) -> Rows:
    """What the target's numbers count: as asked, or its default; ValueError where it cannot."""
    asked = settings.rows
    if asked is not None and asked not in target.rows:
        raise ValueError(
            f"{target.name} counts {' or '.join(target.rows)}, by its own decision; rows={asked!r} "
            "cannot change that. Leave it out."
        )
    return asked or target.rows[0]


_Plan = list[tuple[int, dict[str, float]]]


def _plan(record: Mapping[str, Any], target: Target, settings: Settings) -> tuple[_Plan, list[str]]:
    """[(first step, {domain: weight})] as written, and what is said about phases."""
    # A base run writes them as "stages".
    given = record.get("phases") or record.get("stages") or []
    if given and target.has_phases and not settings.is_constant:
        phases = [(int(each["first_step"]), dict(each["weights"])) for each in given]
        return _stretched(phases, record.get("steps"), settings.total_steps())
    constant = {entry["name"]: float(entry["weight"]) for entry in record["domains"]}
    # They may be the phases' mean, their last, or of another file altogether.
    note = (
        f"Left out: {len(given)} phases. These are the weights that the record has beside them, "
        "constant throughout."
    )
    return [(0, constant)], [note] if given else []


def _stretched(phases: _Plan, recorded: int | None, asked: int | None) -> tuple[_Plan, list[str]]:
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


def _left_out(plan: _Plan, kept: Sequence[str], decimals: int) -> list[str]:
    """Which domains have no share, and why."""
    positive = {name for _, shares in plan for name, weight in shares.items() if weight}
    zeros, small = sorted(plan[0][1].keys() - positive), sorted(positive - set(kept))
    notes = [f"Left out, for the weight is 0: {', '.join(zeros)}."] if zeros else []
    if small:
        notes.append(
            f"Left out, for the share rounds to 0 at {decimals} decimals: "
            f"{', '.join(small)}. More decimals keep them."
        )
    return notes


def _lengths(
    phases: Sequence[Phase], entries: Mapping[str, Mapping[str, Any]], settings: Settings
) -> dict[str, float]:
    """{domain with a share: mean tokens of a document}: as given, else as the record says."""
    check_known(settings.mean_doc_tokens, entries, "mean_doc_tokens names")
    found: dict[str, float] = {}
    for name in sorted({n for phase in phases for n, part in phase.parts.items() if part}):
        entry = entries[name]
        length = settings.mean_doc_tokens.get(name) or entry.get("mean_doc_tokens")
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
    **settings: Any,
) -> dict[str, Any]:
    """The mixture in a framework's file, as a record like weights.json.

    A domain is known by the name that the file gives it; where it has only paths, by the domain
    that `paths` gives that path, or else by the last part of the path. The shares of paths of one
    domain are added. Numbers are normalised.

    Args:
        text: what the file holds.
        source: the target whose format it is; one that is read back.
        paths: as for `export`.
        settings: fields of `Settings`; `rows` and `mean_doc_tokens` count, and where the format's
            phases are tokens long `seq_length` and `batch_size`.

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
    asked = Settings(**settings)
    rows = _rows(target, asked)
    owners = {
        _clean(path): name
        for name, given in (paths or {}).items()
        for path in ([given] if isinstance(given, str) else given)
    }
    found = _parsed(target, text)
    unit = 1 if target.phases_in == "steps" else asked.tokens_per_step()
    if unit is None and len(found) > 1:
        raise ValueError(
            f"The phases of {target.name} begin after so many tokens, and weights.json counts "
            "steps: give seq_length and batch_size."
        )
    phases = [Phase(round(first / (unit or 1)), _summed(shares, owners)) for first, shares in found]
    names = dict.fromkeys(name for phase in phases for name in phase.parts)
    if rows == "documents":
        lengths = _lengths(phases, {name: {} for name in names}, asked)
        phases = [Phase(each.first_step, by_token(each.parts, lengths)) for each in phases]
    unknown = sorted(set(paths or {}) - set(names))
    if unknown:
        raise ValueError(
            f"paths name {', '.join(unknown)}, and the file holds none of their paths; it holds "
            f"{', '.join(names)}."
        )
    weights = [{name: float(each.parts.get(name, 0)) for name in names} for each in phases]
    record: dict[str, Any] = {"schema_version": 1, "method": "imported", "source": source}
    # How long the last phase lasts is not known, so there is no mean to take.
    record["domains"] = [{"name": name, "weight": last} for name, last in weights[-1].items()]
    if len(phases) > 1:
        record["phases"] = [
            {"first_step": each.first_step, "weights": own}
            for each, own in zip(phases, weights, strict=True)
        ]
    check_fields(record, f"The mixture in the text of {source}")
    return record


def _parsed(target: Target, text: str) -> Phases:
    """What `read` finds; a text of another structure is not the format, wherever it shows."""
    assert target.read is not None
    wrong = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
    try:
        found = target.read(text)
        if not all(shares for _, shares in found) or not found:
            raise ValueError("it holds no weights")
        for share in (share for _, shares in found for share in shares):
            if not isinstance(share.path or "", str):
                raise ValueError(f"{share.path!r} is no path")
    except wrong as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise ValueError(f"The text must be {target.title}, and is not: {reason}.") from error
    return found


def _clean(path: str) -> str:
    """A path as the formats agree on it."""
    return path.rstrip("/").removesuffix(".bin").removesuffix(".idx")


def _summed(shares: Sequence[Found], owners: Mapping[str, str]) -> Parts:
    """{domain: share}, of shares that may be of its paths."""
    sums: dict[str, float] = {}
    for share in shares:
        path = _clean(share.path or "")
        name = str(owners.get(path) or share.name or PurePosixPath(path).name)
        if not name:
            raise ValueError(f"A share of {share.weight} has neither a name nor a path.")
        if not 0 <= share.weight < float("inf"):
            raise ValueError(f"A weight must be a finite number >= 0; {name} has {share.weight}.")
        sums[name] = sums.get(name, 0.0) + share.weight
    return normalised(sums)


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
