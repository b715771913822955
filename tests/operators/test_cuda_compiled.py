"""The CUDA kernels compiled for GPUs that need not be there: spills, wide loads, matrix units."""

import importlib
import importlib.util
import itertools
import os
import re
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from doge_fast.kernels import build
from tests.processes import printed_by

SOURCES = build.CSRC_DIR / "cuda"
pytestmark = pytest.mark.exhaustive

# Compute capabilities: A100, H100 and H200, and for later ones PTX.
ARCHITECTURE_FLAGS = (
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
)
ARCHITECTURES = ("sm_80", "sm_90")
TOOLS = ("cuobjdump", "nvdisasm")
# Rows of float32 that are multiplied pair by pair.
PAIRS = range(1, 9)
WIDE_LOAD = re.compile(r"LDG(STS)?\.\S*\b128\b")


@dataclass
class Kernel:
    """What the assembler made of one kernel for one GPU."""

    stack_bytes: int = -1
    instructions: Counter[str] = field(default_factory=Counter)


def tool_folders() -> list[str]:
    """Where NVIDIA's disassembler may be: the toolkit, PATH, the package triton."""
    nvcc = shutil.which("nvcc")
    folders = [str(Path(nvcc).resolve().parent)] if nvcc else []
    triton = importlib.util.find_spec("triton")
    for root in (triton.submodule_search_locations or []) if triton else []:
        folders.append(f"{root}/backends/nvidia/bin")
    return [*folders, os.environ.get("PATH", "")]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of csrc/cuda, with the builder's flags, as far as a machine without a GPU links it."""
    if (nvcc := shutil.which("nvcc")) is None:
        pytest.skip("nvcc is not on PATH")
    path = tmp_path_factory.mktemp("cuda") / "library.so"
    torch_dir = Path(torch.__file__).parent
    command = [nvcc, *build.CUDA_FLAGS, *ARCHITECTURE_FLAGS, "-Xcompiler=-fPIC", "-shared"]
    command += ["--threads=0", "-isystem", str(torch_dir / "include"), f"-L{torch_dir / 'lib'}"]
    command += ["-ltorch_cpu", "-o", str(path), *map(str, sorted(SOURCES.glob("*.cu")))]
    printed_by(*command)
    return path


@pytest.fixture(scope="module")
def kernels(library: Path) -> dict[tuple[str, str], Kernel]:
    """By architecture and mangled name."""
    path = os.pathsep.join(tool_folders())
    found = {name: shutil.which(name, path=path) for name in TOOLS}
    if missing := [name for name, place in found.items() if place is None]:
        pytest.skip(f"{' and '.join(missing)} are neither in the toolkit nor with Triton")
    environment = os.environ | {"PATH": path}

    def lines(option: str) -> list[str]:
        return printed_by(str(found["cuobjdump"]), option, library, env=environment).splitlines()

    kernels: dict[tuple[str, str], Kernel] = {}
    architecture, current = "", Kernel()
    for line in lines("--dump-resource-usage"):
        if match := re.match(r"arch = (sm_\d+)", line):
            architecture = match[1]
        elif match := re.match(r" *Function (\S+):", line):
            current = kernels[architecture, match[1]] = Kernel()
        elif match := re.search(r"STACK:(\d+)", line):
            current.stack_bytes = int(match[1])
    for line in lines("--dump-sass"):
        if match := re.match(r"arch = (sm_\d+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            current = kernels[architecture, match[1]]
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([A-Z][\w.]*)", line):
            name = match[1]
            current.instructions["wide loads"] += bool(WIDE_LOAD.match(name))
            current.instructions["copies"] += name.startswith("LDGSTS")
            current.instructions["matrix products"] += name.startswith(("HMMA", "DMMA"))
            current.instructions["local memory"] += name.startswith(("LDL", "STL"))
    return kernels


def named(kernels: dict[tuple[str, str], Kernel], name: str) -> dict[tuple[str, str], Kernel]:
    """Those of a kernel template: its length precedes a name in C++'s mangling."""
    found = {key: kernel for key, kernel in kernels.items() if f"{len(name)}{name}" in key[1]}
    assert {architecture for architecture, _ in found} == set(ARCHITECTURES), name
    return found


def test_nothing_spills(kernels):
    faults = {
        key: kernel
        for key, kernel in kernels.items()
        if kernel.stack_bytes != 0 or kernel.instructions["local memory"]
    }
    assert not faults


def test_rows_are_loaded_16_bytes_at_a_time(kernels):
    # With a metric there are second moments to load beside the rows.
    for num_rows, is_scaled in itertools.product(PAIRS, (0, 1)):
        every = named(kernels, "gram_pairs")
        template = f"ILi{num_rows}ELb{is_scaled}E"
        mine = {key: value for key, value in every.items() if template in key[1]}
        assert len(mine) == len(ARCHITECTURES)
        for key, kernel in mine.items():
            assert kernel.instructions["wide loads"] >= num_rows + is_scaled, key
    for name in ("gram_tiles", "weighted_sum", "accumulate"):
        for key, kernel in named(kernels, name).items():
            assert kernel.instructions["wide loads"] > 0, key
    for key, kernel in named(kernels, "gram_tiles").items():
        assert kernel.instructions["copies"] > 0, key


def test_many_rows_are_multiplied_by_matrix_units(kernels):
    for key, kernel in named(kernels, "gram_tiles").items():
        assert kernel.instructions["matrix products"] > 0, key
    for key, kernel in named(kernels, "gram_pairs").items():
        assert kernel.instructions["matrix products"] == 0, key


def test_later_gpus_find_ptx(library):
    cuobjdump = shutil.which("cuobjdump", path=os.pathsep.join(tool_folders()))
    if cuobjdump is None:
        pytest.skip("cuobjdump is neither in the toolkit nor with Triton")
    listed = printed_by(cuobjdump, "--list-ptx", library)
    num_sources = len(list(SOURCES.glob("*.cu")))
    assert len(re.findall(r"sm_90\.ptx", listed)) == num_sources


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (binutils)")
def test_the_library_asks_torch_for_its_stable_abi_alone(library):
    """One file runs with whatever torch there is, from the oldest that is accepted."""
    listed = printed_by("nm", "-D", "--undefined-only", library)
    names = {line.split()[-1].split("@")[0] for line in listed.splitlines()}
    assert any(name.startswith("aoti_torch_") for name in names)
    unstable = re.compile(r"_ZNK?\d*(2at|3c10|5torch)")
    assert not [name for name in names if unstable.match(name)]
