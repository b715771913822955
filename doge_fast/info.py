"""What doge_fast finds on this machine: devices, operators that run on them, and why not others."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from doge_fast.kernels import chosen, implementations
from doge_fast.kernels.build import BuildError, cache_dir
from doge_fast.kernels.dispatch import OPERATORS, preference

# What changes what runs, and what the operators' builders read.
VARIABLES = (
    "DOGE_FAST_BACKEND",
    "DOGE_FAST_CACHE",
    "DOGE_FAST_CPU_LEVEL",
    "DOGE_FAST_NO_JIT",
    "CXX",
    "CUDA_HOME",
    "TORCH_CUDA_ARCH_LIST",
    "TRITON_INTERPRET",
    "OMP_NUM_THREADS",
)


def info() -> dict[str, Any]:
    """Versions, devices with the implementation of each operator, cache and environment.

    Asking compiles what is missing, as the first use would. Holds strings, numbers, lists and
    dictionaries only.
    """
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {
        "versions": {
            name: _version(name) for name in ("doge-fast", "torch", "triton", "transformers")
        }
        | {"python": platform.python_version()},
        "devices": [_of_device(device) for device in devices],
        "cache": _cache(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def text(found: dict[str, Any]) -> str:
    """What `info` found, to read."""
    lines = ["  ".join(f"{name} {number}" for name, number in found["versions"].items())]
    for device in found["devices"]:
        lines += ["", f"{device['name']} ({device['device']}): {device['what']}"]
        lines += [f"  {name:<14}{choice}" for name, choice in device["operators"].items()]
        lines += [
            f"  {name} cannot run: {reason}"
            for name, reason in device["implementations"].items()
            if reason
        ]
    cache = found["cache"]
    lines += ["", f"cache: {cache['path']}, {cache['files']} files, {cache['bytes'] / 1e6:.1f} MB"]
    lines += [f"{name}={value}" for name, value in found["environment"].items()]
    return "\n".join(lines)


def _of_device(device: torch.device) -> dict[str, Any]:
    obstacles = implementations(device)
    return {
        "device": str(device),
        "name": _name(device),
        "what": _what(device, obstacles),
        "operators": {name: _choice(name, device) for name in OPERATORS},
        "implementations": obstacles,
    }


def _choice(operator: str, device: torch.device) -> str:
    forced = os.environ.get("DOGE_FAST_BACKEND", "auto")
    try:
        name = chosen(device, operator)
    except (ValueError, RuntimeError) as error:
        return f"none: {error}"
    if forced != "auto":
        return f"{name} (forced by DOGE_FAST_BACKEND={forced})"
    others = [each for each in preference(operator, device) if each != name]
    return f"{name} (of {', '.join(preference(operator, device))})" if others else name


def _what(device: torch.device, obstacles: dict[str, str | None]) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        major, minor = torch.cuda.get_device_capability(device)
        return (
            f"compute capability {major}.{minor}, {properties.total_memory / 2**30:.0f} GiB, "
            f"{properties.multi_processor_count} multiprocessors"
        )
    threads = f"{os.cpu_count()} cores, torch takes {torch.get_num_threads()} threads"
    if obstacles["cpp"] is not None:
        return threads
    try:
        return f"{threads}, compiled operators at level {torch.ops.doge_fast_cpp.level()}"
    except RuntimeError as error:
        return f"{threads}, compiled operators refuse: {error}"


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cache() -> dict[str, Any]:
    try:
        path = cache_dir()
    except BuildError as error:
        return {"path": str(error), "files": 0, "bytes": 0}
    files = [file for file in path.glob("*") if file.is_file()] if path.is_dir() else []
    return {
        "path": str(path),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
