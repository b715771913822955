"""Compiles csrc/ on first use, or says in one sentence why it cannot.

ninja runs the compiler in a fresh directory; the library is then renamed into the cache in one
piece, under a hash of everything it depends on. A lock keeps two processes from building the same
library; the system releases it when its holder ends. torch's own builder keeps one directory for
all versions of the sources, and waits for ever on the lock file of a build that was killed.

Environment, besides that of `compilers`:
    DOGE_FAST_CACHE: where libraries are kept; else the user's cache directory ($XDG_CACHE_HOME).
    DOGE_FAST_NO_JIT: 1 to do without compiled code.
"""

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from doge_fast._layout import CSRC_DIR
from doge_fast.kernels import compilers
from doge_fast.kernels.compilers import BuildError, Recipe

RecipeOf = Callable[[Path], Recipe]

# The libraries, as torch.ops names them.
CPP, CUDA, EMULATED = "doge_fast_cpp", "doge_fast_cuda", "doge_fast_cuda_emulated"
_LIBRARIES: dict[str, tuple[Path, RecipeOf]] = {
    CPP: (CSRC_DIR / "cpu", compilers.cpp_recipe),
    CUDA: (CSRC_DIR / "cuda", compilers.cuda_recipe),
    EMULATED: (CSRC_DIR / "cuda", compilers.emulated_recipe),
}
# What pip install 'doge-fast[kernels]' brings.
_PACKAGES = ("ninja", "filelock", "platformdirs")
# The operators take 10 seconds, with nvcc a minute; an overloaded machine may take many times that.
_TIMEOUT_S = 900.0

_loading = threading.Lock()
# By library: why it cannot be had, or None once its operators are there. One process tries once.
_outcomes: dict[str, str | None] = {}


@functools.cache
def operators(name: str) -> Any:
    """The operators `torch.ops.<name>` of one of the three libraries, compiled if need be.

    Raises:
        BuildError: they cannot be had.
    """
    reason = why_not(name)
    if reason is not None:
        raise BuildError(reason)
    return getattr(torch.ops, name)


def cuda_operators(device_type: str) -> Any:
    """The CUDA operators that read the memory of "cuda" or, emulated, of "cpu".

    Raises:
        BuildError: they cannot be had.
    """
    return operators(CUDA if device_type == "cuda" else EMULATED)


def why_not(name: str) -> str | None:
    """Load one of the three libraries; None if that worked, else the reason as one sentence.

    The first call may take seconds, with nvcc a minute. Later ones repeat its answer at once.
    """
    with _loading:
        if name not in _outcomes:
            _outcomes[name] = _try_to_load(name)
        return _outcomes[name]


def is_built(name: str) -> bool:
    """Whether one of the three libraries is loaded or in the cache: nobody waits for a compiler."""
    if hasattr(getattr(torch.ops, name), "gram"):
        return True
    try:
        return _place(name, *_LIBRARIES[name])[0].is_file()
    except (BuildError, OSError):
        return False


def _try_to_load(name: str) -> str | None:
    # A second copy of the same registrations would end the process.
    if hasattr(getattr(torch.ops, name), "gram"):
        return None
    try:
        load_library(name, *_LIBRARIES[name])
    except BuildError as error:
        return str(error)
    return None


def load_library(name: str, sources: Path, recipe_of: RecipeOf) -> None:
    """Build a library and load its operators. A copy that is damaged is built again.

    Raises:
        BuildError: it cannot be built, does not load, or others may have written it.
    """
    library = build_library(name, sources, recipe_of)
    if not _is_whole(library):
        # Damaged after it was written, by a full disk for example; loading it may end the process.
        library.unlink()
        library = build_library(name, sources, recipe_of)
    for path in (library.parent, library):
        _check_private(path)
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BuildError(f"A library was compiled but does not load: {error}") from error


def _is_whole(library: Path) -> bool:
    """Whether the library is what was written, by the digest beside it."""
    try:
        return _digest_beside(library).read_text("utf-8") == _digest_of(library)
    except (OSError, UnicodeError):
        return False


def _digest_beside(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest_of(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _check_private(path: Path) -> None:
    """Refuse to run what another user may have written."""
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise BuildError(
            f"{path} belongs to another user, who could have put anything there; set "
            "DOGE_FAST_CACHE to a directory of your own."
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"Other users may write {path}, and what is there runs in this process; run "
            f"`chmod go-w {path}`, or set DOGE_FAST_CACHE to a directory of your own."
        )


def build_library(name: str, sources: Path, recipe_of: RecipeOf) -> Path:
    """Compile a folder of sources into one shared library; a cached one is returned as is.

    Several processes that ask for the same library at once compile it once; the others wait.

    Args:
        name: the library's name in the cache, before the hash.
        sources: a folder of sources and headers; headers of its parent count too.
        recipe_of: how such a folder is compiled.

    Returns:
        The path of a complete library.

    Raises:
        BuildError: nothing may be compiled, or a package, torch's headers or a compiler is missing,
            or the cache cannot be written, or the compiler fails.
    """
    library, recipe = _place(name, sources, recipe_of)
    cache = library.parent
    try:
        if library.is_file():
            return library
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(cache)
        with _locked(library.with_suffix(".lock")) as is_alone:
            if not library.is_file():
                _build(recipe, library, is_alone)
    except OSError as error:
        raise BuildError(
            f"The cache {cache} cannot be written ({error.strerror or error}); set DOGE_FAST_CACHE "
            "to a directory that can."
        ) from error
    return library


def _place(name: str, sources: Path, recipe_of: RecipeOf) -> tuple[Path, Recipe]:
    """Where the library is, or would be once it is compiled by the recipe."""
    _check_possible()
    recipe = recipe_of(sources)
    return cache_dir() / f"{name}-{_key(recipe, sources)}.so", recipe


def cache_dir() -> Path:
    """Where compiled libraries are kept: `DOGE_FAST_CACHE`, else in the user's cache directory.

    Raises:
        BuildError: there is no home directory to keep them in, or platformdirs is not installed.
    """
    chosen = os.environ.get("DOGE_FAST_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    _check_installed("platformdirs")
    import platformdirs

    # Without a home directory platformdirs raises; before 4.11 it leaves the ~ in the path. With an
    # empty one the path is that of the root, or none.
    if os.environ.get("HOME") != "" or os.environ.get("XDG_CACHE_HOME"):
        with contextlib.suppress(RuntimeError):
            path = platformdirs.user_cache_path("doge_fast", appauthor=False)
            if path.parts[0] != "~":
                return path.absolute()
    raise BuildError(
        "This user has no home directory for a cache; set DOGE_FAST_CACHE to a directory."
    )


def _check_possible() -> None:
    if os.environ.get("DOGE_FAST_NO_JIT", "0") not in ("", "0"):
        raise BuildError(
            "DOGE_FAST_NO_JIT is set; unset it to let doge_fast compile its operators."
        )
    if sys.platform == "win32":
        raise BuildError("doge_fast compiles its operators on Linux and macOS only.")
    _check_installed(*_PACKAGES)
    if not (compilers.TORCH_DIR / "include/torch/csrc/stable/library.h").is_file():
        raise BuildError(
            f"Torch {torch.__version__} came without the headers of its stable ABI; "
            "install torch >= 2.11 from its wheels."
        )


def _check_installed(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise BuildError(
            f"To compile operators, {', '.join(missing)} must be installed; "
            "pip install 'doge-fast[kernels]' brings what is missing."
        )


def _key(recipe: Recipe, sources: Path) -> str:
    """A hash of all that decides what the library will be."""
    parts = (
        *(torch.__version__, str(torch.compiled_with_cxx11_abi())),
        *(platform.system(), platform.machine(), recipe.identity),
        *(*recipe.compiler, *recipe.flags, *recipe.link),
    )
    digest = hashlib.sha256("\0".join(parts).encode())
    for file in sorted([*sources.parent.glob("*.h"), *sources.rglob("*")]):
        if file.suffix in (".h", ".cuh", ".cpp", ".cu"):
            digest.update(f"\0{file.relative_to(sources.parent)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock `path`, if the file system has locks; whether it is held."""
    from filelock import FileLock

    # A build that takes longer is ended, and a marker file in the place of a lock is waited for as
    # long: older versions of filelock do not know the option that forbids one.
    lock = FileLock(path, timeout=_TIMEOUT_S)
    # Without a lock two may build, and either rename gives a whole library.
    with contextlib.suppress(OSError, NotImplementedError):
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _build(recipe: Recipe, library: Path, is_alone: bool) -> None:
    """Compile in a fresh directory beside `library`, then rename into place."""
    prefix = f".{library.stem}-"
    if is_alone:
        # Left by builds that were killed.
        for left in library.parent.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=library.parent, ignore_cleanup_errors=True
    ) as scratch:
        built = compile_into(Path(scratch), recipe)
        # Whatever the umask: others must not write it.
        built.chmod(0o755)
        digest = built.with_suffix(".sha256")
        digest.write_text(_digest_of(built), "utf-8")
        for written, path in ((digest, _digest_beside(library)), (built, library)):
            with written.open("rb") as file:
                # Without it a crash of the machine could leave the name and lose the bytes.
                os.fsync(file.fileno())
            os.replace(written, path)


def compile_into(folder: Path, recipe: Recipe) -> Path:
    """Follow the recipe in an empty folder, and return the library's path.

    Raises:
        BuildError: the compiler or the linker fails, or takes too long.
    """
    with (folder / "build.ninja").open("w", encoding="utf-8") as file:
        _write_rules(recipe, file)
    _run_ninja(folder, recipe.compiler[0])
    library = folder / "library.so"
    if not library.is_file():
        raise BuildError(
            f"The compiler {recipe.compiler[0]} reported success but wrote no library."
        )
    return library


def _write_rules(recipe: Recipe, file: Any) -> None:
    """What ninja reads: an object of each unit, and a library of the objects."""
    from ninja import ninja_syntax

    def quoted(*words: str) -> str:
        # For the shell, and then for ninja.
        text: str = ninja_syntax.escape(shlex.join(words))
        return text

    include, lib = compilers.TORCH_DIR / "include", compilers.TORCH_DIR / "lib"
    link = [*recipe.link, f"-L{lib}"]
    link += [f"-Wl,-rpath,{lib}"] if sys.platform == "darwin" else []
    compiler = quoted(*recipe.compiler)
    # Two words: g++ and nvcc agree on no other spelling.
    compile_flags = quoted(*recipe.flags, "-isystem", str(include))
    # Never wrapped: ninja would take spaces after a break for indentation.
    writer = ninja_syntax.Writer(file, width=sys.maxsize)
    writer.rule("compile", f"{compiler} {compile_flags} $flags -c $source -o $out")
    writer.rule("link", f"{compiler} $in -o $out {quoted(*link)}")
    objects: list[str] = []
    for source, name, flags in recipe.units():
        objects.append(f"{name}.o")
        variables = {"source": quoted(str(source)), "flags": quoted(*flags)}
        writer.build(objects[-1:], "compile", variables=variables)
    writer.build(["library.so"], "link", objects)


def _run_ninja(folder: Path, compiler: str) -> None:
    import ninja

    # The one of this Python's environment, which need not be on PATH.
    program = shutil.which("ninja", path=ninja.BIN_DIR or None)
    if program is None:
        raise BuildError("The package ninja came without its program; install it again.")
    with subprocess.Popen(
        [program, "--quiet", "-C", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Messages in English, whatever the user's language: the first error line is looked for.
        env={**os.environ, "LC_ALL": "C"},
    ) as process:
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{compiler} took longer than {_TIMEOUT_S:g} s.") from error
        finally:
            # Terminated, ninja ends the compilers that it runs; killed, it would leave them.
            process.terminate()
    if process.returncode != 0:
        raise BuildError(f"The compiler {compiler} failed: {_first_error(output)}")


def _first_error(output: str) -> str:
    """The first line that speaks of an error, else the first line, of what a compiler said."""
    # ninja repeats the command of what failed, on the line after.
    said = re.sub(r"^FAILED: .*\n.*$|^ninja: .*$", "", output, flags=re.MULTILINE)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[0]
