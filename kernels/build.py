"""Compiles csrc/ on first use, or says in one sentence why it cannot.

`torch.utils.cpp_extension.load` builds in a process of its own and in a fresh directory. That is
then renamed into our cache, under a hash of sources, flags, compiler and CPU; torch's cache has one
directory for all of them. Other processes wait at a lock that ends with its holder; torch's
lock file outlives a killed build, and processes wait for it forever.

torch's builder reads CXX, CC, CUDA_HOME, MAX_JOBS and TORCH_CUDA_ARCH_LIST. Beside these:

- DOGE_FAST_CACHE, TORCH_EXTENSIONS_DIR: the cache directory; the first that is set.
- DOGE_FAST_NO_JIT: 1 to run without compiled code.
- DOGE_FAST_MARCH: the CPU to compile for, a value of -march=; default: this machine's.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Beside kernels/, in a checkout as in a wheel.
CSRC_DIR = Path(__file__).resolve().parents[1] / "csrc"

# The libraries, as torch.ops names them.
CPP, CUDA, EMULATED = "doge_fast_cpp", "doge_fast_cuda", "doge_fast_cuda_emulated"
# The extra 'doge-fast[kernels]'.
PACKAGES = ("ninja", "filelock", "setuptools")
# A minute for the CPU, several for a GPU; an overloaded machine takes many times that.
_TIMEOUT_S = 1800.0
# 2.11, the lowest torch we accept: the binary then runs with later versions, too.
_COMMON_FLAGS = ("-std=c++20", "-DTORCH_TARGET_VERSION=0x020b000000000000")
# Without errno and traps `a * b + c` and selects become vector instructions.
_FAST = ("-O2", "-fno-math-errno", "-fno-trapping-math")
_CXX_FLAGS = (*_COMMON_FLAGS, *_FAST, "-fvisibility=hidden")
# torch declares its streams with USE_CUDA only.
CUDA_FLAGS = (*_COMMON_FLAGS, "-O3", "-Xcompiler=-fvisibility=hidden", "-DUSE_CUDA")
# The CUDA sources for a CPU, to test them: each thread is a fiber.
_EMULATOR_FLAGS = (*_CXX_FLAGS, "-O1", "-DDOGE_EMULATED", "-x", "c++")
# The CUDA kernels need bfloat16 matrix units and asynchronous copies.
LOWEST_CAPABILITY = (8, 0)

# The program of the building process.
_BUILD = """
import json, sys
from torch.utils.cpp_extension import load
load(**json.loads(sys.argv[1]))
"""
_loading = threading.Lock()


class BuildError(RuntimeError):
    """The compiled operators are unavailable; the message is one sentence with the reason."""


class Recipe(NamedTuple):
    """The inputs of a build."""

    sources: Path
    """A folder; its parent holds shared headers."""
    flags: Sequence[str]
    identity: str
    """The compiler's version and target, as text."""
    with_cuda: bool = False
    architectures: str = ""
    """TORCH_CUDA_ARCH_LIST; empty: the GPUs that torch sees."""

    def key(self) -> str:
        """A hash of everything that determines the library."""
        digest = hashlib.sha256(f"{torch.__version__} {platform.system()} {self[1:]}".encode())
        for file in sorted([*self.sources.parent.glob("*.h"), *self.sources.glob("*.*")]):
            digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
        return digest.hexdigest()[:20]


def cuda_operators(device_type: str) -> Any:
    """The CUDA operators for "cuda", or the emulated ones for "cpu"; their library is loaded."""
    return getattr(torch.ops, CUDA if device_type == "cuda" else EMULATED)


@functools.cache
def unavailable_reason(name: str) -> str | None:
    """Build and load one of the three libraries; None, or the reason of a failure."""
    with _loading:
        try:
            # A second copy of the same registrations would end the process.
            if not _is_loaded(name):
                load_library(name, recipe_of(name))
        except BuildError as error:
            return str(error)
    return None


def is_built(name: str) -> bool:
    """Whether one of the three libraries is loaded or in the cache; compiles nothing."""
    try:
        return _is_loaded(name) or _path_of(name, recipe_of(name)).is_file()
    except (BuildError, OSError):
        return False


def _is_loaded(name: str) -> bool:
    return hasattr(getattr(torch.ops, name), "gram")


def load_library(name: str, recipe: Recipe) -> Path:
    """Load a library and return its path; build it first if the cache has no intact copy.

    Raises:
        BuildError: it cannot be built or loaded, or other users can write to it.
    """
    library = _path_of(name, recipe)
    cache = library.parent.parent
    try:
        if not _is_intact(library):
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(cache)
            _build(library, recipe)
        for path in (cache, library.parent, library):
            _check_private(path)
    except (OSError, NotImplementedError) as error:
        raise BuildError(
            f"The cache {cache} cannot be written or locked ({error}); set DOGE_FAST_CACHE to "
            "another directory."
        ) from error
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BuildError(f"A library was compiled but does not load: {error}") from error
    return library


def recipe_of(name: str) -> Recipe:
    """The recipe of one of the three libraries; BuildError without a suitable compiler."""
    if os.environ.get("DOGE_FAST_NO_JIT", "0") not in ("", "0"):
        raise BuildError("DOGE_FAST_NO_JIT is set; unset it to let doge_fast compile operators.")
    if missing := [package for package in PACKAGES if importlib.util.find_spec(package) is None]:
        raise BuildError(
            f"To compile operators, {', '.join(missing)} must be installed; "
            "pip install 'doge-fast[kernels]' brings what is missing."
        )
    if name == CUDA:
        return _cuda_recipe(CSRC_DIR / "cuda")
    if name == EMULATED:
        return Recipe(CSRC_DIR / "cuda", _EMULATOR_FLAGS, _macros(_EMULATOR_FLAGS))
    # Generic tuning: for some CPUs GCC splits multiply-adds, which changes the last bits. Compilers
    # have no common option for other architectures than x86-64, and need none.
    march = f"-march={os.environ.get('DOGE_FAST_MARCH') or 'native'}"
    of_cpu = (march, "-mtune=generic") if platform.machine() == "x86_64" else ()
    flags = (*_CXX_FLAGS, *of_cpu)
    return Recipe(CSRC_DIR / "cpu", flags, _macros(flags))


def cxx() -> str:
    """The C++ compiler; torch's builder takes one program without arguments."""
    return os.environ.get("CXX") or "c++"


def _macros(flags: Sequence[str]) -> str:
    """The C++ compiler's predefined macros: its version and the CPU's features."""
    path = shutil.which(cxx())
    if path is None:
        raise BuildError(
            f"No C++ compiler was found: {cxx()} is no program; install one, or set CXX to the "
            "path of a C++20 compiler, without arguments."
        )
    return path + _output_of(path, *flags, "-dM", "-E", "-x", "c++", os.devnull)


def _cuda_recipe(sources: Path) -> Recipe:
    # Not at the top: the import searches for a CUDA toolkit.
    from torch.utils.cpp_extension import CUDA_HOME

    nvcc = f"{CUDA_HOME}/bin/nvcc"
    if not os.access(nvcc, os.X_OK):
        raise BuildError(
            "No CUDA compiler was found (CUDA_HOME, CUDA_PATH, nvcc on PATH, /usr/local/cuda); "
            f"install the CUDA toolkit of torch's version {torch.version.cuda}."
        )
    version = _output_of(nvcc, "--version")
    if f"release {str(torch.version.cuda).split('.')[0]}." not in version:
        raise BuildError(
            f"{nvcc} has another major version than torch's CUDA {torch.version.cuda}; set "
            "CUDA_HOME to a toolkit of that version."
        )
    present = {*map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))}
    listed = needed_architectures(os.environ.get("TORCH_CUDA_ARCH_LIST", ""), present)
    # CC is the compiler under nvcc.
    identity = f"{nvcc} {version} {os.environ.get('CC')} {sorted(present)}"
    return Recipe(sources, CUDA_FLAGS, identity, with_cuda=True, architectures=listed)


def needed_architectures(listed: str, present: Collection[tuple[int, int]]) -> str:
    """The entries of TORCH_CUDA_ARCH_LIST that the present GPUs can run; each takes a minute.

    They are of the GPU's generation or have PTX. A list with names such as "Hopper" is returned
    unchanged.
    """
    names = [name for name in re.split(r"[;,\s]+", listed) if name]
    if not present or not all(re.fullmatch(r"\d+\.\da?(\+PTX)?", name) for name in names):
        return listed

    def serves(name: str, gpu: tuple[int, int]) -> bool:
        major, minor = map(int, re.findall(r"\d+", name))
        is_close = major == gpu[0] or name.endswith("+PTX")
        return is_close and LOWEST_CAPABILITY <= (major, minor) <= gpu

    return ";".join(name for name in names if any(serves(name, gpu) for gpu in present))


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).splitlines()
        raise BuildError(
            f"The compiler {command[0]} does not work ({lines[0] if lines else 'no output'}); "
            "set CXX or CUDA_HOME to another."
        ) from error


def _path_of(name: str, recipe: Recipe) -> Path:
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR")
    is_ours = os.environ.get("DOGE_FAST_CACHE") or not extensions
    cache = cache_dir() if is_ours else Path(str(extensions)).absolute() / "doge_fast"
    return cache / f"{name}-{recipe.key()}" / f"{name}.so"


def cache_dir() -> Path:
    """The cache directory: `DOGE_FAST_CACHE`, else doge_fast in `XDG_CACHE_HOME` or ~/.cache.

    Raises:
        BuildError: this user has no home directory.
    """
    if chosen := os.environ.get("DOGE_FAST_CACHE"):
        return Path(chosen).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # The results without a home directory, and with an empty HOME.
    if caches in ("~/.cache", "/.cache"):
        raise BuildError("This user has no home directory for a cache; set DOGE_FAST_CACHE.")
    return Path(caches) / "doge_fast"


def _check_private(path: Path) -> None:
    """Refuse a path that another user can write to."""
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"{path} belongs to another user, or others can write to it, and its code runs in "
            "this process; set DOGE_FAST_CACHE to a directory of your own, or `chmod go-w` it."
        )


def _is_intact(library: Path) -> bool:
    """Whether the library is intact, by the digest in the file beside it."""
    try:
        return library.with_suffix(".sha256").read_text("utf-8") == _digest_of(library)
    except (OSError, UnicodeError):
        return False


def _digest_of(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _build(library: Path, recipe: Recipe) -> None:
    """Build in a fresh directory under a lock, then rename it into its place."""
    from filelock import FileLock

    folder, cache = library.parent, library.parent.parent
    prefix = f".{folder.name}-"
    with FileLock(cache / f"{folder.name}.lock", timeout=_TIMEOUT_S):
        if _is_intact(library):
            return
        # A damaged library, by a full disk for example, and the directories of killed builds.
        for left in [folder, *cache.glob(f"{prefix}*")]:
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=prefix, dir=cache, ignore_cleanup_errors=True
        ) as scratch:
            built = Path(scratch, library.name)
            _compile(built, recipe)
            # Others must not write to it, whatever the umask.
            built.chmod(0o755)
            built.with_suffix(".sha256").write_text(_digest_of(built), "utf-8")
            Path(scratch).rename(folder)


def _compile(library: Path, recipe: Recipe) -> None:
    import ninja

    sources = sorted(str(f) for f in recipe.sources.iterdir() if f.suffix in (".cpp", ".cu"))
    arguments = {
        "name": library.stem,
        "sources": sources,
        "build_directory": str(library.parent),
        "is_python_module": False,
        "with_cuda": recipe.with_cuda,
        "extra_cuda_cflags" if recipe.with_cuda else "extra_cflags": recipe.flags,
    }
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        # Or `-c` would import from the current directory first.
        "PYTHONSAFEPATH": "1",
        # Ninja of this Python environment, which may not be on PATH.
        "PATH": os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")]),
        # English messages: the first "error:" is searched below.
        "LC_ALL": "C",
        "TORCH_CUDA_ARCH_LIST": recipe.architectures,
    }
    with subprocess.Popen(
        [sys.executable, "-c", _BUILD, json.dumps(arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"Compiling took longer than {_TIMEOUT_S:g} s.") from error
        finally:
            # To the whole group, with ninja, which then ends the compilers.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
    if process.returncode != 0 or not library.is_file():
        # The compiler's first error, else the last line, which is torch's.
        lines = [line for line in map(str.strip, output.splitlines()) if line]
        errors = [line for line in lines if re.search(r"(^|\s)(\w+ )?error:", line)]
        raise BuildError(f"Torch's builder failed: {(errors or lines[-1:] or ['silently'])[0]}")
