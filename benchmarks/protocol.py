"""How everything here is measured: warm, alternated, in rounds, with medians of ratios.

A machine's speed drifts by tens of percent over minutes, so a single time says little. What is
compared runs alternately in one process, once a round; each round gives one ratio; the median of
the ratios and their quartiles are reported. Samples are cold: the caches are overwritten before
each one, unless the data are many times their size.
"""

import gc
import importlib.metadata
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], object]

# Data this many times as large as the last cache come from memory whatever ran before.
CACHES_FOR_COLD = 8
# Where the machine does not say how large its last cache is.
ASSUMED_CACHE_BYTES = 64 << 20
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
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        last.synchronize()
    return first.elapsed_time(last)


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


def cold(num_bytes: int, device: torch.device | str = "cpu") -> Call | None:
    """What to run ahead of a sample so that its data come from memory; None: nothing.

    Args:
        num_bytes: that the sample reads.
    """
    cache_bytes = last_cache_bytes(device)
    if num_bytes >= CACHES_FOR_COLD * cache_bytes:
        return None
    scratch = torch.zeros(2 * cache_bytes // 4, device=device)
    return lambda: scratch.add_(1.0)


def last_cache_bytes(device: torch.device | str) -> int:
    """Of the last level that all threads share."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [
        _parsed_size(path.read_text())
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=ASSUMED_CACHE_BYTES)


def synchronize(device: torch.device | str) -> None:
    """Wait for the device; a CPU never lags."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device | str) -> dict[str, Any]:
    """What every result carries: device, threads, versions, commit."""
    found: dict[str, Any] = {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }
    for package in ("triton", "transformers"):
        version = package_version(package)
        if version is not None:
            found[package] = version
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["architecture"] = f"sm_{properties.major}{properties.minor}"
        found["memory_bytes"] = properties.total_memory
        found["cuda"] = torch.version.cuda
    return found


def device_name(device: torch.device | str) -> str:
    """Of the GPU, or of the CPU with the instructions that torch uses there."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu()} ({torch.backends.cpu.get_cpu_capability()})"


def package_version(name: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def write(path: Path, record: dict[str, Any]) -> None:
    """One JSON file per machine and commit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def as_dict(ratio: Ratio) -> dict[str, float]:
    """Rounded for a results file."""
    return {name: rounded(value) for name, value in asdict(ratio).items()}


def rounded(value: float, digits: int = 4) -> float:
    """To so many significant digits: times range from microseconds to seconds."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def commit() -> str:
    """Of the checkout, marked where it has changes; "unknown" outside git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=10"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
            check=False,
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _parsed_size(text: str) -> int:
    """Bytes of "32768K"."""
    text = text.strip()
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)
