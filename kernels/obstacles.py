"""Why an implementation cannot run on a device, as one sentence; None where it can.

Asking compiles what is missing from the cache and, on a GPU, runs one small kernel: old drivers
and missing compilers show only there.
"""

import importlib
import os
from collections.abc import Callable

import torch

from doge_fast.kernels.build import CPP, CUDA, EMULATED, cuda_operators, operators, why_not
from doge_fast.kernels.compilers import LOWEST_CAPABILITY
from doge_fast.kernels.triton_support import is_installed, is_interpreted

_TOO_OLD = "It needs bfloat16 matrix units, compute capability 8.0 or later."


def of_torch(device: torch.device) -> str | None:
    """Plain torch runs everywhere."""
    return None


def of_cpp(device: torch.device) -> str | None:
    """There must be a compiler, and the CPU the instruction set that was asked for."""
    if device.type != "cpu":
        return f"It works on CPU memory, not on {device}."
    reason: str | None = why_not(CPP)
    if reason is None:
        try:
            # It refuses a level that it was asked for and that the CPU does not have.
            operators(CPP).level()
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return reason


def of_cuda(device: torch.device) -> str | None:
    """There must be a GPU of NVIDIA's and nvcc; on a CPU, the wish for the emulator."""
    if device.type == "cpu":
        return _why_not_emulated()
    if device.type != "cuda":
        return f"It drives GPUs of NVIDIA, not {device}."
    reason = _why_not_this_torch()
    if reason is None and torch.cuda.get_device_capability(device) < LOWEST_CAPABILITY:
        reason = _TOO_OLD
    return reason or why_not(CUDA) or _failure_of(lambda: _fill_one_row(device))


def of_triton(device: torch.device) -> str | None:
    """Needs a GPU and the triton package, or Triton's interpreter on a CPU."""
    if device.type not in ("cpu", "cuda"):
        return f"It drives GPUs of NVIDIA and AMD, not {device}."
    if not is_installed():
        return "The package triton is not installed."
    if is_interpreted() != (device.type == "cpu"):
        return (
            "Triton reaches CPU memory in its interpreter alone; start with TRITON_INTERPRET=1."
            if device.type == "cpu"
            else "TRITON_INTERPRET=1 is set, and its interpreter reaches CPU memory alone."
        )
    if device.type == "cpu":
        return None
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < LOWEST_CAPABILITY:
        return _TOO_OLD
    return _failure_of(lambda: _multiply_one_row(device))


OBSTACLES: dict[str, Callable[[torch.device], str | None]] = {
    "cpp": of_cpp,
    "cuda": of_cuda,
    "triton": of_triton,
    "torch": of_torch,
}


def _why_not_emulated() -> str | None:
    if os.environ.get("DOGE_FAST_CUDA_EMULATE", "0") in ("", "0"):
        return (
            "It drives GPUs of NVIDIA; DOGE_FAST_CUDA_EMULATE=1 runs its kernels on a CPU, slowly, "
            "to test them."
        )
    reason: str | None = why_not(EMULATED)
    return reason


def _why_not_this_torch() -> str | None:
    if torch.version.hip is not None:
        return (
            "It drives GPUs of NVIDIA; this torch is built for those of AMD, which Triton drives."
        )
    if torch.version.cuda is None:
        return f"Torch {torch.__version__} was built without CUDA; install one of its CUDA wheels."
    if not torch.cuda.is_available():
        return "Torch finds no GPU of NVIDIA, or no driver for it; nvidia-smi tells which."
    return None


def _fill_one_row(device: torch.device) -> None:
    source, target = torch.ones(8, device=device), torch.empty(8, device=device)
    cuda_operators("cuda").accumulate([source], [target], False)
    torch.cuda.synchronize(device)


def _multiply_one_row(device: torch.device) -> None:
    # By name: Triton is imported where it runs.
    module = importlib.import_module("doge_fast.kernels.gram.triton_")
    module.gram([torch.ones(1, 16, device=device)])


def _failure_of(first_call: Callable[[], object]) -> str | None:
    try:
        first_call()
    # Whatever a driver or a compiler throws at the first kernel is a reason, not an error of ours.
    except Exception as error:
        line = (str(error).splitlines() or ["no reason given"])[0]
        return f"Its first kernel failed: {type(error).__name__}: {line}"
    return None
