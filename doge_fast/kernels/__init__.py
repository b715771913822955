"""The passes over memory, as torch operators. The code stands in the top-level kernels/ folder."""

from doge_fast._layout import KERNELS_DIR

__path__.append(str(KERNELS_DIR))

# After the line above, which makes these modules findable.
from doge_fast.kernels.dispatch import chosen, explain, implementations  # noqa: E402
from doge_fast.kernels.operators import (  # noqa: E402
    accumulate,
    fill,
    gram,
    segment_sum,
    weighted_sum,
)

__all__ = [
    "accumulate",
    "chosen",
    "explain",
    "fill",
    "gram",
    "implementations",
    "segment_sum",
    "weighted_sum",
]
