"""weights.json: domain weights by name.

Fields that `shapes.WeightsRecord` does not name are kept and not looked at, so that other programs
may write more. docs/weights.md says what each means and who writes it.
"""

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from doge_fast.pipeline import named
from doge_fast.pipeline.failures import FileFailure
from doge_fast.pipeline.records.runs import (
    CONFIG,
    EVALUATION,
    FEWSHOT,
    METRICS,
    WEIGHTS,
    Json,
    check_schema,
    read_json,
)
from doge_fast.pipeline.records.shapes import (
    SUM_TOLERANCE,
    PhaseRecord,
    WeightsRecord,
    check_shape,
)
from doge_fast.weights import weights_file
from doge_fast.weights.weights_file import SCHEMA_VERSION, refusal_of_removed

_WAY_TO_WEIGHTS = (
    ' A file needs {"schema_version": 1, "domains": [{"name": "web", "weight": 1.0}]} at least.'
)
_CORRECT = "Correct it, or leave the field out."
# What a run directory keeps of its run.
_OWN = (CONFIG, METRICS, WEIGHTS, EVALUATION, FEWSHOT)


def is_weight(value: Any) -> bool:
    """A finite number >= 0, not true or false; JSON's whole numbers may exceed float64's range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= sys.float_info.max


SCHEDULES = ("stages",)
"""Fields of weights that change over the steps."""


def write_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Write weights.json, after the checks that `read_weights` makes.

    Args:
        path: the file, or the run directory it goes to.
        weights: {"method", "domains": [{"name", "weight", ...}], ...}; `schema_version` is
            added where absent.

    Raises:
        ValueError: as `read_weights`; nothing is written.
    """
    file = path / WEIGHTS if path.is_dir() else path
    _check_weights({"schema_version": SCHEMA_VERSION, **weights}, file)
    weights_file.write(file, weights)


def check_out(out: Path, read: Iterable[Path]) -> None:
    """Refuse to write over what is read, or over what a run keeps of itself.

    Args:
        out: the file that is to be written.
        read: files, and run directories whose weights.json is read.

    Raises:
        ValueError: it is one of them.
    """
    sources = {(path / WEIGHTS if path.is_dir() else path).resolve() for path in read}
    is_source = out.resolve() in sources
    is_record = out.name in _OWN and (out.parent / CONFIG).exists()
    if is_source or is_record:
        raise ValueError(
            f"out must be a file of its own; {out} is "
            f"{'what is read here' if is_source else 'in a run directory, and a record of it'}. "
            "Name another."
        )


def read_weights(path: Path, *, domains: Sequence[str] | None = None) -> Json:
    """weights.json, checked.

    Args:
        path: the file, or a run directory that holds one.
        domains: where given, exactly these domains must have a weight, in any order.

    Returns:
        The record with all its fields; "domains" in the order of `domains` where that is given.

    Raises:
        ValueError: the file is absent or not JSON; its schema is unknown; a domain has no
            name, occurs twice or has a weight that is not a finite number >= 0; the weights
            do not sum to 1 (within 1e-5); another known field is not what it should be; the
            domains are not `domains`.
    """
    file = path / WEIGHTS if path.is_dir() else path
    record = read_json(file)
    _check_weights(record, file)
    if domains is None:
        return record
    by_name = {entry["name"]: entry for entry in record["domains"]}
    missing = [name for name in domains if name not in by_name]
    extra = [name for name in by_name if name not in domains]
    if missing or extra:
        parts = [f"no weight for {', '.join(missing)}"] if missing else []
        parts += [f"weights for {', '.join(extra)}, which are not trained on"] if extra else []
        raise ValueError(
            f"{file} must weigh exactly the domains of this corpus ({', '.join(domains)}); it has "
            f"{' and '.join(parts)}. Train on the domains of the file, or name another file."
        )
    return record | {"domains": [by_name[name] for name in domains]}


def weights_by_name(record: Mapping[str, Any]) -> dict[str, float]:
    """{name: weight} of a record that `read_weights` returned, in its order."""
    return {entry["name"]: float(entry["weight"]) for entry in record["domains"]}


def _check_weights(record: Json, path: Path) -> None:
    check_schema(record, path, way_out=_WAY_TO_WEIGHTS)
    entries = record.get("domains")
    if not isinstance(entries, list) or not entries:
        raise FileFailure(
            f'{path} must hold "domains", a list of {{"name", "weight"}}; it holds {entries!r}.'
        )
    names = [entry.get("name") if isinstance(entry, Mapping) else None for entry in entries]
    if not all(isinstance(name, str) and name for name in names):
        raise FileFailure(f"{path}: every entry of domains needs a name; the names are {names}.")
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise FileFailure(f"{path}: a domain has one weight; {', '.join(twice)} occurs twice.")
    for entry in entries:
        if not is_weight(entry.get("weight")):
            raise FileFailure(
                f"{path}: a domain weight must be a finite number >= 0; that of "
                f"{entry['name']} is {entry.get('weight')!r}. The run that wrote it has "
                "diverged, or the file was edited."
            )
    total = math.fsum(entry["weight"] for entry in entries)
    if abs(total - 1) > SUM_TOLERANCE:
        raise FileFailure(
            f"{path}: domain weights must sum to 1; these sum to {total:.6g}. "
            "Divide each by the sum."
        )
    check_fields(record, str(path))


def check_fields(record: Mapping[str, Any], where: str) -> None:
    """Every known field of a record holds what it should.

    Args:
        record: weights.json, its `domains` having names and weights.
        where: what a refusal begins with; the file.

    Raises:
        FileFailure: one does not; the sentence names it.
        ValueError: a name cannot be seen whole.
    """
    _refuse_removed(record, where)
    named.check_visible([entry["name"] for entry in record["domains"]], where)
    found = check_shape(record, WeightsRecord, where, told="", way_out=_CORRECT)
    names = [entry.name for entry in found.domains]
    for field in SCHEDULES:
        _check_schedule(getattr(found, field) or (), names, f"{where}: {field}")


def _refuse_removed(record: Mapping[str, Any], where: str) -> None:
    """Refuse weights of a score or target that there is none of any more."""
    for field, value in (("score", "unbiased"), ("target", "worst")):
        if record.get(field) == value:
            raise FileFailure(refusal_of_removed(f"{where}: {field} {value!r}"))
    if record.get("target_mu") is not None:
        raise FileFailure(refusal_of_removed(f"{where}: target_mu"))


def _check_schedule(phases: Sequence[PhaseRecord], names: Sequence[str], where: str) -> None:
    starts = [phase.first_step for phase in phases]
    if starts and (starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts))):
        raise FileFailure(
            f"{where} must begin at step 0 and go on at later and later steps; their first_step "
            f"are {starts}."
        )
    for phase in phases:
        if phase.weights.keys() != set(names):
            raise FileFailure(
                f"{where}, from step {phase.first_step}: weights must be those of exactly "
                f"{', '.join(names)}; they are of {', '.join(phase.weights)}."
            )
        if abs(math.fsum(phase.weights.values()) - 1) > SUM_TOLERANCE:
            raise FileFailure(
                f"{where}, from step {phase.first_step}: weights must sum to 1; they are "
                f"{phase.weights}."
            )
