"""The fields of weights.json: what each may hold, beside the weights themselves.

What is not named here is kept and not looked at, so that other programs may write more. A field
that is null is not known. docs/weights.md says what each means and who writes it.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

# Ten times what a float32 sum over a hundred domains, or six printed decimals, can be off.
SUM_TOLERANCE = 1e-5


class FieldType(NamedTuple):
    """What a field must be: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """A finite number; JSON's true and false are Python's numbers and not ours."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        # JSON's whole numbers have no largest; float64 has.
        return False


def is_weight(value: Any) -> bool:
    """A finite number >= 0."""
    return is_number(value) and value >= 0


def _is_count(value: Any) -> bool:
    """1e9 is a whole number too, however JSON spells it."""
    return is_weight(value) and float(value).is_integer()


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_average(value: Any) -> bool:
    return isinstance(value, Mapping) and _is_count(value.get("count"))


def _is_target(value: Any) -> bool:
    is_universal = value == "universal"
    return is_universal or (
        isinstance(value, Mapping) and bool(value) and all(map(is_weight, value.values()))
    )


TEXT = FieldType("a string that is not empty", _is_text)
OBJECT = FieldType("an object", _is_object)
COUNT = FieldType("a whole number >= 0", _is_count)
POSITIVE_COUNT = FieldType("a whole number >= 1", lambda value: _is_count(value) and value >= 1)
INTEGER = FieldType(
    "an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)
)
AMOUNT = FieldType("a finite number >= 0", is_weight)
POSITIVE = FieldType("a finite number > 0", lambda value: is_number(value) and value > 0)
# A weight that was printed may be more than one by its last digit.
SHARE = FieldType("a number between 0 and 1", lambda v: is_weight(v) and v <= 1 + SUM_TOLERANCE)

DOMAIN_FIELDS: Mapping[str, FieldType] = {
    "weight_last": SHARE,
    "weight_std": AMOUNT,
    "prior": SHARE,
    "tokens": COUNT,
    "documents": COUNT,
    "mean_doc_tokens": POSITIVE,
    "reference_weight": SHARE,
}
"""Of an entry of `domains`, beside `name` and `weight`."""

RECORD_FIELDS: Mapping[str, FieldType] = {
    "method": TEXT,
    "score": TEXT,
    "target": FieldType('"universal" or an object {name: weight >= 0}', _is_target),
    "source": TEXT,
    "model": TEXT,
    "parameters": COUNT,
    "tokenizer_sha256": TEXT,
    "block_size": POSITIVE_COUNT,
    "batch_size": POSITIVE_COUNT,
    "steps": COUNT,
    "tokens": COUNT,
    "seed": INTEGER,
    "mu": POSITIVE,
    "average_from": SHARE,
    "drift": AMOUNT,
    "variant": TEXT,
    "step_size": POSITIVE,
    "smoothing": SHARE,
    "reference": OBJECT,
    "initial": OBJECT,
    "average": FieldType("an object with a count of files, a whole number", _is_average),
    "constraints": OBJECT,
    "versions": OBJECT,
}
"""Of the whole, beside `schema_version`, `domains` and `SCHEDULES`."""

SCHEDULES = ("stages", "phases")
"""Weights that change: [{"first_step", "weights": {name: weight}}]."""


def check_fields(record: Mapping[str, Any], where: str) -> None:
    """Every known field of a record holds what it should.

    Args:
        record: weights.json, its `domains` having names and weights.
        where: what a refusal begins with; the file.

    Raises:
        ValueError: one does not; the sentence names it.
    """
    _check(record, RECORD_FIELDS, where, "")
    for entry in record["domains"]:
        _check(entry, DOMAIN_FIELDS, where, f" of {entry['name']}")
    names = [entry["name"] for entry in record["domains"]]
    for field in SCHEDULES:
        if record.get(field) is not None:
            _check_schedule(record[field], names, f"{where}: {field}")


def _check(
    values: Mapping[str, Any], rules: Mapping[str, FieldType], where: str, of_whom: str
) -> None:
    for field, rule in rules.items():
        value = values.get(field)
        if value is not None and not rule.holds(value):
            raise ValueError(
                f"{where}: {field}{of_whom} must be {rule.words}; it is {value!r}. Correct it, or "
                "leave the field out."
            )


def _check_schedule(schedule: Any, names: Collection[str], where: str) -> None:
    if not isinstance(schedule, Sequence) or isinstance(schedule, str) or not schedule:
        raise ValueError(
            f'{where} must be a list of {{"first_step", "weights"}}; it is {schedule!r}. Correct '
            "it, or leave the field out."
        )
    first_steps: list[Any] = [
        each.get("first_step") if _is_object(each) else None for each in schedule
    ]
    is_rising = all(map(_is_count, first_steps)) and all(
        before < after for before, after in itertools.pairwise(first_steps)
    )
    if not is_rising or first_steps[0] != 0:
        raise ValueError(
            f"{where} must begin at step 0 and go on at later and later steps; their first_step "
            f"are {first_steps}."
        )
    for each in schedule:
        _check_phase(each, names, f"{where}, from step {each['first_step']}")


def _check_phase(phase: Mapping[str, Any], names: Collection[str], where: str) -> None:
    weights = phase.get("weights")
    if not isinstance(weights, Mapping) or set(weights) != set(names):
        found = sorted(weights) if isinstance(weights, Mapping) else weights
        raise ValueError(
            f"{where}: weights must be those of exactly {', '.join(names)}; they are of {found}."
        )
    is_whole = all(map(is_weight, weights.values()))
    total = math.fsum(weights.values()) if is_whole else math.nan
    if not abs(total - 1) <= SUM_TOLERANCE:
        raise ValueError(
            f"{where}: weights must be finite numbers >= 0 that sum to 1; they are {dict(weights)}."
        )
