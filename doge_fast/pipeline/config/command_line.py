"""Makes a verb's dataclass from a command line and a configuration file, with tyro.

A field is an option, its docstring the help. Fields of a file become words before the typed ones,
so both follow the same rules, and typed options win.
"""

import argparse
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import tyro
import yaml
from docstring_parser import parse_from_object
from pydantic import ValidationError
from tyro.conf import Positional, arg
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from doge_fast.pipeline import named
from doge_fast.pipeline.failures import UserError

_AS_PEOPLE_WRITE = ConstructorRegistry()
_FILE = "With --config FILE fields come from YAML, JSON or a run's config.json too; options win."


def parse(words: Sequence[str], config: type, *, verb: str) -> Any:
    """Make a verb's dataclass from the words after it, and from the file of `--config FILE`.

    Raises:
        UserError: the file has the wrong form.
        SystemExit: after `--help`, or for a wrong option; tyro has printed the reason.
    """
    of_file = argparse.ArgumentParser(f"doge-fast {verb}", add_help=False, allow_abbrev=False)
    of_file.add_argument("--config", type=Path)
    known, typed = of_file.parse_known_args(list(words))
    given = {} if known.config is None else read_file(known.config, verb)
    first = list(takewhile(lambda word: not word.startswith("-"), typed))
    first_given: list[str] = []
    for name in positional(config):
        value = given.pop(name, [])
        first_given += map(str, value if isinstance(value, list) else [value])
    examples = [f"doge-fast {verb} {each}" for each in getattr(config, "examples", ())]
    made: partial[Any] = tyro.cli(
        config,
        prog=f"doge-fast {verb}",
        description="\n\n".join([inspect.cleandoc(config.__doc__ or ""), _FILE, *examples]),
        args=[*(first or first_given), *_words(given), *typed[len(first) :]],
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
        registry=_AS_PEOPLE_WRITE,
    )
    return _made(made)


def read_file(path: Path, verb: str) -> dict[str, Any]:
    """The fields of a configuration file.

    The file is the config.json of a run of this verb, or YAML or JSON with fields as in its
    "config".
    """
    try:
        record = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is neither YAML nor JSON: {error}") from None
    if not isinstance(record, dict):
        raise UserError(f"{path} must hold a mapping of fields.")
    if not isinstance(record.get("config"), dict):
        return record
    if record.get("stage") != verb:
        raise UserError(f"{path} is the record of a {record.get('stage')} run, not of {verb}.")
    return dict(record["config"])


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Leaves 010, 1:30, 1e3 and no as text, so that they mean the same as when typed."""

    yaml_implicit_resolvers: Mapping[str, Any] = {}


for _tag, _form, _first in (
    ("null", "~|null|", [*"~n", ""]),
    ("bool", "true|false", [*"tf"]),
    ("merge", "<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_form})$"), _first)


def _words(fields: Mapping[str, Any], is_group: bool = False) -> Iterator[str]:
    """Fields as words of options; a group's fields become options of their own."""
    for name, value in fields.items():
        option = str(name).replace("_", "-")
        if isinstance(value, dict) and not is_group:
            yield from _words(value, is_group=True)
        elif isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        elif value != []:
            first, *others = map(str, value if isinstance(value, list) else [value])
            # A separate word that begins with a dash would be an option.
            yield from [f"--{option}={first}"] if first[:1] == "-" else [f"--{option}", first]
            yield from others


def positional(config: type) -> list[str]:
    """Names of the positional fields."""
    hints = get_type_hints(config, include_extras=True)
    marker: Any = Positional
    return [name for name, hint in hints.items() if marker in getattr(hint, "__metadata__", ())]


@_AS_PEOPLE_WRITE.struct_rule
def _as_call(info: StructTypeInfo) -> StructConstructorSpec | None:
    """The fields of a dataclass, and a call that `_made` makes when tyro is done.

    tyro itself would keep line breaks of docstrings, show empty defaults and box pydantic's errors.
    """
    if not is_dataclass(info.type):
        return None
    hints, specs = get_type_hints(info.type, include_extras=True), []
    shown = arg(help_behavior_hint=lambda default: default and f"(default: {default})")
    for each in fields(info.type):
        default = getattr(info.default, each.name, each.default)
        if default is MISSING:
            default = tyro.MISSING if each.default_factory is MISSING else each.default_factory()
        hint: Any = Annotated[hints[each.name], shown]
        text = partial(_help_of, info.type, each.name)
        specs.append(StructFieldSpec(each.name, hint, default, text))
    return StructConstructorSpec(partial(partial, info.type), tuple(specs))


def _help_of(config: type, name: str) -> str | None:
    """The docstring of a field, or of the dataclass that it holds."""
    held: type = get_type_hints(config)[name]
    return _paragraphs(config).get(name, held.__doc__)


@cache
def _paragraphs(config: type) -> dict[str, str]:
    """{field: its docstring, without line breaks}."""
    docs = (doc for each in config.__mro__[-2::-1] for doc in parse_from_object(each).params)
    return {doc.arg_name: " ".join((doc.description or "").split()) for doc in docs}


def _made(call: "partial[Any]") -> Any:
    """The dataclass and its parts; UserError names an option as it is typed."""
    values = {k: _made(v) if isinstance(v, partial) else v for k, v in call.keywords.items()}
    try:
        return call.func(**values)
    except ValidationError as error:
        # A rule on several fields names them itself.
        told = [
            f"--{each['loc'][0]}".replace("_", "-") + f": {each['msg']}; got {each['input']}."
            if each["loc"]
            else str(each["ctx"]["error"])
            for each in error.errors()
        ]
        raise UserError(" ".join(told)) from None


@_AS_PEOPLE_WRITE.primitive_rule
def _as_people_write(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read 10k, 1.5B and 30% as numbers; expand ~, since shells do not after an equals sign."""
    parts = get_args(info.type) if get_origin(info.type) in (Union, UnionType) else (info.type,)
    kind, is_optional = _bare(parts[0]), len(parts) > 1
    is_several = get_origin(kind) is tuple
    if is_several:
        kind = _bare(get_args(kind)[0])
    if kind not in (str, int, float, Path):
        return None

    def value_of(word: str) -> Any:
        if is_optional and word == "None":
            return None
        if kind is Path:
            return Path(word).expanduser()
        return word if kind is str else named.number_as(kind, word)

    def values_of(words: list[str]) -> Any:
        # An unset shell variable leaves an option without a value.
        if not words:
            raise UserError("it takes at least one value")
        return tuple(map(value_of, words)) if is_several else value_of(words[0])

    name = kind.__name__.upper()
    return PrimitiveConstructorSpec(
        nargs="*" if is_several else 1,
        metavar=f"{name} [{name} ...]" if is_several else name + "|None" * is_optional,
        instance_from_str=values_of,
        is_instance=lambda value: isinstance(value, (tuple if is_several else kind, NoneType)),
        str_from_instance=lambda value: [*map(str, value)] if is_several else [str(value)],
    )


def _bare(hint: Any) -> Any:
    """The type without its range."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint
