"""The example that samples by the weights it learns: what it says of itself is so."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "domain_mixture.py"

pytestmark = pytest.mark.usefixtures("one_thread")


def run(monkeypatch, capsys, *arguments: str) -> dict[str, float]:
    """Shares of the domains in what was drawn, as printed."""
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, "--steps", "200", *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = re.findall(r"^(\w+) +(\d\.\d{3}) of the rows drawn$", capsys.readouterr().out, re.M)
    return {name: float(share) for name, share in printed}


def test_the_base_model_reads_what_the_proxy_finds(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    shares = run(monkeypatch, capsys, "--out", "whole")
    assert shares["stranger"] < shares["half"] < shares["kin"]
    assert shares["kin"] > 0.5

    # Stopped on the way, and gone on with from worker processes: the same bits.
    run(monkeypatch, capsys, "--out", "parts", "--stop-at", "30")
    assert run(monkeypatch, capsys, "--out", "parts", "--workers", "2") == shares
    whole, parts = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("whole", "parts")
    )
    assert whole["reading"] == parts["reading"]
    assert whole["step"] == parts["step"] == 200
    assert all(torch.equal(whole["model"][name], value) for name, value in parts["model"].items())

    # What was drawn in all is the mean of the weights that held, within the rows of two batches.
    history = whole["reading"]["history"]
    ends = [*(first for first, _ in history[1:]), 200]
    held = [max(0, min(end, 200) - first) for (first, _), end in zip(history, ends, strict=True)]
    kin = sum(weights[2] * steps for (_, weights), steps in zip(history, held, strict=True)) / 200
    assert shares["kin"] == pytest.approx(kin, abs=2 / 200)
    record = json.loads((tmp_path / "whole" / "weights.json").read_text(encoding="utf-8"))
    learned = {entry["name"]: entry["weight"] for entry in record["domains"]}
    assert max(learned, key=learned.__getitem__) == "kin"
