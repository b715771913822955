# The public functions of kernels/gram.py, with the signatures of the package's stub.

from doge_fast.kernels import gram as gram
