"""What is kept of an experiment tells the same story as the runs did."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import evidence
from doge_fast import cli
from doge_fast.pipeline.report import experiment_table
from tests.pipeline.written_runs import write_experiment


def test_the_kept_records_make_the_same_tables_and_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = write_experiment(tmp_path / "experiment", (-0.02, -0.021, -0.019))
    kept, again = tmp_path / "kept.json", tmp_path / "again"
    assert evidence.main(["pack", str(experiment), str(kept)]) == 0
    assert evidence.main(["unpack", str(kept), str(again)]) == 0
    capsys.readouterr()
    assert cli.main(["report", "--runs", str(again)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(experiment_table(experiment))
    assert printed.endswith(f"report: {again / 'report.html'}\n")
    assert "DoGE beats uniform" in (again / "report.html").read_text(encoding="utf-8")


def test_few_lines_of_a_training_are_kept_and_all_its_evaluations(tmp_path: Path) -> None:
    lines = [{"step": step, "kind": "train"} for step in range(1, 1001)]
    lines[500:500] = [{"step": 500, "kind": "eval"}]
    lines.append({"step": 1000, "kind": "eval"})
    thin = evidence.thinned(lines, 11)
    assert [line["step"] for line in thin if line["kind"] == "eval"] == [500, 1000]
    steps = [line["step"] for line in thin if line["kind"] == "train"]
    assert (steps[0], steps[-1], len(steps)) == (1, 1000, 11)
    assert max(b - a for a, b in pairwise(steps)) <= 101
    assert evidence.thinned(lines[:5], 11) == lines[:5]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path / "experiment", (-0.02,))
    record = json.loads(json.dumps(evidence.packed(experiment)))
    with pytest.raises(ValueError, match="exists; name a directory that does not"):
        evidence.unpack(record, experiment)
