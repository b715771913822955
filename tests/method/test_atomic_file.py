"""A file is written whole or not at all, whoever else writes, reads or kills."""

import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from doge_fast import atomic_file

unix_files = pytest.mark.skipif(
    os.name == "nt", reason="Windows has no such modes and pipes, and replaces no file that is open"
)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_text_and_bytes(tmp_path):
    path = tmp_path / "a.txt"
    for content, there in (("é\n", b"\xc3\xa9\n"), (b"\x00\r\n", b"\x00\r\n"), ("", b"")):
        atomic_file.write(path, content)
        assert path.read_bytes() == there
    assert names_in(tmp_path) == {"a.txt"}


@unix_files
def test_many_writers_and_a_reader(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("0" * 100_000)
    is_over = threading.Event()
    torn: list[int] = []

    def read() -> None:
        while not is_over.is_set():
            seen = path.read_text()
            if len(seen) != 100_000 or len(set(seen)) != 1:
                torn.append(len(seen))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: atomic_file.write(path, str(n % 10) * 100_000), range(200)))
    finally:
        is_over.set()
        reader.join()
    assert not torn
    assert names_in(tmp_path) == {"a.txt"}


@unix_files
def test_the_mode_is_that_of_a_new_file(tmp_path):
    for mask in (0o022, 0o002, 0o077):
        before = os.umask(mask)
        try:
            atomic_file.write(tmp_path / str(mask), "text")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / str(mask)).stat().st_mode) == 0o666 & ~mask


def test_what_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_file.write(path, "new")
    assert path.read_text() == "old"
    assert names_in(tmp_path) == {"a"}


def test_left_by_the_killed_is_swept_and_by_the_living_is_not(tmp_path):
    old, young, other = (
        tmp_path / name for name in (".a.12.writing", ".a.34.writing", ".b.12.writing")
    )
    for path in (old, young, other):
        path.write_text("half")
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    atomic_file.write(tmp_path / "a", "whole")
    assert names_in(tmp_path) == {"a", young.name, other.name}


def test_a_link_is_followed(tmp_path):
    (tmp_path / "store").mkdir()
    target = tmp_path / "store" / "real"
    target.write_text("old")
    (tmp_path / "link").symlink_to(target)
    atomic_file.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert target.read_text() == "new"


@unix_files
def test_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(pipe.read_text)
        atomic_file.write(pipe, "text")
        assert seen.result(timeout=10) == "text"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
