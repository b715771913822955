"""Predicted steps against those that were measured, and against what the code does now."""

import json
import os
import sys
from typing import Any

import pytest
import torch

from benchmarks.predicted import H100, Work, predicted_ms
from tests import fake_cuda
from tests.pages import ROOT
from tests.processes import printed_by

RESULTS = ROOT / "benchmarks" / "results"
SIDES = {"stacked, measured": "variant_ms", "plain, measured": "baseline_ms"}


def works() -> dict[tuple[str, int], dict[str, Work]]:
    """{(model, K): {a kind of step: its work}}"""
    rows = json.loads((RESULTS / "work-stacked.json").read_text(encoding="utf-8"))["rows"]
    return {
        (row["model"], row["domains"]): {name: Work(**each) for name, each in row["work"].items()}
        for row in rows
    }


def measured_rows() -> list[dict[str, Any]]:
    (path,) = RESULTS.glob("gpu-nvidia-h100-*-steps.json")
    section = json.loads(path.read_text(encoding="utf-8"))["sections"]["steps"]
    return [row for row in section["rows"] if row["mode"] == "stacked"]


@pytest.mark.parametrize("side", SIDES)
def test_steps_of_the_record_are_predicted_within_four_percent(side):
    """All of both sizes and three numbers of domains, by one fitted number."""
    rows = measured_rows()
    assert len(rows) == 6
    for row in rows:
        work = works()[row["model"], row["domains"]][side]
        assert predicted_ms(work, H100) == pytest.approx(row[SIDES[side]], rel=0.04), row["problem"]


def test_a_hidden_gram_matrix_costs_less_and_more_of_anything_costs_more():
    work = works()["82M", 50]["16-bit rows"]
    whole = predicted_ms(work, H100)
    hidden = predicted_ms(work, H100, hidden_gram=1.0)
    assert whole - hidden == pytest.approx(1e3 * work.gram_bytes / H100.bytes_per_s)
    for name in ("flops", "num_bytes", "launches"):
        more = work._replace(**{name: 2 * getattr(work, name)})
        assert predicted_ms(more, H100) > whole


def test_the_table_is_that_of_the_record():
    """In benchmarks/README.md: what a step takes over the fastest plain one."""
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for (model, num_domains), work in works().items():
        plain = predicted_ms(work["fastest plain"], H100)
        kinds = ("stacked, measured", "compiled body", "fused head", "16-bit rows")
        cells = [f"{predicted_ms(work[kind], H100) / plain:.2f}" for kind in kinds]
        hidden = predicted_ms(work["16-bit rows"], H100, hidden_gram=0.7) / plain
        row = " | ".join([model, str(num_domains), f"{plain:.0f}", *cells, f"{hidden:.2f}"])
        assert f"| {row} |" in page


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not torch.__version__.startswith(fake_cuda.TORCH),
    reason=f"the device knows the inner interfaces of torch {fake_cuda.TORCH}x",
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a true one")
def test_the_work_of_the_record_is_that_of_the_code(tmp_path):
    """So a pass over memory that comes or goes is noticed."""
    path = tmp_path / "work.json"
    words = ("-m", "tests.fake_cuda.work", str(path), "--sizes", "82M-7")
    printed_by(sys.executable, *words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    expected = works()["82M", 7]
    for name, numbers in row["work"].items():
        assert Work(**numbers) == pytest.approx(expected[name], rel=1e-3), name
