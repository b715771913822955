"""Triton's kernels compiled for GPUs that need not be there: spills, wide loads, matrix units."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
NUM_PROCESSES = 2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)


Kernels = dict[str, dict[str, int]]


@pytest.mark.exhaustive
def test_kernels_load_wide_and_do_not_spill(tmp_path: Path) -> None:
    kernels = compiled(tmp_path)
    assert len(kernels) >= 80
    faults = {name: measured for name, measured in kernels.items() if not is_right(measured)}
    assert not faults
    # Four tiles of 16 rows by 16 columns: two products on the diagonal, three below it, each of
    # four instructions. The whole square takes 128.
    of_50_rows = kernels[f"gram of 50 rows, {torch.float32}, aligned, sm_80"]
    assert of_50_rows["matrix_products"] == 4 * (4 * 2 + 6 * 3)


def is_right(measured: dict[str, int]) -> bool:
    """No spills, rows in loads of 16 bytes alone, matrix units where meant, for every GPU."""
    is_wide = measured["wide_loads"] >= measured["wanted"]
    # Of reductions, of ragged blocks and of the K x K step nothing is wanted.
    is_only_wide = (
        measured["narrow_loads"] <= measured["allowed_narrow_loads"] or measured["wanted"] == 0
    )
    has_products = (measured["matrix_products"] > 0) == measured["uses_matrix_units"]
    fits = measured["shared_bytes"] <= measured["allowed_shared_bytes"]
    return not measured["stack_bytes"] and fits and is_wide and is_only_wide and has_products


def compiled(cache: Path) -> Kernels:
    """What tests/ahead_of_time.py finds; in processes of their own, that Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Nobody's cache: what was compiled before must not hide what no longer compiles.
    environment["TRITON_CACHE_DIR"] = str(cache)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ahead_of_time", str(part), str(NUM_PROCESSES)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(NUM_PROCESSES)
    ]
    found: Kernels = {}
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        found |= json.loads(output)
    return found
