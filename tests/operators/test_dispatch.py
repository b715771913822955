"""Which implementation runs, how one is forced, and what is said when one cannot."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from doge_fast import kernels
from doge_fast.info import info
from doge_fast.kernels import build, chosen, dispatch, gram, implementations
from doge_fast.kernels.dispatch import IMPLEMENTATIONS
from tests.packages import needs_to_build
from tests.processes import printed_by

GRADS_KN = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
GRAM_KK = torch.tensor([[5.0, 11.0], [11.0, 25.0]], dtype=torch.float64)

# Two calls of each operator in a fresh process; prints what was warned of and what was chosen.
SCRIPT = """
import json, os, sys, warnings
import torch
import doge_fast.kernels as kernels
from doge_fast.kernels import build, dispatch
# Importing compiles nothing, and pulls in neither the pipeline nor triton.
assert not build.unavailable_reason.cache_info().currsize and not dispatch._reasons
heavy = {"transformers", "datasets", "accelerate", "triton", "matplotlib", "setuptools"}
assert not heavy & set(sys.modules)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        rows = torch.ones(2, 3)
        assert kernels.gram(rows).tolist() == [[3, 3], [3, 3]]
        assert kernels.weighted_sum(rows, torch.ones(2)).tolist() == [2, 2, 2]
        kernels.accumulate([torch.ones(3)], [rows[0]], add=True)
        assert rows[0].tolist() == [2, 2, 2]
reason = kernels.implementations("cpu")["cpp"]
# It is remembered.
del os.environ["CXX"]
assert kernels.implementations("cpu")["cpp"] == reason
print(json.dumps({
    "warnings": [[w.category.__name__, str(w.message)] for w in caught],
    "chosen": kernels.chosen("cpu"),
    "reason": reason,
}))
"""


def in_fresh_process(tmp_path: Path, **environment: str) -> dict[str, Any]:
    """What SCRIPT prints, with an empty cache, these variables and no compiler."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DOGE_FAST_") and name != "TRITON_INTERPRET"
    }
    clean |= {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "DOGE_FAST_CACHE": str(tmp_path),
        "CXX": "/nonexistent",
    }
    printed = printed_by(sys.executable, "-c", SCRIPT, env=clean | environment)
    assert not list(tmp_path.iterdir())
    result: dict[str, Any] = json.loads(printed)
    return result


@needs_to_build
def test_a_missing_compiler_is_said_once(tmp_path):
    result = in_fresh_process(tmp_path)
    assert result["chosen"] == "torch"
    [(category, message)] = result["warnings"]
    assert category == "RuntimeWarning"
    assert "cpp cannot run" in message
    assert "/nonexistent" in message
    assert "/nonexistent" in result["reason"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("variable", ["DOGE_FAST_NO_JIT=1", "DOGE_FAST_BACKEND=torch"])
def test_plain_torch_that_was_asked_for_is_not_warned_of(tmp_path, variable):
    name, value = variable.split("=")
    result = in_fresh_process(tmp_path, **{name: value})
    assert result["chosen"] == "torch"
    assert result["warnings"] == []


def test_the_compiled_code_is_chosen_on_a_cpu_where_it_can_run():
    can_run = implementations("cpu")["cpp"] is None
    assert chosen("cpu") == ("cpp" if can_run else "torch")


@pytest.mark.parametrize(("is_built", "best"), [(True, "cuda"), (False, "torch")])
def test_gradients_take_the_cuda_kernel_where_it_is_there(is_built, best, monkeypatch):
    """Nobody waits for nvcc because of it."""
    monkeypatch.setattr(build, "is_built", lambda name: is_built and name == build.CUDA)
    order = dispatch.preference("accumulate", torch.device("cuda"))
    assert order[0] == best
    assert set(order) == {"cuda", "torch"}
    for operator in ("gram", "weighted_sum"):
        order = dispatch.preference(operator, torch.device("cuda"))
        assert order == ("triton", "cuda", "torch")


def of_gram() -> dict[str, Any]:
    """What `doge-fast info` says of the Gram matrix on the CPU."""
    cpu = info()["devices"][0]
    choice: dict[str, Any] = cpu["operators"]["gram"]
    return choice


def test_the_environment_forces(monkeypatch):
    monkeypatch.setenv("DOGE_FAST_BACKEND", "torch")
    assert chosen("cpu") == "torch"
    assert torch.equal(gram(GRADS_KN), GRAM_KK)
    assert "forced by DOGE_FAST_BACKEND=torch" in of_gram()["reason"]
    monkeypatch.setenv("DOGE_FAST_BACKEND", "auto")
    assert "the first that can run" in of_gram()["reason"]


def test_an_unknown_name_is_refused(monkeypatch):
    message = "cpp, cuda, triton, torch; got 'fortran'"
    with pytest.raises(ValueError, match=message):
        gram(GRADS_KN, implementation="fortran")
    monkeypatch.setenv("DOGE_FAST_BACKEND", "fortran")
    with pytest.raises(ValueError, match=message):
        gram(GRADS_KN)
    assert of_gram()["implementation"] is None
    # The argument overrides the environment.
    assert torch.equal(gram(GRADS_KN, implementation="torch"), GRAM_KK)


def test_a_forced_implementation_does_not_give_way(monkeypatch):
    monkeypatch.setattr(
        "doge_fast.kernels.dispatch._reasons", {("cpp", torch.device("cpu")): "It rains."}
    )
    for key in list(dispatch.runs):
        monkeypatch.delitem(dispatch.runs, key)
    message = r"'cpp' was forced and cannot run on cpu: It rains\. .* 'auto'"
    with pytest.raises(RuntimeError, match=message):
        gram(GRADS_KN, implementation="cpp")


def test_an_implementation_that_an_operator_lacks(monkeypatch):
    """Named in a call it is refused; named for all operators, plain torch takes its place."""
    with pytest.raises(ValueError, match="implementations triton, torch; got 'cpp'"):
        dispatch.choose("segment_sum", torch.device("cpu"), "cpp")
    monkeypatch.setenv("DOGE_FAST_BACKEND", "cpp")
    assert chosen("cpu", "segment_sum") == "torch"
    assert dispatch.preference("segment_sum", torch.device("cpu")) == ("torch",)


def test_every_operator_is_written_in_plain_torch_and_exported():
    """And the file of an operator does not hide the function of the same name."""
    for name, operator in dispatch.OPERATORS.items():
        assert "torch" in operator.implementations
        assert set(operator.implementations) <= set(IMPLEMENTATIONS)
        if operator.implementations["torch"].__module__ == f"doge_fast.kernels.{name}":
            importlib.import_module(f"doge_fast.kernels.{name}")
            assert callable(getattr(kernels, name))


def test_without_cuda_the_best_other_implementation_runs():
    gram_of = dispatch.OPERATORS["gram"].implementations
    assert dispatch.choose_without_cuda("gram", torch.device("cpu")) is gram_of[chosen("cpu")]


def test_a_first_kernel_is_tried_on_a_gpu_alone_and_its_error_is_the_reason(monkeypatch):
    def fail(blocks: Any) -> None:
        raise OSError("no driver\nsecond line")

    cpu, gram_of = torch.device("cpu"), dispatch.OPERATORS["gram"].implementations
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert dispatch._failure_of_the_first_kernel("torch", cpu) is None
    monkeypatch.setitem(gram_of, "torch", fail)
    reason = dispatch._failure_of_the_first_kernel("torch", cpu)
    assert reason == "Its first kernel failed: OSError: no driver"
    monkeypatch.setattr(dispatch, "_reasons", {})
    monkeypatch.setattr(dispatch, "_failure_of_the_first_kernel", lambda *_: "tried")
    assert "tried" not in implementations("cpu").values()
