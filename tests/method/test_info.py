"""What is said about this machine."""

import json

import pytest
import torch

from doge_fast import cli
from doge_fast.info import info, text
from doge_fast.kernels.dispatch import IMPLEMENTATIONS, OPERATORS


def test_every_device_says_what_runs_and_why_not():
    found = info()
    assert found["devices"][0]["device"] == "cpu"
    assert len(found["devices"]) == 1 + torch.cuda.device_count()
    for device in found["devices"]:
        assert list(device["operators"]) == list(OPERATORS)
        assert tuple(device["implementations"]) == IMPLEMENTATIONS
    printed = text(found)
    assert "cache: " in printed
    reasons = [
        reason
        for device in found["devices"]
        for reason in device["implementations"].values()
        if reason is not None
    ]
    assert printed.count("cannot run: ") == len(reasons)
    assert json.loads(json.dumps(found)) == found


def test_the_verb(capsys, monkeypatch):
    pytest.importorskip("transformers", reason="the command line needs the pipeline's packages")
    assert cli.main(["info"]) == 0
    assert "weighted_sum" in capsys.readouterr().out
    monkeypatch.setenv("DOGE_FAST_BACKEND", "torch")
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][0]["operators"]["gram"] == {
        "implementation": "torch",
        "reason": "forced by DOGE_FAST_BACKEND=torch",
    }
    assert found["environment"]["DOGE_FAST_BACKEND"] == "torch"


def test_variables_are_shown_a_wrong_one_too(monkeypatch):
    monkeypatch.setenv("DOGE_FAST_BACKEND", "fortran")
    monkeypatch.setenv("DOGE_FAST_CACHE", "/none")
    found = info()
    assert found["devices"][0]["operators"]["gram"]["implementation"] is None
    assert "nothing  The operator gram has the implementations" in text(found)
    assert found["cache"] == "/none"
