"""What is said about this machine."""

import json

import pytest
import torch

from doge_fast import cli
from doge_fast.info import info, text
from doge_fast.kernels.dispatch import IMPLEMENTATIONS, OPERATORS


def test_every_device_says_what_runs_and_why_not() -> None:
    found = info()
    assert found["devices"][0]["device"] == "cpu"
    assert len(found["devices"]) == 1 + torch.cuda.device_count()
    for device in found["devices"]:
        assert tuple(device["operators"]) == OPERATORS
        assert tuple(device["implementations"]) == IMPLEMENTATIONS
    printed = text(found)
    assert "cache: " in printed
    assert "cannot run: " in printed
    assert json.loads(json.dumps(found)) == found


def test_the_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["info"]) == 0
    assert "weighted_sum" in capsys.readouterr().out
    monkeypatch.setenv("DOGE_FAST_BACKEND", "torch")
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][0]["operators"]["gram"] == "torch (forced by DOGE_FAST_BACKEND=torch)"
    assert found["environment"]["DOGE_FAST_BACKEND"] == "torch"


def test_a_forced_name_that_does_not_exist_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOGE_FAST_BACKEND", "fortran")
    assert "none: An operator's implementation is one of" in text(info())


def test_a_cache_that_is_not_there_is_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("DOGE_FAST_CACHE", f"{tmp_path}/none")
    assert info()["cache"] == {"path": f"{tmp_path}/none", "files": 0, "bytes": 0}
