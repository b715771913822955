"""What a step should take on a machine, from its arithmetic, its bytes and its launches.

    t  =  F / (e P)  +  B / b  +  n t_0

F are the operations of matrix products and of attention, P is the data sheet's rate, e the one
number that is fitted to measured steps. B are the bytes that all kernels read and write, b is the
bandwidth of a copy. n kernels that are too small for either take the time t_0 of a launch. Nothing
is assumed to run beside anything else.

`python -m tests.fake_cuda.work` counts F, B and n operator by operator, on a pretended device.
A figure from here is a prediction, and has to say so.
"""

from typing import NamedTuple


class Work(NamedTuple):
    """What the kernels of a step do."""

    flops: float
    """Of matrix products and of attention; a multiplication and an addition are two."""
    num_bytes: float
    """Read and written."""
    gram_bytes: float
    """Those of the Gram matrix."""
    launches: int
    """Kernels that multiply no matrices and move less than `SMALL_BYTES`."""


class Machine(NamedTuple):
    """The limits of a device."""

    flops_per_s: float
    """Dense bfloat16, by the data sheet."""
    share: float
    """What products reach of it."""
    bytes_per_s: float
    """Of a copy, both directions counted."""
    launch_s: float = 2.5e-6


# What an H100 moves in the time of a launch.
SMALL_BYTES = 7.5e6
# Bandwidth and share of the records benchmarks/results/gpu-nvidia-h100-*-steps.json.
H100 = Machine(989e12, 0.725, 3.01e12)
# Never measured: the data sheet of the card with 80 GB, nine tenths of its bandwidth, as an H100
# reaches, and an H100's share.
A100 = Machine(312e12, 0.725, 0.9 * 2.04e12)


def predicted_ms(work: Work, machine: Machine, *, hidden_gram: float = 0.0) -> float:
    """Milliseconds of a step.

    Args:
        work: of its kernels.
        machine: where it runs.
        hidden_gram: the share of the Gram matrix that runs beside other kernels.
    """
    num_bytes = work.num_bytes - hidden_gram * work.gram_bytes
    products_s = work.flops / (machine.share * machine.flops_per_s)
    bytes_s = num_bytes / machine.bytes_per_s
    return 1e3 * (products_s + bytes_s + work.launches * machine.launch_s)
