"""The passes over memory, as torch operators. The code stands in the top-level kernels/ folder.

A checkout has `kernels/` and `csrc/` next to `doge_fast/`; a wheel has both in `doge_fast/_src/`.
Type checkers see neither folder, so they read the signatures in `__init__.pyi`.
"""

from pathlib import Path

_package = Path(__file__).resolve().parents[1]
_of_wheel = _package / "_src" / "kernels"
__path__.append(str(_of_wheel if _of_wheel.is_dir() else _package.parent / "kernels"))

# After the line above, which makes these modules findable. An operator's name is that of its file:
# from here on it is the function.
from doge_fast.kernels.accumulate import accumulate, fill  # noqa: E402
from doge_fast.kernels.cross_entropy import cross_entropy  # noqa: E402
from doge_fast.kernels.dispatch import chosen, implementations  # noqa: E402
from doge_fast.kernels.gram import gram  # noqa: E402
from doge_fast.kernels.gram_and_sum import gram_and_sum  # noqa: E402
from doge_fast.kernels.scale_rows import scale_rows  # noqa: E402
from doge_fast.kernels.segment_sum import segment_sum  # noqa: E402
from doge_fast.kernels.weighted_sum import weighted_sum  # noqa: E402

__all__ = [
    "accumulate",
    "chosen",
    "cross_entropy",
    "fill",
    "gram",
    "gram_and_sum",
    "implementations",
    "scale_rows",
    "segment_sum",
    "weighted_sum",
]
