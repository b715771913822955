"""What compute-sanitizer finds in a few launches of our kernels: reads out of bounds, and races."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.session import Row, Session

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck")
# Launches take a hundred times as long under it, and torch begins slowly.
SECONDS = 120
# Which the launches themselves do not end with.
FOUND = 86


def sanitizer(session: Session) -> Iterator[Row]:
    """A row for each tool."""
    if not session.on_gpu:
        yield {"skipped": "compute-sanitizer watches GPUs"}
        return
    path = find_sanitizer()
    if path is None:
        yield {"skipped": "compute-sanitizer is neither on PATH nor in the CUDA toolkit"}
        return
    for tool in TOOLS:
        yield watched(path, tool, session.device)


def find_sanitizer() -> str | None:
    """On PATH, or beside the CUDA compiler, which its toolkit brings."""
    folders = [os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def watched(path: str, tool: str, device: torch.device, seconds: float = SECONDS) -> Row:
    """Run `benchmarks.gpu.launches` under a tool; right if it found nothing and all was right."""
    row: Row = {"operator": "all", "implementation": tool, "correct": False}
    # Not what torch asks of the driver in vain: it asks on purpose.
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no"]
    program = [sys.executable, "-m", "benchmarks.gpu.launches", "--device", str(device)]
    # Tensors that share an allocation would hide a read past the end of one.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            [path, *options, *program],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        # Slow is not wrong.
        del row["correct"]
        return row | {"skipped": f"not finished within {seconds:g} s"}
    lines = done.stdout.splitlines()
    summaries = [line.strip("= ") for line in lines if re.search(r" SUMMARY: |launches", line)]
    row["said"] = "; ".join(summaries)
    if done.returncode == 0 and "SUMMARY: 0 " in row["said"]:
        return row | {"correct": True}
    # The first complaints, or what it died of.
    complaints = [line for line in lines if line.startswith("=========")][:12] or lines[-12:]
    return row | {"problem": f"code {done.returncode}: {row['said']}", "lines": complaints}
