"""The demonstration: a direction learned for one domain, its distance measured, one page."""

import logging

import pytest

from doge_fast.pipeline import records
from doge_fast.pipeline.config import DemoConfig
from doge_fast.pipeline.demo import MOST_RUNS, demo


@pytest.mark.exhaustive
def test_the_demo_says_how_long_it_takes_and_writes_one_page(
    tmp_path, small_corpus, blocks_cache, caplog
):
    config = DemoConfig(
        tmp_path / "demo", str(small_corpus), target="verse", steps=3, cache_dir=blocks_cache
    )
    with caplog.at_level(logging.INFO, logger="doge_fast"):
        lines = demo(config)
    told = caplog.messages
    (time,) = [place for place, line in enumerate(told) if line.startswith("about ")]
    assert time < min(place for place, line in enumerate(told) if line.startswith("run 1"))
    # What is read is said once, not for every run.
    assert sum(": read are " in line for line in told) <= 1
    page = (config.out / "temperature" / "report.html").read_text(encoding="utf-8")
    # The proxy's course is on the page of the search.
    assert "Loss over 1/T" in page
    assert "How the weights moved" in page
    search = records.read_weights(config.out / "temperature")
    assert 3 <= len(search["points"]) <= MOST_RUNS
    assert search["objective"] == {"verse": 1.0}
    assert "verse" not in records.weights_by_name(search)
    # Nothing is left to do.
    caplog.clear()
    assert demo(config) == lines
    assert not [line for line in caplog.messages if line.startswith(("about", "run "))]
