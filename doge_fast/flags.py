"""From the words of a command line to a verb's dataclass, with a file's fields below the flags.

A field is a flag, its docstring the help. tyro does the parsing; here is what it is given: the
same dataclass with each help text on one line, so that it breaks where the terminal ends.
"""

import argparse
import dataclasses
import io
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from doge_fast.pipeline import config as configs
from doge_fast.pipeline.config.fields import Json, filled, read_file, required, texts_of
from doge_fast.pipeline.named import visible

_ABOUT_FILE = (
    "Fields may come from a file, --config FILE: YAML, JSON, or the config.json of a run. Flags "
    "win over it."
)
# What an experiment says of one kind of run: several have steps or a model, so their flags are
# --proxy.steps, --base.steps; all other flags are the fields' names alone.
PREFIXED = (
    *(configs.ProxyArmsConfig, configs.BaseArmsConfig, configs.DoReMiArmsConfig),
    configs.SelectionArmsConfig,
)
# May be left out and stands without a flag all the same.
_POSITIONAL_FIELDS = {(configs.ExportConfig, "file")}


def parse(words: Sequence[str], config: type, *, verb: str, is_positional: bool) -> Any:
    """The dataclass that the words after a verb make.

    Args:
        words: flags and values; `--config FILE` among them is read here.
        config: the verb's dataclass.
        verb: as it is typed, for help and messages.
        is_positional: whether fields that must be given stand without a flag.

    Raises:
        ValueError: the file is not what it should be.
        SystemExit: after help was asked for, or with tyro's message where a flag is wrong.
    """
    file, words = _file_of(words, verb)
    given = {} if file is None else read_file(file, verb)
    flags = _flags_of(config, is_positional)
    # What must be given is missing, which tyro will say.
    default = config(**dict.fromkeys(required(config), tyro.MISSING))
    if config is configs.ExperimentConfig:
        default = _preset_of(words, given, flags, str(file))
    return _parsed(words, flags, filled(default, given, str(file)), verb)


def _parsed(words: Sequence[str], flags: type, default: Any, verb: str) -> Any:
    """Flags over a default, as an instance of the default's class."""
    config = type(default)
    with _visibly(words):
        parsed = tyro.cli(
            flags,
            args=list(words),
            prog=f"doge-fast {verb}",
            description=_filled_lines(f"{_one_line(config.__doc__)}\n\n{_ABOUT_FILE}"),
            default=_converted(default, flags),
        )
    return _converted(parsed, config)


@contextmanager
def _visibly(words: Sequence[str]) -> Iterator[None]:
    """tyro repeats words as they are, with what a terminal would obey."""
    if all(visible(word) == word for word in words):
        yield
        return
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            yield
    finally:
        print(visible(said.getvalue()), end="", file=sys.stderr)


def _preset_of(words: Sequence[str], given: Json, flags: type, file: str) -> Any:
    """What holds for an experiment where no flag and no file says otherwise: its preset."""
    from doge_fast.pipeline.experiments.presets import preset_of

    # Parsed twice: which preset, and which corpus it makes way for, is among the words.
    unsaid = configs.ExperimentConfig("universal", corpus=configs.CorpusConfig(data=""))
    asked = [word for word in words if word not in ("-h", "--help")]
    said = _parsed(asked, flags, filled(unsaid, given, file), "experiment")
    preset = preset_of(said.name, said.preset, data=said.corpus.data or None)
    return dataclasses.replace(preset, name=tyro.MISSING)


def _file_of(words: Sequence[str], verb: str) -> tuple[Path | None, list[str]]:
    """The file that `--config` names, and the other words."""
    prog = f"doge-fast {verb}"
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    known, others = parser.parse_known_args(list(words))
    return known.config, others


@cache
def _flags_of(config: type, is_positional: bool = False) -> type:
    """The dataclass as tyro shall see it: help on one line, names of flags."""
    hints, texts = get_type_hints(config), texts_of(config)
    positional = required(config) if is_positional else ()
    fields: list[tuple[str, Any]] = []
    for field in dataclasses.fields(config):
        name, hint = field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            hint = _flags_of(hint)  # type: ignore[arg-type]
        else:
            flag = name.replace("_", "-")
            told = tyro.conf.arg(help=texts.get(name), name=flag, prefix_name=config in PREFIXED)
            hint = Annotated[hint, told]
        if name in positional or (config, name) in _POSITIONAL_FIELDS:
            hint = Annotated[hint, tyro.conf.Positional]
        fields.append((name, hint))
    made = dataclasses.make_dataclass(config.__name__, fields, frozen=True)
    made.__doc__ = _one_line(config.__doc__)
    return made


def _converted(value: Any, kind: type) -> Any:
    """The fields of one dataclass in the other of the same fields, nested ones too."""
    hints = get_type_hints(kind)
    return kind(
        **{
            name: _converted(each, hints[name]) if dataclasses.is_dataclass(each) else each
            for name, each in vars(value).items()
        }
    )


def _one_line(text: str | None) -> str:
    """Paragraphs without breaks inside."""
    paragraphs = (text or "").strip().split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def _filled_lines(text: str) -> str:
    """Paragraphs broken where the terminal ends, which tyro does for options alone."""
    width = shutil.get_terminal_size().columns
    # tyro takes a line that begins with a letter for the end of the line before.
    return "\n\n".join(
        textwrap.fill(each, width, subsequent_indent=" ") for each in text.split("\n\n")
    )
