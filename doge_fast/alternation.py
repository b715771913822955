"""How times are compared: in turns, in one process, with medians of ratios.

A machine's speed drifts by tens of percent over minutes, so a single time says little. What is
compared runs alternately, once a round; each round gives one ratio; the median of the ratios and
their quartiles are reported. `doge-fast profile`, the measured bandwidth and all of `benchmarks`
measure through here.
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
# Calls of which the slowest says how long the host takes to queue one.
HOST_SAMPLES = 3
# How much longer than that the device sleeps: the host is not equally fast at every call, and a
# sleep that is too long costs its own time and nothing else.
HOST_MARGIN = 2.0
# Of the sleep that says how fast a device counts: a millisecond or so, of which an event sees all.
COUNTED_CYCLES = 2_000_000


@dataclass(frozen=True)
class Ratio:
    """Paired times of a variant and what it is compared with."""

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


class Clock:
    """Time that a part of a benchmark may take; what it could not do by then is left out."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self._start = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def expired(self) -> bool:
        """Whether nothing new should be begun."""
        return self.spent >= self.seconds


def paired(
    variant: Call,
    baseline: Call,
    *,
    pairs: int,
    warm_up: int = 2,
    device: torch.device | str = "cpu",
    seconds: float = math.inf,
) -> Ratio:
    """Time two callables alternately, the order swapped from pair to pair."""
    for _ in range(warm_up):
        variant()
        baseline()
    calls = {"variant": variant, "baseline": baseline}
    times = alternated(calls, rounds=pairs, device=device, seconds=seconds)
    return ratio_of(times["variant"], times["baseline"])


def alternated(
    calls: Mapping[str, Call],
    *,
    rounds: int,
    device: torch.device | str = "cpu",
    before: Call | None = None,
    seconds: float = math.inf,
    hide_host: bool = False,
) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, all of them warm already.

    Args:
        calls: what runs once a round; who begins changes from round to round.
        rounds: how many, if time allows.
        device: whose queue is drained around each sample.
        before: runs ahead of each sample and is not timed.
        seconds: no round is begun after that, except the first `MIN_ROUNDS`.
        hide_host: a GPU's time alone, as of an operator that is one of many in a queue; else what
            the host takes to queue the work counts too, as it does in a step.
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    cycles = dict.fromkeys(names, 0)
    if hide_host:
        cycles = {name: cycles_to_hide(call, device) for name, call in calls.items()}
    clock = Clock(seconds)
    # A collection inside one sample would be charged to whoever runs then.
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for i in range(rounds):
            if i >= MIN_ROUNDS and clock.expired():
                break
            shift = i // 2 % len(names)
            order = names[shift:] + names[:shift]
            for name in order if i % 2 else reversed(order):
                times[name].append(timed_ms(calls[name], device, before, cycles[name]))
    finally:
        if was_enabled:
            gc.enable()
    return times


def timed_ms(
    call: Call,
    device: torch.device | str = "cpu",
    before: Call | None = None,
    sleep_cycles: int = 0,
) -> float:
    """Milliseconds of one call, the device's queue drained before and after.

    On a GPU between events. An event that finds the queue empty happens at once, and what the host
    then does until the first kernel is in the queue counts as time of the call: its checks, its
    tables, its launches.

    Args:
        before: runs ahead of the call and is not timed.
        sleep_cycles: that a GPU sleeps ahead of the first event, as from `cycles_to_hide`: all of
            the call is queued before it begins.
    """
    synchronize(device)
    if before is not None:
        before()
    if torch.device(device).type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    return _between_events(call, device, sleep_cycles)


def cycles_to_hide(call: Call, device: torch.device | str) -> int:
    """How long a GPU must sleep for the host to queue all of a call meanwhile; 0 on a CPU.

    The longest of a few calls as the host sees them, with a margin, in cycles of the clock as fast
    as it runs now. A call that waits for the device takes longer still; that does no harm.
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
    return math.ceil(HOST_MARGIN * host_ms * _cycles_per_ms(device))


def _cycles_per_ms(device: torch.device | str) -> float:
    """Measured: what a driver says of clocks is not what they do, and they rise with work."""
    sleeps_ms = [
        _between_events(lambda: torch.cuda._sleep(COUNTED_CYCLES), device)  # type: ignore[no-untyped-call]
        for _ in range(HOST_SAMPLES)
    ]
    return COUNTED_CYCLES / min(sleeps_ms)


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
    """Median and quartiles of `scale` times the ratios of two rows of times."""
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
    """Lower and upper."""
    if len(values) < 2:
        return values[0], values[0]
    # Inclusive: with few values the other rule leaves their range.
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def synchronize(device: torch.device | str) -> None:
    """Wait for the device; a CPU never lags."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
