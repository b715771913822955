"""Builds of the CPU operators against each other."""

import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import builds
from benchmarks.problems import MATRIX, Arena
from doge_fast.kernels import implementations

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    implementations("cpu")["cpp"] is not None, reason="the compiled operators cannot run"
)


@pytest.mark.exhaustive
def test_the_working_tree_is_built_under_another_name_and_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOGE_FAST_CACHE", str(tmp_path))
    small = ["--megabytes", "4", "--rows", "3", "--dtypes", "float32", "--shapes", MATRIX]
    assert builds.main(["gram", ".", *small, "--rounds", "3"]) == 0
    heading, columns, line = capsys.readouterr().out.splitlines()
    assert heading.startswith("gram on ")
    assert "of a read" in columns
    assert line.split()[:4] == ["float32", "matrix", "3", "0.3M"]
    assert line.endswith("1.00 [1.00, 1.00]")


def test_a_build_that_is_wrong_is_not_timed() -> None:
    arena = Arena(torch.float32, 4_000_000, "cpu")
    case, calls = builds.case_of("gram", arena, 3, MATRIX, {"HEAD": "doge_fast_cpp"})
    calls["wrong"] = lambda: torch.zeros(3, 3, dtype=torch.float64)
    found = builds.measure(case, calls, rounds=3, seconds=1.0)
    assert found.keys() == {"HEAD"}
    assert found["HEAD"].over_first is not None
    assert found["HEAD"].over_first.ratio == 1
    lines = builds.format_rows(case, ["HEAD", "wrong"], found).splitlines()
    assert lines[1].endswith("WRONG")


def test_sums_of_builds_are_compared_with_copies() -> None:
    arena = Arena(torch.bfloat16, 4_000_000, "cpu")
    case, calls = builds.case_of("weighted_sum", arena, 5, MATRIX, {".": "doge_fast_cpp"})
    found = builds.measure(case, calls, rounds=3, seconds=1.0)
    assert found.keys() == {"."}
    assert "copy_" in case.yardsticks


def test_what_git_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    inside = subprocess.run(["git", "rev-parse"], capture_output=True, cwd=ROOT, check=False)
    if inside.returncode != 0:
        pytest.skip("needs a git checkout")
    assert builds.main(["gram", "no-such-commit"]) == 2
    assert "git has no csrc/ at 'no-such-commit'" in capsys.readouterr().out
