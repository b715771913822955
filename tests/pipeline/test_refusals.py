"""What is said of a wrong command line and of a damaged file: a line for each kind.

A row of command_lines.txt is the words after `doge-fast`, quoted as for a shell, the exit code, and
the word of what is said that matters; one of damaged_files.txt has a file of the workshop and what
is done to it before. X300 is a name of 300 letters, a word in capitals stands for a command below,
and a backslash begins a character as in Python.
"""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from doge_fast import cli
from doge_fast.pipeline import named
from tests.pipeline import workshop
from tests.pipeline.workshop import TRAINED, Damage, answer, contents, restored, said_in

COMMANDS = {
    "PROXY": f"proxy --out new --steps 1 --sequences-per-domain 1 {TRAINED}",
    "BASE": f"base --out new --steps 1 --batch-size 4 {TRAINED}",
    "DOREMI": f"doremi --reference runs/base --out new --steps 1 --batch-size 5 {TRAINED}",
    "SELECT": f"select --out runs/select --steps 2 --batch-size 5 --strategies low2 {TRAINED}",
    "RESUME": f"base --out runs/base --steps 3 --batch-size 4 {TRAINED}",
    "ROWS": TRAINED.replace("--data corpus", "--data {} --domain-column source"),
    "EVALUATE": "evaluate runs/base --device cpu",
    "TASKS": "evaluate runs/base --device cpu --task-data tasks --tasks",
    "REPORT": "report runs --out page/report.html",
}


def rows(table: str) -> Iterator[list[str]]:
    for line in Path(__file__).with_name(table).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            yield [cell.strip() for cell in line.split(" | ")]


def words_of(text: str, file: object = "") -> list[str]:
    for name, command in COMMANDS.items():
        text = re.sub(rf"(^| ){name} ", rf"\1{command} ", text)
    words = ["x" * 300 if word == "X300" else word for word in shlex.split(text)]
    words = [word.replace("{}", str(file)) for word in words]
    return [word.encode().decode("unicode_escape") if "\\" in word else word for word in words]


def test_every_verb_has_a_line():
    found = [" ".join(words_of(words)) for words, *_ in rows("command_lines.txt")]
    for verb in cli.VERBS:
        assert any(words.startswith(f"{verb} ") for words in found), verb


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A workshop, and a copy of it that nobody touches."""
    folder = tmp_path_factory.mktemp("shop")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        workshop.make()
    pristine = tmp_path_factory.mktemp("pristine") / "shop"
    shutil.copytree(folder, pristine, symlinks=True)
    return folder, pristine


@pytest.mark.parametrize(
    "row", [*rows("damaged_files.txt"), *rows("command_lines.txt")], ids=" | ".join
)
def test_what_is_said(row, shop, monkeypatch, capsys, caplog):
    *damage, text, code, word = row
    folder, pristine = shop
    monkeypatch.chdir(folder)
    with restored(folder, pristine):
        words = words_of(text)
        if damage:
            file, what = damage
            # The names of a cache are digests.
            found = sorted(folder.glob(file))[0].relative_to(folder)
            Damage(what)(found)
            words = words_of(f"{text} ", found)
        before = contents(folder)
        said = answer(words, capsys)
        changed = dict(contents(folder).items() ^ before.items())
        # The cache may be filled before a refusal.
        is_untouched = all(path.parts[0] == "cache" for path in changed)
    told = said_in(f"{said.err} {said.out} {caplog.text}")
    assert said.code == int(code), told
    assert word in told
    assert named.visible(said.err) == said.err
    assert "Traceback" not in told
    if said.code:
        assert is_untouched
        assert said.out == ""
        assert "doge-fast" in said.err
