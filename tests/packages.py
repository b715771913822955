"""Packages of others, for tests that need them."""

import importlib.util
import sys
import warnings
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.processes import printed_by

# Of pip install 'doge-fast[kernels]'.
_TO_BUILD = ("ninja", "filelock", "setuptools")
needs_to_build = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, _TO_BUILD)),
    reason=f"to compile operators, {', '.join(_TO_BUILD)} must be installed",
)


def installed(name: str) -> Any:
    """The module, or a skip; what it warns of while it is imported is not ours to repair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            name, reason=f"{name} cannot be imported here", exc_type=ImportError
        )


def environment_of(folder: Path, *packages: str) -> Path:
    """The Python of a fresh environment in `folder` that has some packages and all they need.

    Raises:
        PackageNotFoundError: one of `packages` is not installed here.
    """
    printed_by(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for each in closure(*packages).values():
        for top in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            link = site / top
            # Some packages share a folder.
            if not link.exists():
                link.symlink_to(Path(str(each.locate_file(top))))
    return folder / "bin" / "python"


def closure(*packages: str) -> dict[str, Distribution]:
    """{name: distribution} of packages and of all that they require, where it is installed."""
    found = {name: distribution(name) for name in packages}
    waiting = list(found.values())
    while waiting:
        for text in waiting.pop().requires or ():
            requirement = Requirement(text)
            is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not is_needed or requirement.name in found:
                continue
            try:
                each = distribution(requirement.name)
            except PackageNotFoundError:
                continue
            found[requirement.name] = each
            waiting.append(each)
    return found
