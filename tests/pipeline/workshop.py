"""A directory with everything that the verbs read, which is as it was after every command."""

import json
import os
import random
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from doge_fast import cli
from tests.pipeline.corpora import texts, write_jsonl, write_parquet, write_rows
from tests.pipeline.stages import write_weights
from tests.pipeline.task_documents import write_documents
from tests.pipeline.written_runs import write_experiment

CORPUS = ("code", "logs", "prose", "table", "verse")
_WEIGHTS = {"code": 0.3, "logs": 0.1, "prose": 0.2, "table": 0.15, "verse": 0.25}
TRAINED = (
    "--data corpus --cache-dir cache --vocab-size 300 --block-size 16 --validation-fraction 0.2 "
    "--model micro --device cpu --eval-blocks 4"
)


class Answer(NamedTuple):
    """What a command said."""

    code: int
    out: str
    err: str


def said_in(text: str) -> str:
    """A text on one line, without the sides of boxes."""
    return " ".join(text.replace("│", " ").split())


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> Answer:
    """Run a command in this process; what escapes it fails the test."""
    capsys.readouterr()
    try:
        code = cli.main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    return Answer(code, *capsys.readouterr())


def make() -> None:
    """Fill the current directory."""
    folder = Path("corpus")
    # A domain in every form that is read.
    write_jsonl(folder / "code" / "train.jsonl", texts("code", 30))
    write_jsonl(folder / "code" / "validation.jsonl", texts("held-out code", 9))
    write_parquet(folder / "prose.parquet", text=texts("prose", 40), source=["x"] * 40)
    write_jsonl(folder / "verse.jsonl.gz", texts("verse", 40))
    write_jsonl(folder / "table.jsonl.zst", texts("table", 40))
    (folder / "logs.txt").write_text("\n\n".join(texts("logs", 60)))
    rows = [{"text": text, "source": "ab"[i % 2]} for i, text in enumerate(texts("rows", 40))]
    for name in ("rows.parquet", "rows.jsonl"):
        write_rows(Path(name), rows)
    paths = " ".join(f"{name}=/data/{name}" for name in CORPUS)
    for words in (
        f"proxy --out runs/proxy --steps 3 --sequences-per-domain 1 {TRAINED}",
        f"base --out runs/base --steps 3 --batch-size 4 {TRAINED}",
        "evaluate runs/base --device cpu",
        f"select --out runs/select --steps 2 --batch-size 5 --strategies low2 {TRAINED}",
        f"export runs/proxy --to megatron --out blend.txt --paths {paths}",
    ):
        assert cli.main(words.split()) == 0, words
    shutil.copytree("runs/proxy/model", "tokenizer")
    Path("tasks").mkdir()
    write_documents(Path("tasks"), "copa", "piqa", "winogrande")
    write_weights(Path("own.json"), _WEIGHTS)
    Path("fields.yaml").write_text("corpus: {data: corpus}\ntraining: {steps: 2}\n")
    write_experiment(Path("study"), [-0.1, -0.2])


def contents(folder: Path) -> dict[Path, tuple[int, ...]]:
    """Kind, size and time of each file in a folder, and the kind of each folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        told = path.lstat()
        kind = stat.S_IFMT(told.st_mode)
        of_a_file = () if kind == stat.S_IFDIR else (told.st_size, told.st_mtime_ns)
        found[path.relative_to(folder)] = (kind, *of_a_file)
    return found


@contextmanager
def restored(folder: Path, pristine: Path) -> Iterator[None]:
    """Put the folder back to what the other one is, file by file, when the block ends."""
    try:
        yield
    finally:
        there, wanted = contents(folder), contents(pristine)
        # What is in a folder before the folder itself.
        for path in reversed([path for path in there if there[path] != wanted.get(path)]):
            (folder / path).rmdir() if stat.S_ISDIR(there[path][0]) else (folder / path).unlink()
        for path, told in wanted.items():
            if there.get(path) == told:
                continue
            if stat.S_ISDIR(told[0]):
                (folder / path).mkdir()
            else:
                shutil.copy2(pristine / path, folder / path)


class Damage(NamedTuple):
    """What is done to a file, and how it is written in a table."""

    words: str

    def __call__(self, file: Path) -> None:
        kind, _, rest = self.words.partition(" ")
        getattr(self, f"_{kind}")(file, rest)

    def _delete(self, file: Path, _: str) -> None:
        shutil.rmtree(file) if file.is_dir() else file.unlink()

    def _empty(self, file: Path, _: str) -> None:
        if file.is_dir():
            shutil.rmtree(file)
            file.mkdir()
        else:
            file.write_bytes(b"")

    def _half(self, file: Path, _: str) -> None:
        os.truncate(file, file.stat().st_size // 2)

    def _noise(self, file: Path, _: str) -> None:
        file.write_bytes(random.Random(0).randbytes(max(200, file.stat().st_size)))

    def _flip(self, file: Path, place: str) -> None:
        """One bit, at a share of the file's length."""
        data = bytearray(file.read_bytes())
        data[int(float(place) * (len(data) - 1))] ^= 1 << 4
        file.write_bytes(data)

    def _folder(self, file: Path, _: str) -> None:
        self._delete(file, "")
        file.mkdir()

    def _file(self, folder: Path, text: str) -> None:
        shutil.rmtree(folder)
        folder.write_text(text)

    def _dangling(self, file: Path, _: str) -> None:
        self._delete(file, "")
        file.symlink_to("nothing-there")

    def _around(self, file: Path, _: str) -> None:
        """A link to a folder that holds it."""
        self._delete(file, "")
        file.symlink_to("..")

    def _pipe(self, file: Path, _: str) -> None:
        self._delete(file, "")
        os.mkfifo(file)

    def _text(self, file: Path, text: str) -> None:
        file.write_bytes(text.encode().decode("unicode_escape").encode("utf-8", "surrogateescape"))

    def _add(self, file: Path, text: str) -> None:
        with file.open("ab") as end:
            end.write(text.encode().decode("unicode_escape").encode())

    def _set(self, file: Path, text: str) -> None:
        """`a.0.b JSON`: a place in the JSON that the file holds; without JSON it is taken out."""
        path, _, value = text.partition(" ")
        record = json.loads(file.read_text())
        *parents, last = path.split(".")
        inside = record
        for key in parents:
            inside = inside[int(key)] if isinstance(inside, list) else inside[key]
        key = int(last) if isinstance(inside, list) else last
        if value:
            inside[key] = json.loads(value)
        else:
            del inside[key]
        file.write_text(json.dumps(record))

    def _line(self, file: Path, text: str) -> None:
        """`N TEXT`: a line of the file, counted from 1."""
        number, _, line = text.partition(" ")
        lines = file.read_text().split("\n")
        lines[int(number) - 1] = line
        file.write_text("\n".join(lines))
