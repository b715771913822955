"""Counts of what a step costs the host, on a model of one layer."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import host_calls
from benchmarks.models import Shape

TINY = Shape(1, 2, 32, 64, 16)


def test_views_and_what_runs_inside_operators_do_not_count() -> None:
    x = torch.empty(4, 6, device="meta")

    def run() -> None:
        x.view(6, 4).t().detach()
        # On meta its shape is computed in Python.
        torch.nn.functional.gelu(x)

    assert host_calls.counts_of(run) == {"ours": 0, "calls": 1, "operators": 4, "no_views": 1}


@pytest.mark.exhaustive
def test_a_step_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(host_calls.measure.__kwdefaults__, "shape", TINY)
    out = tmp_path / "host_calls.json"
    threads = torch.get_num_threads()
    try:
        host_calls.main(["--domains", "2", "3", "--rounds", "2", "--json", str(out)])
    finally:
        torch.set_num_threads(threads)
    assert "stacked over plain" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert [row["domains"] for row in rows] == [2, 3]
    for row in rows:
        counts = row["counts"]
        assert counts["plain"]["ours"] == counts["passes"]["ours"] == 0
        assert counts["stacked"]["ours"] > 0
        assert counts["stacked"]["no_views"] > counts["plain"]["no_views"] > 0
        assert set(row["microseconds"]) == {"domain", "combine", "gram", "weighted_sum"}
    # One operator more for each domain at least, whatever the model.
    few, many = (row["counts"]["passes"]["no_views"] for row in rows)
    assert 2 * many > 3 * few - 10


def test_the_same_step_counts_the_same() -> None:
    first, again = (host_calls.counts_of(host_calls.sides(TINY, 2)["sequential"]) for _ in range(2))
    assert first == again
