"""Triton's kernels compiled for GPUs that need not be there: spills, wide loads, matrix units."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUM_PROCESSES = 2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)


Kernels = dict[str, dict[str, int]]
_HALF, _FLOATS = (
    "torch.float16",
    ("torch.float32", "torch.bfloat16", "torch.float16", "torch.float64"),
)
# {kernel: bytes of a thread in local memory}: those that spill, as Triton 3.9 compiles them. All
# but the last are of ragged rows, which a flat buffer does not have.
SPILLS = {
    "gram of 8 rows, torch.float64, ragged, sm_80": 8,
    "gram of 200 rows, torch.float32, ragged, sm_80": 24,
    "gram of 200 rows, torch.bfloat16, ragged, sm_80": 176,
    "gram of 200 rows, torch.float16, ragged, sm_80": 176,
    **{
        f"weighted_sum of 7 rows, {_HALF} to {out}, ragged, {gpu}": num_bytes
        for gpu, num_bytes in (("sm_80", 112), ("sm_90", 136))
        for out in ("torch.bfloat16", "torch.float16")
    },
    **{
        f"weighted_sum of 22 rows, {_HALF} to {out}, ragged, {gpu}": num_bytes
        for gpu, num_bytes in (("sm_80", 32), ("sm_90", 16))
        for out in _FLOATS
    },
    # One number, stored once and read once.
    "weighted_sum of 10 rows, torch.bfloat16 to torch.float32, aligned, sm_90": 8,
}


@pytest.mark.exhaustive
def test_kernels_load_wide_and_do_not_spill(tmp_path: Path) -> None:
    check(compiled("some", tmp_path), 80)


@pytest.mark.soak
def test_every_kernel_loads_wide_and_does_not_spill(tmp_path: Path) -> None:
    check(compiled("all", tmp_path), 700)


def check(kernels: Kernels, least: int) -> None:
    assert len(kernels) >= least
    faults = {name: measured for name, measured in kernels.items() if not is_right(name, measured)}
    assert not faults


def is_right(name: str, measured: dict[str, int]) -> bool:
    """No spills but those known, rows in loads of 16 bytes alone, matrix units where meant."""
    is_wide = measured["wide_loads"] >= measured["wanted"]
    # Of reductions, of ragged blocks and of the K x K step nothing is wanted.
    is_only_wide = (
        measured["narrow_loads"] <= measured["allowed_narrow_loads"] or measured["wanted"] == 0
    )
    has_products = (measured["matrix_products"] > 0) == measured["uses_matrix_units"]
    has_spilled = measured["stack_bytes"] > SPILLS.get(name, 0)
    return not has_spilled and is_wide and is_only_wide and has_products


def compiled(which: str, cache: Path) -> dict[str, dict[str, int]]:
    """What tests/ahead_of_time.py finds; in processes of their own, that Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Nobody's cache: what was compiled before must not hide what no longer compiles.
    environment["TRITON_CACHE_DIR"] = str(cache)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ahead_of_time", which, str(part), str(NUM_PROCESSES)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(NUM_PROCESSES)
    ]
    found: dict[str, dict[str, int]] = {}
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        found |= json.loads(output)
    return found
