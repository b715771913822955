"""The passes over memory, as torch operators. The code stands in the top-level kernels/ folder."""

from doge_fast._layout import KERNELS_DIR

__path__.append(str(KERNELS_DIR))
