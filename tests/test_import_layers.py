"""Imports go down: the layers stand in pyproject.toml, and import-linter checks them."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.processes import printed_by

ROOT = Path(__file__).resolve().parents[1]


def test_imports_go_down(tmp_path):
    pytest.importorskip("importlinter", reason="import-linter is a development dependency")
    # import-linter looks for modules on the disk, where kernels/ stands beside the package and not
    # in it: it gets a copy that has everything where Python's imports find it.
    without = shutil.ignore_patterns("__pycache__", "results")
    for package in ("doge_fast", "benchmarks"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=without)
    kernels = tmp_path / "doge_fast" / "kernels"
    shutil.copytree(ROOT / "kernels", kernels, ignore=without, dirs_exist_ok=True)
    for folder in (path for path in kernels.rglob("*") if path.is_dir()):
        (folder / "__init__.py").touch()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = "from importlinter.cli import lint_imports_command as lint; lint()"
    printed_by(sys.executable, "-c", command, "--no-cache", cwd=tmp_path)
