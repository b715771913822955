"""What the benchmarks share beside the alternation: cold samples, and where a result is from.

Times are compared as `doge_fast.alternation` says. Samples are cold: the caches are overwritten
before each one, unless the data are many times their size.
"""

import gc
import importlib.metadata
import json
import math
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from doge_fast import info
from doge_fast.alternation import Call, Ratio, alternated, ratio_of

# Data this many times as large as the last cache come from memory whatever ran before.
CACHES_FOR_COLD = 8
# Where the machine does not say how large its last cache is.
ASSUMED_CACHE_BYTES = 64 << 20


def paired(
    variant: Call,
    baseline: Call,
    *,
    pairs: int,
    warm_up: int = 2,
    device: torch.device | str = "cpu",
    seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> Ratio:
    """Time two callables alternately, the order swapped from pair to pair."""
    for _ in range(warm_up):
        variant()
        baseline()
    calls = {"variant": variant, "baseline": baseline}
    times = alternated(calls, rounds=pairs, device=device, seconds=seconds, clock=clock)
    return ratio_of(times["variant"], times["baseline"])


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
        found["driver"] = driver()
    return found


def driver() -> str | None:
    """The version of NVIDIA's driver, as nvidia-smi says it; None where there is none."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return None
    # All GPUs of a machine have one driver.
    return next(iter(done.stdout.split()), None) if done.returncode == 0 else None


def release(device: torch.device | str) -> None:
    """Give back all memory that nobody holds: wrapped optimizers are cycles, and wait for that."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def device_name(device: torch.device | str) -> str:
    """Of the GPU, or of the CPU with the instructions that torch uses there."""
    device = torch.device(device)
    name = info.device_name(device)
    return name if device.type == "cuda" else f"{name} ({torch.backends.cpu.get_cpu_capability()})"


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


def _parsed_size(text: str) -> int:
    """Bytes of "32768K"."""
    text = text.strip()
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)
