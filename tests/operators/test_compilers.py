"""nvcc and what it compiles for, and a sentence for every obstacle to the CUDA operators."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from doge_fast.kernels import build, compilers
from doge_fast.kernels.compilers import (
    USUAL_CAPABILITIES,
    BuildError,
    Nvcc,
    architecture_flags,
    capabilities,
    check_release,
    find_nvcc,
    nvcc_recipe,
)
from doge_fast.kernels.obstacles import of_cuda
from tests.packages import needs_to_build

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
GPU = torch.device("cuda")


def make_nvcc(folder: Path, answer: str, status: int = 0) -> Path:
    """A toolkit whose nvcc says `answer` to everything."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho '{answer}'\nexit {status}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a variable nor PATH names a CUDA compiler."""
    for name in ("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been tried yet."""
    monkeypatch.setattr(build, "_outcomes", {})


@pytest.mark.usefixtures("no_toolkit")
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", "PATH"])
def test_nvcc_is_found(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_nvcc(tmp_path, "Cuda compilation tools, release 12.8, V12.8.93")
    monkeypatch.setenv(variable, str(path.parent if variable == "PATH" else tmp_path))
    assert find_nvcc() == Nvcc(str(path), (12, 8))


@pytest.mark.usefixtures("no_toolkit")
def test_cuda_home_comes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = make_nvcc(tmp_path / "a", "release 13.0, V13.0.1")
    other = make_nvcc(tmp_path / "b", "release 12.1, V12.1.1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "a"))
    monkeypatch.setenv("PATH", str(other.parent))
    assert find_nvcc() == Nvcc(str(wanted), (13, 0))


@pytest.mark.usefixtures("no_toolkit")
@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        ("release 12.8, V12.8.93", 1, "does not answer to --version"),
        ("gcc 13", 0, "does not say its release; is it nvcc"),
    ],
)
def test_an_nvcc_that_is_none_is_said(
    answer: str, status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_nvcc(tmp_path, answer, status)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=message):
        find_nvcc()


@pytest.mark.usefixtures("no_toolkit")
def test_no_nvcc_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers.shutil, "which", lambda _: None)
    with pytest.raises(BuildError, match=r"No CUDA compiler .*; install the CUDA toolkit"):
        find_nvcc()


def test_a_toolkit_of_another_major_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    check_release(Nvcc("nvcc", (12, 1)))
    with pytest.raises(BuildError, match=r"nvcc is of CUDA 13\.0, torch of CUDA 12\.8; set CUDA_H"):
        check_release(Nvcc("nvcc", (13, 0)))


def test_the_list_of_capabilities_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for listed in ("8.0;9.0+PTX", "8.0 9.0+PTX", "7.5, 8.0, 9.0+PTX"):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
        assert capabilities() == ("8.0", "9.0+PTX")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(BuildError, match="names 'Hopper'; name compute capabilities"):
        capabilities()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0")
    with pytest.raises(BuildError, match=r"8\.0 or later, asked for were \['7\.0'\]"):
        capabilities()


def test_without_a_list_it_is_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: [(9, 0), (8, 0), (9, 0)][i])
    assert capabilities() == ("8.0", "9.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert capabilities() == USUAL_CAPABILITIES


def test_a_gpu_younger_than_nvcc_gets_ptx() -> None:
    known = (75, 80, 90)
    assert architecture_flags(("8.0", "9.0+PTX"), known) == [
        "-gencode=arch=compute_80,code=[sm_80]",
        "-gencode=arch=compute_90,code=[sm_90,compute_90]",
    ]
    assert architecture_flags(("12.0",), known) == ["-gencode=arch=compute_90,code=[compute_90]"]
    assert architecture_flags(("9.0a",), known) == ["-gencode=arch=compute_90,code=[sm_90]"]
    with pytest.raises(BuildError, match="knows 90, 100, not 80"):
        architecture_flags(("8.0",), (90, 100))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_said() -> None:
    reason = of_cuda(GPU)
    assert reason is not None
    assert "was built without CUDA" in reason or "Torch finds no GPU" in reason
    assert "AMD" in str(why_not_on_amd())
    assert "not mps" in str(of_cuda(torch.device("mps")))


def why_not_on_amd() -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.2")
        return of_cuda(GPU)


@needs_to_build
@pytest.mark.usefixtures("fresh", "no_toolkit")
def test_a_gpu_without_a_toolkit_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on most machines with torch from a wheel: Triton runs, and info says why CUDA does not."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(compilers.shutil, "which", lambda _: None)
    monkeypatch.delenv("DOGE_FAST_NO_JIT", raising=False)
    reason = of_cuda(GPU)
    assert reason is not None
    assert reason.endswith("install the CUDA toolkit of torch's version 12.8.")
    monkeypatch.setattr(compilers, "find_nvcc", lambda: pytest.fail("a second try"))
    assert of_cuda(GPU) == reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "compute capability 8.0 or later" in str(of_cuda(GPU))


@pytest.mark.usefixtures("fresh")
def test_nothing_is_compiled_where_that_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOGE_FAST_NO_JIT", "1")
    for name in (build.CUDA, build.EMULATED):
        with pytest.raises(BuildError, match="DOGE_FAST_NO_JIT is set"):
            build.build_library(name, *build._LIBRARIES[name])


def test_the_emulator_is_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOGE_FAST_CUDA_EMULATE", "0")
    assert "DOGE_FAST_CUDA_EMULATE=1" in str(of_cuda(CPU))


@needs_to_build
def test_a_broken_nvcc_says_its_first_error(tmp_path: Path) -> None:
    path = make_nvcc(tmp_path, "gram.cu(3): error: no such thing", 2)
    (tmp_path / "scratch").mkdir()
    recipe = nvcc_recipe(build.CSRC_DIR / "cuda", Nvcc(str(path), (13, 0)), [])
    with pytest.raises(BuildError, match=r"nvcc failed: gram.cu\(3\): error: no such thing"):
        build.compile_into(tmp_path / "scratch", recipe)


def test_importing_compiles_nothing(tmp_path: Path) -> None:
    code = "import doge_fast.kernels.build as b; assert not b._outcomes"
    environment = os.environ | {"DOGE_FAST_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not list(tmp_path.iterdir())


def test_the_emulated_kernels_want_one_copy_in_a_process() -> None:
    reason = of_cuda(CPU)
    if reason is not None:
        pytest.skip(reason)
    build._outcomes.pop(build.EMULATED)
    assert build.why_not(build.EMULATED) is None
    assert build.cache_dir().is_dir()
