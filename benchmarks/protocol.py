"""How everything here is measured: warm, alternated, in pairs, with medians of ratios.

A machine's speed drifts by tens of percent over minutes, so a single time says little. Two
variants run alternately in one process; each pair gives one ratio; the median of the ratios and
their quartiles are reported.
"""

import gc
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Ratio:
    """Paired times of a variant and what it is compared with."""

    variant_ms: float
    """Median."""
    baseline_ms: float
    """Median."""
    ratio: float
    """Median of the pairwise ratios variant / baseline."""
    low: float
    """Lower quartile of the ratios."""
    high: float
    """Upper quartile of the ratios."""
    pairs: int


def paired(
    variant: Callable[[], object],
    baseline: Callable[[], object],
    *,
    pairs: int,
    warm_up: int = 2,
    device: torch.device | str = "cpu",
) -> Ratio:
    """Time two callables alternately, the order swapped from pair to pair."""
    for _ in range(warm_up):
        variant()
        baseline()
    times: list[tuple[float, float]] = []
    # A collection inside one sample would be charged to whoever runs then.
    gc.collect()
    gc.disable()
    try:
        for i in range(pairs):
            if i % 2:
                second, first = timed_ms(baseline, device), timed_ms(variant, device)
            else:
                first, second = timed_ms(variant, device), timed_ms(baseline, device)
            times.append((first, second))
    finally:
        gc.enable()
    ratios = [a / b for a, b in times]
    low, _, high = statistics.quantiles(ratios, n=4) if pairs > 1 else (ratios[0],) * 3
    return Ratio(
        variant_ms=statistics.median(a for a, _ in times),
        baseline_ms=statistics.median(b for _, b in times),
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        pairs=pairs,
    )


def timed_ms(call: Callable[[], object], device: torch.device | str = "cpu") -> float:
    """Milliseconds of one call, the device's queue drained before and after."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def synchronize(device: torch.device | str) -> None:
    """Wait for the device; a CPU never lags."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device | str) -> dict[str, Any]:
    """What every result carries: device, threads, versions, commit."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _cpu()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }


def write(path: Path, record: dict[str, Any]) -> None:
    """One JSON file per machine and commit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def as_dict(ratio: Ratio) -> dict[str, float]:
    """Rounded for a results file."""
    return {name: round(value, 4) for name, value in asdict(ratio).items()}


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return (
                    f"{line.split(':', 1)[1].strip()} ({torch.backends.cpu.get_cpu_capability()})"
                )
    return platform.processor() or platform.machine()


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return done.stdout.strip() or "unknown"
