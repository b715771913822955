"""What compute-sanitizer finds in a few launches of our kernels: reads out of bounds, and races."""

import os
import re
import shutil
import sys
from collections.abc import Iterator

import torch

from benchmarks.gpu.session import Row, Session, run_command

# Launches take a hundred times as long under it, and torch begins slowly.
SECONDS = 600
# Which the launches themselves do not end with.
FOUND = 86


def memcheck(session: Session) -> Iterator[Row]:
    """Reads and writes out of bounds, in half a minute."""
    return _found_by("memcheck", session)


def racecheck(session: Session) -> Iterator[Row]:
    """Threads that race for shared memory, in several minutes."""
    return _found_by("racecheck", session)


def _found_by(tool: str, session: Session) -> Iterator[Row]:
    if not session.on_gpu:
        yield {"skipped": "compute-sanitizer watches GPUs"}
        return
    path = find_sanitizer()
    if path is None:
        yield {"skipped": "compute-sanitizer is neither on PATH nor in the CUDA toolkit"}
        return
    yield watched(path, tool, session.device, session.seconds_for(1, SECONDS))


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
    words = [path, *options, *program]
    code, printed = run_command(words, seconds, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    if code is None:
        # Slow is not wrong.
        del row["correct"]
        return row | {"skipped": printed}
    lines = printed.splitlines()
    summaries = [line.strip("= ") for line in lines if re.search(r" SUMMARY: |launches", line)]
    row["said"] = "; ".join(summaries)
    if code == 0 and "SUMMARY: 0 " in row["said"]:
        return row | {"correct": True}
    # The first complaints, or what it died of.
    complaints = [line for line in lines if line.startswith("=========")][:12] or lines[-12:]
    return row | {"problem": f"code {code}: {row['said']}", "lines": complaints}
