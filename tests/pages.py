"""Runs what a page of the documentation shows, in the order in which it shows it.

`python` blocks share one namespace. In `bash` blocks every line is a command: `doge-fast` runs in
this process, with fewer steps and a smaller model; others are checked or run as `_SHELL` says; a
command that nobody knows fails. A `text` block is what the block before it printed, compared line
by line with all numbers left out; `...` stands for lines that are not shown. `json` and `yaml` must
be well formed; `none` and `diff` are for the eye.

An HTML comment on the line above a block says more:

- `<!-- test: parse -->`: too long to run; the command line's parser takes it, and that is all;
- `<!-- test: refused -->`: the command is refused, with an exit code of 2;
- `<!-- test: file NAME -->`: the block is the content of that file;
- `<!-- test: needs MODULE -->`: not run where the module is not installed.
"""

import contextlib
import importlib.util
import io
import json
import re
import shlex
import sys
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from doge_fast import cli
from tests.processes import printed_by

ROOT = Path(__file__).resolve().parents[1]

_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<order>.+?) -->\n)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
_NUMBER = re.compile(r"(?<![A-Za-z_])[-+]?\d[\d.,]*(?:e[-+]?\d+)?")
_FOR_THE_EYE = ("none", "diff")

# What makes a run one of a second: the last of equal options counts.
_SMALL_MODEL = ["--model", "micro"]
_SHORT = ["--steps", "4", "--warmup-steps", "1", "--eval-blocks", "2", *_SMALL_MODEL]
_SHORTER = {verb: _SHORT for verb in ("proxy", "base", "doremi", "select")} | {
    "evaluate": ["--blocks", "2"],
    "profile": ["--steps", "1"],
}
# Verbs that run for minutes however small: their options are read and nothing is run.
_TOO_LONG = ("demo", "experiment")


@dataclass(frozen=True)
class Block:
    """A fenced block and what the comment above it asks for."""

    language: str
    text: str
    order: str
    argument: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, from top to bottom; directives of the generator are none."""
    source = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(source):
        if match["language"].startswith("{"):
            continue
        order, _, argument = (match["order"] or "").partition(" ")
        line = source.count("\n", 0, match.start("text")) + 1
        found.append(Block(match["language"], match["text"], order, argument, line))
    return found


class Reader:
    """Somebody who types in what a page shows, in the present directory.

    Args:
        page: the Markdown file.
        cache: where packed blocks are kept.
    """

    def __init__(self, page: Path, cache: Path) -> None:
        self.page = page
        self.cache = cache
        self.namespace: dict[str, object] = {"__name__": "__main__"}
        self.printed = ""

    def read(self) -> None:
        """Every block, one after the other."""
        for block in blocks_of(self.page):
            place = f"{self.page.name}, line {block.line}"
            try:
                self._read(block, place)
            except BaseException as error:
                error.add_note(f"in {place}")
                raise

    def _read(self, block: Block, place: str) -> None:
        if block.order == "needs" and importlib.util.find_spec(block.argument) is None:
            self.printed = "..."
        elif block.order == "needs" and block.language == "python":
            # What another package warns of is none of ours.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.printed = self._execute(block, place)
        elif block.order == "file":
            Path(block.argument).parent.mkdir(parents=True, exist_ok=True)
            Path(block.argument).write_text(block.text, encoding="utf-8")
        elif block.order == "parse" and block.language == "python":
            compile(block.text, place, "exec")
        elif block.language == "python":
            self.printed = self._execute(block, place)
        elif block.language == "bash":
            commands = block.text.replace("\\\n", " ").splitlines()
            self.printed = "".join(self._type(line, block.order) for line in commands)
        elif block.language == "text":
            assert_alike(block.text, self.printed)
        elif block.language in ("json", "yaml"):
            load = json.loads if block.language == "json" else yaml.safe_load
            assert load(block.text)
        else:
            assert block.language in _FOR_THE_EYE, f"nobody knows how to check {block.language!r}"

    def _execute(self, block: Block, place: str) -> str:
        # The file name makes a traceback say which block failed.
        code = compile(block.text, place, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, self.namespace)
        return printed.getvalue()

    def _type(self, line: str, order: str) -> str:
        words = shlex.split(line, comments=True)
        if not words:
            return ""
        if words[0] == "doge-fast":
            return _doge_fast(words[1:], order, self.cache)
        assert words[0] in _SHELL, f"nobody knows how to check the command {line!r}"
        return _SHELL[words[0]](words)


def assert_alike(shown: str, printed: str) -> None:
    """Every line that is shown was printed, apart from its numbers and the room around them."""
    there = {_shape(line) for line in printed.splitlines()}
    if "..." in there:
        return
    missing = [line for line in shown.splitlines() if line.strip() and _shape(line) not in there]
    missing = [line for line in missing if "..." not in line]
    assert not missing, "\n".join(["not printed:", *missing, "but:", printed])


def _shape(line: str) -> str:
    # A rule below a table's head is as long as its columns are wide; a star marks the best number.
    words = re.sub(r"[-─]{2,}", "--", _NUMBER.sub("#", line)).split()
    return " ".join(word for word in words if word != "*")


def _doge_fast(arguments: list[str], order: str, cache: Path) -> str:
    verb = arguments[0]
    if order == "parse" or verb in _TOO_LONG:
        assert cli.parse(arguments) is not None
        return "..."
    # Documents of tasks are no blocks.
    shorter = [] if "--tasks" in arguments else _SHORTER.get(verb, [])
    if shorter is _SHORT:
        shorter = [*shorter, "--cache-dir", str(cache)]
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        code = cli.main([*arguments, *shorter])
    expected = cli.failures.USAGE if order == "refused" else 0
    assert code == expected, f"doge-fast {shlex.join(arguments)} -> {code}\n{said.getvalue()}"
    # A refusal, and what a verb has to remark, is read on the terminal with the rest.
    return printed.getvalue() + said.getvalue()


def _pip(words: list[str]) -> str:
    """`pip install` of this project names extras that there are."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert words[1] == "install", words
    for package in words[2:]:
        if found := re.fullmatch(r"(?:doge-fast|\.)\[(.+)\]", package):
            unknown = set(found[1].split(",")) - set(project["optional-dependencies"])
            assert not unknown, f"no such extra: {unknown}"
    return "..."


def _python(words: list[str]) -> str:
    """The script or module is there; examples and benchmarks have tests of their own."""
    module = words[words.index("-m") + 1] if "-m" in words else None
    path = Path(module.replace(".", "/") + ".py" if module else words[1])
    assert (ROOT / path).exists() or path.exists(), f"no such file: {path}"
    return printed_by(sys.executable, *words[1:]) if path.exists() and not module else "..."


_SHELL: dict[str, Callable[[list[str]], str]] = {
    "pip": _pip,
    "python": _python,
    **dict.fromkeys(("ls", "cat", "head"), lambda words: printed_by(*words)),
    # Their names are all that can be checked here.
    **dict.fromkeys(("make", "git", "cd"), lambda words: "..."),
}
