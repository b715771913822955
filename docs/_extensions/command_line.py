"""The command line's options as tables, read from the dataclasses that the parser is made of.

`{command-line}` writes a section for each verb: what it does, and for every field of its class
the flag, the default and what the field's docstring says.
"""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from doge_fast import cli
from doge_fast.pipeline.config import ExportConfig

# What may be left out and stands without a flag all the same.
_WITHOUT_FLAG = {(ExportConfig, "file")}


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("command-line", _CommandLine)
    return {"parallel_read_safe": True}


class _CommandLine(SphinxDirective):
    """All verbs, in the order of `doge-fast --help`."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(inspect.getfile(cli))
        self.env.note_dependency(inspect.getfile(next(iter(cli._STAGES))))
        return self.parse_text_to_nodes(sections(), allow_section_headings=True)


def sections() -> str:
    """All sections, in Markdown."""
    return "\n".join(line for verb in cli._VERBS for line in _section(verb))


def _section(verb: str) -> Iterator[str]:
    for names, config in _commands((verb,), cli._VERBS[verb]):
        yield from (f"({'-'.join(('verb', *names))})=", f"## doge-fast {' '.join(names)}", "")
        yield from (inspect.cleandoc(config.__doc__ or ""), "")
        yield from _tables(config, config in cli._POSITIONAL)


def _commands(names: tuple[str, ...], config: Any) -> Iterator[tuple[tuple[str, ...], type]]:
    """(verb and subverb, its dataclass): one, or one for each member of a union."""
    config, name = _bare(config)
    if name:
        names = (*names, name)
    if get_origin(config) in (Union, UnionType):
        for member in get_args(config):
            yield from _commands(names, member)
    else:
        yield names, config


def _bare(config: Any) -> tuple[Any, str | None]:
    """Without what Annotated adds, and the subcommand's name, if that adds one."""
    name = None
    while get_origin(config) is Annotated:
        config, *extra = get_args(config)
        name = next((each.name for each in extra if getattr(each, "name", None)), name)
    return config, name


def _tables(config: type, positional: bool) -> Iterator[str]:
    """The stage's own fields, then those of each group it shares with other stages."""
    hints = get_type_hints(config, include_extras=False)
    texts = _field_texts(config)
    own = [f for f in dataclasses.fields(config) if not dataclasses.is_dataclass(hints[f.name])]
    if own:
        yield from ("| option | default | |", "|---|---|---|")
    for field in own:
        default = _default(field)
        stands_alone = (positional and default is None) or (config, field.name) in _WITHOUT_FLAG
        is_named = not stands_alone
        option = _flag(field.name, hints[field.name], is_named)
        shown = "required" if default is None else default
        text = " ".join(texts.get(field.name, "").split()).replace("|", "\\|")
        yield f"| {option} | {shown} | {_safe(text)} |"
    yield ""
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(group := hints[field.name]):
            yield from (f"**{field.name}**: {inspect.cleandoc(group.__doc__ or '')}", "")
            yield from _tables(group, False)


def _safe(text: str) -> str:
    """A docstring's angle brackets and stars are no markup."""
    return text.replace("*", "\\*").replace("<", "\\<").replace("$", "\\$")


def _flag(name: str, hint: Any, is_named: bool) -> str:
    value = _value(hint)
    if not is_named:
        return f"`{name.upper()}`"
    # `from_` is a field because `from` is a word of Python.
    flag = "--" + name.rstrip("_").replace("_", "-")
    if hint is bool:
        return f"`{flag}`, `--no-{flag[2:]}`"
    return f"`{flag} {value}`"


def _value(hint: Any) -> str:
    """What stands behind a flag."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if origin in (Union, UnionType):
        return _value(next(each for each in arguments if each is not type(None)))
    if origin is tuple:
        return f"{_value(arguments[0])} ..."
    names = {str: "TEXT", int: "N", float: "X", Path: "PATH", bool: "True|False"}
    return names.get(hint, getattr(hint, "__name__", "VALUE").upper()).replace("|", "\\|")


def _default(field: "dataclasses.Field[Any]") -> str | None:
    """As the table shows it; None for a field that must be given."""
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return None
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    return f"`{value}`" if str(value) else "(empty)"


def _field_texts(config: type) -> dict[str, str]:
    """{field: the string below it in the source}; inherited fields too."""
    texts: dict[str, str] = {}
    for each in reversed(config.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0].body  # type: ignore[attr-defined]
        for statement, below in pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[statement.target.id] = ast.literal_eval(below.value)  # type: ignore[union-attr]
    return texts
