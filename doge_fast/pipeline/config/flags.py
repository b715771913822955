"""From the words of a command line to a verb's dataclass, and the help of a verb.

A field is an option, its docstring the help. Fields of a file that `--config` names stand below
the options that are typed. What is wrong is said in one sentence, with what was nearest.
"""

import dataclasses
import difflib
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from doge_fast.pipeline import config as configs
from doge_fast.pipeline.config.fields import Json, filled, read_file, required, texts_of

# What an experiment says of one kind of run: several have steps or a model, so their options are
# --proxy.steps, --base.steps; all other options are the fields' names alone.
PREFIXED = (
    *(configs.ProxyArmsConfig, configs.BaseArmsConfig, configs.DoReMiArmsConfig),
    configs.SelectionArmsConfig,
)
# May be left out and stands without an option all the same.
_POSITIONAL_FIELDS = {(configs.ExportConfig, "file")}
_HELP = ("-h", "--help", "--help-all")
# What other programs call it.
_ELSEWHERE = {
    "lr": "--learning-rate",
    "wd": "--weight-decay",
    "bs": "--batch-size",
    "batch-size": "--sequences-per-domain",
    "per-device-train-batch-size": "--sequences-per-domain",
    "seq-len": "--block-size",
    "seq-length": "--block-size",
    "max-steps": "--steps",
    "iterations": "--steps",
    "epochs": "--steps",
    "warmup": "--warmup-steps",
    "dataset": "--data",
    "output-dir": "--out",
    "output": "--out",
    "model-name-or-path": "--model",
}
_FACTORS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_NEGATIVE = re.compile(r"-(\.?\d|inf|nan)")
# Of the column with the options.
_INDENT = 26
_UNSAID: Any = object()


class Option(NamedTuple):
    """A field of a verb, or of a group of its fields."""

    path: tuple[str, ...]
    """Names of the fields that lead to it."""
    flag: str
    """As it is typed; of one that stands without a flag the name for messages."""
    hint: Any
    """Its type, without what may be absent."""
    text: str
    default: Any
    is_positional: bool
    group: type
    """The dataclass that has the field."""

    @property
    def is_several(self) -> bool:
        """Whether it takes any number of values."""
        return get_origin(self.hint) is tuple

    @property
    def kind(self) -> Any:
        """The type of a value."""
        return get_args(self.hint)[0] if self.is_several else self.hint

    @property
    def usage(self) -> str:
        """The option with what it takes."""
        names = {str: "TEXT", int: "N", float: "X", Path: "PATH"}
        choices = get_args(self.kind) if get_origin(self.kind) is Literal else ()
        value = "{" + ",".join(choices) + "}" if choices else names.get(self.kind, "")
        if self.is_positional:
            return self.flag.upper() + (" ..." if self.is_several else "")
        return " ".join(filter(None, (self.flag, value, "..." if self.is_several else "")))

    def read(self, words: Sequence[str]) -> Any:
        """The field's value, of the words behind the option.

        Raises:
            ValueError: they are none.
        """
        values = tuple(_read(word, self.kind, self.flag) for word in words)
        if self.is_several:
            return values
        if len(values) != 1:
            raise ValueError(f"{self.flag} takes one value; got {' '.join(words) or 'none'}.")
        return values[0]


def _read(word: str, kind: Any, flag: str) -> Any:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if word not in choices:
            near = difflib.get_close_matches(word, choices, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"{flag} must be one of {', '.join(choices)}; got {word!r}.{hint}")
        return word
    if kind in (int, float):
        number, factor = word, 1.0
        if word[-1:] in _FACTORS:
            number, factor = word[:-1], _FACTORS[word[-1]]
        try:
            value = int(word) if kind is int and factor == 1 else float(number) * factor
            if kind is int and value != int(value):
                raise ValueError(word)
            return kind(value)
        except (ValueError, OverflowError):
            what = "a whole number" if kind is int else "a number"
            raise ValueError(f"{flag} must be {what}, 10k or 1B too; got {word!r}.") from None
    return kind(word)


def parse(words: Sequence[str], config: type, *, verb: str, is_positional: bool) -> Any:
    """The dataclass that the words after a verb make.

    Args:
        words: options and values; `--config FILE` among them is read here.
        config: the verb's dataclass.
        verb: as it is typed, for help and messages.
        is_positional: whether fields that must be given stand without an option.

    Raises:
        ValueError: an option, its value or the file is not what it should be.
        SystemExit: after help was asked for.
    """
    unsaid = config(**dict.fromkeys(required(config), _UNSAID))
    options = options_of(unsaid, is_positional)
    if asked := [word for word in words if word in _HELP]:
        print(help_of(options, config, verb, has_all=asked[0] == "--help-all"))
        raise SystemExit(0)
    said, file = _said(words, options, verb)
    given = {} if file is None else read_file(file, verb)
    if config is configs.ExperimentConfig:
        unsaid = _preset(unsaid, said, given)
    result = _with(filled(unsaid, given, str(file)), said)
    if missing := [option for option in options if _value(result, option.path) is _UNSAID]:
        needs = "; ".join(f"{o.flag}: {re.split(r'[.;] ', o.text)[0].rstrip('.')}" for o in missing)
        raise ValueError(f"{verb} needs {needs}. See doge-fast {verb} --help.")
    return result


def options_of(
    config: Any, is_positional: bool, prefix: str = "", path: tuple[str, ...] = ()
) -> list[Option]:
    """The options of a dataclass and of those inside, its own first.

    Args:
        config: with the defaults.
        is_positional: whether fields that must be given stand without an option.
        prefix: of the flags.
        path: of fields that lead to it.
    """
    kind = type(config)
    hints, texts = get_type_hints(kind), texts_of(kind)
    own, inside = [], []
    for field in dataclasses.fields(kind):
        name, default = field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(default):
            inner = f"{name}." if type(default) in PREFIXED else ""
            inside += options_of(default, False, inner, (*path, name))
            continue
        hint = hints[name]
        if get_origin(hint) in (Union, UnionType):
            hint = next(each for each in get_args(hint) if each is not type(None))
        is_bare = (default is _UNSAID and is_positional) or (kind, name) in _POSITIONAL_FIELDS
        flag = name if is_bare else "--" + prefix + name.rstrip("_").replace("_", "-")
        own.append(Option((*path, name), flag, hint, texts.get(name, ""), default, is_bare, kind))
    # What must be given comes first.
    return sorted(own, key=lambda option: option.default is not _UNSAID) + inside


def _said(
    words: Sequence[str], options: Sequence[Option], verb: str
) -> tuple[dict[tuple[str, ...], Any], Path | None]:
    """{path: value} of the options that are typed, and the file of `--config`."""
    by_flag = {option.flag: option for option in options if not option.is_positional}
    places = [option for option in options if option.is_positional]
    said: dict[tuple[str, ...], Any] = {}
    file: Path | None = None
    left = list(words)
    while left:
        word = left.pop(0)
        if not _is_flag(word):
            if not places:
                raise ValueError(f"{verb} takes no {word!r} without an option before it.")
            place = places.pop(0)
            values = [word, *(_values(left) if place.is_several else ())]
            said[place.path] = place.read(values)
            continue
        flag, is_joined, joined = word.partition("=")
        switch = by_flag.get(flag.replace("--no-", "--", 1))
        if switch is not None and switch.hint is bool and not is_joined:
            said[switch.path] = switch.flag == flag
            continue
        option = by_flag.get(flag)
        if option is not None and option.hint is bool:
            raise ValueError(f"{flag} takes no value: it is {flag} or --no-{flag[2:]}.")
        if option is None and flag != "--config":
            raise ValueError(f"{verb} has no option {flag}. {_nearest(flag, by_flag, verb)}")
        is_several = option is not None and option.is_several
        values = [joined] if is_joined else _values(left, most=None if is_several else 1)
        if option is None:
            if len(values) != 1:
                raise ValueError("--config takes one value, a file; got none.")
            file = Path(values[0])
        elif values == ["None"] and not is_several:
            said[option.path] = None
        else:
            said[option.path] = option.read(values)
    return said, file


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NEGATIVE.match(word)


def _values(left: list[str], most: int | None = None) -> list[str]:
    """Take words up to the next option, at most so many."""
    values: list[str] = []
    while left and not _is_flag(left[0]) and (most is None or len(values) < most):
        values.append(left.pop(0))
    return values


def _nearest(flag: str, by_flag: dict[str, Option], verb: str) -> str:
    elsewhere = _ELSEWHERE.get(flag.lstrip("-").replace("_", "-"), "")
    near = difflib.get_close_matches(flag.replace("_", "-"), by_flag, n=1, cutoff=0.7)
    known = [elsewhere] if elsewhere in by_flag else near
    if known:
        return f"Did you mean {known[0]}?"
    return f"doge-fast {verb} --help-all lists its options."


def _preset(unsaid: Any, said: dict[tuple[str, ...], Any], given: Json) -> Any:
    """What holds for an experiment where no option and no file says otherwise: its preset."""
    from doge_fast.pipeline.experiments.presets import preset_of

    corpus = given.get("corpus")
    data = corpus.get("data") if isinstance(corpus, dict) else None
    # Of the file, where they are words that are known.
    named: Json = {key: given[key] for key in ("name", "preset") if key in given}
    chosen = filled(dataclasses.replace(unsaid, name="universal"), named)
    name, preset = (said.get((key,), getattr(chosen, key)) for key in ("name", "preset"))
    made = preset_of(name, preset, data=said.get(("corpus", "data"), data))
    return dataclasses.replace(made, name=unsaid.name)


def _with(config: Any, said: dict[tuple[str, ...], Any]) -> Any:
    """A dataclass with the values at these paths."""
    changes: Json = {path[0]: value for path, value in said.items() if len(path) == 1}
    for name in {path[0] for path in said if len(path) > 1}:
        inside = {path[1:]: value for path, value in said.items() if path[0] == name}
        changes[name] = _with(getattr(config, name), inside)
    return dataclasses.replace(config, **changes)


def _value(config: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        config = getattr(config, name)
    return config


def help_of(options: Sequence[Option], config: type, verb: str, *, has_all: bool) -> str:
    """The help of a verb: what a user decides, or all options.

    Args:
        options: of the verb.
        config: its dataclass.
        verb: as it is typed.
        has_all: show all options; False: those of `config.main` where it has that.
    """
    main = getattr(config, "main", ())
    is_short = bool(main) and not has_all
    shown = [o for o in options if not is_short or o.path[-1] in main]
    needed = [option.usage for option in options if option.default is _UNSAID]
    width = min(shutil.get_terminal_size().columns, 120)
    lines = [" ".join(("usage: doge-fast", verb, *needed, "[OPTIONS]"))]
    for paragraph in (config.__doc__ or "").strip().split("\n\n"):
        lines += ["", *textwrap.wrap(" ".join(paragraph.split()), width)]
    group: type | None = config
    lines.append("")
    if is_short:
        shown.sort(key=lambda option: main.index(option.path[-1]))
        group = None
    for option in shown:
        if group is not None and option.group is not group:
            group = option.group
            lines += ["", *textwrap.wrap(" ".join((group.__doc__ or "").split()), width)]
        lines += _entry(option, width)
    if is_short:
        left = len(options) - len(shown)
        lines += ["", f"{left} further options: doge-fast {verb} --help-all"]
    about_file = "--config FILE: YAML or JSON with fields, or a run's config.json; options win."
    lines += textwrap.wrap(about_file, width)
    if examples := getattr(config, "examples", ()):
        lines += ["", "examples:", *(f"  doge-fast {verb} {each}" for each in examples)]
    return "\n".join(lines)


def _entry(option: Option, width: int) -> Iterator[str]:
    """An option, and beside or below it what it is."""
    usage = option.usage
    if option.hint is bool and option.default is True:
        usage = f"--no-{option.flag[2:]}"
    text = f"{option.text} {_default(option)}".strip()
    beside = textwrap.wrap(text, max(width - _INDENT, 20))
    if len(usage) + 4 > _INDENT:
        yield f"  {usage}"
    elif beside:
        yield f"  {usage}".ljust(_INDENT) + beside.pop(0)
    yield from (" " * _INDENT + line for line in beside)


def _default(option: Option) -> str:
    value = option.default
    if value is _UNSAID:
        return "(required)"
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    is_told = value in (None, "") or isinstance(value, bool)
    return "" if is_told else f"(default: {value})"
