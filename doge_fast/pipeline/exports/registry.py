"""The targets, and how weights go to one.

export(weights, to=name, paths=...)  ->  what the framework takes, as text
"""

import functools
import math
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from doge_fast.pipeline import named
from doge_fast.pipeline.exports.blend import (
    Blend,
    BlendSplit,
    DomainPaths,
    ExportTarget,
    Parts,
    Rows,
    by_document,
    listed_paths,
    name_of_file,
    normalised,
)
from doge_fast.pipeline.exports.writers import WRITERS
from doge_fast.pipeline.failures import UserError
from doge_fast.pipeline.records.weights import check_fields, held_out_targets
from doge_fast.pipeline.wording import first_few

_UNITS = {"blocks": "tokens", "documents": "documents"}
# NeMo trains language models with Megatron-Bridge since 3.0.
_ALSO = {"nemo": "megatron-bridge"}


class Exported(NamedTuple):
    """What `export` made."""

    text: str
    """What the framework takes."""
    warnings: tuple[str, ...]
    """What was left out or changed."""
    notes: tuple[str, ...]
    """What the numbers mean and what goes wrong with the target."""


@functools.cache
def targets() -> Mapping[str, ExportTarget]:
    """{name: target}, those of targets.yaml, each with what writes its text."""
    about = yaml.safe_load(Path(__file__).with_name("targets.yaml").read_text(encoding="utf-8"))
    return {
        name: ExportTarget(name, write=WRITERS[name], **fields) for name, fields in about.items()
    }


def _find(name: str) -> ExportTarget:
    known, name = targets(), _ALSO.get(name, name)
    if name not in known:
        near = named.nearest(name, known, f"There are {', '.join(known)}.")
        raise UserError(
            f"There is no target {name!r}. {near} doge-fast export --list explains them."
        )
    return known[name]


def export(
    weights: Mapping[str, Any],
    *,
    to: str,
    paths: DomainPaths | None = None,
    valid_paths: DomainPaths | None = None,
    test_paths: DomainPaths | None = None,
    decimals: int = 6,
    rows: Rows | None = None,
    mean_doc_tokens: Mapping[str, float] | None = None,
    seq_length: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Exported:
    """Write domain weights as a training framework takes them.

    A pure function of its arguments, but for the sizes of a domain's several files. Domains are in
    the order of their names. Numbers are rounded by largest remainder, so as decimals they sum to
    exactly 1.

    Args:
        weights: a record as `records.read_weights` returns it, or {domain: weight}, each >= 0.
        to: a name of `targets()`.
        paths: {domain: path, or list of paths}.
        valid_paths: likewise of validation data, for the targets that take it.
        test_paths: likewise of test data.
        decimals: places of every number, 1 to 15.
        rows: what one drawn item is, a block of equally many tokens or a whole document; None: the
            target's default.
        mean_doc_tokens: {domain: tokens of a document > 0}, before what the record says.
        seq_length: tokens of a training sequence, if the target needs it.
        batch_size: sequences in an optimizer step, over all devices, if the target needs it.
        seed: of the framework's own draws.

    Returns:
        The text, what was left out, and what the numbers mean.

    Raises:
        UserError: there is no such target, a domain has no path, a path no domain, or the target
            would not take what it was given; the text says what to do.
    """
    target, record = _find(to), _record(weights)
    if rows is not None and rows not in target.rows:
        raise UserError(
            f"{target.name} counts {' or '.join(target.rows)}, by its own decision; rows={rows!r} "
            "cannot change that. Leave it out."
        )
    rows = rows or target.rows[0]
    entries = {entry["name"]: entry for entry in record["domains"]}
    parts = normalised({name: float(entry["weight"]) for name, entry in entries.items()})
    lengths, given_lengths = dict[str, float](), mean_doc_tokens or {}
    option = "mean_doc_tokens (--mean-doc-tokens)"
    named.check_known(option, given_lengths, entries, "the weights")
    for name, length in given_lengths.items():
        if not 0 < length < math.inf:
            raise UserError(f"{option} must be a number above 0; that of {name} is {length:g}.")
    if rows == "documents":
        lengths = _lengths(parts, entries, given_lengths)
        parts = by_document(parts, lengths)
    given: dict[BlendSplit, DomainPaths | None] = {
        "train": paths,
        "valid": valid_paths,
        "test": test_paths,
    }
    blend = Blend(
        parts=parts,
        paths={split: listed_paths(split, each or {}, entries) for split, each in given.items()},
        rows=rows,
        mean_doc_tokens=lengths,
        decimals=decimals,
        seq_length=seq_length,
        batch_size=batch_size,
        seed=seed,
    )
    missing = [name for name in blend.shares() if name not in blend.paths["train"]]
    if target.takes and missing:
        raise UserError(
            f"Every domain with a weight needs a path; there is none for {', '.join(missing)}. "
            "Give them as paths={name: path} (--paths NAME=PATH ...)."
        )
    listed = [path for each in blend.paths.values() for paths in each.values() for path in paths]
    for path in listed if target.takes_patterns else ():
        # Of another path the framework would read another file.
        name_of_file(path, target.name, is_pattern=True)
    warnings = _left_out(blend)
    if stages := record.get("stages"):
        warnings.append(
            f"Left out: the {len(stages)} stages of the run. These are its mean weights, constant "
            "throughout."
        )
    notes = [_unit(target, blend), *target.traps]
    if aims := held_out_targets(record):
        notes.insert(0, f"Learned for the loss on {first_few(aims)}: keep it out of the mixture.")
    made = target.write(blend)
    text = made if isinstance(made, str) else string.Template(target.template).substitute(made)
    return Exported(text, tuple(warnings), tuple(notes))


def _record(weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record; a plain {domain: weight} becomes one."""
    record = weights
    if not isinstance(weights.get("domains"), Sequence):
        record = {"domains": [{"name": name, "weight": value} for name, value in weights.items()]}
    check_fields(record, "The weights")
    return record


def _left_out(blend: Blend) -> list[str]:
    """Which domains have no share, and why."""
    zeros = sorted(name for name, part in blend.parts.items() if not part)
    small = sorted(blend.parts.keys() - blend.shares().keys() - set(zeros))
    decimals = blend.decimals
    notes = [f"Left out, for the weight is 0: {', '.join(zeros)}."] if zeros else []
    if small:
        notes.append(
            f"Left out, for the share rounds to 0 at {decimals} decimals: "
            f"{', '.join(small)}. More decimals keep them."
        )
    return notes


def _lengths(
    parts: Parts, entries: Mapping[str, Mapping[str, Any]], given: Mapping[str, float]
) -> dict[str, float]:
    """{domain with a share: mean tokens of a document}: as given, else as the record says."""
    lengths: dict[str, float] = {}
    for name in sorted(name for name, part in parts.items() if part):
        entry = entries[name]
        length = given.get(name, entry.get("mean_doc_tokens"))
        if length is None and entry.get("documents"):
            length = (entry.get("tokens") or 0) / entry["documents"]
        lengths[name] = float(length or 0)
    missing = [name for name, length in lengths.items() if not length]
    if missing:
        raise UserError(
            "This framework draws documents, and learned weights are shares of tokens: to convert "
            "them it takes the mean tokens of a document, which the file does not have for "
            f"{', '.join(missing)} (of text files that doge_fast cut into pieces there is none). "
            "Give mean_doc_tokens (--mean-doc-tokens NAME=NUMBER ...), the tokens of a row as the "
            "framework reads it, or rows='blocks' (--rows blocks) if every row of the data holds "
            "equally many tokens."
        )
    return lengths


def _unit(target: ExportTarget, blend: Blend) -> str:
    """What the numbers are shares of, and what they would be otherwise."""
    is_open = len(target.rows) > 1
    if blend.rows == "blocks":
        way = ": all rows are taken to hold equally many (else --rows documents)" if is_open else ""
        return f"Weights are shares of tokens{way}."
    lengths = [f"{name} {tokens:.6g}" for name, tokens in sorted(blend.mean_doc_tokens.items())]
    way = "; --rows blocks where all rows hold equally many" if is_open else ""
    return (
        "Weights are shares of documents, made from the learned shares of tokens by the mean "
        f"tokens of a document: {first_few(lengths, 8)}{way}."
    )


def listing() -> str:
    """Every target, what it writes, what a path is, what its numbers count: lines for people."""
    lines = []
    for target in targets().values():
        default, *others = target.rows
        counts = [_UNITS[default], *(f"{_UNITS[rows]} with --rows {rows}" for rows in others)]
        facts = {
            "path": target.takes,
            "counts": ", or ".join(counts),
            "checked": target.checked,
        }
        lines.append(f"{target.name}: {target.title}")
        lines += [f"    {what:<7} {words}" for what, words in facts.items() if words]
    return "\n".join(lines)
