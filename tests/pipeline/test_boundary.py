"""Refusals and errors of the system are a sentence with an exit code; others have a traceback."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doge_fast import cli
from doge_fast.pipeline import failures, named, records, trainer
from doge_fast.pipeline.base import train_base
from tests.pipeline.stages import write_weights
from tests.pipeline.workshop import answer
from tests.pipeline.written_runs import write_proxy


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Gives `info` another body."""
    monkeypatch.delenv(cli.TRACEBACK, raising=False)

    def replace(run: Any) -> None:
        monkeypatch.setitem(cli.VERBS, "info", cli.VERBS["info"]._replace(run=run, loads=()))

    return replace


def raised_in(error: BaseException) -> None:
    raise error


class PanicException(BaseException):
    """As pyo3 raises it where tokenizers or safetensors panic."""


CASES = [
    # (error, code, what is said)
    (failures.UserError("A rule. A way out."), 2, "A rule. A way out."),
    (failures.FileFailure("x.json is damaged."), 1, "x.json is damaged."),
    (failures.Diverged("run has diverged."), 1, "run has diverged."),
    (OSError(errno.ENOSPC, "No space", "a.bin"), 1, "a.bin: No space."),
    (OSError(errno.ENOENT, "No such file", "a"), 2, "a: No such file."),
    (OSError(errno.EIO, "Input/output error"), 1, "doge-fast: Input/output error."),
]


@pytest.mark.parametrize(("error", "code", "told"), CASES, ids=lambda value: str(value)[:40])
def test_every_kind_of_failure_has_its_code_and_sentence(verb, error, code, told, capsys):
    verb(lambda config: raised_in(error))
    said = answer(["info"], capsys)
    assert said.code == code
    assert said.out == ""
    assert said.err.startswith("doge-fast: ")
    assert told in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("expected 3 got 4"), "ValueError: expected 3 got 4"),
        (PanicException("capacity overflow"), "PanicException: capacity overflow"),
        (AssertionError(), "AssertionError: AssertionError"),
        (KeyError("nothing"), "KeyError: 'nothing'"),
        (MemoryError(), "MemoryError: MemoryError"),
        # Half of a character, as a file's name of other bytes has it in what a library says.
        (RuntimeError("a\udcffb"), "RuntimeError: a\\udcffb"),
    ],
    ids=str,
)
def test_any_other_error_has_its_traceback(verb, monkeypatch, capsys, error, told):
    verb(lambda config: raised_in(error))
    said = answer(["info"], capsys)
    assert said.code == failures.WORLD
    assert said.err.startswith(f"doge-fast: {told}\nTraceback")
    assert "in raised_in" in said.err
    monkeypatch.setenv(cli.TRACEBACK, "1")
    with pytest.raises(type(error)):
        cli.main(["info"])


def test_what_a_library_says_stands_after_the_directory(tmp_path):
    """torch.save does not say which file it was writing."""
    with pytest.raises(RuntimeError) as found:
        torch.save(torch.zeros(10_000), "/dev/full")
    told = failures.ending_of(found.value, tmp_path)
    assert told.code == failures.WORLD
    assert told.sentence.startswith(f"{tmp_path}: RuntimeError: [enforce fail")


def test_a_full_standard_output_is_said():
    command = f"{sys.executable} -m doge_fast export --list > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == failures.WORLD
    assert done.stderr.startswith("doge-fast: The standard output: No space left on device.")
    assert done.stderr.count("\n") == 1


def test_a_name_that_looks_like_a_known_one_is_shown_letter_by_letter():
    for call in (
        lambda: named.check_known("domains", ["we\u200bb"], ["web"], "here"),
        lambda: records.read_weights("we\u200bb=1", domains=["web"]),
    ):
        with pytest.raises(ValueError, match=r"'we\\u200bb'"):
            call()


@pytest.mark.parametrize(
    "name", ["\x1b[1m", "a\nb", "a\rb", "\u202ex", "a\x00b", "\u2028b", "\x9b1", "\udcff", "\u3164"]
)
def test_names_that_a_terminal_would_obey(name, tmp_path, capsys):
    shown = named.visible(name)
    assert all(character.isprintable() or character == "\n" for character in shown)
    with pytest.raises(ValueError, match="characters"):
        write_weights(tmp_path / "w.json", {name: 1.0})
    said = answer(["weights", "show", name], capsys)
    assert said.code == failures.USAGE
    assert f"{shown} does not exist" in said.err or "without a NUL" in said.err
    # Letters of any script, and what joins them, are as good as others.
    named.check_visible(["naïve", "日本語", "فارسی", "می\u200cخواهم", "a b", "x/y"], "here")


def test_a_second_sigterm_ends_at_once_where_it_is_not_the_first_one_again(monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    before = signal.signal(signal.SIGTERM, failures.raise_terminated)
    try:
        with trainer.StopOnSignal(tmp_path).watching():
            for clock[0] in (100.0, 100.1, 100.0 + trainer.ECHO_SECONDS):
                signal.raise_signal(signal.SIGTERM)
            clock[0] += 0.1
            with pytest.raises(failures.Terminated):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is failures.raise_terminated
        # The first one, which no training has ended for.
        assert type(failures.late.pop()) is failures.Terminated
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_before_a_training_ends_as_ctrl_c_does(verb, capsys, number, code):
    def told(config: Any) -> list[str]:
        os.kill(os.getpid(), number)
        return ["never"]

    verb(told)
    # Ignored where the tests run under nohup.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        said = answer(["info"], capsys)
        assert (said.code, said.err.split(".")[0]) == (code, f"doge-fast: Ended by {number.name}")
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        assert answer(["info"], capsys).out == "never\n"
    finally:
        signal.signal(number, before)


def test_files_of_a_model_are_open_as_records_are(base):
    mask = 0o027
    before = os.umask(mask)
    try:
        config = base(steps=1, warmup_steps=0)
        train_base(config)
    finally:
        os.umask(before)
    files = [file for file in config.out.rglob("*") if file.is_file()]
    assert len(files) > 5
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~mask}


def test_reading_and_writing_name_the_file(tmp_path):
    with failures.writing(tmp_path / "a" / "b.txt"):
        (tmp_path / "a" / "b.txt").write_text("x")
    with pytest.raises(OSError, match=r"c\.txt"), failures.writing(tmp_path / "c.txt"):
        raise OSError(errno.ENOSPC, "x", "beside")
    with pytest.raises(failures.FileFailure, match="d cannot be read: 3"), failures.reading("d"):
        raise KeyError(3)
    with pytest.raises(OSError, match="denied") as told, failures.reading("e.parquet"):
        raise OSError(errno.EACCES, "denied")
    assert told.value.filename == "e.parquet"


def test_a_run_that_may_not_be_read_is_not_left_out_of_a_report(tmp_path, monkeypatch, capsys):
    write_proxy(tmp_path / "one")
    hidden = write_proxy(tmp_path / "two")
    listdir = os.listdir

    def refused(folder: Path) -> list[str]:
        if folder == hidden:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return listdir(folder)

    # chmod stops nobody who is root; lexists says no where it may not look.
    monkeypatch.setattr(os, "listdir", refused)
    monkeypatch.setattr(
        os.path, "lexists", lambda path: hidden not in Path(path).parents and os.path.exists(path)
    )
    said = answer(["report", str(tmp_path)], capsys)
    assert said.code == failures.WORLD
    assert f"{hidden}: Permission denied." in said.err


def test_names_of_a_record_are_shown_escaped_in_page_and_terminal(tmp_path, capsys):
    """weights.json refuses them; a config.json of elsewhere is shown as it is, but harmless."""
    names = ("a\x1b[31mb", "\u202egnp", "plain")
    tokens = dict.fromkeys(names, 100_000)
    run = write_proxy(tmp_path / "run", domains=names, tokens=tokens, is_finished=False)
    said = answer(["report", str(run)], capsys)
    assert said.code == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    for text in (said.out, said.err, page):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "a\\x1b[31mb" in page
