"""What a device's memory can do, measured: the yardstick that a pass over memory is held against.

Nothing is read from a data sheet. A read is the fastest of a few ways to touch every byte of a
buffer far larger than the caches; a copy counts the bytes read and the bytes written.
"""

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from doge_fast.kernels.operators import gram

# Larger than any cache; small beside the memory of anything that trains.
NUM_BYTES = {"cpu": 256 << 20}
NUM_BYTES_ELSEWHERE = 1 << 30
REPEATS = 7


class Bandwidth(NamedTuple):
    """Bytes per second, medians of a few runs."""

    read: float
    """Reading alone."""
    copy: float
    """Reading and writing, both counted."""


@cache
def bandwidth(device: torch.device, num_bytes: int | None = None) -> Bandwidth:
    """Read and copy bandwidth of `device`, with the threads that torch uses now.

    Measured on the first call for a device and size, and kept.

    Args:
        device: a CPU or a GPU, with its index.
        num_bytes: of the buffer; None: 256 MiB on a CPU, 1 GiB elsewhere.
    """
    num_bytes = num_bytes or NUM_BYTES.get(device.type, NUM_BYTES_ELSEWHERE)
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    ways: list[Callable[[], object]] = [
        lambda: source.sum(),
        lambda: torch.dot(source, source) if source.numel() < 2**31 else source.sum(),
        lambda: gram(source[None]),
    ]
    size = source.numel() * source.element_size()
    read = size / min(seconds(way, device) for way in ways)
    return Bandwidth(read=read, copy=2 * size / seconds(lambda: target.copy_(source), device))


def seconds(run: Callable[[], Tensor | object], device: torch.device) -> float:
    """Median time of `run` on `device`, after one call that does not count."""
    run()
    return statistics.median(_timed(run, device) for _ in range(REPEATS))


def _timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        begin.record()
        run()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
