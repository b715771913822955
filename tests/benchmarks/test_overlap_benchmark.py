"""The benchmark of rows that travel while ranks compute, on layers that do not sleep."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from benchmarks import overlap
from doge_fast.distributed import data_parallel
from tests.ranks import Ranks

SHARES = (0.5, 2.0)


def quick() -> list[dict[str, Any]]:
    """On a rank, which may have been given other work before and is given more."""
    before = dist.all_to_all_single, data_parallel.all_gather
    overlap.SLEEP_SECONDS, overlap.NUM_LAYERS, overlap.WIDTH = 0.0, 1, 16
    found = overlap.times_of_rank(3, SHARES, 3)
    assert (dist.all_to_all_single, data_parallel.all_gather) == before
    return found


def test_the_command_prints_and_records(
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(
        num_ranks: int, num_domains: int, shares: Any, *, pairs: int
    ) -> list[dict[str, Any]]:
        return overlap.rows_of(ranks.run(num_ranks, quick), num_ranks, num_domains)

    monkeypatch.setattr(overlap, "measure", measured)
    path = tmp_path / "overlap.json"
    overlap.main(["--ranks", "2", "--domains", "3", "--pairs", "3", "--json", str(path)])
    assert capsys.readouterr().out.count("2 ranks, K=3") == len(SHARES)
    rows = json.loads(path.read_text())["rows"]
    assert [row["share"] for row in rows] == list(SHARES)
    slower, faster = (row["megabytes_per_second"] for row in reversed(rows))
    assert faster > slower
    assert all(row["ahead_over_after"]["pairs"] == 3 for row in rows)
