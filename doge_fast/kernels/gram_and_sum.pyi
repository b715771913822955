# The public functions of kernels/gram_and_sum.py, with the signatures of the package's stub.

from doge_fast.kernels import gram_and_sum as gram_and_sum
