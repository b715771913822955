# The public functions of kernels/segment_sum.py, with the signatures of the package's stub.

from doge_fast.kernels import segment_sum as segment_sum
