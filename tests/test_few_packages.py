"""What a machine need not have: the pipeline's packages, plugins of pytest, our versions."""

import json
import os
import re
import subprocess
import warnings
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from benchmarks.gpu import bars
from benchmarks.gpu.__main__ import PARTS, STANDARD
from benchmarks.gpu.session import expected
from tests.conftest import default_device
from tests.packages import environment_of
from tests.processes import ended

ROOT = Path(__file__).resolve().parents[1]
FEW = ("torch", "numpy", "triton", "einops", "tyro", "pydantic", "pyyaml")
ABSENT = ("transformers", "datasets", "scipy", "lm_eval", "ninja")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with what the package needs, Triton and pytest."""
    try:
        found = environment_of(tmp_path_factory.mktemp("few") / "venv", *FEW, "pytest")
    except PackageNotFoundError as error:
        pytest.skip(f"{error} is not installed here")
    absent = f"import importlib.util as u; print([n for n in {ABSENT} if u.find_spec(n)])"
    assert run(found, "-c", absent).stdout.strip() == "[]"
    return found


def run(python: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A program in that environment, with our sources and nothing else of this one."""
    dropped = ("PYTHONPATH", "PYTEST_ADDOPTS", "DOGE_FAST_BACKEND")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    return ended(python, *words, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)})


@pytest.mark.exhaustive
def test_the_gpu_script_runs_with_few_packages(python, tmp_path):
    """All of it; the compiled operators need ninja, which it says, and the job transformers."""
    words = ["--device", "cpu", "--quick", "--commit", "abc", "--out", str(tmp_path)]
    done = run(python, "-m", "benchmarks.gpu", *words)
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    sections = record["sections"]
    assert set(sections) == {name for part in STANDARD for name in PARTS[part].sections}
    assert bars.is_correct(sections), done.stdout
    (job,) = sections["job"]["rows"]
    assert re.search(r"needs more packages: ModuleNotFoundError: No module", job["skipped"])
    missing = {name: record["missing"].get(name) for name in expected(default_device())}
    if "cpp" in missing:
        assert re.search(r"ninja.* must be installed", str(missing["cpp"]))
        assert re.search(r"^MISSING +cpp should run on this device", done.stdout, re.MULTILINE)
    assert done.returncode == (bars.WRONG if record["missing"] else bars.ALL_WELL)


@pytest.mark.exhaustive
def test_nothing_compiled_and_no_transformers_is_no_error(python, tmp_path, monkeypatch):
    monkeypatch.setenv("DOGE_FAST_CACHE", str(tmp_path))
    done = run(python, "-m", "doge_fast", "info")
    assert done.returncode == 0, done.stderr
    assert re.search(r"gram +torch +the first that can run of cpp, torch", done.stdout)
    assert re.search(r"cpp cannot run: .*ninja", done.stdout)


@pytest.mark.exhaustive
def test_tests_of_operators_and_method_are_collected_and_run(python):
    """With nothing but pytest itself, whose configuration names options of plugins."""
    done = run(python, "-m", "pytest", "--collect-only", "-q", "tests/operators", "tests/method")
    assert done.returncode == 0, done.stdout[-3000:]
    some = ("tests/method/test_alternation.py", "tests/method/test_on_a_gpu.py")
    done = run(python, "-m", "pytest", "-q", *some, "tests/operators/test_reweight.py")
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_warning_is_an_error_where_it_is_ours(pytestconfig):
    """Other packages warn of themselves, each version of something else."""
    assert __name__.startswith("tests.")
    ((action, *_, ours),) = (line.split(":", 3) for line in pytestconfig.getini("filterwarnings"))

    def warn_of(module: str) -> None:
        warnings.warn_explicit("call another", FutureWarning, "file", 1, module=module)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings(action, module=ours)
        for module in ("doge_fast", "doge_fast.step", "benchmarks.peers", "tests.test_docs"):
            with pytest.raises(FutureWarning):
                warn_of(module)
        for module in ("torch", "testsuite", "elsewhere.tests"):
            warn_of(module)
