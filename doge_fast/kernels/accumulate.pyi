# The public functions of kernels/accumulate.py, with the signatures of the package's stub.

from doge_fast.kernels import accumulate as accumulate
from doge_fast.kernels import fill as fill
