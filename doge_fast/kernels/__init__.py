"""The passes over memory, as torch operators. The code stands in the top-level kernels/ folder."""

from doge_fast._layout import KERNELS_DIR

__path__.append(str(KERNELS_DIR))

# After the line above, which makes these modules findable. An operator's name is that of its file:
# from here on it is the function.
from doge_fast.kernels.accumulate import accumulate, fill  # noqa: E402
from doge_fast.kernels.dispatch import chosen, explain, implementations  # noqa: E402
from doge_fast.kernels.gram import gram  # noqa: E402
from doge_fast.kernels.reweight.operator import reweight  # noqa: E402
from doge_fast.kernels.segment_sum import segment_sum  # noqa: E402
from doge_fast.kernels.weighted_sum import weighted_sum  # noqa: E402

__all__ = [
    "accumulate",
    "chosen",
    "explain",
    "fill",
    "gram",
    "implementations",
    "reweight",
    "segment_sum",
    "weighted_sum",
]
