"""The cache is found, keeps what came first, and says so when it cannot be written."""

import errno
from dataclasses import replace

import pytest
from filelock import FileLock

from doge_fast.pipeline import cache, records
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.domains import load_corpus


def test_two_at_once_both_find_it_packed(tmp_path):
    config = CorpusConfig(cache_dir=tmp_path)

    def make_while_another_does(folder):
        for each in (folder, tmp_path / "blocks" / "key"):
            each.mkdir()
            (each / "file").write_text("key")
        records.write_manifest(tmp_path / "blocks" / "key")

    for _ in "ab":
        path = cache.made(config, "blocks", "key", make_while_another_does)
        assert (path / "file").read_text() == "key"
    assert list((tmp_path / "blocks").iterdir()) == [path]


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "Error writing bytes to file"),
        Exception("No space left on device (os error 28)"),
    ],
    ids=["Arrow", "tokenizers"],
)
def test_a_disk_that_is_full_of_the_cache(tmp_path, failure):
    """Neither says which file it was writing."""

    def make(_):
        raise failure

    told = r"The cache must be writable; .*blocks is not: .*No space left on device\. Name another"
    with pytest.raises(ValueError, match=told):
        cache.made(CorpusConfig(cache_dir=tmp_path), "blocks", "key", make)


def test_the_cache_is_found_through_the_environment(tmp_path, config, monkeypatch):
    monkeypatch.setenv("DOGE_FAST_CACHE", str(tmp_path / "elsewhere"))
    load_corpus(replace(config, cache_dir=None))
    assert len(list((tmp_path / "elsewhere" / "blocks").iterdir())) == 3


def test_what_no_longer_agrees_with_its_manifest_is_made_again(tmp_path, caplog):
    config = CorpusConfig(cache_dir=tmp_path)

    def make(folder):
        folder.mkdir()
        (folder / "file").write_bytes(bytes(100))

    path = cache.made(config, "blocks", "key", make)
    with (path / "file").open("rb") as reader:
        for damage in (
            lambda: (path / "file").write_bytes(bytes(99)),
            lambda: (path / "file").write_bytes(bytes(99) + b"x"),
            lambda: (path / "more").touch(),
            lambda: (path / "file").unlink(),
            lambda: (path / "manifest.json").unlink(),
            lambda: (path / "manifest.json").write_text("{"),
        ):
            caplog.clear()
            damage()
            assert cache.made(config, "blocks", "key", make) == path
            assert (path / "file").read_bytes() == bytes(100)
            assert "key is damaged, or without its manifest" in caplog.text
            cache.made(config, "blocks", "key", lambda _: pytest.fail("it is whole"))
        # Whoever has it open reads on.
        reader.read()
    assert [entry.name for entry in (tmp_path / "blocks").iterdir()] == ["key"]


def test_what_killed_processes_left_is_removed(tmp_path):
    config = CorpusConfig(cache_dir=tmp_path)
    for left in ("dead", "live"):
        (tmp_path / "blocks" / f".making-blocks-{left}-x1" / "0").mkdir(parents=True)
    (tmp_path / "locks").mkdir()
    with FileLock(tmp_path / "locks" / "blocks-live"):
        cache.made(config, "blocks", "key", lambda path: path.mkdir())
    left = {entry.name for entry in (tmp_path / "blocks").iterdir()}
    assert left == {"key", ".making-blocks-live-x1"}
