"""Compiles csrc/ on first use, or says in one sentence why it cannot.

torch's own builder keeps one unkeyed directory per Python version, needs ninja on PATH, and waits
for ever on the lock file of a build that was killed. This one calls the compiler itself. A library
is named by a hash of everything it depends on, built in a directory of its own, and renamed into
the cache in one piece; the lock belongs to a process and goes with it.

Environment:
    CXX: the compiler; else c++, g++ or clang++, the first on PATH.
    DOGE_FAST_CACHE: where libraries are kept; else ~/.cache/doge_fast.
    DOGE_FAST_NO_JIT: 1 to do without compiled code.
"""

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from doge_fast._layout import CSRC_DIR

if sys.platform != "win32":
    import fcntl

# 2.11, the lowest torch we accept: the binary then calls nothing that a later one lacks.
_TORCH_TARGET = "0x020b000000000000"
# Instruction sets that the arithmetic is compiled for, worst first; one that the compiler does not
# know is left out. Which of them runs is settled by the CPU that loads the library.
_LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "baseline": (),
        "avx2": (_AVX2 := ("-mavx2", "-mfma", "-mf16c")),
        "avx512": (_AVX512 := (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")),
        "avx512bf16": (*_AVX512, "-mavx512bf16"),
    },
}
_FLAGS = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    # No errno and no trap handlers: lets `a * b + c` and selects become vector instructions.
    "-fno-math-errno",
    "-fno-trapping-math",
    f"-DTORCH_TARGET_VERSION={_TORCH_TARGET}",
)
# The operators take 10 seconds; an emulated or overloaded machine may take many times that.
_COMPILER_TIMEOUT_S = 900.0


class BuildError(RuntimeError):
    """The compiled operators cannot be had; the message is one sentence with the reason."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: how to call it, and what it says it is."""

    command: tuple[str, ...]
    version: str


_loading = threading.Lock()
# Empty: not tried yet. One entry: the reason why not, or None once the operators are there.
_outcome: list[str | None] = []


def load_cpp() -> None:
    """Make `torch.ops.doge_fast_cpp.*` available, compiling it when the cache has no copy.

    The first call may take seconds; later ones return at once. A failure is remembered as well: one
    process tries once.

    Raises:
        BuildError: there is no compiler, no cache to write to, the compiler fails, or
            `DOGE_FAST_NO_JIT=1`.
    """
    reason = why_not_cpp()
    if reason is not None:
        raise BuildError(reason)


def why_not_cpp() -> str | None:
    """Load the compiled CPU operators; None if that worked, else the reason as one sentence."""
    with _loading:
        if not _outcome:
            _outcome.append(_try_to_load())
        return _outcome[0]


def _try_to_load() -> str | None:
    # A second copy of the same registrations would end the process.
    if hasattr(torch.ops.doge_fast_cpp, "gram"):
        return None
    try:
        _load(CSRC_DIR / "cpu", "doge_fast_cpp")
    except BuildError as error:
        return str(error)
    return None


def _load(sources: Path, name: str) -> None:
    load_library(lambda: build_library(sources, name))


def load_library(build: Callable[[], Path]) -> None:
    """Load the operators of the library that `build` gives; build again if it is damaged.

    Raises:
        BuildError: it cannot be built, or does not load.
    """
    library = build()
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        return
    except OSError:
        # Damaged after it was written, by a full disk for example.
        library.unlink(missing_ok=True)
    library = build()
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BuildError(
            f"The library {library} was compiled but does not load: {_first_line(error)}"
        ) from error


def build_library(sources: Path, name: str) -> Path:
    """Compile a folder of C++ into one shared library; a cached one is returned as is.

    What stands in its folder `levels`, if it has one, is compiled once for each instruction set of
    the architecture, with DOGE_LEVEL_NAME defined; DOGE_LEVELS names them all to the others.

    Args:
        sources: a folder of .cpp files and headers; headers of its parent count too.
        name: the library's name in the cache, before the hash.

    Returns:
        The path of a complete library.

    Raises:
        BuildError: `DOGE_FAST_NO_JIT=1`, no compiler, torch without stable headers, an unwritable
            cache, or a compiler error.
    """
    check_jit()
    if sys.platform == "win32":
        raise BuildError("doge_fast compiles its operators on Linux and macOS only.")
    check_torch_headers()
    compiler = find_compiler()
    parts = [
        shlex.join(compiler.command),
        compiler.version,
        shlex.join(_FLAGS),
        repr(_LEVELS),
        f"{platform.system()} {platform.machine()}",
    ]
    return cached_library(
        name, parts, sources, lambda scratch: _compile(sources, compiler, scratch)
    )


def cached_library(
    name: str, parts: Sequence[str], sources: Path, compile_into: Callable[[Path], Path]
) -> Path:
    """The library that `compile_into` makes, from the cache where it has been made before.

    Several processes that ask for the same library at once compile it once: the others wait for an
    advisory lock, which the system releases when its holder dies.

    Args:
        name: the library's name in the cache, before the hash.
        parts: what decides, besides the sources and torch, what the library will be.
        sources: the folder of the sources; its parent's headers count too.
        compile_into: makes the library in an empty folder and returns its path.

    Raises:
        BuildError: the cache cannot be written; or what `compile_into` raises.
    """
    cache = cache_dir()
    library = cache / f"{name}-{_key(parts, sources)}.so"
    if library.exists():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _build(library, compile_into)
    except OSError as error:
        raise BuildError(
            f"The cache {cache} cannot be written ({error.strerror or error}); set DOGE_FAST_CACHE "
            "to a directory that can."
        ) from error
    return library


def check_jit() -> None:
    """Raise BuildError if `DOGE_FAST_NO_JIT` asks for nothing to be compiled."""
    if os.environ.get("DOGE_FAST_NO_JIT", "0") not in ("", "0"):
        raise BuildError(
            "DOGE_FAST_NO_JIT is set; unset it to let doge_fast compile its operators."
        )


def cache_dir() -> Path:
    """Where compiled libraries are kept: `DOGE_FAST_CACHE`, else ~/.cache/doge_fast.

    Raises:
        BuildError: there is no home directory to keep them in.
    """
    chosen = os.environ.get("DOGE_FAST_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    try:
        return Path.home() / ".cache" / "doge_fast"
    except RuntimeError as error:
        raise BuildError(
            "This user has no home directory for a cache; set DOGE_FAST_CACHE to a directory."
        ) from error


def find_compiler() -> Compiler:
    """The C++ compiler to use: `CXX` (which may hold arguments), else the first on PATH.

    Raises:
        BuildError: there is none, or it does not answer to --version.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    candidates = [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]
    for command in candidates:
        if shutil.which(command[0]) is not None:
            return Compiler(tuple(command), _version_of(command))
    if chosen:
        raise BuildError(
            f"CXX names {chosen[0]}, which is not an executable; unset it or name a C++20 compiler."
        )
    raise BuildError("No C++ compiler was found (c++, g++, clang++); install one or set CXX.")


def _version_of(command: Sequence[str]) -> str:
    try:
        answer = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(
            f"The C++ compiler {shlex.join(command)} does not answer to --version "
            f"({_first_line(error)}); set CXX to another."
        ) from error
    return answer.stdout


def check_torch_headers() -> None:
    """Raise BuildError if torch came without the headers of its stable ABI."""
    if not (torch_dir() / "include/torch/csrc/stable/library.h").is_file():
        raise BuildError(
            f"Torch {torch.__version__} came without the headers of its stable ABI; "
            "install torch >= 2.11 from its wheels."
        )


def torch_dir() -> Path:
    """Where torch is installed."""
    return Path(torch.__file__).resolve().parent


def _key(parts: Sequence[str], sources: Path) -> str:
    """A hash of all that decides what the library will be."""
    everything = [torch.__version__, str(torch.compiled_with_cxx11_abi()), *parts]
    digest = hashlib.sha256("\0".join(everything).encode())
    for file in sorted([*sources.parent.glob("*.h"), *sources.rglob("*")]):
        if file.suffix in (".h", ".cuh", ".cpp", ".cu"):
            digest.update(f"\0{file.relative_to(sources.parent)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock `path`. It ends with the process, however that ends."""
    with path.open("w") as file:
        if sys.platform != "win32":
            # A file system without locks: both build, and either rename gives a whole library.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(library: Path, compile_into: Callable[[Path], Path]) -> None:
    """Compile in a fresh directory beside `library`, then rename into place."""
    prefix = f".{library.stem}-"
    # Left by builds that were killed: whoever holds the lock is the only builder.
    for left in library.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=library.parent, ignore_cleanup_errors=True
    ) as scratch:
        built = compile_into(Path(scratch))
        with built.open("rb") as file:
            # Without it a crash of the machine could leave the name and lose the bytes.
            os.fsync(file.fileno())
        os.replace(built, library)


def _compile(sources: Path, compiler: Compiler, scratch: Path) -> Path:
    levels = known_levels(compiler) if (sources / "levels").is_dir() else {}
    names = " ".join(f"DOGE_LEVEL({level})" for level in levels)
    command = [*compiler.command, *_FLAGS, f"-isystem{torch_dir() / 'include'}"]
    units: list[tuple[Path, str, tuple[str, ...]]] = [
        (source, source.stem, (f"-DDOGE_LEVELS={names}",))
        for source in sorted(sources.glob("*.cpp"))
    ]
    # First, since they take longest.
    units[:0] = [
        (source, f"{source.stem}-{level}", (f"-DDOGE_LEVEL_NAME={level}", *flags))
        for source in sorted(sources.glob("levels/*.cpp"))
        for level, flags in levels.items()
    ]
    objects = [str(scratch / f"{stem}.o") for _, stem, _ in units]
    run_all(
        [
            [*command, *flags, "-c", str(source), "-o", target]
            for (source, _, flags), target in zip(units, objects, strict=True)
        ]
    )
    lib = torch_dir() / "lib"
    library = scratch / "library.so"
    link = ["-shared", *objects, f"-L{lib}", "-ltorch_cpu", "-o", str(library)]
    if sys.platform == "darwin":
        link.append(f"-Wl,-rpath,{lib}")
    run_all([[*compiler.command, *link]])
    return library


def known_levels(compiler: Compiler) -> dict[str, tuple[str, ...]]:
    """Instruction sets of this architecture that the compiler knows, each with its flags."""
    wanted = _LEVELS.get(platform.machine(), {"baseline": ()})
    return {level: flags for level, flags in wanted.items() if _knows(compiler, flags)}


def _knows(compiler: Compiler, flags: Sequence[str]) -> bool:
    command = [*compiler.command, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return not flags or subprocess.run(command, capture_output=True, check=False).returncode == 0


def run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run the commands side by side; what a failing one said becomes the error.

    Raises:
        BuildError: a command fails, cannot be run, or takes too long.
    """
    # Messages in English, whatever the user's language: the first error line is looked for.
    environment = {**os.environ, "LC_ALL": "C"}
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    env=environment,
                )
            )
        for command, process in zip(commands, running, strict=True):
            output, _ = process.communicate(timeout=_COMPILER_TIMEOUT_S)
            if process.returncode != 0:
                raise BuildError(f"The C++ compiler {command[0]} failed: {_first_error(output)}")
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"The C++ compiler took longer than {_COMPILER_TIMEOUT_S:g} s.") from error
    except OSError as error:
        raise BuildError(
            f"The C++ compiler cannot be run ({error}); set CXX to another."
        ) from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            with process:
                pass


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[0]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
