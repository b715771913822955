"""What hypothesis draws: numbers, points of the simplex, gradients, and what a file may hold.

Profiles: "few", which `make test` runs, always the same examples; "many", which `make soak` runs.
"""

from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

_COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("few", max_examples=25, derandomize=True, **_COMMON)
settings.register_profile("many", max_examples=1000, **_COMMON)


def reals(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers that are not smaller than what float64 divides by, or zero."""
    return st.floats(low, high, allow_nan=False, allow_subnormal=False)


def vectors(
    size: int | st.SearchStrategy[int], low: float = -1e3, high: float = 1e3
) -> st.SearchStrategy[Tensor]:
    """[size] float64."""
    sizes = st.just(size) if isinstance(size, int) else size
    return sizes.flatmap(
        lambda n: st.lists(reals(low, high), min_size=n, max_size=n).map(
            lambda values: torch.tensor(values, dtype=torch.float64)
        )
    )


def points(size: int | st.SearchStrategy[int]) -> st.SearchStrategy[Tensor]:
    """[size] float64 on the simplex, zeros and far scales included."""

    def normalised(values: Tensor) -> Tensor:
        total = values.sum()
        return values / total if total > 0 else torch.full_like(values, 1 / len(values))

    return vectors(size, 0.0, 1.0).map(normalised)


@st.composite
def gradients(draw: st.DrawFn, rows: int | None = None) -> Tensor:
    """[R, N] float64 rows of one to six domains, each of a scale of its own; some are zero."""
    num_rows = draw(st.integers(1, 6)) if rows is None else rows
    num_columns = draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    normal_RN = torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)
    scales = st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 1e3])
    scales_R = draw(st.lists(scales, min_size=num_rows, max_size=num_rows))
    return normal_RN * torch.tensor(scales_R, dtype=torch.float64)[:, None]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=12,
)
"""What a file may hold after it was read."""
