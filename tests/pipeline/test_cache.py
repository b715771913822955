"""The cache is found, keeps what came first, and says so when it cannot be written."""

import pytest

from doge_fast.pipeline import cache
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.domains import load_corpus
from tests.pipeline.corpora import rename


def test_two_at_once_both_find_it_packed(tmp_path):
    config = CorpusConfig(cache_dir=tmp_path)

    def make_while_another_does(folder):
        for each in (folder, tmp_path / "blocks" / "key"):
            each.mkdir()
            (each / "file").write_text("key")

    for _ in "ab":
        path = cache.made(config, "blocks", "key", make_while_another_does)
        assert (path / "file").read_text() == "key"
    assert list((tmp_path / "blocks").iterdir()) == [path]


def test_a_cache_that_cannot_be_written(tmp_path, config):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"The cache must be writable; .* Name another with cache"):
        load_corpus(rename(config, cache_dir=tmp_path / "file" / "cache"))


def test_the_cache_is_found_through_the_environment(tmp_path, config, monkeypatch):
    monkeypatch.setenv("DOGE_FAST_CACHE", str(tmp_path / "elsewhere"))
    load_corpus(rename(config, cache_dir=None))
    assert len(list((tmp_path / "elsewhere" / "blocks").iterdir())) == 3
