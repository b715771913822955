"""A CUDA device over host memory, for tests without a GPU.

Tensors say `cuda:0` and go through torch's dispatch key, guards and autograd queues of CUDA;
operators run on the CPU. Every wait of the host is noted or raises, new memory is NaN, a captured
region can be replayed, and memory ends where a test says. It changes torch for good, so it belongs
in a process of its own, as a plugin of pytest: `-p tests.fake_cuda`.
"""

import os
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

# Of which the device knows the inner interfaces.
TORCH = "2.13."


class Stream:
    """The only one of a device: what is queued has happened."""

    def __init__(self, device: Any = None) -> None:
        self.device = _placed(device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.device == self.device

    def __hash__(self) -> int:
        return hash(self.device)

    def record_event(self, event: object = None) -> Any:
        return SimpleNamespace(synchronize=lambda: torch.ops.fake_cuda.wait("event"))

    def wait_event(self, event: object) -> None:
        pass

    wait_stream = wait_event


class Graph:
    """What ran between begin and end of a capture, to run again."""

    number: int

    def replay(self) -> None:
        torch.ops.fake_cuda.replay(self.number)


@contextmanager
def _capture(graph: Graph, **options: object) -> Iterator[None]:
    torch.ops.fake_cuda.begin_capture()
    try:
        yield
    finally:
        graph.number = torch.ops.fake_cuda.end_capture()


@contextmanager
def not_captured() -> Iterator[None]:
    """What runs within is left out of a captured region, as if it ran on another stream."""
    torch.ops.fake_cuda.set_paused(True)
    try:
        yield
    finally:
        torch.ops.fake_cuda.set_paused(False)


class OnDevice:
    """Makes a device the one in use."""

    def __init__(self, device: Any) -> None:
        self.index = _placed(device).index

    def __enter__(self) -> None:
        self.before = torch.ops.fake_cuda.current_device()
        torch.ops.fake_cuda.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        torch.ops.fake_cuda.set_device(self.before)


def _placed(device: Any = None) -> torch.device:
    index = device if isinstance(device, int) else torch.device(device or "cuda").index
    return torch.device("cuda", torch.ops.fake_cuda.current_device() if index is None else index)


def _pinned(self: Tensor, device: object = None) -> Tensor:
    copy = self.clone()
    torch.ops.fake_cuda.pin(copy)
    return copy


@contextmanager
def memory_of(num_bytes: int) -> Iterator[None]:
    """Both devices together say that they have so much memory, and refuse what goes beyond.

    What is refused is not allocated; what fits is, on the host.
    """
    before = _memory()[0]
    torch.ops.fake_cuda.set_memory(num_bytes)
    try:
        yield
    finally:
        torch.ops.fake_cuda.set_memory(before)


def _memory() -> list[int]:
    """[bytes of the device, bytes in use, most bytes that were in use]"""
    return list(torch.ops.fake_cuda.memory())


def waits() -> list[str]:
    """What the host has waited for since the last call."""
    return list(torch.ops.fake_cuda.take_waits())


def build(folder: Path) -> dict[str, str]:
    """Compile the device, in half a minute; what the environment of a process needs to have it.

    Raises:
        subprocess.CalledProcessError, FileNotFoundError: there is no compiler, or it fails.
    """
    library = folder / "fake_cuda.so"
    compiler = os.environ.get("CXX", "c++")
    words = ["-std=c++20", "-O0", "-w", "-fPIC", "-shared", f"-I{sysconfig.get_path('include')}"]
    words += [f"-I{path}" for path in cpp_extension.include_paths()]
    words += [str(Path(__file__).with_name("device.cpp")), "-o", str(library)]
    torch_folder = Path(torch.__file__).with_name("lib")
    words += [f"-L{torch_folder}", f"-Wl,--no-as-needed,-rpath,{torch_folder}"]
    subprocess.run([compiler, *words, "-ltorch_cpu", "-lc10"], check=True)
    # Ahead of torch's own libraries in the order of symbols, behind them in that of beginning.
    return {"LD_PRELOAD": str(library)}


def pytest_configure() -> None:
    """Let torch see the two devices; in a process with the environment that `build` gives."""
    os.environ.pop("LD_PRELOAD")
    new = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 2,
        "current_device": torch.ops.fake_cuda.current_device,
        "device": OnDevice,
        "set_device": lambda device: torch.ops.fake_cuda.set_device(_placed(device).index),
        "get_device_name": lambda device=None: "fake",
        "get_device_properties": lambda device=None: SimpleNamespace(major=8, minor=0),
        "mem_get_info": lambda device=None: (_memory()[0] - _memory()[1], _memory()[0]),
        "memory_allocated": lambda device=None: _memory()[1],
        "max_memory_allocated": lambda device=None: _memory()[2],
        "reset_peak_memory_stats": lambda device=None: torch.ops.fake_cuda.reset_peak(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "current_stream": Stream,
        "Stream": Stream,
        "stream": lambda stream: OnDevice(stream.device),
        "synchronize": lambda device=None: torch.ops.fake_cuda.wait("synchronize"),
        "set_sync_debug_mode": lambda mode: torch.ops.fake_cuda.set_strict(mode == "error"),
        "CUDAGraph": Graph,
        "graph": _capture,
        "is_current_stream_capturing": torch.ops.fake_cuda.is_capturing,
    }
    for name, value in new.items():
        setattr(torch.cuda, name, value)
    Tensor.pin_memory = _pinned


def interpret_triton() -> None:
    """Run Triton's kernels on the device in its interpreter, if they start on the device in use."""
    from triton.runtime.interpreter import GridExecutor

    from doge_fast.kernels.availability import REASONS

    def arguments(_: object, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        for each in (*args, *kwargs.values()):
            if isinstance(each, Tensor) and each.device != _placed():
                raise RuntimeError(f"launched on {_placed()}, with a tensor on {each.device}")
        return [_on_host(each) for each in args], {k: _on_host(v) for k, v in kwargs.items()}

    GridExecutor._init_args_hst = arguments
    GridExecutor._restore_args_dev = lambda *_: None
    REASONS["triton"] = lambda device: None


def _on_host(value: Any) -> Any:
    return torch.ops.fake_cuda.host(value) if isinstance(value, Tensor) else value
