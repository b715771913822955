"""The part of the script for GPUs that runs on several of them, here with processes of a CPU."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import ranks as part
from benchmarks.gpu import report
from benchmarks.gpu.session import Row, Session


@pytest.mark.exhaustive
def test_two_ranks_are_right_and_timed():
    found = gpu.run_section(part.ranks, Session(torch.device("cpu"), quick=True), 300.0)
    assert "failure" not in found, found
    *checks, timed = found["rows"]
    assert all(row["correct"] for row in found["rows"]), found
    assert [row["operator"] for row in checks] == ["weights of ddp", "weights of fsdp2"]
    assert {row["implementation"] for row in checks} == {"2 ranks"}
    assert timed["ratio"] > 0
    text = "\n".join(report._rank_table(found["rows"]))
    assert "3 checks held." in text
    assert "| tiny | 7 | ddp, 2 ranks |" in text
    assert (report.line_of(timed) or "").startswith("tiny ddp, 2 ranks K=7: ")


def test_one_gpu_is_too_few(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rows = list(part.ranks(Session(torch.device("cuda"), quick=True)))
    assert rows == [{"skipped": "needs two GPUs"}]


def test_as_many_ranks_as_gpus(monkeypatch):
    started: list[list[str]] = []

    def launched(words: list[str], out: Path) -> Iterator[Row]:
        started.append(words)
        yield {"correct": True}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(part, "launched", launched)
    assert list(part.ranks(Session(torch.device("cuda"), quick=False))) == [{"correct": True}]
    (words,) = started
    assert words[words.index("--nproc-per-node") + 1] == "4"
    assert words[words.index("--device") + 1] == "cuda"
    assert "--quick" not in words


def checked(near: float, far: float) -> Row:
    """Of two ranks, whose weights are off by so much from those of one process."""
    alone = torch.full((2, 3), 0.5, dtype=torch.float64)
    off: Tensor = torch.tensor([near, far])[dist.get_rank()].double()
    return part.check("ddp", alone, alone + off)


@pytest.mark.parametrize(
    ("near", "far", "problem"),
    [
        (0.0, 0.0, None),
        (1e-12, 1e-12, None),
        (0.0, 1e-12, "other weights on other ranks"),
        (1e-6, 1e-6, "off by 1.0e-06"),
        (float("nan"), float("nan"), "other weights on other ranks"),
    ],
)
def test_what_is_right(ranks, near, far, problem):
    for row in ranks.run(2, checked, near, far):
        assert row["correct"] == (problem is None)
        assert row.get("problem") == problem


def test_ranks_that_fail_say_so(tmp_path):
    words = [sys.executable, "-c", "raise SystemExit('no NCCL')"]
    (row,) = part.launched(words, tmp_path / "rows.json")
    assert not row["correct"]
    assert row["problem"] == "code 1"
    assert row["lines"] == ["no NCCL"]


# As torchrun, whose ranks are in sessions of their own: asked to end, it ends them.
HANGS = """
import signal, subprocess, sys, time
lives = "import sys, time\\nwhile True: open(sys.argv[1], 'a').write('.'); time.sleep(0.05)"
child = subprocess.Popen([sys.executable, "-c", lives, sys.argv[1]], start_new_session=True)

def end(*_):
    child.kill()
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
while True:
    time.sleep(0.1)
"""


def test_ranks_that_hang_are_ended_all_of_them(tmp_path):
    life = tmp_path / "life"
    life.touch()
    (row,) = part.launched([sys.executable, "-c", HANGS, str(life)], tmp_path / "none", seconds=2.0)
    assert row["problem"] == "the ranks did not end within 2 s"
    end = life.read_text()
    time.sleep(0.3)
    assert life.read_text() == end != ""
