"""What is said of a command line that is wrong, a line for each kind: command_lines.txt.

A row is the words after `doge-fast`, quoted as for a shell, the exit code, and the word of what is
said that matters. X300 is a name of 300 letters, a word in capitals stands for a command of
test_damaged_files, and a backslash begins a character as in Python.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from doge_fast import cli
from doge_fast.pipeline import named
from tests.pipeline.test_damaged_files import COMMANDS, shop  # noqa: F401
from tests.pipeline.workshop import answer, restored, said_in, written

TABLE = Path(__file__).with_name("command_lines.txt")


def rows() -> Iterator[list[str]]:
    """(words, code, word) of every row."""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            yield [cell.strip() for cell in line.split(" | ")]


def words_of(text: str) -> list[str]:
    for name, command in COMMANDS.items():
        text = re.sub(rf"^{name} ", f"{command} ", text)
    words = ["x" * 300 if word == "X300" else word for word in shlex.split(text)]
    return [word.encode().decode("unicode_escape") if "\\" in word else word for word in words]


def test_every_verb_has_a_line() -> None:
    found = [" ".join(words_of(words)) for words, *_ in rows()]
    for verb in cli.VERBS:
        assert any(words.startswith(f"{verb} ") for words in found), verb


@pytest.mark.parametrize(
    ("words", "code", "word"),
    list(rows()),
)
def test_what_is_said_of_a_wrong_command_line(
    words: str,
    code: str,
    word: str,
    shop: tuple[Path, Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, pristine = shop
    monkeypatch.chdir(folder)
    with restored(folder, pristine):
        before = written(folder)
        said = answer(words_of(words), capsys)
        assert written(folder) == before
        made = sorted(entry.name for entry in folder.iterdir())
    told = said_in(said.err)
    assert said.code == int(code), told
    assert word in told
    assert named.visible(said.err) == said.err
    assert "Traceback" not in told
    assert "not foreseen" not in told
    assert said.out == ""
    assert made == sorted(entry.name for entry in pristine.iterdir())
