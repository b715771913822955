"""weights.json: domain weights by name, and what is believed of such a file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from doge_fast import weights_file
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
from doge_fast.pipeline.weights_fields import SUM_TOLERANCE, check_fields, is_weight
from doge_fast.weights_file import SCHEMA_VERSION

_WAY_TO_WEIGHTS = (
    ' A file needs {"schema_version": 1, "domains": [{"name": "web", "weight": 1.0}]} at least; '
    'of {"web": 1.0} doge-fast export FILE --from json --out weights.json makes one.'
)
# What a run directory keeps of its run.
_OWN = (CONFIG, METRICS, WEIGHTS, EVALUATION, FEWSHOT)


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
        The record, with all its fields, known or not; its "domains" are put in the order of
        `domains` where that is given.

    Raises:
        ValueError: the file is absent or not JSON; its schema is unknown; a domain has no
            name, occurs twice or has a weight that is not a finite number >= 0; the weights
            do not sum to 1 (within 1e-5); another known field is not what it should be (see
            `weights_fields`; null is not known); the domains are not `domains`.
    """
    file = path / WEIGHTS if path.is_dir() else path
    record = read_json(file)
    _check_weights(record, file)
    if domains is None:
        return record
    by_name = {entry["name"]: entry for entry in record["domains"]}
    _check_domains(by_name, domains, file)
    return record | {"domains": [by_name[name] for name in domains]}


def weights_by_name(record: Mapping[str, Any]) -> dict[str, float]:
    """{name: weight} of a record that `read_weights` returned, in its order."""
    return {entry["name"]: float(entry["weight"]) for entry in record["domains"]}


def _check_weights(record: Json, path: Path) -> None:
    check_schema(record, path, way_out=_WAY_TO_WEIGHTS)
    entries = record.get("domains")
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f'{path} must hold "domains", a list of {{"name", "weight"}}; it holds {entries!r}.'
        )
    names = [entry.get("name") if isinstance(entry, Mapping) else None for entry in entries]
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{path}: every entry of domains needs a name; the names are {names}.")
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: a domain has one weight; {', '.join(twice)} occurs twice.")
    for entry in entries:
        _check_weight(entry, path)
    total = math.fsum(entry["weight"] for entry in entries)
    if abs(total - 1) > SUM_TOLERANCE:
        raise ValueError(
            f"{path}: domain weights must sum to 1; these sum to {total:.6g}. "
            "Divide each by the sum."
        )
    check_fields(record, str(path))


def _check_weight(entry: Mapping[str, Any], path: Path) -> None:
    weight = entry.get("weight")
    if not is_weight(weight):
        raise ValueError(
            f"{path}: a domain weight must be a finite number >= 0; that of {entry['name']} is "
            f"{weight!r}. The run that wrote it has diverged, or the file was edited."
        )


def _check_domains(found: Iterable[str], domains: Sequence[str], path: Path) -> None:
    missing = [name for name in domains if name not in found]
    extra = [name for name in found if name not in domains]
    if missing or extra:
        parts = [f"no weight for {', '.join(missing)}"] if missing else []
        parts += [f"weights for {', '.join(extra)}, which are not trained on"] if extra else []
        raise ValueError(
            f"{path} must weigh exactly the domains of this corpus ({', '.join(domains)}); it has "
            f"{' and '.join(parts)}. Train on the domains of the file, or name another file."
        )
