"""The fields of the verbs' dataclasses: what their docstrings say, and values from a file."""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import os
import textwrap
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from doge_fast.pipeline import named
from doge_fast.pipeline.config.ranges import bare, check_value, is_optional

Config = TypeVar("Config")
Json = dict[str, Any]


def texts_of(config: type) -> dict[str, str]:
    """{field: the string below it in the source, on one line}; inherited fields too."""
    texts: dict[str, str] = {}
    for each in reversed(config.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for statement, below in pairwise(tree.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
                assert isinstance(statement.target, ast.Name)
                texts[statement.target.id] = " ".join(ast.literal_eval(below.value).split())
    return texts


def required(config: type) -> tuple[str, ...]:
    """The fields of a dataclass that have no default."""
    return tuple(
        field.name
        for field in dataclasses.fields(config)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )


def read_file(path: Path, verb: str) -> Json:
    """The fields that a file gives for a verb.

    It is YAML or JSON with fields as in the "config" of a run's config.json; or such a config.json
    itself, of this verb.
    """
    import yaml

    from doge_fast.pipeline import strict_yaml

    try:
        record = strict_yaml.load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config must be a file of fields; {path}: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        told = " ".join(str(error).split())
        raise ValueError(f"config must be YAML or JSON; {path} is not: {told}.") from None
    if not isinstance(record, dict):
        raise ValueError(f"config must hold a mapping of fields; {path} does not.")
    if not isinstance(record.get("config"), dict):
        return record
    stage = record.get("stage")
    if stage != verb:
        raise ValueError(f"{path} is the record of a {stage} run; it cannot configure {verb}.")
    return dict(record["config"])


def filled(default: Config, given: Mapping[str, Any], where: str = "config") -> Config:
    """`default` with the values that are given, as JSON or YAML holds them.

    Raises:
        ValueError: a key is no field, or a value is not of its field's type.
    """
    hints = get_type_hints(type(default), include_extras=True)
    hints = {field.name: hints[field.name] for field in dataclasses.fields(default)}  # type: ignore[arg-type]
    changes = {}
    for said, value in given.items():
        # As a flag spells it.
        key = str(said).replace("-", "_")
        if key not in hints:
            raise ValueError(_unknown(key, default, where))
        now = getattr(default, key)
        if not dataclasses.is_dataclass(now):
            changes[key] = converted(f"{where}: {key}", value, hints[key])
        elif isinstance(value, Mapping):
            changes[key] = filled(now, value, f"{where}: {key}")
        else:
            raise ValueError(f"{where}: {key} must be a mapping of fields; it is {value!r}.")
    return dataclasses.replace(default, **changes)  # type: ignore[type-var]


def converted(name: str, value: Any, hint: Any) -> Any:
    """A word that was typed, or a value of a file, as a field of this type holds it.

    Raises:
        ValueError: it is not of the type or out of its range; the sentence begins with `name`.
    """
    found = _held(value, hint)
    check_value(name, found, hint)
    return found


def _held(value: Any, hint: Any) -> Any:
    """A number for its text, a path, a tuple; anything else is left for the check."""
    if is_optional(hint) and value in (None, "None"):
        return None
    kind = bare(hint)
    if get_origin(kind) is tuple:
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(_held(each, get_args(kind)[0]) for each in values)
    if kind is Path and isinstance(value, str):
        # A shell leaves `~` behind an equals sign, and a file has no shell.
        return Path(os.path.expanduser(value))
    if kind in (int, float) and isinstance(value, str):
        with contextlib.suppress(ValueError, OverflowError):
            return named.number_as(kind, value)
    return int(value) if kind is int and isinstance(value, float) and value.is_integer() else value


def _unknown(key: str, config: Any, where: str) -> str:
    """The refusal of a key, with the fields nearest to it, wherever they are."""
    names = dict(_paths(config))
    told = ", ".join(names[name] for name in difflib.get_close_matches(key, names, n=2))
    known = ", ".join(field.name for field in dataclasses.fields(config))
    way = f"Nearest: {told}." if told else f"The fields are {known}."
    return f"{where}: {key} is no field. {way}"


def _paths(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, dotted path) of every field, nested ones too."""
    for field in dataclasses.fields(config):
        yield field.name, prefix + field.name
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _paths(value, f"{prefix}{field.name}.")
