"""Packages of others, for tests that need them."""

import warnings
from typing import Any

import pytest


def installed(name: str) -> Any:
    """The module, or a skip; what it warns of while it is imported is not ours to repair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            name, reason=f"{name} cannot be imported here", exc_type=ImportError
        )
