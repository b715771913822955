"""The builder of the compiled operators: one build per key, and a sentence for every failure."""

import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from doge_fast.kernels import build
from doge_fast.kernels.availability import of_cuda
from doge_fast.kernels.build import BuildError, needed_architectures
from tests.packages import needs_to_build
from tests.processes import shell_script

ROOT = Path(__file__).resolve().parents[2]
CPU, GPU = torch.device("cpu"), torch.device("cuda")

needs_compiler = pytest.mark.skipif(
    shutil.which(build.cxx()) is None, reason="no C++ compiler on PATH"
)

# Stands for the compiler. Writes down every call, and misbehaves when a file beside it says so.
WRAPPER = """
here=$(dirname "$0")
case " $* " in
*" -dM "*|*dumpversion*) exec c++ "$@" ;;
*" -c "*) echo compile >> "$here/log" ;;
*) echo link >> "$here/log" ;;
esac
while [ -e "$here/hang" ]; do sleep 0.1; [ -e "$here/hang" ] || touch "$here/went-on"; done
exec c++ "$@"
"""


class Workshop:
    """A folder with a tiny source, a cache of its own and a compiler that keeps a log."""

    def __init__(self, root: Path) -> None:
        # Of the compiler alone the path must hold no spaces.
        folder = root / "it's  two spaces"
        self.sources = folder / "csrc" / "cpu"
        self.sources.mkdir(parents=True)
        self.cache = folder / "cache"
        self.write(42)
        self.compiler = shell_script(root / "bin" / "g++", WRAPPER)

    def write(self, answer: int) -> None:
        # The flags hide what is not marked otherwise.
        mark = '__attribute__((visibility("default")))'
        (self.sources / "tiny.cpp").write_text(
            f'extern "C" {mark} int answer() {{ return {answer}; }}\n'
        )

    def load(self) -> Path:
        return build.load_library("tiny", build.recipe_of("tiny"))

    def key(self) -> str:
        return build.recipe_of("tiny").key()

    def calls(self) -> list[str]:
        log = self.compiler.parent / "log"
        return log.read_text().split() if log.exists() else []

    def left_behind(self) -> list[str]:
        return [file.name for file in self.cache.glob(".*")] if self.cache.exists() else []


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    made = Workshop(tmp_path)
    monkeypatch.setenv("DOGE_FAST_CACHE", str(made.cache))
    monkeypatch.setenv("CXX", str(made.compiler))
    monkeypatch.setattr(build, "CSRC_DIR", made.sources.parent)
    monkeypatch.delenv("DOGE_FAST_NO_JIT", raising=False)
    return made


def answer_of(library: Path) -> int:
    return ctypes.CDLL(str(library)).answer()


@needs_to_build
@needs_compiler
class TestCache:
    """What is built is kept, for one user, whole."""

    # Each build takes a process with torch; so one serves several questions.
    def test_a_library_is_built_once_privately_and_again_when_damaged(self, workshop, monkeypatch):
        # The building process imports nothing from the current directory.
        (workshop.sources / "torch.py").write_text("raise SystemExit('the wrong torch')\n")
        monkeypatch.chdir(workshop.sources)
        assert not build.is_built("tiny")
        assert workshop.calls() == []
        mask = os.umask(0)
        try:
            library = workshop.load()
        finally:
            os.umask(mask)
        assert answer_of(library) == 42
        assert build.is_built("tiny")
        assert workshop.load() == library
        assert workshop.calls() == ["compile", "link"]
        assert workshop.left_behind() == []
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (library.parent, library)]
        assert modes == [0o700, 0o755]
        assert stat.S_IMODE(workshop.cache.stat().st_mode) == 0o700
        # One bit, or the end.
        damaged = bytearray(library.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        library.unlink()
        library.write_bytes(damaged)
        assert answer_of(workshop.load()) == 42
        assert library.read_bytes() != bytes(damaged)
        library.write_bytes(library.read_bytes()[:-1])
        workshop.load()
        assert workshop.calls() == ["compile", "link"] * 3

    def test_what_others_may_have_written_is_not_loaded(self, workshop):
        library = workshop.load()
        for path in (library, library.parent, workshop.cache):
            mode = path.stat().st_mode
            for bit in (stat.S_IWGRP, stat.S_IWOTH):
                path.chmod(mode | bit)
                with pytest.raises(BuildError, match=f"{path} .*chmod go-w"):
                    workshop.load()
            path.chmod(mode)
        if os.getuid() != 0:
            pytest.skip("only root may give files away")
        for path in (library, library.parent, workshop.cache):
            os.chown(path, 1234, -1)
            with pytest.raises(BuildError, match=f"{path} belongs to another user"):
                workshop.load()
            os.chown(path, 0, -1)

    def test_a_cache_that_cannot_be_written_serves_what_is_in_it(self, workshop, monkeypatch):
        library = workshop.load()

        def refused(*_: object, **__: object) -> None:
            raise PermissionError(13, "Read-only file system")

        # In the place of permissions, which do not stop root.
        for name in ("mkdir", "rename", "write_text"):
            monkeypatch.setattr(Path, name, refused)
        assert workshop.load() == library
        monkeypatch.setenv("DOGE_FAST_CACHE", str(workshop.cache / "other"))
        with pytest.raises(BuildError, match=r"Read-only .*DOGE_FAST_CACHE"):
            workshop.load()

    @pytest.mark.exhaustive
    def test_a_build_that_takes_too_long_is_ended(self, workshop, monkeypatch):
        hang = workshop.compiler.parent / "hang"
        hang.touch()
        recipe = build.recipe_of("tiny")
        started = time.monotonic()
        # Long enough to reach the compiler on an idle machine; what is asked holds without that.
        monkeypatch.setattr(build, "_TIMEOUT_S", 20.0)
        with pytest.raises(BuildError, match="longer than 20 s"):
            build.load_library("tiny", recipe)
        assert time.monotonic() - started < 200
        assert workshop.left_behind() == []
        hang.unlink()
        # A compiler that still ran would now see that, and go on.
        time.sleep(0.5)
        assert not (workshop.compiler.parent / "went-on").exists()


# What eight processes do at once.
LOAD_OPERATORS = """
import sys, torch
from doge_fast.kernels import build
print("ready", flush=True)
sys.stdin.readline()
# What the wrapper's log would not show: the library is whole and does its work.
assert build.unavailable_reason(build.CPP) is None, build.unavailable_reason(build.CPP)
rows_RN = torch.arange(60, dtype=torch.float32).view(3, 20)
exact_RR = rows_RN.double() @ rows_RN.double().T
assert torch.equal(torch.ops.doge_fast_cpp.gram([rows_RN]), exact_RR)
"""


@pytest.mark.exhaustive
@needs_to_build
@needs_compiler
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("killed", [0, 1], ids=["all live", "the first is killed"])
def test_eight_builders_with_a_real_compiler(workshop, killed):
    """They end with one library, linked once, which all of them load; nothing is left behind."""
    racers = [
        # In a session of its own, whose compilers a signal to it reaches.
        subprocess.Popen(
            [sys.executable, "-c", LOAD_OPERATORS],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
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
        print(file=racer.stdin, flush=True)
        deadline = time.monotonic() + 300
        while not workshop.calls():
            assert time.monotonic() < deadline, "the build never started"
            time.sleep(0.02)
        os.killpg(racer.pid, signal.SIGKILL)
        racer.communicate()
    for racer in racers[killed:]:
        print(file=racer.stdin, flush=True)
    for racer in racers[killed:]:
        racer.communicate(timeout=3000)
    assert [racer.returncode for racer in racers[killed:]] == [0] * (8 - killed)
    assert len(list(workshop.cache.glob("*/*.so"))) == 1
    assert workshop.left_behind() == []
    assert workshop.calls().count("link") == 1


@needs_to_build
@needs_compiler
def test_the_key_follows_sources_compiler_cpu_and_torch(workshop, monkeypatch):
    keys = {workshop.key()}
    workshop.write(43)
    keys.add(workshop.key())
    (workshop.sources / "beside.h").write_text("// new\n")
    keys.add(workshop.key())
    (workshop.sources.parent / "above.h").write_text("// new\n")
    keys.add(workshop.key())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.999")
        keys.add(workshop.key())
    with monkeypatch.context() as patch:
        patch.setattr(build, "_CXX_FLAGS", (*build._CXX_FLAGS, "-DOTHER"))
        keys.add(workshop.key())
    monkeypatch.setenv("CXX", "c++")
    keys.add(workshop.key())
    assert len(keys) == 7
    moved = workshop.sources.parent.rename(workshop.cache.parent / "elsewhere")
    monkeypatch.setattr(build, "CSRC_DIR", moved)
    assert workshop.key() in keys
    if build.platform.machine() == "x86_64":
        monkeypatch.setenv("DOGE_FAST_MARCH", "x86-64")
        assert workshop.key() not in keys


@needs_to_build
@needs_compiler
def test_what_a_compiler_says_or_that_there_is_none(workshop, monkeypatch):
    (workshop.sources / "tiny.cpp").write_text("int wrong( { }\n")
    with pytest.raises(BuildError, match=r"tiny\.cpp:1:.*error"):
        workshop.load()
    assert list(workshop.cache.glob("tiny-*/")) == []
    assert workshop.left_behind() == []
    for compiler, said in (
        ("/nonexistent/g++", r"No C\+\+ compiler .* /nonexistent/g\+\+"),
        ("false", "false does not work"),
    ):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(BuildError, match=said):
            workshop.load()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(workshop.cache))
    with pytest.raises(BuildError, match=r"No C\+\+ compiler"):
        workshop.load()


def test_a_package_that_is_not_installed_or_a_build_that_is_forbidden(workshop, monkeypatch):
    for package in build.PACKAGES:
        said = rf"{package}.* must be installed; .*doge-fast\[kernels\]"
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(BuildError, match=said):
                workshop.load()
    monkeypatch.setenv("DOGE_FAST_NO_JIT", "1")
    for name in (build.CPP, build.CUDA, build.EMULATED):
        with pytest.raises(BuildError, match="DOGE_FAST_NO_JIT"):
            build.recipe_of(name)
    assert workshop.calls() == []
    assert not workshop.cache.exists()


@needs_to_build
@needs_compiler
def test_the_cache_is_where_the_user_keeps_caches(workshop, monkeypatch, tmp_path):
    recipe = build.recipe_of("tiny")
    assert build._path_of("tiny", recipe).is_relative_to(workshop.cache)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "torch"))
    assert build._path_of("tiny", recipe).is_relative_to(workshop.cache)
    monkeypatch.delenv("DOGE_FAST_CACHE")
    assert build._path_of("tiny", recipe).is_relative_to(tmp_path / "torch" / "doge_fast")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert build.cache_dir() == tmp_path / "elsewhere" / "doge_fast"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / ".cache" / "doge_fast"
    monkeypatch.setenv("HOME", "")
    with pytest.raises(BuildError, match="no home directory"):
        build.cache_dir()
    # What os.path says of a user without one.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(BuildError, match="no home directory"):
        build.cache_dir()


@pytest.mark.parametrize(
    ("listed", "present", "needed"),
    [
        ("8.0;8.6;9.0;10.0+PTX", [(9, 0)], "9.0"),
        ("8.0 9.0+PTX", [(8, 6), (8, 0)], "8.0"),
        ("8.0,9.0+PTX", [(8, 0), (12, 0)], "8.0;9.0+PTX"),
        ("8.0;8.6;8.9", [(8, 6)], "8.0;8.6"),
        ("9.0a", [(9, 0)], "9.0a"),
        # Where nothing serves, torch takes the GPUs that are there; the kernels need 8.0.
        ("8.0;8.6", [(9, 0)], ""),
        ("7.5+PTX", [(8, 0)], ""),
        ("", [(9, 0)], ""),
        # What torch alone knows, and no GPU to compare with.
        ("Ampere;9.0", [(9, 0)], "Ampere;9.0"),
        ("8.0;9.0", [], "8.0;9.0"),
    ],
)
def test_architectures_that_serve_no_gpu_are_not_compiled(listed, present, needed):
    assert needed_architectures(listed, present) == needed


@pytest.fixture
def nvidia(monkeypatch, tmp_path):
    """As on a machine with torch from a wheel and a GPU: the folder in which a toolkit may be."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    build.unavailable_reason.cache_clear()
    monkeypatch.delenv("DOGE_FAST_NO_JIT", raising=False)
    yield tmp_path
    build.unavailable_reason.cache_clear()


def toolkit(folder: Path, says: str, status: int = 0) -> None:
    """A toolkit whose nvcc says `says` to everything."""
    shell_script(folder / "bin" / "nvcc", f"echo '{says}'\nexit {status}")


@needs_to_build
def test_a_gpu_without_a_toolkit_is_said_once(nvidia, monkeypatch):
    """Triton runs, and info says why CUDA does not."""
    reason = of_cuda(GPU)
    assert "install the CUDA toolkit of torch's version 12.8" in str(reason)
    monkeypatch.setattr(build, "recipe_of", lambda name: pytest.fail("a second try"))
    assert of_cuda(GPU) == reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "compute capability 8.0 or later" in str(of_cuda(GPU))


@needs_to_build
def test_a_toolkit_must_be_of_torchs_major_version(nvidia, monkeypatch):
    toolkit(nvidia, "release 12.1, V12.1.1")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0")
    recipe = build.recipe_of(build.CUDA)
    assert recipe.architectures == "9.0"
    toolkit(nvidia, "release 13.0, V13.0.1")
    with pytest.raises(BuildError, match=r"major version .*12\.8; set CUDA_HOME"):
        build.recipe_of(build.CUDA)
    toolkit(nvidia, "broken", status=1)
    with pytest.raises(BuildError, match="nvcc does not work"):
        build.recipe_of(build.CUDA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_said(monkeypatch):
    reason = of_cuda(GPU)
    assert "was built without CUDA" in str(reason) or "Torch finds no GPU" in str(reason)
    assert "not mps" in str(of_cuda(torch.device("mps")))
    monkeypatch.setenv("DOGE_FAST_CUDA_EMULATE", "0")
    assert "DOGE_FAST_CUDA_EMULATE=1" in str(of_cuda(CPU))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "AMD" in str(of_cuda(GPU))


@needs_to_build
@needs_compiler
@pytest.mark.skipif(
    os.environ.get("DOGE_FAST_NO_JIT", "0") not in ("", "0"), reason="DOGE_FAST_NO_JIT is set"
)
def test_the_operators_build_and_load_once():
    assert build.unavailable_reason(build.CPP) is None
    assert torch.ops.doge_fast_cpp.gram([torch.ones(1, 2)]).item() == 2
    # A second copy of the registrations would end the process.
    build.unavailable_reason.cache_clear()
    assert build.unavailable_reason(build.CPP) is None
