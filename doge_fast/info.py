"""Describe this machine: devices, and which implementation of each operator runs on them."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from doge_fast.kernels import chosen, implementations
from doge_fast.kernels.build import BuildError, cache_dir
from doge_fast.kernels.dispatch import AUTO, OPERATORS, preference

PACKAGES = ("doge-fast", "torch", "triton", "transformers")
# Environment variables, beside DOGE_FAST_*, that decide which operators run and how they are built.
VARIABLES = (
    "CXX",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "MAX_JOBS",
    "TORCH_CUDA_ARCH_LIST",
    "TORCH_EXTENSIONS_DIR",
    "TRITON_INTERPRET",
    "OMP_NUM_THREADS",
    "XDG_CACHE_HOME",
)


def info() -> dict[str, Any]:
    """Versions, devices with the implementation of each operator, cache and environment, as JSON.

    Compiles operators that are not compiled yet, as their first use would. Needs only torch.
    """
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    try:
        cache = str(cache_dir())
    except BuildError as error:
        cache = str(error)
    return {
        "versions": versions(),
        "devices": [_device(device) for device in devices],
        "cache": cache,
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name in VARIABLES or name.startswith("DOGE_FAST_")
        },
    }


def versions() -> dict[str, str]:
    """{package: version} of doge_fast, torch, triton, transformers and Python."""
    packages = {name: _version(name) for name in PACKAGES}
    return packages | {"torch": torch.__version__, "python": platform.python_version()}


def device_name(device: torch.device) -> str:
    """The device's product name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def text(machine: dict[str, Any]) -> str:
    """The result of `info` as readable lines."""
    lines = ["  ".join(f"{name} {number}" for name, number in machine["versions"].items())]
    for device in machine["devices"]:
        lines += ["", f"{device['name']} ({device['device']}): {device['what']}"]
        lines += [
            f"  {name:<14}{choice['implementation'] or 'nothing':<9}{choice['reason']}"
            for name, choice in device["operators"].items()
        ]
        lines += [
            f"  {name} cannot run: {reason}"
            for name, reason in device["implementations"].items()
            if reason
        ]
    if not any(device["device"].startswith("cuda") for device in machine["devices"]):
        lines += ["", f"GPUs: none that torch {machine['versions']['torch']} sees"]
    lines += ["", f"cache: {machine['cache']}"]
    lines += [f"{name}={value}" for name, value in machine["environment"].items()]
    return "\n".join(lines)


def _device(device: torch.device) -> dict[str, Any]:
    what = f"{os.cpu_count()} cores, torch takes {torch.get_num_threads()} threads"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        what = (
            f"compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB, "
            f"{properties.multi_processor_count} multiprocessors"
        )
    return {
        "device": str(device),
        "name": device_name(device),
        "what": what,
        "operators": {name: _choice(name, device) for name in OPERATORS},
        "implementations": implementations(device),
    }


def _choice(operator: str, device: torch.device) -> dict[str, str | None]:
    try:
        name = chosen(device, operator)
    except (ValueError, RuntimeError) as error:
        return {"implementation": None, "reason": str(error)}
    requested = os.environ.get("DOGE_FAST_BACKEND") or AUTO
    reason = f"the first that can run of {', '.join(preference(operator, device))}"
    if requested != AUTO:
        reason = f"forced by DOGE_FAST_BACKEND={requested}"
    return {"implementation": name, "reason": reason}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
