"""The compiled operators pass their tests on other CPUs, as far as this one can stand for them."""

import os
import platform
import re
import sys
from pathlib import Path

import pytest

from doge_fast.kernels import implementations
from tests.processes import printed_by

ROOT = Path(__file__).resolve().parents[2]
CPUINFO = Path("/proc/cpuinfo")

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="CPUs are those of x86-64"),
    pytest.mark.skipif(
        implementations("cpu")["cpp"] is not None, reason="the compiled operators cannot run"
    ),
]
# What -march= takes, and what a CPU must have to stand for it, as the system calls it.
MARCHES = {
    "x86-64": (),
    "x86-64-v3": ("avx2", "fma", "f16c"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "cooperlake": ("avx512f", "avx512_bf16"),
}
ROWS = ("gram", "weighted_sum", "gram_and_sum")
TESTS = [f"tests/operators/test_{name}.py" for name in ("accumulate", *ROWS)]
# Equal terms are all rounded the same way: the most that float32 sums go astray.
TESTS.append("tests/operators/test_accuracy.py::test_many_rows_of_equal_terms_lose_nothing")


# It compiles the operators first.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("march", MARCHES)
def test_operators_pass_their_tests_on_every_cpu(march):
    flags = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text() if CPUINFO.exists() else "", re.M)
    has = set(flags[1].split()) if flags else set()
    if missing := set(MARCHES[march]) - has:
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    environment = os.environ | {"DOGE_FAST_MARCH": march, "DOGE_FAST_TEST_DEVICE": "cpu"}
    environment.pop("DOGE_FAST_BACKEND", None)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not soak", "-k", "cpp or compiled"]
    # Tests of what could not be built would be.
    assert "skipped" not in printed_by(*command, *TESTS, cwd=ROOT, env=environment)
