"""csrc/ compiles against the headers of the oldest torch that we accept, and of this one.

Headers are the same files in the wheels of every platform. Those of another version are taken from
the folder that TORCH_HEADERS_2_11_0 (or whichever version) names, the one that holds `torch/csrc`;
else from the user's cache; else out of the smallest wheel that pip finds, once.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from doge_fast.kernels import build

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = "installed"
# Without CUDA inside, a tenth of the size of others.
PLATFORMS = ("macosx_11_0_arm64", "macosx_14_0_arm64")
DOWNLOAD_S = 300
# What a header lacks, the front end finds: code for one GPU, without optimisation and assembler.
QUICKLY = ("-gencode=arch=compute_90,code=compute_90", "-Xcicc=-O0")


def oldest() -> str:
    """The lowest torch of pyproject.toml, as "2.11.0"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (bound,) = [each for each in project["dependencies"] if each.startswith("torch>=")]
    return f"{bound.removeprefix('torch>=')}.0"


@pytest.fixture(scope="module", params=[oldest(), INSTALLED])
def headers(request: pytest.FixtureRequest) -> Path:
    """The folder `include` of a version of torch, or a skip."""
    version: str = request.param
    if version in (INSTALLED, torch.__version__.split("+")[0]):
        return Path(torch.__file__).parent / "include"
    if chosen := os.environ.get(f"TORCH_HEADERS_{version.replace('.', '_')}"):
        return Path(chosen)
    try:
        folder = build.cache_dir() / "torch-headers" / version
    except build.BuildError as error:
        pytest.skip(str(error))
    if not folder.is_dir():
        download(version, folder)
    return folder / "torch" / "include"


def download(version: str, folder: Path) -> None:
    """Unpack the headers of a wheel into `folder`, or skip."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", f"torch=={version}", "--no-deps"]
        pip += ["--only-binary=:all:", "--python-version=3.12", f"--dest={scratch}", "--quiet"]
        pip += [f"--platform={platform}" for platform in PLATFORMS]
        try:
            done = subprocess.run(
                pip, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"torch {version} could not be downloaded within {DOWNLOAD_S} s")
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            pytest.skip(f"the headers of torch {version} cannot be had: {reason}")
        (wheel,) = Path(scratch).glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("torch/include/")]
            archive.extractall(f"{scratch}/headers", names)
        # In one piece; where another process was faster, the folder is there and not empty.
        with contextlib.suppress(OSError):
            Path(f"{scratch}/headers").rename(folder)


def failures(command: Sequence[str], sources: Sequence[Path], headers: Path) -> dict[str, str]:
    """{source: what the compiler said} of those that do not compile."""

    def said(source: Path) -> str:
        words = [*command, "-isystem", str(headers), str(source)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.stderr[-2000:] if done.returncode else ""

    assert sources
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        texts = pool.map(said, sources)
    return {source.name: text for source, text in zip(sources, texts, strict=True) if text}


def test_the_operators_for_cpus_compile(headers: Path) -> None:
    try:
        recipe = build.recipe_of(build.CPP)
    except build.BuildError as error:
        pytest.skip(str(error))
    command = [build.cxx(), *recipe.flags, "-fsyntax-only"]
    assert not failures(command, sorted(recipe.sources.glob("*.cpp")), headers)


def test_the_operators_for_gpus_compile(headers: Path) -> None:
    if (nvcc := shutil.which("nvcc")) is None:
        pytest.skip("nvcc is not on PATH")
    command = [nvcc, *build.CUDA_FLAGS, *QUICKLY, "-Xcompiler=-fPIC", "-c", "-o", os.devnull]
    assert not failures(command, sorted((build.CSRC_DIR / "cuda").glob("*.cu")), headers)
