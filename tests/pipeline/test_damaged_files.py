"""What every verb says of a file that is damaged, missing or something else: damaged_files.txt.

A row names a file of the workshop, what is done to it, the command, its exit code, and the word of
what is said that matters: a line for each kind.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline import workshop
from tests.pipeline.workshop import TRAINED, Damage, answer, restored, written

TABLE = Path(__file__).with_name("damaged_files.txt")
COMMANDS = {
    "PROXY": f"proxy --out new --steps 1 --sequences-per-domain 1 {TRAINED}",
    "BASE": f"base --out new --steps 1 --batch-size 4 {TRAINED}",
    "DOREMI": f"doremi --reference runs/base --out new --steps 1 --batch-size 5 {TRAINED}",
    "SELECT": f"select --out runs/select --steps 2 --batch-size 5 --strategies high2 {TRAINED}",
    "RESUME": f"base --out runs/base --steps 3 --batch-size 4 {TRAINED}",
    "ROWS": TRAINED.replace("--data corpus", "--data {} --domain-column source"),
    "EVALUATE": "evaluate runs/base --device cpu",
    "REPORT": "report --runs runs --out page/report.html",
}


def rows() -> Iterator[list[str]]:
    """(file, damage, words, code, word) of every row."""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            yield [cell.strip() for cell in line.split(" | ")]


def words_of(text: str, file: str) -> list[str]:
    """The words of a row; those in capitals stand for more."""
    words = [COMMANDS.get(word, word) for word in text.split()]
    return " ".join(words).replace("{}", file).split()


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
    ("file", "damage", "words", "code", "word"),
    list(rows()),
)
def test_what_is_said_of_a_damaged_file(
    file: str,
    damage: str,
    words: str,
    code: str,
    word: str,
    shop: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, pristine = shop
    monkeypatch.chdir(folder)
    # The names of a cache are digests.
    found = sorted(folder.glob(file))[0].relative_to(folder)
    with restored(folder, pristine):
        Damage(damage)(found)
        before = written(folder)
        said = answer(words_of(words, file), capsys)
        is_untouched = written(folder) == before and not Path("new").exists()
    told = " ".join(f"{said.err} {said.out} {caplog.text}".split())
    assert said.code == int(code), told
    assert word in told
    assert "Traceback" not in told
    assert "not foreseen" not in told
    if said.code:
        assert is_untouched
        assert said.out == ""
        assert said.err.splitlines()[-1].startswith("doge-fast: ")
