"""Peak memory of a step, in a process of its own, so that nothing else is counted.

On a CPU the peak of the resident set during steps after the second; on a GPU the allocator's.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def peak_bytes(target: str, arguments: dict[str, Any], device: torch.device | str) -> int:
    """Peak during a step of `target(**arguments, device=device)()`.

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
    return int(done.stdout.split()[-1])


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
        step()
        print(torch.cuda.max_memory_allocated())
        return
    # 5 resets the high-water mark of the resident set (man 5 proc).
    Path("/proc/self/clear_refs").write_text("5")
    step()
    step()
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    print(int(line.split()[1]) * 1024)


if __name__ == "__main__":
    main()
