"""From the words of a command line to a verb's dataclass, and the help of a verb.

A field is an option, its docstring the help. Fields of a file that `--config` names stand below
the options that are typed. What is wrong is said in one sentence, with what was nearest.
"""

import argparse
import dataclasses
import functools
import re
import shutil
import textwrap
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

from doge_fast.pipeline import config as configs
from doge_fast.pipeline.config.fields import (
    Json,
    converted,
    filled,
    read_file,
    required,
    texts_of,
)
from doge_fast.pipeline.config.ranges import bare
from doge_fast.pipeline.named import nearest

# May be left out and stands without an option all the same.
_POSITIONAL_FIELDS = {(configs.ExportConfig, "file")}
_HELP = ("-h", "--help", "--help-all")
_UNSAID: Any = object()
_DASHED = "What begins with - and is no option follows =, as --domains=-x, or stands in --config."


class Option(NamedTuple):
    """A field of a verb, or of a group of its fields."""

    path: tuple[str, ...]
    """Names of the fields that lead to it."""
    flag: str
    """As it is typed; of one that stands without a flag the name for messages."""
    hint: Any
    """Its type, None and range included."""
    text: str
    default: Any
    is_positional: bool
    group: type
    """The dataclass that has the field."""

    @property
    def name(self) -> str:
        """As a message says it."""
        return self.flag.upper() if self.is_positional else self.flag

    @property
    def is_several(self) -> bool:
        """Whether it takes any number of values."""
        return get_origin(bare(self.hint)) is tuple

    @property
    def kind(self) -> Any:
        """The type of a value."""
        kind = bare(self.hint)
        return bare(get_args(kind)[0]) if self.is_several else kind


def parse(words: Sequence[str], config: type, *, verb: str, is_positional: bool) -> Any:
    """The dataclass that the words after a verb make; `--config FILE` among them is read here.

    Raises:
        ValueError: an option, its value or the file is not what it should be.
        SystemExit: after help was asked for.
    """
    unsaid = config(**dict.fromkeys(required(config), _UNSAID))
    options = options_of(unsaid, is_positional)
    if asked := [word for word in words if word in _HELP]:
        main = getattr(config, "main", ()) if asked[0] != "--help-all" else ()
        print(_parser(options, config, verb, main).format_help().rstrip())
        raise SystemExit(0)
    typed = vars(_parser(options, config, verb, ()).parse_args(list(words)))
    file = typed.pop("--config", None)
    said = {
        option.path: converted(option.name, typed[option.flag], option.hint)
        for option in options
        if typed.get(option.flag, _UNSAID) is not _UNSAID
    }
    given = {} if file is None else read_file(file, verb)
    result = _with(filled(unsaid, given, str(file)), said)
    if missing := [o for o in options if attrgetter(".".join(o.path))(result) is _UNSAID]:
        needs = "; ".join(f"{o.flag}: {re.split(r'[.;] ', o.text)[0].rstrip('.')}" for o in missing)
        raise ValueError(f"{verb} needs {needs}. See doge-fast {verb} --help.")
    return result


def options_of(config: Any, is_positional: bool, path: tuple[str, ...] = ()) -> list[Option]:
    """The options of a dataclass and of those inside, its own first.

    `is_positional`: fields that must be given stand without an option.
    """
    kind = type(config)
    hints, texts = get_type_hints(kind, include_extras=True), texts_of(kind)
    own, inside = [], []
    for field in dataclasses.fields(kind):
        name, default = field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(default):
            inside += options_of(default, False, (*path, name))
            continue
        is_bare = (default is _UNSAID and is_positional) or (kind, name) in _POSITIONAL_FIELDS
        flag = name if is_bare else "--" + name.replace("_", "-")
        # Every field is explained.
        own.append(Option((*path, name), flag, hints[name], texts[name], default, is_bare, kind))
    # What must be given comes first.
    return sorted(own, key=lambda option: option.default is not _UNSAID) + inside


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        # "argument --steps: must be ...", or "... : expected one argument".
        said = message.removeprefix("argument ").replace(": must be", " must be", 1).rstrip(".")
        end = "" if said.endswith("?") else "."
        if "expected" in said and any(re.match("-[^-]", word) for word in self._words):
            end += f" {_DASHED}"
        raise ValueError(f"{self.prog.removeprefix('doge-fast ')}: {said}{end}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, with the nearest option for one that there is not."""
        self._words: Sequence[str] = args
        found, left = self.parse_known_args(args, namespace)
        if left:
            verb, word = self.prog.removeprefix("doge-fast "), left[0]
            flag = word.partition("=")[0]
            if not flag.startswith("-"):
                raise ValueError(f"{verb} takes no {word!r} without an option before it.")
            otherwise = _DASHED if flag[:2] != "--" else f"doge-fast {verb} --help-all lists all."
            word = flag.lstrip("-").replace("_", "-")
            near = nearest(word, self._option_string_actions, otherwise)
            raise ValueError(f"{verb} has no option {flag}. {near}")
        return found


def _parser(
    options: Sequence[Option], config: type, verb: str, main: Sequence[str]
) -> argparse.ArgumentParser:
    """The parser of a verb; what is not typed is not in its result.

    Its help shows the fields that `main` names, in this order, or all.
    """
    shown = [option for option in options if not main or option.path[-1] in main]
    if main:
        shown.sort(key=lambda option: main.index(option.path[-1]))
    examples = [f"  doge-fast {verb} {each}" for each in getattr(config, "examples", ())]
    about = ["--config FILE: YAML or JSON with fields, or a run's config.json; options win."]
    if left := len(options) - len(shown):
        about.insert(0, f"{left} further options: doge-fast {verb} --help-all")
    width = min(shutil.get_terminal_size().columns, 120)
    needed = " ".join(_metavar(each) for each in options if each.default is _UNSAID)
    parser = _Parser(
        prog=f"doge-fast {verb}",
        usage=" ".join(filter(None, ("%(prog)s", needed, "[OPTIONS]"))),
        description=_wrapped(config.__doc__ or "", width),
        epilog="\n".join(
            [
                *(textwrap.fill(each, width) for each in about),
                *(["", "examples:", *examples] if examples else []),
            ]
        ),
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=26, width=width
        ),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--config", dest="--config", type=Path, help=argparse.SUPPRESS)
    groups: dict[type, Any] = {}
    for option in shown:
        if option.group not in groups and not main:
            title = None if option.group is config else _wrapped(option.group.__doc__ or "", width)
            groups[option.group] = parser.add_argument_group(title)
        _add(groups.get(option.group, parser), option)
    return parser


def _add(parser: Any, option: Option) -> None:
    text = f"{option.text} {_default(option)}".strip().replace("%", "%%")
    names = [option.flag] if option.is_positional else ["--" + option.flag.removeprefix("--")]
    if option.kind is bool:
        parser.add_argument(
            *names, dest=option.flag, action=argparse.BooleanOptionalAction, help=text
        )
        return
    several = "?" if option.is_positional else None
    if option.is_several:
        # Of an option without a word the word may be a variable that is not set.
        several = "*" if option.is_positional else "+"
    # Not argparse.SUPPRESS, which it would read as if it were typed.
    rest = {"default": _UNSAID} if option.is_positional else {"dest": option.flag}
    parser.add_argument(*names, **rest, nargs=several, metavar=_value_name(option), help=text)


def _value_name(option: Option) -> Any:
    if option.is_positional:
        return option.flag.upper()
    choices = get_args(option.kind) if get_origin(option.kind) is Literal else ()
    names = {str: "TEXT", int: "N", float: "X", Path: "PATH"}
    return "{" + ",".join(choices) + "}" if choices else names[option.kind]


def _metavar(option: Option) -> str:
    """What must be given, for the first line of the help."""
    name = _value_name(option)
    words = [name] if option.is_positional else [option.flag, name]
    return " ".join([*words, *(["..."] if option.is_several else [])])


def _wrapped(text: str, width: int) -> str:
    paragraphs = (" ".join(each.split()) for each in text.strip().split("\n\n"))
    return "\n\n".join(textwrap.fill(each, width) for each in paragraphs)


def _with(config: Any, said: dict[tuple[str, ...], Any]) -> Any:
    """A dataclass with the values at these paths."""
    changes: Json = {path[0]: value for path, value in said.items() if len(path) == 1}
    for name in {path[0] for path in said if len(path) > 1}:
        inside = {path[1:]: value for path, value in said.items() if path[0] == name}
        changes[name] = _with(getattr(config, name), inside)
    return dataclasses.replace(config, **changes)


def _default(option: Option) -> str:
    value = option.default
    if value is _UNSAID:
        return "(required)"
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    is_told = value in (None, "") or isinstance(value, bool)
    return "" if is_told else f"(default: {value})"
