"""Where everything runs, how large, and what must be there."""

import functools
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases
from doge_fast.kernels import build, implementations

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Session:
    """A device, and what is asked of it."""

    device: torch.device
    quick: bool
    """Tiny problems, to try the code out."""
    tokens: Path | None = None
    """What the job trains on; None: what it draws."""
    end_s: float = math.inf
    """Of the section's time, as `time.monotonic` counts."""

    @property
    def on_gpu(self) -> bool:
        """Whether there are streams and graphs."""
        return self.device.type == "cuda"

    @functools.cached_property
    def names(self) -> list[str]:
        """Implementations that run here, plain torch among them."""
        return cases.timed_implementations(self.device, with_torch=True)

    def missing(self) -> dict[str, str]:
        """Implementations that should run here and cannot, each with its reason."""
        reasons = implementations(self.device)
        return {name: reason for name in expected(self.device) if (reason := reasons[name])}

    def free_bytes(self) -> int:
        """Of the device's memory; a modest guess on a CPU."""
        return torch.cuda.mem_get_info(self.device)[0] if self.on_gpu else 1 << 30

    def seconds_for(self, num_commands: int, most: float) -> float:
        """Of the first of so many commands: its share of the time that is left."""
        # Less a little, in which a process ends and its row is written.
        left_s = 0.95 * (self.end_s - time.monotonic())
        return min(most, max(0.0, left_s / num_commands))


def run_command(words: Sequence[str], seconds: float, **variables: str) -> tuple[int | None, str]:
    """Exit code of a program and all that it printed; None and why, where time ran out."""
    options: Row = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options |= {"env": {**os.environ, **variables}, "cwd": ROOT, "start_new_session": True}
    with subprocess.Popen(words, **options) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        except BaseException as reason:
            # With what it has started, which would go on using the GPU. Only asked to end does
            # torchrun end its ranks, within half a minute.
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(40)
            process.kill()
            if isinstance(reason, subprocess.TimeoutExpired):
                return None, f"not finished within {seconds:.3g} s"
            raise
    return process.returncode, printed


def expected(device: torch.device) -> tuple[str, ...]:
    """What should run on a device: Triton on a GPU, CUDA on NVIDIA's; C++ where a compiler is."""
    if device.type == "cuda":
        return ("triton",) if torch.version.hip is not None else ("cuda", "triton")
    return () if shutil.which(build.cxx()) is None else ("cpp",)
