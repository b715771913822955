"""A terminal has a bar, a log has lines."""

import logging
import sys

import pytest

from doge_fast import cli
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
    *_, last = (line for line in run(caplog) if line.startswith("base"))
    assert last.startswith("base: 4 of 4 steps, 00:00, 00:00 left, ")
    assert last.endswith(", loss=3.000")


def test_what_is_logged_beside_a_bar_clears_it_without_a_line_of_its_own(caplog):
    """The command line takes every bar away before it writes a line; that writes nothing here."""
    cli._log_visibly()
    log = logging.getLogger("doge_fast")
    with (
        caplog.at_level(logging.INFO, "doge_fast"),
        progress.bar(4, "outer", "step"),
        progress.bar(4, "inner", "step"),
    ):
        log.info("told")
    assert caplog.messages == ["told"]


def test_a_short_run_leaves_no_line(caplog):
    assert run(caplog) == []


def test_a_terminal_has_a_bar_and_its_log_no_line(caplog, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(caplog) == []
    assert "base: 100%" in capsys.readouterr().err
