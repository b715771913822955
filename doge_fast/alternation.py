"""Compare times in one process: alternated calls, and medians of ratios.

A machine's speed drifts by tens of percent over minutes, so a single time says little. The calls
to compare run alternately, once a round. Each round gives one ratio; the median and quartiles of
the ratios are reported.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

MIN_ROUNDS = 3
# The host's time to queue a call is the maximum over this many calls.
HOST_SAMPLES = 3
# The device sleeps this many times as long, since the host's time varies; sleeping too long does
# not change the measured time.
HOST_MARGIN = 2.0
# Cycles of the sleep that measures a device's clock: about a millisecond.
COUNTED_CYCLES = 2_000_000


@dataclass(frozen=True)
class Ratio:
    """Paired times of a variant and a baseline."""

    variant_ms: float
    """Median."""
    baseline_ms: float
    """Median."""
    ratio: float
    """Median of the ratios variant / baseline of each round."""
    low: float
    """Lower quartile of the ratios."""
    high: float
    """Upper quartile of the ratios."""
    pairs: int


def alternated(
    calls: Mapping[str, Call],
    *,
    rounds: int,
    device: torch.device | str = "cpu",
    before: Call | None = None,
    seconds: float = math.inf,
    hide_host: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Milliseconds of each warmed-up call in each round, in an order that changes.

    Args:
        calls: what is timed.
        rounds: number of rounds, if time allows.
        device: its queue is drained around each sample.
        before: runs before each sample and is not timed.
        seconds: no round begins after that, except the first `MIN_ROUNDS`.
        hide_host: measure a GPU's time alone, as of an operator in a full queue. Otherwise the
            host's time to queue the work counts too, as in a step.
        clock: seconds, on a CPU; `time.process_time` leaves out what other processes take.
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    cycles = {name: cycles_to_hide(calls[name], device) if hide_host else 0 for name in names}
    end = time.monotonic() + seconds
    # A garbage collection would count for the call in which it happens.
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for i in range(rounds):
            if i >= MIN_ROUNDS and time.monotonic() >= end:
                break
            shift = i // 2 % len(names)
            order = names[shift:] + names[:shift]
            for name in order if i % 2 else reversed(order):
                times[name].append(timed_ms(calls[name], device, before, cycles[name], clock))
    finally:
        if was_enabled:
            gc.enable()
    return times


def timed_ms(
    call: Call,
    device: torch.device | str = "cpu",
    before: Call | None = None,
    sleep_cycles: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Milliseconds of one call, the device's queue drained before and after.

    On a GPU the time is between two events. In an empty queue the first event happens at once, so
    the host's work until the first kernel is queued counts too; the GPU sleeps `sleep_cycles`
    before it, for the host to queue the whole call meanwhile.
    """
    synchronize(device)
    if before is not None:
        before()
    if torch.device(device).type != "cuda":
        start = clock()
        call()
        return (clock() - start) * 1e3
    return _between_events(call, device, sleep_cycles)


def cycles_to_hide(call: Call, device: torch.device | str) -> int:
    """Clock cycles that a GPU must sleep while the host queues a call; 0 on a CPU.

    For a call that waits for the device this is too long, which does no harm.
    """
    if torch.device(device).type != "cuda":
        return 0
    host_ms = 0.0
    for _ in range(HOST_SAMPLES):
        synchronize(device)
        start = time.perf_counter()
        call()
        host_ms = max(host_ms, (time.perf_counter() - start) * 1e3)
    synchronize(device)
    # The clock is measured: it rises with work, and the driver's figure is not the current one.
    sleeps_ms = [
        _between_events(lambda: torch.cuda._sleep(COUNTED_CYCLES), device)  # type: ignore[no-untyped-call]
        for _ in range(HOST_SAMPLES)
    ]
    return math.ceil(HOST_MARGIN * host_ms * COUNTED_CYCLES / min(sleeps_ms))


def _between_events(call: Call, device: torch.device | str, sleep_cycles: int = 0) -> float:
    """Milliseconds on a GPU from the first event to the last, after a sleep."""
    with torch.cuda.device(device):
        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        if sleep_cycles:
            torch.cuda._sleep(sleep_cycles)  # type: ignore[no-untyped-call]
        first.record()
        call()
        last.record()
        last.synchronize()
    return float(first.elapsed_time(last))


def ratio_of(
    variant_ms: Sequence[float], baseline_ms: Sequence[float], scale: float = 1.0
) -> Ratio:
    """Median and quartiles of `scale` times the ratios of paired times."""
    ratios = [scale * a / b for a, b in zip(variant_ms, baseline_ms, strict=True)]
    low, high = quartiles(ratios)
    return Ratio(
        variant_ms=statistics.median(variant_ms),
        baseline_ms=statistics.median(baseline_ms),
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        pairs=len(ratios),
    )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile."""
    quarters = torch.tensor([0.25, 0.75], dtype=torch.float64)
    low, high = torch.tensor(values, dtype=torch.float64).quantile(quarters).tolist()
    return low, high


def synchronize(device: torch.device | str) -> None:
    """Wait for a GPU's queue; nothing to do on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
