"""Which compilers there are, and the recipes by which they make a library of csrc/.

Environment:
    CXX: the C++ compiler, also the one under nvcc; else c++, g++ or clang++, the first on PATH.
    CUDA_HOME, CUDA_PATH: the CUDA toolkit; else nvcc on PATH, else /usr/local/cuda.
    TORCH_CUDA_ARCH_LIST: compute capabilities to compile for, such as "8.0;9.0+PTX".
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

TORCH_DIR = Path(torch.__file__).resolve().parent
# 2.11, the lowest torch we accept: the binary then calls nothing that a later one lacks.
_TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
_CPP_FLAGS = (
    *("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", _TORCH_TARGET),
    # No errno and no trap handlers: lets `a * b + c` and selects become vector instructions.
    *("-fno-math-errno", "-fno-trapping-math"),
)
_EMULATOR_FLAGS = (*_CPP_FLAGS, "-O1", "-DDOGE_EMULATED", "-x", "c++")
_NVCC_FLAGS = (
    *("-std=c++20", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", _TORCH_TARGET),
    # torch declares its streams only then.
    "-DUSE_CUDA",
)
# Instruction sets that the arithmetic is compiled for, worst first; one that the compiler does not
# know is left out. The CPU that loads the library settles which of them runs.
_LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "baseline": (),
        "avx2": (_AVX2 := ("-mavx2", "-mfma", "-mf16c")),
        "avx512": (_AVX512 := (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")),
        "avx512bf16": (*_AVX512, "-mavx512bf16"),
    },
}
# The kernels need bfloat16 matrix units and asynchronous copies.
LOWEST_CAPABILITY = (8, 0)
# What is compiled where no GPU says what it is: two generations, and for all later ones PTX.
USUAL_CAPABILITIES = ("8.0", "9.0+PTX")


class BuildError(RuntimeError):
    """The compiled operators cannot be had; the message is one sentence with the reason."""


class Nvcc(NamedTuple):
    """A CUDA compiler: where it is, and the release of its toolkit."""

    path: str
    release: tuple[int, int]


class Unit(NamedTuple):
    """A source file, the name of its object file, and flags for it alone."""

    source: Path
    name: str
    flags: tuple[str, ...] = ()


class Recipe(NamedTuple):
    """Compiler, flags and sources of a library."""

    compiler: tuple[str, ...]
    """The command that compiles and links, without flags."""
    flags: tuple[str, ...]
    """Of every unit."""
    link: tuple[str, ...]
    """Flags of the linker."""
    units: Callable[[], Sequence[Unit]]
    """Called when there is something to compile: it may ask the compiler what it knows."""
    identity: str
    """The compiler's version, and what else `units` depends on."""


def cpp_recipe(sources: Path) -> Recipe:
    """The recipe of a folder of C++ for CPUs.

    What stands in its folder `levels`, if it has one, is compiled once for each instruction set of
    the architecture, with DOGE_LEVEL_NAME defined; DOGE_LEVELS names them all to the others.

    Raises:
        BuildError: there is no C++ compiler.
    """
    compiler = find_compiler()

    def units() -> list[Unit]:
        levels = known_levels(compiler) if (sources / "levels").is_dir() else {}
        names = " ".join(f"DOGE_LEVEL({level})" for level in levels)
        of_levels = [
            Unit(source, f"{source.stem}-{level}", (f"-DDOGE_LEVEL_NAME={level}", *flags))
            for source in sorted(sources.glob("levels/*.cpp"))
            for level, flags in levels.items()
        ]
        # Last, since the levels take longest.
        return of_levels + [
            Unit(source, source.stem, (f"-DDOGE_LEVELS={names}",))
            for source in sorted(sources.glob("*.cpp"))
        ]

    identity = f"{_version_of(compiler)}{_LEVELS}"
    return Recipe(compiler, _CPP_FLAGS, ("-shared", "-ltorch_cpu"), units, identity)


def emulated_recipe(sources: Path) -> Recipe:
    """The recipe of a folder of CUDA sources for the CPU, for tests: each CUDA thread is a fiber.

    Raises:
        BuildError: there is no C++ compiler.
    """
    compiler = find_compiler()
    link = ("-shared", "-ltorch_cpu")
    return Recipe(
        compiler, _EMULATOR_FLAGS, link, lambda: _cuda_units(sources), _version_of(compiler)
    )


def cuda_recipe(sources: Path) -> Recipe:
    """The recipe of a folder of CUDA sources for GPUs.

    Raises:
        BuildError: there is no nvcc, it is of another CUDA than torch, or `CXX` or
            `TORCH_CUDA_ARCH_LIST` names what it cannot use.
    """
    nvcc = find_nvcc()
    check_release(nvcc)
    return nvcc_recipe(sources, nvcc, architecture_flags(capabilities(), known_to(nvcc)))


def nvcc_recipe(sources: Path, nvcc: Nvcc, flags: Sequence[str]) -> Recipe:
    """The recipe for the architectures that `flags` name.

    The CUDA runtime is linked in, so that no second toolkit need be there to run. torch's CUDA half
    is named where torch has one.

    Raises:
        BuildError: `CXX` names no compiler.
    """
    host = (f"-ccbin={shlex.join(find_compiler())}",) if os.environ.get("CXX") else ()
    names = ("torch_cpu", "torch_cuda", "c10_cuda")
    there = [f"-l{name}" for name in names if (TORCH_DIR / "lib" / f"lib{name}.so").is_file()]
    return Recipe(
        compiler=(nvcc.path, *host),
        flags=(*_NVCC_FLAGS, *flags),
        link=("-shared", "-cudart=static", *there),
        units=lambda: _cuda_units(sources),
        identity=str(nvcc.release),
    )


def _cuda_units(sources: Path) -> list[Unit]:
    return [Unit(source, source.stem) for source in sorted(sources.glob("*.cu"))]


def find_compiler() -> tuple[str, ...]:
    """The C++ compiler's command: `CXX`, which may hold arguments, else the first on PATH.

    Raises:
        BuildError: there is none.
    """
    wanted = os.environ.get("CXX", "")
    try:
        chosen = shlex.split(wanted)
    except ValueError as error:
        raise BuildError(f"CXX is {wanted!r}, which is not valid in a shell: {error}.") from error
    for name, *arguments in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        path = shutil.which(name)
        if path is not None:
            # Absolute, since ninja runs it in another folder.
            return (os.path.abspath(path), *arguments)
    if chosen:
        raise BuildError(
            f"CXX names {chosen[0]}, which is not an executable; unset it or name a C++20 compiler."
        )
    raise BuildError("No C++ compiler was found (c++, g++, clang++); install one or set CXX.")


def known_levels(compiler: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Instruction sets of this architecture that the compiler knows, each with its flags."""
    wanted = _LEVELS.get(platform.machine(), {"baseline": ()})
    return {level: flags for level, flags in wanted.items() if _knows(compiler, flags)}


def _knows(compiler: Sequence[str], flags: Sequence[str]) -> bool:
    command = [*compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return not flags or subprocess.run(command, capture_output=True, check=False).returncode == 0


def _version_of(compiler: Sequence[str]) -> str:
    try:
        return subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise BuildError(
            f"The compiler {shlex.join(compiler)} does not answer to --version ({reason}); "
            "set CXX or CUDA_HOME to another."
        ) from error


def find_nvcc() -> Nvcc:
    """The CUDA compiler of CUDA_HOME or CUDA_PATH, else on PATH, else in the usual place.

    Raises:
        BuildError: there is none, or it does not say its release.
    """
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [*(f"{home}/bin/nvcc" for home in homes), "nvcc", "/usr/local/cuda/bin/nvcc"]
    path = next(filter(None, map(shutil.which, candidates)), None)
    if path is None:
        raise BuildError(
            "No CUDA compiler was found (CUDA_HOME, CUDA_PATH, nvcc on PATH); install the CUDA "
            f"toolkit of torch's version {torch.version.cuda or ''}".rstrip()
            + "."
        )
    release = re.search(r"release (\d+)\.(\d+)", _version_of([path]))
    if release is None:
        raise BuildError(f"The CUDA compiler {path} does not say its release; is it nvcc?")
    return Nvcc(os.path.abspath(path), (int(release[1]), int(release[2])))


def check_release(nvcc: Nvcc) -> None:
    """Raise BuildError unless nvcc's CUDA is of the major version that torch was built for."""
    wanted = torch.version.cuda
    if wanted is None or int(wanted.split(".")[0]) != nvcc.release[0]:
        raise BuildError(
            f"The CUDA compiler {nvcc.path} is of CUDA {nvcc.release[0]}.{nvcc.release[1]}, torch "
            f"of CUDA {wanted}; set CUDA_HOME to a toolkit of torch's major version."
        )


def capabilities() -> tuple[str, ...]:
    """What to compile for, such as ("8.0", "9.0+PTX").

    `TORCH_CUDA_ARCH_LIST` where it is set, else the GPUs that are present, else
    `USUAL_CAPABILITIES`.

    Raises:
        BuildError: the list names something else than compute capabilities, or none from 8.0 on.
    """
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    wanted = [name for name in re.split(r"[;,\s]+", listed) if name]
    if not wanted:
        present = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
        wanted = [f"{major}.{minor}" for major, minor in sorted(set(present))]
    usable = tuple(name for name in wanted if _capability(name) >= LOWEST_CAPABILITY)
    if wanted and not usable:
        raise BuildError(
            f"The CUDA kernels need compute capability 8.0 or later, asked for were {wanted}; "
            "add one to TORCH_CUDA_ARCH_LIST."
        )
    return usable or USUAL_CAPABILITIES


def _capability(text: str) -> tuple[int, int]:
    """(9, 0) of "9.0", "9.0a" or "9.0+PTX"; we use no instructions of one GPU alone."""
    parts = re.fullmatch(r"(\d+)\.(\d)[a-z]?(\+PTX)?", text)
    if parts is None:
        raise BuildError(
            f'TORCH_CUDA_ARCH_LIST names {text!r}; name compute capabilities, as in "8.0;9.0+PTX".'
        )
    return int(parts[1]), int(parts[2])


def architecture_flags(wanted: Sequence[str], known: Sequence[int]) -> list[str]:
    """What tells nvcc to compile for the capabilities, PTX of an older one for those it cannot.

    Args:
        wanted: as from `capabilities`.
        known: what this nvcc compiles for, such as 80 and 90.

    Raises:
        BuildError: nvcc compiles for nothing as old as a wanted one.
    """
    flags = []
    for name in wanted:
        major, minor = _capability(name)
        number = 10 * major + minor
        best = max(filter(number.__ge__, known), default=None)
        if best is None:
            raise BuildError(f"The CUDA compiler knows {', '.join(map(str, known))}, not {number}.")
        # Where nvcc does not know a GPU, the driver compiles the rest of the way from PTX.
        codes = [f"sm_{best}"] if best == number else []
        codes += [f"compute_{best}"] if best < number or name.endswith("+PTX") else []
        flags.append(f"-gencode=arch=compute_{best},code=[{','.join(codes)}]")
    return flags


def known_to(nvcc: Nvcc) -> list[int]:
    """Compute capabilities that nvcc compiles for, such as 80."""
    answer = subprocess.run(
        [nvcc.path, "--list-gpu-arch"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    return [int(number) for number in re.findall(r"^compute_(\d+)$", answer, flags=re.MULTILINE)]
