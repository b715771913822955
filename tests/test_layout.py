"""Wheel, sdist and editable install all import, show their types, and leak no bare `kernels`.

Everything is built from a copy of the tracked files into temporary folders, and imported from
outside the checkout with the interpreter's packages (torch, numpy) still visible.
"""

import ast
import os
import re
import shutil
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import doge_fast.kernels
from tests.packages import environment_of
from tests.processes import ended, printed_by

ROOT = Path(__file__).resolve().parents[1]

PIP_INSTALL = [
    *["install", "--quiet", "--no-deps", "--no-build-isolation"],
    *["--disable-pip-version-check", "--no-cache-dir"],
]

# Reaches both folders that stand outside the package in a checkout.
PROBE = """
import importlib.util, sys
import doge_fast, doge_fast.kernels
from doge_fast.kernels import build
assert (build.CSRC_DIR / "cpu" / "gram.cpp").exists()
import torch
doge_fast.kernels.gram(torch.ones(2, 3), implementation="torch")
import doge_fast.pipeline.config
found = importlib.util.find_spec("kernels")
assert found is None or found.origin is None, found
print(doge_fast.__file__)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would clone, working-tree changes included."""
    copy = tmp_path_factory.mktemp("checkout")
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    listed = ended(*command, cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout: what belongs to it cannot be listed")
    for name in listed.stdout.splitlines():
        source = ROOT / name
        if source.is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(source.read_bytes())
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "--wheel", tmp_path_factory.mktemp("wheel"))


def build(source: Path, kind: str, out: Path) -> Path:
    # Without isolation: setuptools is installed, and nothing is fetched.
    printed_by(sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", out, source)
    (built,) = out.iterdir()
    return built


def probe(cwd: Path, path: Path | None = None, python: str | Path = sys.executable) -> Path:
    """Where the package is found, from `path` ahead of any installed copy."""
    environment = {"PATH": "/usr/bin:/bin", "DOGE_FAST_NO_JIT": "1"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    output = printed_by(python, "-P", "-c", PROBE, cwd=cwd, env=environment)
    return Path(output.strip().splitlines()[-1])


def test_wheel_imports_and_carries_sources_and_nothing_at_top_level(wheel, tmp_path):
    pip = [sys.executable, "-m", "pip", *PIP_INSTALL]
    printed_by(*pip, "--target", tmp_path / "site", wheel)
    assert probe(tmp_path, tmp_path / "site").is_relative_to(tmp_path / "site")
    names = zipfile.ZipFile(wheel).namelist()
    # Figures' styles, targets of exports, the page's template: what is no module is there too.
    files = (path for path in (ROOT / "doge_fast").rglob("*") if path.is_file())
    ours = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"}
    assert ours <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"doge_fast"}
    for folder in ("kernels", "csrc"):
        sources = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / folder).rglob("*")
            if path.suffix in {".py", ".cpp", ".cu", ".h", ".cuh"}
        }
        carried = {name.removeprefix("doge_fast/_src/") for name in names}
        assert sources <= carried, sources - carried


@pytest.mark.exhaustive
def test_sdist_builds_the_same_wheel(checkout, wheel, tmp_path):
    sdist = build(checkout, "--sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build(unpacked, "--wheel", tmp_path / "again")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


@pytest.mark.exhaustive
def test_editable(checkout, tmp_path):
    # What the package needs is there, the package is not.
    needed = ("torch", "numpy", "einops", "tyro", "pydantic", "pyyaml", "setuptools")
    python = environment_of(tmp_path / "venv", *needed)
    pip = [sys.executable, "-m", "pip", "--python", python, *PIP_INSTALL]
    printed_by(*pip, "--ignore-installed", "--editable", checkout)
    assert probe(tmp_path, python=python).is_relative_to(checkout)


def test_the_stub_has_the_signatures_of_the_sources():
    """Type checkers read the stub, because they do not see kernels/ beside the package."""
    folder = ROOT / "doge_fast" / "kernels"
    stub = functions_in(folder / "__init__.pyi")
    sources = {}
    for path in (ROOT / "kernels").glob("*.py"):
        sources |= functions_in(path)
    assert stub == {name: sources[name] for name in stub}
    assert set(stub) == set(doge_fast.kernels.__all__)


def functions_in(path: Path) -> dict[str, str]:
    """{name: arguments -> result} of the public functions of a file."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {
        node.name: f"{ast.unparse(node.args)} -> {ast.unparse(node.returns)}"
        for node in body
        if isinstance(node, ast.FunctionDef) and node.returns is not None
    }


# A program without an error; one that reveals two signatures and calls `gram` wrongly.
RIGHT = """
import torch
from doge_fast import DoGEOptimizer
from doge_fast.kernels import gram
weight = torch.nn.Parameter(torch.ones(2))
optimizer = DoGEOptimizer(torch.optim.SGD([weight], lr=0.1), domains=["a", "b"])
gram_KK: torch.Tensor = gram(torch.ones(2, 3))
"""
USER = """
from doge_fast.kernels import accumulate, chosen, fill, gram, implementations, segment_sum
from doge_fast.kernels import weighted_sum
reveal_type(gram)
reveal_type(weighted_sum)
gram(17, nonsense=True)
"""
SEEN = [
    r"grads: (torch\._tensor\.)?Tensor \| ([\w.]+\.)?Sequence\[(torch\._tensor\.)?Tensor\]",
    r"coefficients_R: (torch\._tensor\.)?Tensor",
    r"nonsense",
]


@pytest.fixture(scope="module")
def installed(
    request: pytest.FixtureRequest, checkout: Path, wheel: Path, tmp_path_factory
) -> tuple[Path, dict[str, str]]:
    """A Python that has the package in one of three ways, and the environment that it needs."""
    python = environment_of(
        tmp_path_factory.mktemp("typed") / "venv", "torch", "numpy", "einops", "setuptools"
    )
    pip = [sys.executable, "-m", "pip", "--python", python, *PIP_INSTALL, "--ignore-installed"]
    if request.param == "checkout":
        return python, {"MYPYPATH": str(checkout), "PYTHONPATH": str(checkout)}
    if request.param == "editable":
        # Type checkers follow no import hooks, which are setuptools' other way.
        pip += ["--config-settings", "editable_mode=strict", "--editable"]
    printed_by(*pip, checkout if request.param == "editable" else wheel)
    return python, {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
@pytest.mark.parametrize("installed", ["wheel", "editable", "checkout"], indirect=True)
def test_a_users_type_checker_sees_the_signatures(installed, checker, tmp_path):
    """Without them `gram` is Any, and everything is right."""
    python, environment = installed
    program = shutil.which(checker, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"{checker} is not installed")
    (tmp_path / "right.py").write_text(RIGHT, encoding="utf-8")
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    option = "--python-executable" if checker == "mypy" else "--pythonpath"
    right, done = (
        ended(program, option, python, name, cwd=tmp_path, env=os.environ | environment)
        for name in ("right.py", "user.py")
    )
    assert right.returncode == 0, right.stdout + right.stderr
    assert done.returncode == 1, done.stdout + done.stderr
    for seen in SEEN:
        assert re.search(seen, done.stdout), done.stdout


def test_what_is_pinned_runs_on_the_python_of_debian():
    """Of the pinned packages that are installed here; another release would not be found there."""
    pins = (ROOT / ".ci/constraints.txt").read_text(encoding="utf-8")
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", pins, re.M):
        found = next(iter(metadata.distributions(name=name)), None)
        if found is not None and found.version == version:
            pythons = SpecifierSet(found.metadata.get("Requires-Python") or "")
            assert pythons.contains("3.11.2"), f"{name} {version} asks for Python {pythons}"


def test_the_method_needs_nothing_but_torch_and_einops():
    """As on a machine that has a GPU, torch and little else."""
    code = """
import sys
for name in ("numpy", "transformers", "datasets", "matplotlib", "tyro", "pydantic", "yaml"):
    sys.modules[name] = None
import warnings
warnings.simplefilter("ignore")
import torch
import benchmarks.gpu.__main__, doge_fast.info
from doge_fast import DoGEOptimizer
from doge_fast.kernels.chunks import Span, chunk_tables
model = torch.nn.Linear(3, 1)
names = ["a", "b", "c"]
optimizer = DoGEOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), domains=names, domains_per_step=2
)
for name in optimizer.domains_of_step:
    with optimizer.domain(name):
        model(torch.randn(2, 3)).square().mean().backward()
optimizer.step()
(table,) = chunk_tables([Span(0, 4, 64, 100)], ("source", "length"), 64, torch.device("cpu"))[1:]
assert table.table.tolist() == [[256, 36]]
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DOGE_FAST_BACKEND": "torch"}
    printed_by(sys.executable, "-c", code, env=environment, cwd=ROOT)
