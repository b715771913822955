"""What is said of a command line that is wrong, for every verb and every target: command_lines.txt.

A row is the words after `doge-fast`, quoted as for a shell, the exit code, and a part of what is
said. X300 is a name of 300 letters, and a backslash begins a character as in Python. A fifth of the
rows is in `make test`, all of them in `make test-all`.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from doge_fast import cli
from doge_fast.pipeline import named
from doge_fast.pipeline.exports.registry import targets
from tests.pipeline.test_damaged_files import shop  # noqa: F401
from tests.pipeline.workshop import answer, restored, said_in

TABLE = Path(__file__).with_name("command_lines.txt")
SAMPLE = 5


def rows() -> Iterator[list[str]]:
    """(words, code, sentence) of every row."""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            yield [cell.strip() for cell in line.split(" | ")]


def words_of(text: str) -> list[str]:
    words = ["x" * 300 if word == "X300" else word for word in shlex.split(text)]
    return [word.encode().decode("unicode_escape") if "\\" in word else word for word in words]


def test_the_table_has_every_verb_and_every_target() -> None:
    found = [row[0] for row in rows()]
    assert len(set(found)) == len(found) >= 400
    assert {len(row) for row in rows()} == {3}
    for verb in cli.VERBS:
        assert sum(words.startswith(f"{verb} ") for words in found) >= 5, verb
    for target in targets():
        assert sum(f"--to {target} " in words for words in found) >= 3, target


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        pytest.param(*row, marks=[pytest.mark.exhaustive] if number % SAMPLE else [])
        for number, row in enumerate(rows())
    ],
)
def test_what_is_said_of_a_wrong_command_line(
    words: str,
    code: str,
    sentence: str,
    shop: tuple[Path, Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, pristine = shop
    monkeypatch.chdir(folder)
    with restored(folder, pristine):
        said = answer(words_of(words), capsys)
        made = sorted(entry.name for entry in folder.iterdir())
    told = said_in(said.err)
    assert said.code == int(code), told
    assert sentence in told
    assert named.visible(said.err) == said.err
    assert "Traceback" not in told
    assert "not foreseen" not in told
    assert said.out == ""
    assert made == sorted(entry.name for entry in pristine.iterdir())


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["weights", "show", "a\x1b[31mb"], 2, "doge-fast: a\\x1b[31mb does not exist."),
        (["weights", "show", "--n\x1b[31mope", "x"], 2, "--n\\x1b[31mope"),
        (["profile", "--steps", "0"], 2, "doge-fast: steps must be at least 1; got 0."),
    ],
)
def test_the_program_itself(words: list[str], code: int, sentence: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "doge_fast", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert sentence in done.stderr
    assert "\x1b[31m" not in done.stderr
