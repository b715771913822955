"""Compiles csrc/cuda on first use, or says in one sentence why it cannot.

nvcc compiles for the GPUs that are present, never at import. Where there is no GPU the same sources
compile for the CPU, each CUDA thread a fiber: an emulator for tests, as slow as it sounds.

Environment:
    CUDA_HOME, CUDA_PATH: the toolkit; else nvcc on PATH, else /usr/local/cuda.
    TORCH_CUDA_ARCH_LIST: compute capabilities to compile for, such as "8.0;9.0+PTX".
    CXX: the host compiler; else the one that nvcc finds.
    DOGE_FAST_CUDA_EMULATE: 1 to let the emulated kernels run on CPU tensors.
    DOGE_FAST_CACHE, DOGE_FAST_NO_JIT: as for the CPU operators.
"""

import functools
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from doge_fast._layout import CSRC_DIR
from doge_fast.kernels.build import (
    BuildError,
    cached_library,
    check_jit,
    check_torch_headers,
    find_compiler,
    load_library,
    run_all,
    torch_dir,
)

# Operators as compiled from csrc/cuda, for a GPU and for the emulator.
CUDA_NAMESPACE = "doge_fast_cuda"
EMULATED_NAMESPACE = "doge_fast_cuda_emulated"
SOURCES = CSRC_DIR / "cuda"

# The kernels need bfloat16 matrix units and asynchronous copies.
LOWEST_CAPABILITY = (8, 0)
# What is compiled where no GPU says what it is: two generations, and for all later ones PTX.
USUAL_CAPABILITIES = ("8.0", "9.0+PTX")
# 2.11, the lowest torch we accept: the binary then calls nothing that a later one lacks.
_TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
_NVCC_FLAGS = (
    "-std=c++20",
    "-O3",
    # Torch declares what it says of streams only then.
    "-DUSE_CUDA",
    _TORCH_TARGET,
    "-Xcompiler=-fPIC,-fvisibility=hidden",
)
_EMULATOR_FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-DDOGE_EMULATED",
    _TORCH_TARGET,
)


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler: where it is, and the release of its toolkit."""

    path: str
    release: tuple[int, int]


_loading = threading.Lock()
# By namespace: the reason why not, or None once its operators are there. One process tries once.
_outcomes: dict[str, str | None] = {}


def why_not_cuda(device: torch.device) -> str | None:
    """None if the CUDA operators run on `device`, else the reason they do not, as one sentence.

    Asking compiles them when the cache has no copy, and runs one.
    """
    if device.type == "cpu":
        return _why_not_emulated()
    if device.type != "cuda":
        return f"It drives GPUs of NVIDIA, not {device}."
    reason = _why_not_this_torch()
    if reason is None and torch.cuda.get_device_capability(device) < LOWEST_CAPABILITY:
        reason = "It needs bfloat16 matrix units, compute capability 8.0 or later."
    if reason is None:
        reason = _outcome_of(CUDA_NAMESPACE, build_cuda_library)
    return _failure_of_first_launch(device) if reason is None else reason


def load_cuda() -> None:
    """Make `torch.ops.doge_fast_cuda.*` available, compiling it when the cache has no copy.

    The first call may take a minute; later ones return at once. A failure is remembered as well.

    Raises:
        BuildError: torch has no CUDA, there is no GPU and no nvcc, or of another CUDA than torch,
            no cache to write to, a compiler error, or `DOGE_FAST_NO_JIT=1`.
    """
    reason = _why_not_this_torch() or _outcome_of(CUDA_NAMESPACE, build_cuda_library)
    if reason is not None:
        raise BuildError(reason)


def load_emulated() -> None:
    """Make `torch.ops.doge_fast_cuda_emulated.*` available: the CUDA kernels, on CPU tensors.

    Raises:
        BuildError: there is no C++ compiler, no cache to write to, or the compiler fails.
    """
    reason = _outcome_of(EMULATED_NAMESPACE, build_emulated_library)
    if reason is not None:
        raise BuildError(reason)


@functools.cache
def operators(device_type: str) -> Any:
    """The compiled operators that read the memory of "cuda" or, emulated, of "cpu".

    Raises:
        BuildError: they cannot be had.
    """
    if device_type == "cuda":
        load_cuda()
        return getattr(torch.ops, CUDA_NAMESPACE)
    load_emulated()
    return getattr(torch.ops, EMULATED_NAMESPACE)


def find_nvcc() -> Nvcc:
    """The CUDA compiler of CUDA_HOME or CUDA_PATH, else on PATH, else in the usual place.

    Raises:
        BuildError: there is none, or it does not say its release.
    """
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [*(f"{home}/bin/nvcc" for home in homes), "nvcc", "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        path = shutil.which(candidate)
        if path is not None:
            return Nvcc(path, _release_of(path))
    raise BuildError(
        "No CUDA compiler was found (CUDA_HOME, CUDA_PATH, nvcc on PATH); install the CUDA toolkit "
        f"of torch's version{f' {torch.version.cuda}' if torch.version.cuda else ''}."
    )


def _release_of(path: str) -> tuple[int, int]:
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(
            f"The CUDA compiler {path} does not answer to --version: {error}"
        ) from error
    found = re.search(r"release (\d+)\.(\d+)", answer)
    if found is None:
        raise BuildError(f"The CUDA compiler {path} does not say its release; is it nvcc?")
    return int(found[1]), int(found[2])


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
    listed = re.split(r"[;,\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip())
    wanted = [each for each in listed if each]
    if not wanted:
        present = {
            torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())
        }
        wanted = [f"{major}.{minor}" for major, minor in sorted(present)]
    for each in wanted:
        if _capability(each) is None:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST names {each!r}; name compute capabilities, as in "
                '"8.0;9.0+PTX".'
            )
    usable = tuple(each for each in wanted if (_capability(each) or (0, 0)) >= LOWEST_CAPABILITY)
    if wanted and not usable:
        raise BuildError(
            f"The CUDA kernels need compute capability 8.0 or later, asked for were {wanted}; "
            "add one to TORCH_CUDA_ARCH_LIST."
        )
    return usable or USUAL_CAPABILITIES


def _capability(text: str) -> tuple[int, int] | None:
    """(9, 0) of "9.0", "9.0a" or "9.0+PTX"; we use no instructions of one GPU alone."""
    found = re.fullmatch(r"(\d+)\.(\d)[a-z]?(\+PTX)?", text)
    return (int(found[1]), int(found[2])) if found else None


def architecture_flags(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    """What tells nvcc to compile for the capabilities, PTX of an older one for those it cannot.

    Args:
        wanted: as from `capabilities`.
        known: what this nvcc compiles for, such as "80" and "90".

    Raises:
        BuildError: nvcc compiles for nothing as old as a wanted one.
    """
    flags = []
    for each in wanted:
        capability = _capability(each) or LOWEST_CAPABILITY
        number = capability[0] * 10 + capability[1]
        if str(number) in known:
            codes = [f"sm_{number}"]
            codes += [f"compute_{number}"] if each.endswith("+PTX") else []
        else:
            # The driver compiles the rest of the way.
            older = [int(name) for name in known if int(name) < number]
            if not older:
                raise BuildError(f"The CUDA compiler knows {', '.join(known)}, not {number}.")
            number = max(older)
            codes = [f"compute_{number}"]
        flags.append(f"-gencode=arch=compute_{number},code=[{','.join(codes)}]")
    return flags


def _known_to(nvcc: Nvcc) -> tuple[str, ...]:
    """Compute capabilities that nvcc compiles for, such as "80"."""
    answer = subprocess.run(
        [nvcc.path, "--list-gpu-arch"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    return tuple(re.findall(r"^compute_(\d+)$", answer, flags=re.MULTILINE))


def build_cuda_library() -> Path:
    """Compile csrc/cuda into one shared library; a cached one is returned as is.

    Raises:
        BuildError: see `load_cuda`.
    """
    check_jit()
    check_torch_headers()
    nvcc = find_nvcc()
    check_release(nvcc)
    flags = [*_NVCC_FLAGS, *architecture_flags(capabilities(), _known_to(nvcc))]
    if os.environ.get("CXX"):
        flags.append(f"-ccbin={shlex.join(find_compiler().command)}")
    parts = [nvcc.path, str(nvcc.release), *flags]
    library: Path = cached_library(
        CUDA_NAMESPACE, parts, SOURCES, lambda scratch: compile_cuda(nvcc, flags, scratch)
    )
    return library


def compile_cuda(nvcc: Nvcc, flags: Sequence[str], scratch: Path) -> Path:
    """Compile csrc/cuda with `flags` in the folder `scratch`, and link it against torch.

    The CUDA runtime is linked in, so that no second toolkit need be there to run. Torch's CUDA half
    is named where torch has one.

    Raises:
        BuildError: nvcc fails.
    """
    compiler = [nvcc.path, *flags, f"-isystem={torch_dir() / 'include'}"]
    objects = _compile_all(compiler, sorted(SOURCES.glob("*.cu")), scratch)
    lib = torch_dir() / "lib"
    torch_libraries = [
        f"-l{name}"
        for name in ("torch_cpu", "torch_cuda", "c10_cuda")
        if (lib / f"lib{name}.so").is_file()
    ]
    library = scratch / "library.so"
    link = ["-shared", "-cudart=static", *objects, f"-L{lib}", *torch_libraries, "-o", str(library)]
    host = [flag for flag in flags if flag.startswith("-ccbin=")]
    run_all([[nvcc.path, *host, *link]])
    return library


def build_emulated_library() -> Path:
    """Compile csrc/cuda for the CPU, threads as fibers; a cached library is returned as is.

    Raises:
        BuildError: see `load_emulated`.
    """
    check_jit()
    check_torch_headers()
    compiler = find_compiler()
    command = [*compiler.command, *_EMULATOR_FLAGS, f"-isystem{torch_dir() / 'include'}"]

    def compile_into(scratch: Path) -> Path:
        sources = sorted(SOURCES.glob("*.cu"))
        objects = _compile_all([*command, "-x", "c++"], sources, scratch)
        library = scratch / "library.so"
        link = ["-shared", *objects, f"-L{torch_dir() / 'lib'}", "-ltorch_cpu", "-o", str(library)]
        run_all([[*compiler.command, *link]])
        return library

    parts = [compiler.version, shlex.join(command)]
    library: Path = cached_library(EMULATED_NAMESPACE, parts, SOURCES, compile_into)
    return library


def _compile_all(compiler: Sequence[str], sources: Sequence[Path], scratch: Path) -> list[str]:
    objects = [str(scratch / f"{source.stem}.o") for source in sources]
    run_all(
        [
            [*compiler, "-c", str(source), "-o", target]
            for source, target in zip(sources, objects, strict=True)
        ]
    )
    return objects


def _why_not_this_torch() -> str | None:
    if torch.version.hip is not None:
        return (
            "It drives GPUs of NVIDIA; this torch is built for those of AMD, which Triton drives."
        )
    if torch.version.cuda is None:
        return f"Torch {torch.__version__} was built without CUDA; install one of its CUDA wheels."
    if not torch.cuda.is_available():
        return "Torch finds no GPU of NVIDIA, or no driver for it; nvidia-smi tells which."
    return None


def _why_not_emulated() -> str | None:
    if os.environ.get("DOGE_FAST_CUDA_EMULATE", "0") in ("", "0"):
        return (
            "It drives GPUs of NVIDIA; DOGE_FAST_CUDA_EMULATE=1 runs its kernels on a CPU, slowly, "
            "to test them."
        )
    return _outcome_of(EMULATED_NAMESPACE, build_emulated_library)


def _outcome_of(namespace: str, build: Callable[[], Path]) -> str | None:
    with _loading:
        if namespace not in _outcomes:
            _outcomes[namespace] = _try_to_load(namespace, build)
        return _outcomes[namespace]


def _try_to_load(namespace: str, build: Callable[[], Path]) -> str | None:
    # A second copy of the same registrations would end the process.
    if hasattr(getattr(torch.ops, namespace), "gram"):
        return None
    try:
        load_library(build)
    except BuildError as error:
        return str(error)
    return None


def _failure_of_first_launch(device: torch.device) -> str | None:
    """What a first small launch says: a driver that is too old shows only there."""
    source, target = torch.ones(8, device=device), torch.empty(8, device=device)
    try:
        operators("cuda").accumulate([source], [target], False)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"Its first kernel failed: {(str(error).splitlines() or ['no reason given'])[0]}"
    return None
