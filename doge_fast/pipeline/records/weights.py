"""weights.json: domain weights by name.

Fields that `schema.WeightsRecord` does not name are kept and not looked at, so that other programs
may write more. docs/weights.md says what each means and who writes it.
"""

import math
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from doge_fast.pipeline import named
from doge_fast.pipeline.config import MIX
from doge_fast.pipeline.failures import FileFailure, UserError
from doge_fast.pipeline.records.schema import (
    CONFIG,
    EVALUATION,
    FEWSHOT,
    METRICS,
    SUM_TOLERANCE,
    WEIGHTS,
    Json,
    WeightsRecord,
    check_shape,
    read_json,
)
from doge_fast.weights import weights_file
from doge_fast.weights.weights_file import SCHEMA_VERSION

_WAY_TO_WEIGHTS = (
    ' A file needs {"schema_version": 1, "domains": [{"name": "web", "weight": 1.0}]} or '
    '{"web": 1.0} at least.'
)
_CORRECT = "Correct it, or leave the field out."
# What a run directory keeps of its run.
_OWN = (CONFIG, METRICS, WEIGHTS, EVALUATION, FEWSHOT)


def weights_path(source: str | Path) -> Path:
    """weights.json of a run directory, or the file itself; typed weights may be too long a name."""
    return Path(source, WEIGHTS) if os.path.isdir(source) else Path(source)


def write_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Write {"method", "domains": [{"name", "weight", ...}], ...} to a file or run directory.

    Raises:
        UserError: as `read_weights`; nothing is written.
    """
    file = weights_path(path)
    _check_record({"schema_version": SCHEMA_VERSION, **weights}, str(file))
    weights_file.write(file, weights)


def check_out(out: Path, read: Iterable[Path]) -> None:
    """Raise UserError where `out` is what is read, or what a run keeps of itself.

    `read` are files, and run directories whose weights.json is read.
    """
    sources = {os.path.realpath(weights_path(path)) for path in read}
    is_source = os.path.realpath(out) in sources
    is_record = out.name in _OWN and (out.parent / CONFIG).exists()
    if is_source or is_record:
        raise UserError(
            f"out must be a file of its own; {out} is "
            f"{'what is read here' if is_source else 'in a run directory, and a record of it'}. "
            "Name another."
        )


def read_weights(source: str | Path, *, domains: Sequence[str] | None = None) -> Json:
    """Domain weights, checked.

    Args:
        source: a weights.json, a JSON file of {name: weight}, a run directory that holds a
            weights.json, or the weights themselves: "books=0.5,code=0.5".
        domains: where given, exactly these domains must have a weight, in any order.

    Returns:
        The record with all its fields; "domains" in the order of `domains` where that is given.

    Raises:
        UserError: the file is absent or not JSON; its schema is unknown; a domain has no
            name, occurs twice or has a weight that is not a finite number >= 0; the weights
            do not sum to 1 (within 1e-5); another known field is not what it should be; the
            domains are not `domains`.
    """
    file = str(weights_path(source))
    if is_typed(source):
        words = [word for word in str(source).split(",") if word.strip()]
        try:
            record = _of_numbers(named.numbers(words, "weights"), file)
            _check_record(record, file)
        except FileFailure as error:
            # No file is damaged.
            raise UserError(str(error)) from None
    elif not os.path.lexists(file):
        if Path(source, CONFIG).exists():
            raise UserError(
                f"{source} has no {WEIGHTS} yet: its run is not complete. Repeat the command that "
                "began it; it resumes."
            )
        raise UserError(
            f"{file} does not exist. Name a weights.json, a run that holds one, or the weights "
            "themselves, as web=0.7,code=0.3."
        )
    else:
        record = read_json(Path(file), f"Restore it.{_WAY_TO_WEIGHTS}")
        if not record.keys() & {"domains", "schema_version"}:
            record = _of_numbers(record, file)
        _check_record(record, file)
        if record.pop("sha256", None) not in (None, weights_file.digest_of(record)):
            raise FileFailure(
                f"{file} is not as it was written: its sha256 differs. Restore it; or remove its "
                "field sha256, where it was edited on purpose."
            )
    if domains is None:
        return record
    by_name = {entry["name"]: entry for entry in record["domains"]}
    missing = [name for name in domains if name not in by_name]
    extra = [name for name in by_name if name not in domains]
    if missing or extra:
        parts = [f"no weight for {', '.join(missing)}"] if missing else []
        others = ", ".join(named.apart(extra, domains))
        parts += [f"weights for {others}, which are not trained on"] if extra else []
        raise UserError(
            f"{file} must weigh exactly the domains of this corpus ({', '.join(domains)}); it has "
            f"{' and '.join(parts)}. Train on the domains of the file (--domains "
            f"{shlex.join(by_name)}), or name another."
        )
    return record | {"domains": [by_name[name] for name in domains]}


def is_typed(source: str | Path) -> bool:
    """Whether it is NAME=NUMBER,... rather than where weights are kept."""
    text = str(source)
    first, equals, _ = text.partition("=")
    is_path = os.sep in first and "," not in text
    return bool(equals) and not is_path and not os.path.exists(source)


def _of_numbers(weights: Mapping[str, Any], where: str) -> Json:
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight < math.inf:
            raise FileFailure(
                f"{where}: the weight of {name!r} must be a number, at least 0; it is {weight!r}."
                f"{_WAY_TO_WEIGHTS}"
            )
    domains = [{"name": name, "weight": weight} for name, weight in weights.items()]
    return {"schema_version": SCHEMA_VERSION, "domains": domains}


def weights_by_name(record: Mapping[str, Any]) -> dict[str, float]:
    """{name: weight} of a record that `read_weights` returned, in its order."""
    return {entry["name"]: float(entry["weight"]) for entry in record["domains"]}


def held_out_targets(record: Mapping[str, Any]) -> list[str]:
    """The targets of a record that `read_weights` returned, but for those that are trained on."""
    target, weights = record.get("target"), weights_by_name(record)
    names = target if isinstance(target, Mapping) else ()
    return [name for name in names if name != MIX and name not in weights]


def target_shares(record: Mapping[str, Any], names: Collection[str]) -> dict[str, float]:
    """{name: its share in the mean over these targets}, as the record's target weighs them.

    Empty where it has no weight for one of them.
    """
    target = record.get("target")
    if not isinstance(target, Mapping) or not all(target.get(name) for name in names):
        return {}
    total = math.fsum(target[name] for name in names)
    return {name: target[name] / total for name in names}


def is_same_mixture(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether weights agree but for their last bits, in which machines may differ."""
    return one.keys() == other.keys() and all(
        math.isclose(one[name], other[name], rel_tol=1e-9) for name in one
    )


def _check_record(record: Json, where: str) -> None:
    check_fields(record, where)
    total = math.fsum(entry["weight"] for entry in record["domains"])
    if abs(total - 1) > SUM_TOLERANCE:
        raise FileFailure(
            f"{where}: domain weights must sum to 1; these sum to {total:.6g}. "
            "Divide each by the sum."
        )


def check_fields(record: Mapping[str, Any], where: str) -> None:
    """Every known field of a record holds what it should; the sum of the weights is not looked at.

    Raises:
        FileFailure: one does not, or a domain occurs twice; the sentence names it.
        UserError: a name cannot be seen whole.
    """
    entries = record.get("domains")
    if isinstance(entries, list):
        # First: JSON itself has no word for half a character.
        given = [entry.get("name") for entry in entries if isinstance(entry, Mapping)]
        named.check_visible([name for name in given if isinstance(name, str) and name], where)
    shaped = check_shape(record, WeightsRecord, where, problem="", way_out=_CORRECT)
    names = [entry.name for entry in shaped.domains]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FileFailure(f"{where}: a domain has one weight; {', '.join(twice)} occurs twice.")
