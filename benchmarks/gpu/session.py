"""Where everything runs, how large, and what must be there."""

import functools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases
from doge_fast.kernels import build, implementations

Row = dict[str, Any]

# Seven domains of text, where a checkout has its data beside it.
CORPUS = Path(__file__).resolve().parents[3] / "shared" / "data" / "mini_slimpajama"


@dataclass(frozen=True)
class Session:
    """A device, and what is asked of it."""

    device: torch.device
    quick: bool
    """Tiny problems, to try the code out."""
    corpus: Path = CORPUS
    """What the main job trains on."""

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


def expected(device: torch.device) -> tuple[str, ...]:
    """What should run on a device: Triton on a GPU, CUDA on NVIDIA's; C++ where a compiler is."""
    if device.type == "cuda":
        return ("triton",) if torch.version.hip is not None else ("cuda", "triton")
    return () if shutil.which(build.cxx()) is None else ("cpp",)
