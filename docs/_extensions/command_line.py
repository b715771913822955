"""The command line's options as tables, read from the dataclasses that the parser is made of.

`{command-line}` writes a section for each verb: what it does, and for every field of its class
the flag, the default and what the field's docstring says.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

from doge_fast import cli
from doge_fast.pipeline.config.command_line import positional


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("command-line", _CommandLine)
    return {"parallel_read_safe": True}


class _CommandLine(SphinxDirective):
    """All verbs, in the order of `doge-fast --help`."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(inspect.getfile(cli))
        for verb in cli.VERBS.values():
            self.env.note_dependency(inspect.getfile(verb.config))
        return self.parse_text_to_nodes(sections(), allow_section_headings=True)


def sections() -> str:
    """All sections, in Markdown."""
    return "\n".join(line for name in cli.VERBS for line in _section(name))


def _section(name: str) -> Iterator[str]:
    verb = cli.VERBS[name]
    yield from (f"(verb-{name.replace(' ', '-')})=", f"## doge-fast {name}", "")
    yield from (inspect.cleandoc(verb.config.__doc__ or ""), "")
    yield from _tables(verb.config)


def _tables(config: type) -> Iterator[str]:
    """The stage's own fields, then those of each group it shares with other stages."""
    hints = get_type_hints(config, include_extras=False)
    texts = _texts_of(config)
    own = [f for f in dataclasses.fields(config) if not dataclasses.is_dataclass(hints[f.name])]
    if own:
        yield from ("| option | default | |", "|---|---|---|")
    for field in own:
        default = _default(field)
        option = _flag(field.name, hints[field.name], field.name not in positional(config))
        shown = "required" if default is None else default
        text = texts.get(field.name, "").replace("|", "\\|")
        yield f"| {option} | {shown} | {_safe(text)} |"
    yield ""
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(group := hints[field.name]):
            yield from (f"**{field.name}**: {inspect.cleandoc(group.__doc__ or '')}", "")
            yield from _tables(group)


def _texts_of(config: type) -> dict[str, str]:
    """{field: the string below it in the source}; inherited fields too."""
    texts = {}
    for each in reversed(config.__mro__[:-1]):
        found = ModuleAnalyzer.for_module(each.__module__).find_attr_docs()
        for (owner, name), lines in found.items():
            if owner == each.__name__:
                texts[name] = " ".join(" ".join(lines).split())
    return texts


def _safe(text: str) -> str:
    """A docstring's angle brackets and stars are no markup."""
    return text.replace("*", "\\*").replace("<", "\\<").replace("$", "\\$")


def _flag(name: str, hint: Any, is_named: bool) -> str:
    value = _value(hint)
    if not is_named:
        return f"`{name.upper()}`"
    flag = "--" + name.replace("_", "-")
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
