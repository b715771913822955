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
) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, all of them warm already.

    Args:
        calls: what runs once a round; who begins changes from round to round.
        rounds: how many, if time allows.
        device: whose queue is drained around each sample.
        before: runs ahead of each sample and is not timed.
        seconds: no round is begun after that, except the first `MIN_ROUNDS`.
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
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
                times[name].append(timed_ms(calls[name], device, before))
    finally:
        if was_enabled:
            gc.enable()
    return times


def timed_ms(call: Call, device: torch.device | str = "cpu", before: Call | None = None) -> float:
    """Milliseconds of one call, the device's queue drained before and after.

    On a GPU between events. What `before` has queued then hides the time of the launches.
    """
    synchronize(device)
    if before is not None:
        before()
    if torch.device(device).type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    with torch.cuda.device(device):
        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
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
