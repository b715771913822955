"""Predict the time of a step on a machine from its arithmetic, its bytes and its launches.

    t  =  F / (e P)  +  B / b  +  n t_0

F is the number of operations in matrix products and attention, P the peak rate of the data sheet,
and e the share of P that is reached, the one fitted number. B is the number of bytes that all
kernels read and write, b the bandwidth of a copy. n counts the small kernels, whose time is that of
a launch, t_0. The model assumes that no kernels overlap.

`python -m tests.fake_cuda.work` counts F, B and n per operator, on a simulated device. Label these
figures as predictions.
"""

from typing import NamedTuple

from doge_fast.profiling.roofline import Traffic
from doge_fast.weights.rule import UpdateRule


class Work(NamedTuple):
    """Work of the kernels of a step."""

    flops: float
    """Operations of matrix products and attention; a multiply-add counts as two."""
    num_bytes: float
    """Bytes read and written."""
    gram_bytes: float
    """Bytes read and written for the Gram matrix; part of `num_bytes`."""
    launches: int
    """Kernels that multiply no matrices and move less than `SMALL_BYTES`."""


class Machine(NamedTuple):
    """The limits of a device."""

    flops_per_s: float
    """Dense bfloat16 rate of the data sheet."""
    share: float
    """Share of `flops_per_s` that matrix products reach."""
    bytes_per_s: float
    """Bandwidth of a copy; bytes read and bytes written both count."""
    launch_s: float = 2.5e-6


# Bytes that an H100 moves in the time of a launch.
SMALL_BYTES = 7.5e6
# Bandwidth and share from benchmarks/results/gpu-nvidia-h100-*-steps.json.
H100 = Machine(989e12, 0.725, 3.01e12)
# Not measured: rates of the 80 GB card's data sheet, with the fractions that an H100 reaches (nine
# tenths of the bandwidth, and the same share).
A100 = Machine(312e12, 0.725, 0.9 * 2.04e12)


def predicted_ms(work: Work, machine: Machine, *, hidden_gram: float = 0.0) -> float:
    """Predicted milliseconds of a step.

    Args:
        work: work of the step's kernels.
        machine: limits of the device.
        hidden_gram: share of the Gram matrix's bytes that overlaps with other kernels.
    """
    num_bytes = work.num_bytes - hidden_gram * work.gram_bytes
    products_s = work.flops / (machine.share * machine.flops_per_s)
    bytes_s = num_bytes / machine.bytes_per_s
    return 1e3 * (products_s + bytes_s + work.launches * machine.launch_s)


def rows_traffic(
    rule: type[UpdateRule], num_domains: int, *, row_bytes: int, gradient_bytes: int
) -> dict[str, Traffic]:
    """Least traffic of a rule's rows per phase, in a stacked step without targets.

    A step with `domain(name)` also reads a gradient per row in `accumulate`.

    Args:
        rule: determines the number of rows, and whether second moments are read.
        num_domains: K.
        row_bytes: bytes of one row.
        gradient_bytes: bytes of one gradient of the model; its second moments have as many.
    """
    rows = num_domains * row_bytes * (2 if rule.has_halves else 1)
    # Second moments for `gram`; the combined gradient, read again for its norm, for `weighted_sum`.
    more = gradient_bytes if rule.is_preconditioned else 0
    phases = {"accumulate": Traffic(0, rows)}
    if rule.has_mixture:
        return phases | {
            "gram": Traffic(rows + more, gradient_bytes),
            "weighted_sum": Traffic(more, 0),
        }
    return phases | {
        "gram": Traffic(rows + more, 0),
        "weighted_sum": Traffic(rows + more, gradient_bytes),
    }
