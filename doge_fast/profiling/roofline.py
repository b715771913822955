"""Measured memory bandwidth of a device, and the time that memory traffic takes at least.

No number comes from a data sheet. The read bandwidth is that of the fastest of several functions
that read a buffer far larger than the caches; the copy bandwidth that of the fastest of several
that copy it. A copy counts bytes read and bytes written.
"""

import statistics
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from doge_fast.alternation import Call, alternated, quartiles
from doge_fast.kernels.gram import gram
from doge_fast.kernels.weighted_sum import weighted_sum

REPEATS = 9
# torch.dot goes through BLAS, whose sizes are 32-bit.
MAX_BLAS = 2**31


class Bandwidth(NamedTuple):
    """Bytes per second, medians of a few runs."""

    read: float
    """Bandwidth of a read."""
    copy: float
    """Bandwidth of a copy; bytes read and bytes written both count."""
    spread: float
    """Interquartile range over median, the larger of read and copy."""


class Traffic(NamedTuple):
    """Bytes that must be read and written."""

    read: int
    written: int

    def seconds(self, limits: Bandwidth) -> float:
        """Least time at the measured bandwidths; writes, and as many reads, take copy time."""
        alone = max(0, self.read - self.written)
        return float((self.read + self.written - alone) / limits.copy + alone / limits.read)


def bandwidth(device: torch.device | str, num_bytes: int | None = None) -> Bandwidth:
    """Measure the read and copy bandwidth of `device`; on a CPU with torch's current threads.

    A read is the fastest of `torch.sum`, `torch.dot` and our Gram matrix of one row. A copy is the
    fastest of `Tensor.copy_` and our weighted sum of one row, which on a CPU bypasses the caches.
    Measured once per device, size and number of threads.

    Args:
        device: a CPU or a GPU.
        num_bytes: >= 64; size of the buffer. None: 256 MiB on a CPU, 1 GiB on a GPU. A buffer
            smaller than the caches measures the caches. Two buffers are allocated.
    """
    device = torch.device(device)
    if num_bytes is None:
        # Larger than any cache; small beside the memory of anything that trains.
        num_bytes = 256 << 20 if device.type == "cpu" else 1 << 30
    if num_bytes < 64:
        raise ValueError(
            f"num_bytes must be at least 64; got {num_bytes}. Leave it out for the standard size."
        )
    return _measured(device, num_bytes, torch.get_num_threads())


@cache
def _measured(device: torch.device, num_bytes: int, num_threads: int) -> Bandwidth:
    # `num_threads` is only part of the cache's key.
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    one_R = torch.ones(1, device=device, dtype=torch.float64)
    reads: dict[str, Call] = {"sum": source.sum, "gram": lambda: gram(source[None])}
    if source.numel() < MAX_BLAS:
        reads["dot"] = lambda: torch.dot(source, source)
    copies: dict[str, Call] = {
        "copy": lambda: target.copy_(source),
        "weighted_sum": lambda: weighted_sum(source[None], one_R, out=target),
    }
    calls = reads | copies
    for call in calls.values():
        call()
    times = alternated(calls, rounds=REPEATS, device=device, hide_host=True)
    read = min((times[name] for name in reads), key=statistics.median)
    copy = min((times[name] for name in copies), key=statistics.median)
    size = source.numel() * source.element_size()
    return Bandwidth(
        read=1e3 * size / statistics.median(read),
        copy=2e3 * size / statistics.median(copy),
        spread=max(_spread(read), _spread(copy)),
    )


def _spread(milliseconds: Sequence[float]) -> float:
    low, high = quartiles(milliseconds)
    return (high - low) / statistics.median(milliseconds)
