"""Triton's kernels compiled for GPUs that need not be there: spills, wide loads, matrix units."""

import importlib.util
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import printed_by

ROOT = Path(__file__).resolve().parents[2]
NUM_PROCESSES = 2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)

# Bytes of stack that spilled registers take, for sm_80, 86, 89, 90 and 120, by version of Triton;
# what is not named has none. None: it does not compile, and plain torch takes over.
SPILLS: dict[str, dict[str, list[int | None]]] = {
    "3.4": {
        "gram of 64 rows, float32": [32, 40, 40, 40, 32],
        "gram of 128 rows, float32": [376, 376, 376, 160, 320],
        "gram of 22 rows, float64": [None, None, None, None, None],
        "reweight of 64 of 64 rows, paper": [656, 656, 656, 728, 600],
        "reweight of 32 of 64 rows, published": [960, 608, 608, 632, 632],
    },
    "3.6": {
        "gram of 128 rows, float32": [0, 0, 0, 0, 184],
        "reweight of 64 of 64 rows, paper": [736, 736, 736, 736, 608],
        "reweight of 32 of 64 rows, published": [968, 624, 624, 648, 648],
    },
    "3.7": {
        "gram of 50 rows, float32": [0, 0, 0, 0, 24],
        "gram of 64 rows, float32": [0, 0, 0, 0, 32],
        "gram of 128 rows, float32": [0, 0, 0, 0, 208],
    },
    "3.9": {"gram of 128 rows, float32": [0, 0, 0, 0, 208]},
}


@pytest.mark.exhaustive
def test_kernels_load_wide_and_do_not_spill(tmp_path):
    with ThreadPoolExecutor() as pool:
        words = [(str(part), str(NUM_PROCESSES)) for part in range(NUM_PROCESSES)]
        parts = pool.map(lambda each: ahead_of_time(tmp_path, *each), words)
    kernels = {name: found for part in parts for name, found in part.items()}
    assert len(kernels) >= 80
    assert not {name: found for name, found in kernels.items() if not found["is_right"]}
    # Four tiles of 16 rows by 16 columns: two products on the diagonal, three below it, each of
    # four instructions. The whole square takes 128.
    of_50_rows = kernels[f"gram of 50 rows, {torch.float32}, aligned, sm_80"]
    assert of_50_rows["matrix_products"] == 4 * (4 * 2 + 6 * 3)


@pytest.mark.exhaustive
def test_registers_spill_where_the_table_says(tmp_path):
    """The most that a kernel holds, for GPUs of all kinds, by the Triton that is installed."""
    import triton

    version = ".".join(triton.__version__.split(".")[:2])
    if version not in SPILLS:
        pytest.skip(f"Triton {version} is not in the table")
    found = ahead_of_time(tmp_path, "spills")
    assert "gram of 50 rows, float32" in found
    assert {name: bytes_ for name, bytes_ in found.items() if set(bytes_) != {0}} == SPILLS[version]


def ahead_of_time(cache: Path, *words: str) -> Any:
    """What the program says, in a process in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Nobody's cache: what was compiled before must not hide what no longer compiles.
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    command = (sys.executable, "-m", "tests.ahead_of_time", *words)
    return json.loads(printed_by(*command, cwd=ROOT, env=environment))
