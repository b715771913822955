"""weights.json: domain weights by name, and what every field of such a file may hold.

Fields that are not named here are kept and not looked at, so that other programs may write more. A
field that is null is not known. docs/weights.md says what each means and who writes it.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from doge_fast.weights import removed, weights_file
from doge_fast.weights.weights_file import SCHEMA_VERSION

# Ten times what a float32 sum over a hundred domains, or six printed decimals, can be off.
_SUM_TOLERANCE = 1e-5

_WAY_TO_WEIGHTS = (
    ' A file needs {"schema_version": 1, "domains": [{"name": "web", "weight": 1.0}]} at least.'
)
# In the constraints of weights within bounds: {domain: number} of each.
_BOUNDS = ("floor", "cap", "max_epochs")
# What a run directory keeps of its run.
_OWN = (CONFIG, METRICS, WEIGHTS, EVALUATION, FEWSHOT)


def is_weight(value: Any) -> bool:
    """A finite number >= 0, not true or false; JSON's whole numbers may exceed float64's range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= sys.float_info.max


def _is_count(value: Any) -> bool:
    """1e9 is a whole number too, however JSON spells it."""
    return is_weight(value) and value % 1 == 0


def _is_target(value: Any) -> bool:
    is_object = isinstance(value, Mapping) and bool(value)
    return value == "universal" or (is_object and all(map(is_weight, value.values())))


def _is_average(value: Any) -> bool:
    if not isinstance(value, Mapping) or not _is_count(value.get("count")):
        return False
    members = value.get("of")
    is_list = isinstance(members, list) and all(isinstance(each, Mapping) for each in members)
    return members is None or is_list


def _are_bounds(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    bounds = [value[kind] for kind in _BOUNDS if value.get(kind) is not None]
    return all(isinstance(each, Mapping) and all(map(is_weight, each.values())) for each in bounds)


class FieldType(NamedTuple):
    """What a field must be: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


_TEXT = FieldType("a string that is not empty", lambda v: isinstance(v, str) and v != "")
_OBJECT = FieldType("an object", lambda v: isinstance(v, Mapping))
_COUNT = FieldType("a whole number >= 0", _is_count)
_POSITIVE_COUNT = FieldType("a whole number >= 1", lambda v: _is_count(v) and v >= 1)
_AMOUNT = FieldType("a finite number >= 0", is_weight)
_POSITIVE = FieldType("a finite number > 0", lambda v: is_weight(v) and v > 0)
# A weight that was printed may be more than one by its last digit.
_SHARE = FieldType("a number between 0 and 1", lambda v: is_weight(v) and v <= 1 + _SUM_TOLERANCE)

DOMAIN_FIELDS: Mapping[str, FieldType] = {
    **dict.fromkeys(("weight_last", "prior", "reference_weight"), _SHARE),
    **dict.fromkeys(("tokens", "documents"), _COUNT),
    "weight_std": _AMOUNT,
    "mean_doc_tokens": _POSITIVE,
}
"""Of an entry of `domains`, beside `name` and `weight`."""

RECORD_FIELDS: Mapping[str, FieldType] = {
    **dict.fromkeys(("method", "score", "source", "model", "tokenizer_sha256", "variant"), _TEXT),
    **dict.fromkeys(("reference", "initial", "versions"), _OBJECT),
    **dict.fromkeys(("parameters", "steps", "tokens"), _COUNT),
    **dict.fromkeys(("block_size", "batch_size"), _POSITIVE_COUNT),
    **dict.fromkeys(("mu", "step_size"), _POSITIVE),
    **dict.fromkeys(("average_from", "smoothing"), _SHARE),
    "drift": _AMOUNT,
    "seed": FieldType("an integer", lambda v: isinstance(v, int) and not isinstance(v, bool)),
    "target": FieldType('"universal" or an object {name: weight >= 0}', _is_target),
    "average": FieldType(
        'an object with a count of files, a whole number, and "of", a list of objects', _is_average
    ),
    "constraints": FieldType(
        f"an object, with numbers >= 0 by domain in {', '.join(_BOUNDS)}", _are_bounds
    ),
}
"""Of the whole, beside `schema_version`, `domains` and `SCHEDULES`."""

SCHEDULES = ("stages",)
"""Weights that change: [{"first_step", "weights": {name: weight}}]."""


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


def read_named(
    items: Sequence[str], *, domains: Sequence[str], taken: Sequence[str]
) -> dict[str, Path]:
    """{name: file} of NAME=FILE, each file one that `read_weights` reads.

    Args:
        items: as they were typed.
        domains: as for `read_weights`.
        taken: names that the experiment has given to arms of its own.

    Raises:
        ValueError: one is written otherwise, a name stands twice or is taken, or as `read_weights`.
    """
    found: dict[str, Path] = {}
    for item in items:
        name, _, file = item.partition("=")
        if not name or not file or name in found:
            raise ValueError(
                "weights must be NAME=FILE, each with a name of its own, the file a weights.json "
                f"or a run directory that holds one; got {item!r}."
            )
        if name in taken:
            raise ValueError(
                f"weights (--weights) need names that the experiment has not given; {name} is one "
                f"of {', '.join(taken)}. Choose another NAME."
            )
        found[name] = Path(file)
        read_weights(found[name], domains=domains)
    return found


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
                f"{path}: a domain weight must be a finite number >= 0; that of {entry['name']} is "
                f"{entry.get('weight')!r}. The run that wrote it has diverged, or the file was "
                "edited."
            )
    total = math.fsum(entry["weight"] for entry in entries)
    if abs(total - 1) > _SUM_TOLERANCE:
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
        ValueError: one does not; the sentence names it.
    """
    _refuse_removed(record, where)
    named.check_visible([entry["name"] for entry in record["domains"]], where)
    _check_types(record, RECORD_FIELDS, where)
    for entry in record["domains"]:
        _check_types(entry, DOMAIN_FIELDS, where, f" of {entry['name']}")
    names = {entry["name"]: None for entry in record["domains"]}
    for field in SCHEDULES:
        if record.get(field) is not None:
            _check_schedule(record[field], names, f"{where}: {field}")


def _refuse_removed(record: Mapping[str, Any], where: str) -> None:
    """Refuse weights of a score or target that there is none of any more."""
    for field, value in (("score", "unbiased"), ("target", "worst")):
        if record.get(field) == value:
            raise FileFailure(removed.refusal(f"{where}: {field} {value!r}"))
    if record.get("target_mu") is not None:
        raise FileFailure(removed.refusal(f"{where}: target_mu"))


def _check_types(
    values: Mapping[str, Any], rules: Mapping[str, FieldType], where: str, whose: str = ""
) -> None:
    for field, rule in rules.items():
        value = values.get(field)
        if value is not None and not rule.holds(value):
            raise FileFailure(
                f"{where}: {field}{whose} must be {rule.words}; it is {value!r}. Correct it, or "
                "leave the field out."
            )


def _check_schedule(schedule: Any, names: Mapping[str, None], where: str) -> None:
    if not isinstance(schedule, Sequence) or isinstance(schedule, str) or not schedule:
        raise FileFailure(
            f'{where} must be a list of {{"first_step", "weights"}}; it is {schedule!r}. Correct '
            "it, or leave the field out."
        )
    starts: list[Any] = [p.get("first_step") if isinstance(p, Mapping) else None for p in schedule]
    is_rising = all(map(_is_count, starts)) and all(a < b for a, b in itertools.pairwise(starts))
    if not is_rising or starts[0] != 0:
        raise FileFailure(
            f"{where} must begin at step 0 and go on at later and later steps; their first_step "
            f"are {starts}."
        )
    for start, phase in zip(starts, schedule, strict=True):
        weights = phase.get("weights")
        if not isinstance(weights, Mapping) or weights.keys() != names.keys():
            found = sorted(weights) if isinstance(weights, Mapping) else weights
            raise FileFailure(
                f"{where}, from step {start}: weights must be those of exactly {', '.join(names)}; "
                f"they are of {found}."
            )
        is_whole = all(map(is_weight, weights.values()))
        if not is_whole or abs(math.fsum(weights.values()) - 1) > _SUM_TOLERANCE:
            raise FileFailure(
                f"{where}, from step {start}: weights must be finite numbers >= 0 that sum to 1; "
                f"they are {dict(weights)}."
            )
