"""Packages of others, for tests that need them."""

import importlib.util
import warnings
from typing import Any

import pytest

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
