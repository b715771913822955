"""Cases of a grid: those that stand for it in `make test`, and the rest, which are exhaustive."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def grid(*axes: Iterable[Any], some: Callable[..., bool]) -> list[Any]:
    """Cases of `pytest.mark.parametrize`: the product of the axes.

    Args:
        axes: values of each argument.
        some: whether a case, one value of each axis, stays in `make test`.
    """
    return [
        pytest.param(*case, marks=() if some(*case) else pytest.mark.exhaustive)
        for case in itertools.product(*axes)
    ]
