"""The passes over memory, as torch operators. The code stands in the top-level kernels/ folder.

A checkout has `kernels/` and `csrc/` next to `doge_fast/`; a wheel has both in `doge_fast/_src/`.
"""

from pathlib import Path

_package = Path(__file__).resolve().parents[1]
for _root in (_package / "_src", _package.parent):
    if (_root / "kernels").is_dir() and (_root / "csrc").is_dir():
        break
else:
    raise ImportError(
        f"doge_fast needs its folders kernels/ and csrc/; neither {_package / '_src'} nor "
        f"{_package.parent} holds both. Install the wheel again, or keep the checkout whole."
    )
__path__.append(str(_root / "kernels"))

# After the line above, which makes these modules findable. An operator's name is that of its file:
# from here on it is the function.
from doge_fast.kernels.accumulate import accumulate, fill  # noqa: E402
from doge_fast.kernels.dispatch import chosen, explain, implementations  # noqa: E402
from doge_fast.kernels.gram import gram  # noqa: E402
from doge_fast.kernels.segment_sum import segment_sum  # noqa: E402
from doge_fast.kernels.weighted_sum import weighted_sum  # noqa: E402

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
