"""Memory of a step, in a process of its own, so that nothing else is counted.

On a CPU the peak of the resident set during steps after the second, and the resident set between
steps; on a GPU the allocator's.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]


class Bytes(NamedTuple):
    """Of a process."""

    resting: int
    """Between steps."""
    peak: int
    """During a step."""


def peak_bytes(target: str, arguments: dict[str, Any], device: torch.device | str) -> int:
    """Peak during a step of `target(**arguments, device=device)()`."""
    return bytes_of(target, arguments, device).peak


def bytes_of(target: str, arguments: dict[str, Any], device: torch.device | str) -> Bytes:
    """Memory between and during steps of `target(**arguments, device=device)()`.

    Args:
        target: "module:function", which gives a step.
        arguments: of the function, as JSON can say them.
    """
    environment = {
        **os.environ,
        # glibc otherwise keeps freed memory, and the peak would be that of an earlier moment.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    command = [sys.executable, "-m", "benchmarks.memory", target, json.dumps(arguments)]
    done = subprocess.run(
        [*command, str(device)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"measuring the memory of {target} failed: {reason[-1]}")
    resting, peak = done.stdout.split()[-2:]
    return Bytes(int(resting), int(peak))


def main() -> None:
    """What `peak_bytes` starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("arguments", type=json.loads)
    parser.add_argument("device")
    args = parser.parse_args()
    module, function = args.target.split(":")
    make = getattr(importlib.import_module(module), function)
    step = make(**args.arguments, device=args.device)
    step()
    step()
    if torch.device(args.device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        resting = torch.cuda.memory_allocated()
        step()
        print(resting, torch.cuda.max_memory_allocated())
        return
    # 5 resets the high-water mark of the resident set (man 5 proc).
    Path("/proc/self/clear_refs").write_text("5")
    step()
    step()
    status = Path("/proc/self/status").read_text().splitlines()
    kilobytes = {line.split(":")[0]: line.split()[1] for line in status if line.startswith("Vm")}
    print(*(1024 * int(kilobytes[name]) for name in ("VmRSS", "VmHWM")))


if __name__ == "__main__":
    main()
