"""The passes over memory, as torch operators. The code stands in the top-level kernels/ folder."""

from doge_fast._layout import KERNELS_DIR

__path__.append(str(KERNELS_DIR))

# After the line above, which makes these modules findable.
from doge_fast.kernels.dispatch import chosen, explain, implementations  # noqa: E402
from doge_fast.kernels.operators import accumulate, gram, reweight, weighted_sum  # noqa: E402

__all__ = [
    "accumulate",
    "chosen",
    "explain",
    "gram",
    "implementations",
    "reweight",
    "weighted_sum",
]
