"""A terminal has a bar, a log has lines."""

import logging
import sys

import pytest

from doge_fast.pipeline import progress


def run(caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.INFO, "doge_fast"), progress.bar(4, "base", "step") as bar:
        for loss in range(4):
            bar.set_postfix(loss=f"{loss}.000", refresh=False)
            bar.update()
    list(progress.over(range(3), "packing"))
    return [record.getMessage() for record in caplog.records]


def test_a_log_has_lines_where_there_is_no_terminal(caplog, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    said = run(caplog)
    assert said[-1].startswith("base: 4 of 4 steps, 00:00, 00:00 left, ")
    assert said[-1].endswith(", loss=3.000")


def test_a_short_run_leaves_no_line(caplog):
    assert run(caplog) == []


def test_a_terminal_has_a_bar_and_its_log_no_line(caplog, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(caplog) == []
    assert "base: 100%" in capsys.readouterr().err
