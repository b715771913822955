"""The script for GPUs, here on the CPU with tiny problems, and what comes of its record."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cases, gpu, prefer
from benchmarks.gpu import Session
from tests.processes import printed_by

ROOT = Path(__file__).resolve().parents[2]
CPU = Session(torch.device("cpu"), quick=True)


@pytest.mark.exhaustive
def test_everything_runs_and_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = gpu.main(["--device", "cpu", "--quick", "--out", str(tmp_path), "--commit", "abc"])
    (path,) = tmp_path.glob("gpu-*-abc.json")
    record = json.loads(path.read_text())
    # Triton's interpreter may be on, and its time means nothing.
    assert set(record["implementations"]) <= {"cpp", "torch"}
    failures = {name: each.get("failure") for name, each in record["sections"].items()}
    assert failures == dict.fromkeys(gpu.SECTIONS)
    assert not any(section["cut"] for section in record["sections"].values())
    assert all(section["rows"] for section in record["sections"].values())
    wrong = [
        row
        for name in gpu.CHECKING
        for row in record["sections"][name]["rows"]
        if not row.get("correct", "skipped" in row)
    ]
    assert wrong == []
    assert code == 0
    text = path.with_suffix(".md").read_text()
    assert all(f"## {name}\n" in text for name in gpu.SECTIONS)
    assert "Everything checked was right." in text
    printed = capsys.readouterr().out
    assert "not measured" in printed
    assert str(path) in printed


def test_something_wrong_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cases.gram
    monkeypatch.setattr(cases, "gram", lambda *args, **options: right(*args, **options) + 1)
    arguments = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--commit", "abc"]
    assert gpu.main([*arguments, "--sections", "correctness"]) == 1
    (path,) = tmp_path.glob("*.md")
    assert "NOT RIGHT" in path.read_text()
    assert "| gram | torch | float32 | 7 | matrix | off by" in path.read_text()


def failing(session: Session) -> Iterator[dict[str, Any]]:
    yield {"correct": True}
    raise RuntimeError("the second kernel failed")


def endless(session: Session) -> Iterator[dict[str, Any]]:
    while True:
        yield {"correct": True}


def test_a_failing_section_is_recorded_and_a_slow_one_is_cut() -> None:
    failed = gpu.run_section(failing, CPU, 60.0)
    assert failed["rows"] == [{"correct": True}]
    assert failed["failure"] == "RuntimeError: the second kernel failed"
    cut = gpu.run_section(endless, CPU, 0.05)
    assert cut["cut"]
    assert "failure" not in cut
    assert cut["seconds"] < 5
    assert not gpu.is_correct({"correctness": failed})
    assert gpu.is_correct({"correctness": cut})
    assert not gpu.is_correct({"correctness": {"rows": [], "cut": True}})
    assert not gpu.is_correct({"determinism": {"rows": [{"correct": True}, {"correct": False}]}})


def operator_row(**changes: Any) -> dict[str, Any]:
    row = {"operator": "gram", "label": "", "shape": "matrix", "rows": 7, "columns": 124_000_000}
    row |= {"dtype": "float32", "implementation": "cuda", "ms": 2.0, "fraction": [0.9, 0.9, 0.9]}
    return row | changes


def test_bars_speak_of_the_better_implementation_in_the_worse_shape() -> None:
    rows = [
        operator_row(),
        operator_row(implementation="triton", fraction=[0.7, 0.7, 0.7]),
        operator_row(shape="blocks", fraction=[0.88, 0.8, 0.9]),
        # Too small to be asked.
        operator_row(columns=1_000_000, shape="bias", fraction=[0.1, 0.1, 0.1]),
    ]
    steps = [
        {"domains": 7, "ratio": 1.05, "host_synchronisations": "none"},
        {"domains": 7, "ratio": 1.09, "host_synchronisations": "called a synchronizing operation"},
        {"domains": 50, "ratio": 1.9, "host_synchronisations": "none"},
        {"domains": 7, "skipped": "out of memory"},
    ]
    steps = [{"mode": "sequential", **row} for row in steps]
    steps.append({"mode": "stacked", "domains": 7, "ratio": 2.0, "host_synchronisations": "none"})
    graphs = [{"largest_difference": 0.0}]
    sections = {"operators": rows, "steps": steps, "graphs": graphs}
    found = gpu.bars({name: {"rows": each} for name, each in sections.items()})
    verdicts = [(each["value"], each["verdict"]) for each in found]
    assert verdicts == [
        (0.88, "met"),
        (None, "not measured"),
        (None, "not measured"),
        (None, "not measured"),
        (1.09, "MISSED"),
        ("called a synchronizing operation", "MISSED"),
        (0.0, "met"),
    ]


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "sees no GPU" in capsys.readouterr().err


SCRIPT = ROOT / "benchmarks" / "gpu.sh"


def help_of(script: Path, **variables: str) -> str:
    """What it prints when it is asked for help, on a PATH whose python3 need not have torch."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON"}
    return printed_by("bash", script, "--help", env=environment | variables)


def test_the_shell_script_is_one() -> None:
    assert "--quick" in help_of(SCRIPT, PYTHON=sys.executable)


def test_the_shell_script_takes_the_python_of_the_checkout(tmp_path: Path) -> None:
    for folder in ("benchmarks", "bin", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    script = Path(shutil.copy(SCRIPT, tmp_path / "benchmarks"))
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    for python in ("bin/python3", ".venv/bin/python"):
        (tmp_path / python).write_text(f'#!/bin/sh\necho "{python} $*"\n')
        (tmp_path / python).chmod(0o755)
        assert help_of(script, PATH=path) == f"{python} -m benchmarks.gpu --help\n"


def record_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    sections = {"operators": {"rows": rows}}
    return {"device": "a GPU", "architecture": "sm_90", "correct": True, "sections": sections}


def timed(operator: str, **ms: float) -> list[dict[str, Any]]:
    return [
        operator_row(operator=operator, implementation=name, ms=each) for name, each in ms.items()
    ]


ROWS = [
    *timed("gram", cuda=1.0, triton=2.0, torch=9.0),
    *timed("weighted_sum", cuda=1.2, triton=1.1, torch=9.0),
    *timed("accumulate", cuda=1.0, triton=1.5, torch=0.9),
    *timed("reweight", cuda=0.01, triton=0.02, torch=0.3),
]
FASTEST = {"gram": "cuda", "weighted_sum": "triton", "accumulate": "torch", "reweight": "cuda"}


def test_the_dispatcher_gets_what_was_faster(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"sm_80": {"gram": "triton"}, "sm_90": {"gram": "triton"}}))
    source = tmp_path / "gpu.json"
    source.write_text(json.dumps(record_of(ROWS)))
    prefer.main([str(source), "--out", str(path)])
    assert json.loads(path.read_text()) == {
        "sm_80": {"gram": "triton"},
        "sm_90": {**FASTEST, "source": "gpu.json"},
    }


def test_each_problem_counts_the_same() -> None:
    long = [{**row, "columns": 10**9, "ms": 1000 * row["ms"]} for row in timed("gram", cuda=1.1)]
    long += [{**row, "columns": 10**9, "ms": 1000 * row["ms"]} for row in timed("gram", triton=1.0)]
    # Twice as fast on one, a tenth slower on another a thousand times as long.
    assert prefer.preferences(record_of([*ROWS, *long]))["gram"] == "cuda"
    # A problem that one of them did not run compares nothing.
    alone = [operator_row(implementation="triton", columns=3, ms=1e-9)]
    assert prefer.preferences(record_of([*ROWS, *alone]))["gram"] == "cuda"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": None}, "preferences are for GPUs; the record is of 'a GPU'"),
        ({"correct": False}, "something was not right on that device"),
        ({"sections": {}}, "gram was not measured"),
    ],
)
def test_no_preference_without_a_measurement(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prefer.preferences(record_of(ROWS) | changes)
