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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from doge_fast._layout import CSRC_DIR

if sys.platform != "win32":
    import fcntl

# 2.11, the lowest torch we accept: the binary then calls nothing that a later one lacks.
_TORCH_TARGET = "0x020b000000000000"
# Everything beyond is tried without when the compiler does not know it.
_OPTIONAL_FLAGS = ("-march=native",)
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
    library = build_library(sources, name)
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        return
    except OSError:
        # Damaged after it was written, by a full disk for example.
        library.unlink(missing_ok=True)
    library = build_library(sources, name)
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BuildError(
            f"The library {library} was compiled but does not load: {_first_line(error)}"
        ) from error


def build_library(sources: Path, name: str) -> Path:
    """Compile every .cpp file of a folder into one shared library; a cached one is returned as is.

    Several processes that ask for the same library at once compile it once: the others wait for an
    advisory lock, which the system releases when its holder dies.

    Args:
        sources: a folder of .cpp files and headers; headers of its parent count too.
        name: the library's name in the cache, before the hash.

    Returns:
        The path of a complete library.

    Raises:
        BuildError: `DOGE_FAST_NO_JIT=1`, no compiler, torch without stable headers, an unwritable
            cache, or a compiler error.
    """
    if os.environ.get("DOGE_FAST_NO_JIT", "0") not in ("", "0"):
        raise BuildError(
            "DOGE_FAST_NO_JIT is set; unset it to let doge_fast compile its operators."
        )
    if sys.platform == "win32":
        raise BuildError("doge_fast compiles its operators on Linux and macOS only.")
    _check_torch_headers()
    compiler = find_compiler()
    cache = cache_dir()
    library = cache / f"{name}-{_key(sources, compiler)}.so"
    if library.exists():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _build(sources, compiler, library)
    except OSError as error:
        raise BuildError(
            f"The cache {cache} cannot be written ({error.strerror or error}); set DOGE_FAST_CACHE "
            "to a directory that can."
        ) from error
    return library


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


def _check_torch_headers() -> None:
    if not (_torch_dir() / "include/torch/csrc/stable/library.h").is_file():
        raise BuildError(
            f"Torch {torch.__version__} came without the headers of its stable ABI; "
            "install torch >= 2.11 from its wheels."
        )


def _torch_dir() -> Path:
    return Path(torch.__file__).resolve().parent


def _key(sources: Path, compiler: Compiler) -> str:
    """A hash of all that decides what the library will be."""
    parts = [
        torch.__version__,
        str(torch.compiled_with_cxx11_abi()),
        shlex.join(compiler.command),
        compiler.version,
        shlex.join((*_FLAGS, *_OPTIONAL_FLAGS)),
        _cpu(),
    ]
    digest = hashlib.sha256("\0".join(parts).encode())
    for file in sorted([*sources.parent.glob("*.h"), *sources.iterdir()]):
        if file.suffix in (".h", ".cpp"):
            digest.update(f"\0{file.name}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:20]


def _cpu() -> str:
    """What -march=native depends on. One home directory may serve machines of several kinds."""
    identity = f"{platform.system()} {platform.machine()} {platform.processor()}"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        first = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
        told = {key.strip(): value for key, value in first.items()}
        known = ("model name", "flags", "Features", "CPU implementer", "CPU part")
        identity += "".join(told.get(key, "") for key in known)
    return identity


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock `path`. It ends with the process, however that ends."""
    with path.open("w") as file:
        if sys.platform != "win32":
            # A file system without locks: both build, and either rename gives a whole library.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(sources: Path, compiler: Compiler, library: Path) -> None:
    """Compile in a fresh directory beside `library`, then rename into place."""
    prefix = f".{library.stem}-"
    # Left by builds that were killed: whoever holds the lock is the only builder.
    for left in library.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=library.parent, ignore_cleanup_errors=True
    ) as scratch:
        built = _compile(sources, compiler, Path(scratch))
        with built.open("rb") as file:
            # Without it a crash of the machine could leave the name and lose the bytes.
            os.fsync(file.fileno())
        os.replace(built, library)


def _compile(sources: Path, compiler: Compiler, scratch: Path) -> Path:
    try:
        return _compile_with((*_FLAGS, *_OPTIONAL_FLAGS), sources, compiler, scratch)
    except BuildError:
        # Some compilers know no native architecture; an error in the source comes again.
        return _compile_with(_FLAGS, sources, compiler, scratch)


def _compile_with(flags: Sequence[str], sources: Path, compiler: Compiler, scratch: Path) -> Path:
    include = f"-isystem{_torch_dir() / 'include'}"
    commands = []
    objects = []
    for source in sorted(sources.glob("*.cpp")):
        objects.append(str(scratch / f"{source.stem}.o"))
        commands.append([*compiler.command, *flags, include, "-c", str(source), "-o", objects[-1]])
    _run_all(commands)
    lib = _torch_dir() / "lib"
    library = scratch / "library.so"
    link = ["-shared", *objects, f"-L{lib}", "-ltorch_cpu", "-o", str(library)]
    if sys.platform == "darwin":
        link.append(f"-Wl,-rpath,{lib}")
    _run_all([[*compiler.command, *link]])
    return library


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run the commands side by side; what a failing one said becomes the error."""
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
