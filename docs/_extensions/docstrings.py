"""Docstrings as this project writes them, read as reStructuredText.

They are plain text with `code`, formulas and examples in paragraphs of their own, and sections in
Google's style. Bars, asterisks and trailing underscores of formulas mean themselves.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from textwrap import dedent

from sphinx.application import Sphinx

_SECTION = re.compile(r"^(Args|Attributes|Examples?|Raises|Returns|Yields|Notes?):$")
_CODE = re.compile(r"(``.+?``|`[^`]+`)")
# `W_j  =  < g_j , ... >`: whoever leaves so much room around the sign writes a formula.
_FORMULA = re.compile(r"^[^.=]{1,40}(\s{2,}=\s|\s=\s{2,})")
_ITEM = re.compile(r"^(- |\d+\. )")
_NAMES = re.compile(r"^ {4}(\w+, )+\w+,$")
_TEXT = ".. code-block:: text"
_VALUES = ("attribute", "property", "data")
_kept: dict[str, list[str]] = {}


def setup(app: Sphinx) -> dict[str, bool]:
    """Rewrite docstrings before napoleon, which runs at 500, sees them."""
    app.connect("autodoc-process-docstring", _rewrite, priority=400)
    app.connect("autodoc-process-docstring", _restore, priority=600)
    return {"parallel_read_safe": True}


def _rewrite(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    lines[:] = list(_readable(lines))
    if what in _VALUES:
        _kept[name] = list(lines)


def _restore(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """A sentence with a colon in it, which napoleon takes for `type: description`."""
    if what in _VALUES:
        lines[:] = _kept.pop(name)


def _readable(lines: Sequence[str]) -> Iterator[str]:
    """The lines with formulas and examples as literal blocks, and other markup escaped."""
    last = ""
    in_section = False
    for is_text, group in groupby(lines, key=lambda line: bool(line.strip())):
        paragraph = list(_joined(group))
        if not is_text:
            yield from paragraph
            continue
        is_indented = paragraph[0].startswith("    ")
        if not is_indented:
            in_section = bool(_SECTION.match(paragraph[0]))
        if is_indented and not in_section and not _ITEM.match(last):
            if not last.endswith("::"):
                yield from (_block_of(paragraph), "")
            # What follows in the same block needs no sign of its own.
            last = "::"
            yield from paragraph
            continue
        if _FORMULA.match(paragraph[0]) and not in_section:
            yield from (_TEXT, "", *(f"    {line}" for line in paragraph))
            last = ""
            continue
        last = paragraph[0] if _ITEM.match(paragraph[0]) else paragraph[-1]
        yield from map(_escaped, paragraph)


def _block_of(lines: Sequence[str]) -> str:
    """What begins the block: a program is coloured, a formula is not."""
    try:
        ast.parse(dedent("\n".join(lines)))
    except SyntaxError:
        return _TEXT
    return _TEXT if _FORMULA.match(lines[0].lstrip()) else "::"


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Names of parameters that share a description, on one line."""
    waiting = ""
    for line in lines:
        if _NAMES.match(line):
            waiting += line if not waiting else line.strip()
            waiting += " "
        else:
            yield waiting + line.strip() if waiting else line
            waiting = ""
    if waiting:
        yield waiting.rstrip()


def _escaped(line: str) -> str:
    """Markup characters outside of `code` stand for themselves."""
    if line.lstrip().startswith(">>>"):
        return line
    if line.startswith("Source: "):
        return "*Source:* " + _escaped(line.removeprefix("Source: "))
    parts = _CODE.split(line)
    for at in range(0, len(parts), 2):
        part = re.sub(r"(?<!\\)([|*])", r"\\\1", parts[at])
        parts[at] = re.sub(r"(?<=\w)_(?=\W|$)", r"\\_", part)
    # "`Stage`s": markup must end where a word does.
    return re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", "".join(parts))
