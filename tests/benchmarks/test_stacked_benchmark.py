"""The benchmark of one backward pass for all domains, on models of a few thousand parameters."""

import json

import pytest
import torch

from benchmarks import stacked, steps
from benchmarks.models import Shape
from benchmarks.stacked import FusedStep, Head
from benchmarks.steps import DogeStep, Problem

TINY = Shape(1, 2, 32, 64, 16)


def test_the_fused_step_is_the_stacked_step():
    problem = Problem(TINY, 3, 6, mode=steps.STACKED)
    alphas = []
    for side in (DogeStep, FusedStep):
        step = side(problem, "cpu")
        step()
        alphas.append(step.optimizer.alpha)
    torch.testing.assert_close(*alphas, rtol=1e-6, atol=0)


def test_both_heads_give_the_same_gradients():
    for ours, theirs in zip(
        Head(True, 3, 5, 8, 40, "cpu")(), Head(False, 3, 5, 8, 40, "cpu")(), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.exhaustive
def test_the_command_prints_and_records(tmp_path, monkeypatch, capsys):
    problem = Problem(TINY, 3, 6, mode=steps.STACKED, bar=0.001)
    monkeypatch.setattr(stacked, "CPU_PROBLEMS", (problem,))
    monkeypatch.setattr(stacked, "CPU_HEADS", ((3, 5, 8, 40),))
    out = tmp_path / "stacked.json"
    stacked.main(["--device", "cpu", "--pairs", "3", "--json", str(out)])
    printed = capsys.readouterr().out
    assert "(bar 0.001: missed), over one domain after another" in printed
    assert "fused / naive = " in printed
    record = json.loads(out.read_text())
    (row,), (head,) = record["rows"], record["heads"]
    assert row["over_plain"]["pairs"] == 3
    assert row["plain_peak_bytes"] >= row["plain_resting_bytes"] > 0
    assert row["rows_bytes"] == 3 * 4 * stacked.models.num_parameters(TINY)
    assert row["memory_verdict"] in ("met", "missed")
    assert head["fused_peak_bytes"] > 0


def test_a_wrong_head_is_not_timed(monkeypatch):
    wrong = stacked.linear_domain_losses
    monkeypatch.setattr(stacked, "linear_domain_losses", lambda *args: 2 * wrong(*args))
    with pytest.raises(RuntimeError, match="gradients of the head are off"):
        stacked.measure_head((3, 5, 8, 40), "cpu", pairs=1, with_memory=False)
