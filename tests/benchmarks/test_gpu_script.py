"""The script for GPUs, here on the CPU with tiny problems."""

import os
import sys
import time

import pytest
import torch

from benchmarks import cases
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import bars, job
from benchmarks.gpu.session import Row, Session
from tests.packages import needs_to_build
from tests.pages import ROOT
from tests.processes import printed_by

QUICK = ["--device", "cpu", "--quick", "--commit", "abc"]


@needs_to_build
@pytest.mark.soak
def test_every_part_runs_and_is_right(tmp_path):
    script, python = ROOT / "benchmarks" / "gpu.sh", os.environ | {"PYTHON": sys.executable}
    printed = printed_by("bash", script, *QUICK, "--out", str(tmp_path), env=python)
    assert "everything checked was right" in printed


@pytest.mark.exhaustive
def test_wrong_operator_is_the_exit_code(tmp_path, monkeypatch):
    correctness = [*QUICK, "--out", str(tmp_path), "correctness"]
    assert gpu.main(correctness) == bars.ALL_WELL
    right = cases.gram
    monkeypatch.setattr(cases, "gram", lambda *args, **options: right(*args, **options) + 1)
    assert gpu.main(correctness) == bars.WRONG


def test_check_that_fails_or_does_not_end_is_not_right():
    def failing(session):
        yield {"correct": True}
        raise RuntimeError("the second kernel failed")

    def endless(session):
        while True:
            yield {"correct": True}
            time.sleep(0.01)

    session = Session(torch.device("cpu"), quick=True)
    assert not bars.is_correct({"steps": gpu.run_section(failing, session, 60.0)})
    cut = gpu.run_section(endless, session, 0.05)
    assert not bars.is_correct({"correctness": cut})
    # A table may be shorter.
    assert bars.is_correct({"steps": cut})


def test_the_worst_size_of_the_anchor_is_judged():
    rows = [{"domains": 7, "ratio": ratio} for ratio in (1.01, 1.03)]
    found = bars.bars({"anchor": {"rows": [*rows, {"domains": 50, "ratio": 1.09}]}}, on_gpu=True)
    verdicts = {bar["bar"].split(",")[1].strip(): (bar["value"], bar["verdict"]) for bar in found}
    assert verdicts["K = 7: at most 1.02 of the fastest plain one"] == (1.03, "MISSED")
    assert verdicts["K = 50: at most 1.1 of the fastest plain one"] == (1.09, "met")
    assert verdicts["K = 22: at most 1.05 of the fastest plain one"] == (None, "not measured")


def test_the_job_draws_the_tokens_that_it_is_not_given(tmp_path):
    path = tmp_path / "tokens.pt"
    job.draw(path, 2000)
    found = torch.load(path)
    assert len(found) == job.DRAWN_DOMAINS
    assert all(each.max() < 50_304 and len(each) == 2000 for each in found.values())
    # The later the domain, the more of its words come back after seven places.
    repeats = [(each[7:] == each[:-7]).double().mean() for each in found.values()]
    assert repeats[-1] > 2 * repeats[0]
    blocks = job.Blocks(found["domain0"], 32)
    assert len(blocks) == 2000 // 32
    assert blocks[1]["input_ids"].tolist() == found["domain0"][32:64].tolist()


def test_bar_is_asked_of_the_worst_size_and_judged_on_a_gpu_alone():
    def step(ratio: float, model: str) -> Row:
        row = {"model": model, "mode": "sequential", "domains": 7, "ratio": ratio}
        return row | {"host_synchronisations": "none"}

    sections = {"steps": {"rows": [step(1.02, "82M"), step(1.06, "124M")]}}
    on_gpu, on_cpu = (bars.bars(sections, on_gpu=each) for each in (True, False))
    assert (1.06, "MISSED") in [(bar["value"], bar["verdict"]) for bar in on_gpu]
    assert bars.exit_code({"correct": True, "bars": on_gpu}) == bars.BARS_MISSED
    assert bars.exit_code({"correct": True, "bars": on_cpu}) == bars.ALL_WELL
