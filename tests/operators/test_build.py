"""The builder of the compiled operators: one build per key, and a sentence for every failure."""

import ctypes
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from doge_fast.kernels import build, compilers
from doge_fast.kernels.compilers import BuildError, cpp_recipe, find_compiler, known_levels
from tests.packages import needs_to_build

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = needs_to_build

needs_compiler = pytest.mark.skipif(
    all(shutil.which(name) is None for name in ("c++", "g++", "clang++")),
    reason="no C++ compiler on PATH",
)

needs_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="other processors have one instruction set here"
)

# Stands for the compiler. Writes down every call, and misbehaves when a file beside it says so.
WRAPPER = """#!/bin/sh
here=$(dirname "$0")
case " $* " in
*" --version "*) exec c++ --version ;;
*" -fsyntax-only "*) ;;
*" -c "*) echo compile >> "$here/log" ;;
*) echo link >> "$here/log" ;;
esac
[ -e "$here/slow" ] && sleep 0.5
while [ -e "$here/hang" ]; do sleep 0.1; [ -e "$here/hang" ] || touch "$here/went-on"; done
if [ -e "$here/old" ]; then
  case " $* " in *" -mavx512bf16 "*) echo "error: unknown -mavx512bf16"; exit 1 ;; esac
fi
exec c++ "$@"
"""

# What a separate process runs: build the folder argv[1], print the library's path.
BUILD_ELSEWHERE = """
import sys
from pathlib import Path
from doge_fast.kernels import build, compilers
from doge_fast.kernels.compilers import BuildError, cpp_recipe, find_compiler, known_levels
print("ready", flush=True)
sys.stdin.readline()
print(build.build_library("tiny", Path(sys.argv[1]), build.compilers.cpp_recipe), flush=True)
"""


class Workshop:
    """A folder with a tiny source, a cache of its own and a compiler that keeps a log."""

    def __init__(self, root: Path) -> None:
        self.sources = root / "csrc" / "cpu"
        self.sources.mkdir(parents=True)
        self.cache = root / "cache"
        self.write(42)
        self.compiler = root / "bin" / "compiler"
        self.compiler.parent.mkdir()
        self.compiler.write_text(WRAPPER)
        self.compiler.chmod(0o755)

    def write(self, answer: int) -> None:
        # The flags hide what is not marked otherwise.
        mark = '__attribute__((visibility("default")))'
        (self.sources / "tiny.cpp").write_text(
            f'extern "C" {mark} int answer() {{ return {answer}; }}\n'
        )

    def build(self) -> Path:
        return build.build_library("tiny", self.sources, cpp_recipe)

    def switch(self, name: str, on: bool = True) -> None:
        file = self.compiler.parent / name
        file.touch() if on else file.unlink()

    def calls(self) -> list[str]:
        log = self.compiler.parent / "log"
        return log.read_text().split() if log.exists() else []

    def left_behind(self) -> list[str]:
        return [file.name for file in self.cache.glob(".*")] if self.cache.exists() else []

    def start_elsewhere(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", BUILD_ELSEWHERE, str(self.sources)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    made = Workshop(tmp_path)
    monkeypatch.setenv("DOGE_FAST_CACHE", str(made.cache))
    monkeypatch.setenv("CXX", str(made.compiler))
    monkeypatch.delenv("DOGE_FAST_NO_JIT", raising=False)
    return made


def answer_of(library: Path) -> int:
    return ctypes.CDLL(str(library)).answer()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@needs_compiler
def test_a_second_build_comes_from_the_cache(workshop):
    first = workshop.build()
    assert answer_of(first) == 42
    assert workshop.calls() == ["compile", "link"]
    assert workshop.build() == first
    assert workshop.calls() == ["compile", "link"]
    assert workshop.left_behind() == []


@needs_compiler
def test_what_is_built_is_known_without_a_build(workshop, monkeypatch):
    monkeypatch.setitem(build._LIBRARIES, "tiny", (workshop.sources, cpp_recipe))
    assert not build.is_built("tiny")
    assert workshop.calls() == []
    workshop.build()
    assert build.is_built("tiny")
    monkeypatch.setenv("CXX", "/nonexistent")
    assert not build.is_built("tiny")


@needs_compiler
def test_the_key_follows_sources_headers_and_compiler(workshop, monkeypatch):
    libraries = {workshop.build()}
    workshop.write(43)
    changed = workshop.build()
    assert answer_of(changed) == 43
    libraries.add(changed)
    (workshop.sources / "beside.h").write_text("// new\n")
    libraries.add(workshop.build())
    (workshop.sources.parent / "above.h").write_text("// new\n")
    libraries.add(workshop.build())
    monkeypatch.setattr(torch, "__version__", "2.999")
    libraries.add(workshop.build())
    monkeypatch.setenv("CXX", f"{workshop.compiler} -DOTHER")
    libraries.add(workshop.build())
    assert len(libraries) == 6


LEVEL = "const char* DOGE_LEVEL_NAME() { return __FILE__; }\n"


@needs_x86
@needs_compiler
def test_each_instruction_set_is_compiled_once(workshop):
    (workshop.sources / "levels").mkdir()
    (workshop.sources / "levels" / "level.cpp").write_text(LEVEL)
    workshop.build()
    assert workshop.calls() == ["compile"] * 5 + ["link"]


@needs_x86
@needs_compiler
def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(workshop):
    (workshop.sources / "levels").mkdir()
    (workshop.sources / "levels" / "level.cpp").write_text(LEVEL)
    workshop.switch("old")
    workshop.build()
    assert workshop.calls() == ["compile"] * 4 + ["link"]
    assert list(known_levels(find_compiler())) == ["baseline", "avx2", "avx512"]


@needs_compiler
@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.999])
def test_a_damaged_library_is_built_again(workshop, kept):
    library = workshop.build()
    whole = library.read_bytes()
    library.write_bytes(whole[: int(kept * len(whole)) if kept < 1 else kept])
    build.load_library("tiny", workshop.sources, cpp_recipe)
    assert answer_of(library) == 42


@needs_compiler
def test_a_library_of_which_one_bit_is_wrong_is_built_again(workshop):
    library = workshop.build()
    damaged = bytearray(library.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    library.write_bytes(damaged)
    build.load_library("tiny", workshop.sources, cpp_recipe)
    assert library.read_bytes() != bytes(damaged)


@needs_compiler
def test_nobody_else_writes_what_is_loaded(workshop):
    mask = os.umask(0)
    try:
        library = workshop.build()
        assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(library.stat().st_mode) == 0o755
        for path in (library, library.parent):
            mode = path.stat().st_mode
            for bit in (stat.S_IWGRP, stat.S_IWOTH):
                path.chmod(mode | bit)
                with pytest.raises(
                    BuildError, match=rf"Other users may write {path}, .*chmod go-w"
                ):
                    build.load_library("tiny", workshop.sources, cpp_recipe)
            path.chmod(mode)
        build.load_library("tiny", workshop.sources, cpp_recipe)
    finally:
        os.umask(mask)


@needs_compiler
@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root may give files away"
)
def test_what_another_user_owns_is_not_loaded(workshop):
    library = workshop.build()
    for path in (library, library.parent):
        os.chown(path, 1234, -1)
        with pytest.raises(BuildError, match=rf"{path} belongs to another user"):
            build.load_library("tiny", workshop.sources, cpp_recipe)
        os.chown(path, 0, -1)


@needs_compiler
def test_a_directory_in_the_place_of_a_library(workshop):
    library = workshop.build()
    library.unlink()
    library.mkdir()
    with pytest.raises(BuildError, match=r"cannot be written \(Is a directory\)"):
        workshop.build()


@needs_compiler
def test_a_compiler_that_writes_nothing(workshop, monkeypatch):
    lazy = workshop.sources.parent / "lazy"
    lazy.write_text("#!/bin/sh\n[ $1 = --version ] && echo lazy 1.0\nexit 0\n")
    lazy.chmod(0o755)
    monkeypatch.setenv("CXX", str(lazy))
    with pytest.raises(BuildError, match="lazy reported success but wrote no library"):
        workshop.build()


def test_a_compiler_with_an_open_quote(workshop, monkeypatch):
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(
        BuildError, match=r"CXX is \"'g\+\+\", which is not valid in a shell: No closing"
    ):
        workshop.build()


def test_a_compiler_that_is_not_there(workshop, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/g++ -m64")
    with pytest.raises(BuildError, match=r"CXX names /nonexistent/g\+\+.*not an executable"):
        workshop.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(workshop.cache))
    with pytest.raises(BuildError, match=r"No C\+\+ compiler was found"):
        workshop.build()


def test_a_compiler_that_is_none(workshop, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError, match="false does not answer to --version"):
        workshop.build()


@needs_compiler
def test_a_compiler_error_is_quoted(workshop):
    (workshop.sources / "tiny.cpp").write_text("int wrong( { }\n")
    with pytest.raises(BuildError, match=r"failed: .*tiny\.cpp:1:.*error"):
        workshop.build()
    assert list(workshop.cache.glob("*.so")) == []
    assert workshop.left_behind() == []


@needs_compiler
def test_a_cache_that_cannot_be_written(workshop):
    # A file where the directory should be: refuses root, whom permissions do not stop.
    workshop.cache.write_text("")
    with pytest.raises(BuildError, match=r"cannot be written .*set DOGE_FAST_CACHE"):
        workshop.build()


def test_no_jit(workshop, monkeypatch):
    monkeypatch.setenv("DOGE_FAST_NO_JIT", "1")
    with pytest.raises(BuildError, match="DOGE_FAST_NO_JIT is set"):
        workshop.build()
    assert workshop.calls() == []
    assert not workshop.cache.exists()


@pytest.mark.parametrize("package", ["ninja", "filelock", "platformdirs"])
def test_a_package_that_is_not_installed(workshop, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BuildError, match=rf"{package} must be installed; pip install 'doge-f"):
        workshop.build()
    assert workshop.calls() == []


@pytest.mark.skipif(sys.platform != "linux", reason="the variable is for Linux")
def test_the_cache_is_where_the_user_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.delenv("DOGE_FAST_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert build.cache_dir() == tmp_path / "elsewhere" / "doge_fast"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / ".cache" / "doge_fast"
    monkeypatch.setenv("DOGE_FAST_CACHE", str(tmp_path / "chosen"))
    assert build.cache_dir() == tmp_path / "chosen"


def test_an_empty_home_is_none(monkeypatch):
    for name in ("DOGE_FAST_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "")
    with pytest.raises(BuildError, match="no home directory"):
        build.cache_dir()


def test_no_home_directory(monkeypatch):
    for name in ("DOGE_FAST_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    # What os.path says of a user without one.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(BuildError, match="no home directory"):
        build.cache_dir()


def test_a_headerless_torch(workshop, monkeypatch, tmp_path):
    monkeypatch.setattr(compilers, "TORCH_DIR", tmp_path / "torch")
    with pytest.raises(BuildError, match="without the headers of its stable ABI"):
        workshop.build()


@needs_compiler
def test_a_killed_build_leaves_nothing_that_hangs(workshop):
    workshop.switch("hang")
    with workshop.start_elsewhere() as victim:
        go(victim)
        deadline = time.monotonic() + 120
        while not workshop.calls():
            assert time.monotonic() < deadline, "the build never started"
            time.sleep(0.02)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    assert workshop.left_behind() != []
    workshop.switch("hang", on=False)
    assert answer_of(workshop.build()) == 42
    assert workshop.left_behind() == []


@needs_compiler
def test_a_build_that_takes_too_long_is_ended(workshop, monkeypatch):
    workshop.switch("hang")
    monkeypatch.setattr(build, "_TIMEOUT_S", 1.0)
    with pytest.raises(BuildError, match=r"compiler took longer than 1 s"):
        workshop.build()
    assert workshop.calls() == ["compile"]
    assert workshop.left_behind() == []
    workshop.switch("hang", on=False)
    # A compiler that still ran would now see that, and go on.
    time.sleep(0.5)
    assert not (workshop.compiler.parent / "went-on").exists()


@needs_compiler
def test_paths_may_hold_anything(tmp_path, monkeypatch):
    odd = Workshop(tmp_path / "it's $HOME, 2  spaces: a $ b")
    monkeypatch.setenv("DOGE_FAST_CACHE", str(odd.cache))
    monkeypatch.setenv("CXX", shlex.quote(str(odd.compiler)))
    monkeypatch.delenv("DOGE_FAST_NO_JIT", raising=False)
    assert answer_of(odd.build()) == 42


@pytest.mark.exhaustive
@needs_compiler
def test_racing_processes_build_once(workshop):
    workshop.switch("slow")
    racers = [workshop.start_elsewhere() for _ in range(3)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        go(racer)
    printed = [racer.communicate(timeout=120)[0].strip() for racer in racers]
    assert printed == [str(workshop.build())] * 3
    assert workshop.calls() == ["compile", "link"]


LOAD_ELSEWHERE = """
import sys, torch
from doge_fast.kernels import build
print("ready", flush=True)
sys.stdin.readline()
# What the wrapper's log would not show: the library is whole and does its work.
assert build.why_not(build.CPP) is None, build.why_not(build.CPP)
rows_RN = torch.arange(60, dtype=torch.float32).view(3, 20)
exact_RR = rows_RN.double() @ rows_RN.double().T
assert torch.equal(torch.ops.doge_fast_cpp.gram([rows_RN]), exact_RR)
print(build.build_library(build.CPP, build.CSRC_DIR / "cpu", build.compilers.cpp_recipe))
"""


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("killed", [0, 1], ids=["all live", "the first is killed"])
def test_eight_builders_with_a_real_compiler(tmp_path, killed):
    """They end with one library, linked once, which all of them load."""
    compiler = tmp_path / "compiler"
    compiler.write_text(WRAPPER)
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    environment = {
        **os.environ,
        **{"PYTHONPATH": str(REPOSITORY), "DOGE_FAST_CACHE": str(cache), "CXX": str(compiler)},
    }
    environment.pop("DOGE_FAST_NO_JIT", None)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD_ELSEWHERE],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for _ in range(8)
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers[:killed]:
        go(racer)
        while not list(cache.glob(".doge*/*.o")):
            time.sleep(0.05)
        os.killpg(racer.pid, signal.SIGKILL)
        racer.communicate()
    for racer in racers[killed:]:
        go(racer)
    printed = {racer.communicate(timeout=1500)[0].strip() for racer in racers[killed:]}
    (library,) = cache.glob("*.so")
    assert printed == {str(library)}
    assert [racer.returncode for racer in racers[killed:]] == [0] * (8 - killed)
    assert not list(cache.glob(".doge*"))
    links = (tmp_path / "log").read_text().split().count("link")
    assert links == 1


def test_the_reason_is_remembered_and_raised():
    program = (
        "import os, torch\n"
        "from doge_fast.kernels import build\n"
        "reason = build.why_not(build.CPP)\n"
        "assert reason.startswith('CXX names /nonexistent'), reason\n"
        "del os.environ['CXX']\n"
        "assert build.why_not(build.CPP) == reason\n"
        "try:\n"
        "    build.operators(build.CPP)\n"
        "except build.BuildError as error:\n"
        "    assert str(error) == reason\n"
        "else:\n"
        "    raise AssertionError('no BuildError')\n"
        "assert not hasattr(torch.ops.doge_fast_cpp, 'gram')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CXX": "/nonexistent"}
    environment.pop("DOGE_FAST_NO_JIT", None)
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


@needs_compiler
@pytest.mark.skipif(
    "CXX" in os.environ and shutil.which(os.environ["CXX"].split()[0]) is None,
    reason="CXX names no compiler",
)
@pytest.mark.skipif(
    os.environ.get("DOGE_FAST_NO_JIT", "0") not in ("", "0"), reason="DOGE_FAST_NO_JIT is set"
)
def test_the_operators_build_and_load():
    assert build.operators(build.CPP) is torch.ops.doge_fast_cpp
    assert build.why_not(build.CPP) is None
    rows_RN = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    exact_RR = rows_RN.double() @ rows_RN.double().T
    assert torch.equal(torch.ops.doge_fast_cpp.gram([rows_RN]), exact_RR)
