"""The compiled operators on other CPUs than this one, as far as it can stand for them."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from doge_fast.kernels import implementations
from tests.laws import normalised_error

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

SCRIPT = """
import sys, torch
from doge_fast.kernels import accumulate, gram, weighted_sum
rows = torch.load(sys.argv[1])
found = {}
for name, block in rows.items():
    sums = weighted_sum(block, torch.arange(1, len(block) + 1).double(), implementation="cpp")
    row = torch.zeros(block.shape[1], dtype=torch.float16)
    accumulate([block[0]], [row], add=True, implementation="cpp")
    found[name] = [gram(block, implementation="cpp"), sums, row]
torch.save(found, sys.argv[2])
"""


def run_at(march: str, rows: Path, tmp_path: Path) -> dict[str, list[torch.Tensor]]:
    """{name: [Gram matrix, weighted sum, row]}, compiled for a CPU."""
    flags = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text() if CPUINFO.exists() else "", re.M)
    has = set(flags[1].split()) if flags else set()
    if missing := set(MARCHES[march]) - has:
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    out = tmp_path / f"{march}.pt"
    environment = os.environ | {"DOGE_FAST_MARCH": march, "PYTHONPATH": str(ROOT)}
    environment.pop("DOGE_FAST_BACKEND", None)
    command = [sys.executable, "-c", SCRIPT, rows, out]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[torch.Tensor]] = torch.load(out)
    return found


@pytest.mark.parametrize("march", MARCHES)
def test_every_cpu_computes_the_same(march: str, tmp_path: Path) -> None:
    blocks = {}
    # At once, a panel and a block more, several tiles of many, in groups, and copied together.
    for num_rows in (1, 7, 8, 22, 97, 130):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            block = torch.randn(num_rows, 1237).to(dtype)
            # Below the normal numbers of float16, and where it rounds up to infinity.
            block[0, :4] = torch.tensor([6e-8, 3e-5, 65519.0, -1e-8]).to(dtype)
            blocks[f"{num_rows} {dtype}"] = block
    # Equal terms are all rounded the same way: the most that float32 sums go astray.
    equal_N = torch.full((1 << 22,), 1.876224398612976)
    blocks |= {f"{num_rows} equal float32": equal_N.expand(num_rows, -1) for num_rows in (2, 22)}
    rows = tmp_path / "rows.pt"
    torch.save(blocks, rows)
    for name, (gram_RR, sums_N, row_N) in run_at(march, rows, tmp_path).items():
        if "equal" in name:
            exact = equal_N.double().square().sum()
            assert (gram_RR - exact).abs().max() <= 1e-6 * exact, name
            continue
        block = blocks[name].double()
        unit = 1e-14 if "float64" in name else 1e-6
        assert normalised_error(gram_RR, block @ block.T) <= unit, name
        weights_R = torch.arange(1, len(block) + 1).double()
        exact_N, size_N = weights_R @ block, weights_R @ block.abs()
        rounding = torch.finfo(sums_N.dtype).eps
        bound_N = (rounding + 32 * 6e-8) * size_N + torch.finfo(sums_N.dtype).smallest_normal
        is_finite_N = sums_N.isfinite()
        assert ((sums_N - exact_N).abs() <= bound_N)[is_finite_N].all(), name
        assert torch.equal(row_N, blocks[name][0].to(torch.float16)), name


def test_half_precision_converts_as_torch_does_where_no_instruction_does(tmp_path: Path) -> None:
    """All 65536 float16 numbers there and back, and float32 numbers between them."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    blocks = {
        "there and back": every[None],
        "between": (every.float() * (1 + 2.0**-11))[None],
        "beyond": torch.randn(1, 4096) * torch.logspace(-12, 8, 4096),
    }
    rows = tmp_path / "rows.pt"
    torch.save(blocks, rows)
    for name, (_, _, row_N) in run_at("x86-64", rows, tmp_path).items():
        expected = blocks[name][0].to(torch.float16)
        is_number = ~expected.isnan()
        # Adding to zero makes zeros positive.
        assert torch.equal(row_N[is_number], expected[is_number]), name
        assert row_N[~is_number].isnan().all()
