"""One library for every CPU of an architecture: what each level holds, and which one runs."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from doge_fast._layout import CSRC_DIR
from doge_fast.kernels import build, compilers, gram, implementations
from tests.laws import normalised_error

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are those of x86-64"),
    pytest.mark.skipif(
        implementations("cpu")["cpp"] is not None, reason="the compiled operators cannot run"
    ),
]
needs_binutils = pytest.mark.skipif(
    shutil.which("nm") is None or shutil.which("objdump") is None,
    reason="needs nm and objdump (binutils)",
)

WIDE = re.compile(r"%[yz]mm")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the library is linked from, by name: the arithmetic of each level, and the rest."""
    folder = tmp_path_factory.mktemp("levels")
    build.compile_into(folder, compilers.cpp_recipe(CSRC_DIR / "cpu"))
    return {path.stem: path for path in folder.glob("*.o")}


def of_levels(objects: dict[str, Path]) -> dict[str, Path]:
    return {
        name.removeprefix("level-"): path
        for name, path in objects.items()
        if name.startswith("level-")
    }


def printed(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.exhaustive
@needs_binutils
def test_no_level_leaves_a_function_to_the_linkers_choice(objects: dict[str, Path]) -> None:
    """An inline function of a library, compiled for a late CPU, must not be everybody's copy."""
    for level, path in of_levels(objects).items():
        shared = [
            line
            for line in printed("nm", "-C", path).splitlines()
            if re.search(r" [WVu] ", line) and f"doge_fast::{level}::" not in line
        ]
        assert not shared, f"{level} has {shared}"


@pytest.mark.exhaustive
@needs_binutils
def test_levels_hold_what_they_are_for(objects: dict[str, Path]) -> None:
    code = {level: printed("objdump", "-d", path) for level, path in of_levels(objects).items()}
    assert not WIDE.search(code["baseline"])
    assert "vfmadd" in code["avx2"]
    assert "%zmm" not in code["avx2"]
    if "avx512" in code:
        assert re.search(r"vfmadd\w+ps .*%zmm", code["avx512"])
        assert "vdpbf16ps" not in code["avx512"]
    if "avx512bf16" in code:
        assert re.search(r"vdpbf16ps .*%zmm", code["avx512bf16"])


@pytest.mark.exhaustive
@needs_binutils
def test_what_is_compiled_once_needs_no_late_cpu(objects: dict[str, Path]) -> None:
    """Checks, scheduling and registration run before any level is chosen."""
    for source in sorted((CSRC_DIR / "cpu").glob("*.cpp")):
        assert not WIDE.search(printed("objdump", "-d", objects[source.stem])), source.name


SCRIPT = """
import json, sys, torch
from doge_fast.kernels import accumulate, gram, weighted_sum
rows = torch.load(sys.argv[1])
found = {}
for name, block in rows.items():
    sums = weighted_sum(block, torch.arange(1, len(block) + 1).double(), implementation="cpp")
    row = torch.zeros(block.shape[1], dtype=torch.float16)
    accumulate([block[0]], [row], add=True, implementation="cpp")
    found[name] = [gram(block, implementation="cpp"), sums, row]
torch.save(found, sys.argv[2])
print(torch.ops.doge_fast_cpp.level())
"""


def run_at(level: str, rows: Path, tmp_path: Path) -> dict[str, list[torch.Tensor]]:
    out = tmp_path / f"{level}.pt"
    environment = os.environ | {"DOGE_FAST_CPU_LEVEL": level, "PYTHONPATH": str(ROOT)}
    environment.pop("DOGE_FAST_BACKEND", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, rows, out],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if "names a level" in done.stderr or "must name a level" in done.stderr:
        pytest.skip(f"this CPU does not run {level}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == level
    found: dict[str, list[torch.Tensor]] = torch.load(out)
    return found


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512", "avx512bf16"])
def test_every_level_computes_the_same(level: str, tmp_path: Path) -> None:
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
    for name, (gram_RR, sums_N, row_N) in run_at(level, rows, tmp_path).items():
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


def test_half_precision_converts_as_torch_does_at_the_baseline(tmp_path: Path) -> None:
    """All 65536 float16 numbers there and back, and float32 numbers between them."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    blocks = {
        "there and back": every[None],
        "between": (every.float() * (1 + 2.0**-11))[None],
        "beyond": torch.randn(1, 4096) * torch.logspace(-12, 8, 4096),
    }
    rows = tmp_path / "rows.pt"
    torch.save(blocks, rows)
    for name, (_, _, row_N) in run_at("baseline", rows, tmp_path).items():
        expected = blocks[name][0].to(torch.float16)
        is_number = ~expected.isnan()
        # Adding to zero makes zeros positive.
        assert torch.equal(row_N[is_number], expected[is_number]), name
        assert row_N[~is_number].isnan().all()


def test_an_unknown_level_is_refused(tmp_path: Path) -> None:
    code = (
        "import torch; from doge_fast.kernels import gram; gram(torch.ones(1, 2), "
        "implementation='cpp')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"DOGE_FAST_CPU_LEVEL": "sse9", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "must name a level that this CPU runs, one of baseline" in done.stderr
    assert "it is sse9" in done.stderr


def test_the_result_is_that_of_any_number_of_threads() -> None:
    blocks = [torch.randn(20, n) for n in (70_001, 64, 3, 9_000)]
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            found.append(json.dumps(gram(blocks, implementation="cpp").tolist()))
    finally:
        torch.set_num_threads(threads)
    assert len(set(found)) == 1
