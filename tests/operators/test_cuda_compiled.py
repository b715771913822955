"""The CUDA kernels compiled for GPUs that need not be there.

Spills, wide loads, matrix units; and by arithmetic on what was compiled, how long the products of a
warp wait for each other, how many bytes are on their way to a multiprocessor, and how long it idles
at the end. `pytest -rP` on this file prints these figures.
"""

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from doge_fast.kernels import build, compilers
from doge_fast.kernels.gram import cuda_ as gram_cuda
from tests.multiprocessors import (
    GPUS,
    chain_cycles,
    equal_sizes,
    lost_at_the_end,
    program_sizes,
)

SOURCES = build.CSRC_DIR / "cuda"
pytestmark = pytest.mark.exhaustive

# Compute capabilities: A100, H100 and H200, and for later ones PTX.
CAPABILITIES = ("8.0", "9.0+PTX")
ARCHITECTURES = tuple(GPUS)
TOOLS = ("cuobjdump", "nvdisasm")
# Rows of float32 that are multiplied pair by pair.
PAIRS = range(1, 9)
WIDE_LOAD = re.compile(r"LDG(STS)?\.\S*\b128\b")


@dataclass
class Kernel:
    """What the assembler made of one kernel for one GPU."""

    registers: int = -1
    stack_bytes: int = -1
    # What the kernel declares itself.
    shared_bytes: int = -1
    instructions: Counter[str] = field(default_factory=Counter)
    # Addresses and texts.
    code: list[tuple[int, str]] = field(default_factory=list)


def tool_folders() -> list[str]:
    """Where NVIDIA's disassembler may be: the toolkit, PATH, the package triton."""
    try:
        folders = [str(Path(compilers.find_nvcc().path).resolve().parent)]
    except compilers.BuildError:
        return []
    triton = importlib.util.find_spec("triton")
    for root in (triton.submodule_search_locations or []) if triton else []:
        folders.append(f"{root}/backends/nvidia/bin")
    return [*folders, os.environ.get("PATH", "")]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of csrc/cuda, as a machine without a GPU compiles it."""
    try:
        nvcc = compilers.find_nvcc()
        build._check_possible()
    except compilers.BuildError as error:
        pytest.skip(str(error))
    flags = compilers.architecture_flags(CAPABILITIES, compilers.known_to(nvcc))
    recipe = compilers.nvcc_recipe(SOURCES, nvcc, flags)
    return build.compile_into(tmp_path_factory.mktemp("cuda"), recipe)


@pytest.fixture(scope="module")
def kernels(library: Path) -> dict[tuple[str, str], Kernel]:
    """By architecture and mangled name."""
    path = os.pathsep.join(tool_folders())
    found = {name: shutil.which(name, path=path) for name in TOOLS}
    if missing := [name for name, place in found.items() if place is None]:
        pytest.skip(f"{' and '.join(missing)} are neither in the toolkit nor with Triton")
    environment = os.environ | {"PATH": path}

    def lines(option: str) -> list[str]:
        command = [str(found["cuobjdump"]), option, str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return done.stdout.splitlines()

    kernels: dict[tuple[str, str], Kernel] = {}
    architecture, current = "", Kernel()
    for line in lines("--dump-resource-usage"):
        if match := re.match(r"arch = (sm_\d+)", line):
            architecture = match[1]
        elif match := re.match(r" *Function (\S+):", line):
            current = kernels[architecture, match[1]] = Kernel()
        elif match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", line):
            current.registers, current.stack_bytes, shared = map(int, match.groups())
            # From sm_90 on with the 1024 bytes that the system keeps for itself, if there are any.
            current.shared_bytes = max(0, shared - (1024 if architecture == "sm_90" else 0))
    for line in lines("--dump-sass"):
        if match := re.match(r"arch = (sm_\d+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            current = kernels[architecture, match[1]]
        elif match := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+((?:@\S+\s+)?([A-Z][\w.]*).*?);", line):
            name = match[3]
            current.code.append((int(match[1], 16), match[2]))
            current.instructions["wide loads"] += bool(WIDE_LOAD.match(name))
            current.instructions["copies"] += name.startswith("LDGSTS")
            current.instructions["matrix products"] += name.startswith(("HMMA", "DMMA"))
            current.instructions["local memory"] += name.startswith(("LDL", "STL"))
    return kernels


def named(kernels: dict[tuple[str, str], Kernel], name: str) -> dict[tuple[str, str], Kernel]:
    """Those of a kernel template: its length precedes a name in C++'s mangling."""
    return {key: kernel for key, kernel in kernels.items() if f"{len(name)}{name}" in key[1]}


def test_there_is_every_kernel_for_every_gpu(kernels: dict[tuple[str, str], Kernel]) -> None:
    numbers = {
        # Dtypes of gradients and rows, stored or added.
        "accumulate": 4 * 4 * 2,
        "weighted_sum": 4 * 4,
        "gram_pairs": len(PAIRS),
        # Groups of 8 rows, up to 64; of float32 from 9 rows on.
        "gram_tiles": 3 * 8 + 7,
        "gram_panels": 4,
        "gram_reduce": 4,
    }
    for name, number in numbers.items():
        for architecture in ARCHITECTURES:
            of_gpu = [key for key in named(kernels, name) if key[0] == architecture]
            assert len(of_gpu) == number, (name, architecture)
    assert len(kernels) == len(ARCHITECTURES) * sum(numbers.values())


def test_nothing_spills(kernels: dict[tuple[str, str], Kernel]) -> None:
    faults = {
        key: kernel
        for key, kernel in kernels.items()
        if kernel.stack_bytes != 0 or kernel.instructions["local memory"]
    }
    assert not faults


def test_rows_are_loaded_16_bytes_at_a_time(kernels: dict[tuple[str, str], Kernel]) -> None:
    for num_rows in PAIRS:
        every = named(kernels, "gram_pairs")
        mine = {key: value for key, value in every.items() if f"ILi{num_rows}E" in key[1]}
        assert len(mine) == len(ARCHITECTURES)
        for key, kernel in mine.items():
            assert kernel.instructions["wide loads"] >= num_rows, key
    for name in ("gram_tiles", "gram_panels", "weighted_sum", "accumulate"):
        for key, kernel in named(kernels, name).items():
            assert kernel.instructions["wide loads"] > 0, key
    for name in ("gram_tiles", "gram_panels"):
        for key, kernel in named(kernels, name).items():
            assert kernel.instructions["copies"] > 0, key


def test_many_rows_are_multiplied_by_matrix_units(kernels: dict[tuple[str, str], Kernel]) -> None:
    for name in ("gram_tiles", "gram_panels"):
        for key, kernel in named(kernels, name).items():
            assert kernel.instructions["matrix products"] > 0, key
    for key, kernel in named(kernels, "gram_pairs").items():
        assert kernel.instructions["matrix products"] == 0, key


# Of the storage types that are asked about, in the mangled names.
MANGLED = {"float32": "f", "bfloat16": "8Bfloat16"}
ITEMSIZE = {"float32": 4, "bfloat16": 2}
# Products of 8 or 16 columns of a piece of two groups: three of split numbers at two columns each.
PHASES = {"float32": 6, "bfloat16": 2}


@dataclass(frozen=True)
class Launch:
    """What csrc/cuda/gram.cu launches for some rows, in its terms."""

    kernel: str
    template: str
    num_threads: int
    dynamic_bytes: int
    # Of a block, on their way while it waits.
    bytes_ahead: int
    # Matrix products of a warp, from one wait to the next.
    products: int
    entries: int
    max_programs: int

    def found(self, kernels: dict[tuple[str, str], Kernel], architecture: str) -> Kernel:
        [kernel] = [
            value
            for key, value in named(kernels, self.kernel).items()
            if key[0] == architecture and f"I{self.template}E" in plain(key[1])
        ]
        return kernel

    def blocks(self, kernels: dict[tuple[str, str], Kernel], architecture: str) -> int:
        """Those that a multiprocessor runs at once."""
        kernel = self.found(kernels, architecture)
        shared = kernel.shared_bytes + self.dynamic_bytes
        return GPUS[architecture].blocks_of(kernel.registers, shared, self.num_threads)


def plain(mangled: str) -> str:
    """A mangled name without the namespaces of its arguments."""
    return re.sub(r"NS\d*_(\d+[A-Z][a-z]+\d+)E", r"\1", mangled)


def constant(name: str, file: str) -> int:
    """An integer of csrc/cuda; of the two that the emulator and a GPU have, the GPU's."""
    text = (SOURCES / file).read_text(encoding="utf-8")
    found = re.findall(rf"constexpr int\w* {name} = ([^;]+);", text)
    base, _, shift = found[-1].partition("<<")
    return int(base) << int(shift or 0)


def launch_of(num_rows: int, dtype: str) -> Launch:
    most = constant("MAX_PROGRAMS", "gram.cu")
    most_of_many = constant("MAX_PROGRAMS_OF_MANY_ROWS", "gram.cu")
    most_entries = constant("MAX_PARTIAL_ENTRIES", "gram.cu")
    few = constant("FEW_ENTRIES", "gram.cu")
    if dtype == "float32" and num_rows <= len(PAIRS):
        threads = constant("PAIRS_THREADS", "gram_pairs.cuh")
        entries = num_rows * (num_rows + 1) // 2
        return Launch(
            "gram_pairs", f"Li{num_rows}", threads, 0, num_rows * 16 * threads, 0, entries, most
        )
    phases = PHASES[dtype]
    if num_rows <= 64:
        groups = -(-num_rows // 8)
        steps = {1: 8, 2: 4, 3: 2, 4: 2}.get(groups, 1)
        stages = 4 if 5 <= groups < 8 else 3
        tall = (groups + 1) // 2
        tiles = tall * (tall - 1) + groups
        entries = tiles * 4 * 32
        return Launch(
            "gram_tiles",
            f"{MANGLED[dtype]}Li{groups}",
            128,
            stages * steps * groups * 128 * 16,
            # A warp has 64 bytes of each row in a piece.
            (stages - 1) * steps * num_rows * 64 * 4,
            tiles * steps * phases,
            entries,
            min(most if entries <= few else most_of_many, most_entries // entries),
        )
    assert num_rows <= 128
    stages = constant("STAGES", "gram_panels.cuh")
    return Launch(
        "gram_panels",
        MANGLED[dtype],
        256,
        stages * 128 * 64,
        (stages - 1) * num_rows * 64,
        2 * 8 * phases,
        128 * 128,
        most_entries // (128 * 128),
    )


def test_pieces_are_copied_as_the_model_says(kernels: dict[tuple[str, str], Kernel]) -> None:
    """The bytes ahead, of which a block's code starts one stage in each of its copies."""
    for num_rows, dtype, architecture in itertools.product(
        (8, 16, 24, 32, 40, 48, 56, 64), MANGLED, ARCHITECTURES
    ):
        launch = launch_of(num_rows, dtype)
        if launch.kernel == "gram_tiles":
            of_stage = {8: 8, 16: 8, 24: 6, 32: 8}.get(num_rows, num_rows // 8)
            copies = launch.found(kernels, architecture).instructions["copies"]
            assert copies > 0
            assert copies % of_stage == 0, (num_rows, dtype, architecture)


# Before products had several sums or several tiles went side by side, a warp waited 2480 cycles for
# those of a stage of float32 panels and 1204 of bfloat16, 968 and 613 at 22 float32 and 7 bfloat16
# rows, 2234 at 64 float32 rows.
@pytest.mark.parametrize(
    ("num_rows", "dtype", "most"),
    [
        (7, "bfloat16", 250),
        (22, "bfloat16", 250),
        (50, "bfloat16", 600),
        (128, "bfloat16", 830),
        (16, "float32", 320),
        (22, "float32", 400),
        (32, "float32", 600),
        (48, "float32", 660),
        (50, "float32", 650),
        (64, "float32", 720),
        (128, "float32", 1100),
    ],
)
def test_products_do_not_wait_in_one_chain(
    num_rows: int, dtype: str, most: int, kernels: dict[tuple[str, str], Kernel]
) -> None:
    launch = launch_of(num_rows, dtype)
    for architecture in ARCHITECTURES:
        code = launch.found(kernels, architecture).code
        cycles = chain_cycles(code, launch.products)
        print(f"{num_rows} {dtype} rows, {architecture}: {cycles} cycles for {launch.products}")
        assert cycles <= most


# 4.3 TB/s of an H200 are 32.6 bytes a nanosecond and multiprocessor: 40 to 64 KB in all that memory
# takes to answer.
LEAST_AHEAD = 48 << 10


@pytest.mark.parametrize("num_rows", [7, 22, 50, 128])
@pytest.mark.parametrize("dtype", MANGLED)
def test_enough_bytes_are_on_their_way(
    num_rows: int, dtype: str, kernels: dict[tuple[str, str], Kernel]
) -> None:
    launch = launch_of(num_rows, dtype)
    for architecture in ARCHITECTURES:
        blocks = launch.blocks(kernels, architecture)
        ahead = blocks * launch.bytes_ahead
        registers = launch.found(kernels, architecture).registers
        print(
            f"{num_rows} {dtype} rows, {architecture}: {registers} registers, {blocks} blocks, "
            f"{ahead >> 10} KiB ahead"
        )
        assert ahead >= LEAST_AHEAD


def test_the_other_operators_have_enough_on_their_way_too(
    kernels: dict[tuple[str, str], Kernel],
) -> None:
    ahead = {
        # Two rows' 16 columns of a thread.
        ("weighted_sum", "IffE"): 256 * 16 * 4 * constant("ROWS_AHEAD", "weighted_sum.cu"),
        ("weighted_sum", "I8Bfloat16fE"): 256 * 16 * 2 * constant("ROWS_AHEAD", "weighted_sum.cu"),
        # Sixteen elements of a thread, read and, when added, of the row too.
        ("accumulate", "IffLb0EE"): 256 * 16 * 4,
        ("accumulate", "IffLb1EE"): 256 * 16 * 8,
        ("accumulate", "I8Bfloat16fLb0EE"): 256 * 16 * 2,
        ("accumulate", "I8Bfloat16fLb1EE"): 256 * 16 * 6,
    }
    for (name, template), of_block in ahead.items():
        every = named(kernels, name)
        mine = {key[0]: every[key] for key in every if template in plain(key[1])}
        assert sorted(mine) == sorted(ARCHITECTURES)
        for architecture, kernel in mine.items():
            blocks = GPUS[architecture].blocks_of(kernel.registers, kernel.shared_bytes, 256)
            print(f"{name} {template}, {architecture}: {blocks * of_block >> 10} KiB ahead")
            assert blocks * of_block >= LEAST_AHEAD, (name, template, architecture)


@pytest.mark.parametrize("num_columns", [82_000_000, 124_000_000])
@pytest.mark.parametrize("num_rows", [7, 22, 50, 128])
@pytest.mark.parametrize("dtype", MANGLED)
def test_multiprocessors_end_together(
    num_rows: int, dtype: str, num_columns: int, kernels: dict[tuple[str, str], Kernel]
) -> None:
    """Of the time of a launch, at most 3 % is lost while its last programs end."""
    launch = launch_of(num_rows, dtype)
    chunks = -(-num_columns // gram_cuda.CHUNK_COLUMNS)
    for architecture, gpu in GPUS.items():
        places = gpu.multiprocessors * launch.blocks(kernels, architecture)
        lost = lost_at_the_end(program_sizes(chunks, launch.max_programs), places)
        equal = lost_at_the_end(equal_sizes(chunks, launch.max_programs), places)
        print(
            f"{num_rows} {dtype} rows, {num_columns} columns, {architecture}: "
            f"{places} at once, {lost:.1%} lost; with equal programs {equal:.1%}"
        )
        assert lost <= 0.03


def test_later_gpus_find_ptx(library: Path) -> None:
    path = os.pathsep.join(tool_folders())
    cuobjdump = shutil.which("cuobjdump", path=path)
    if cuobjdump is None:
        pytest.skip("cuobjdump is neither in the toolkit nor with Triton")
    command = [cuobjdump, "--list-ptx", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    num_sources = len(list(SOURCES.glob("*.cu")))
    assert len(re.findall(r"sm_90\.ptx", listed)) == num_sources


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (binutils)")
def test_the_library_asks_torch_for_its_stable_abi_alone(library: Path) -> None:
    """And brings the CUDA runtime along: one file runs with whatever torch there is."""
    command = ["nm", "-D", "--undefined-only", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].split("@")[0] for line in listed.splitlines()}
    assert any(name.startswith("aoti_torch_") for name in names)
    assert not [name for name in names if name.startswith("cuda")]
    unstable = re.compile(r"_ZNK?\d*(2at|3c10|5torch)")
    assert not [name for name in names if unstable.match(name)]
