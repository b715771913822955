"""The reason why an implementation cannot run on a device, as one sentence, or None.

For a compiled implementation this compiles it, unless it is in the cache.
"""

import os
from collections.abc import Callable

import torch

from doge_fast.kernels.build import CPP, CUDA, EMULATED, LOWEST_CAPABILITY, unavailable_reason
from doge_fast.kernels.triton_support import is_installed, is_interpreted

_TOO_OLD = "It needs bfloat16 matrix units, compute capability 8.0 or later."


def of_cpp(device: torch.device) -> str | None:
    """Needs a C++ compiler."""
    if device.type != "cpu":
        return f"It works on CPU memory, not on {device}."
    reason: str | None = unavailable_reason(CPP)
    return reason


def of_cuda(device: torch.device) -> str | None:
    """Needs an NVIDIA GPU and nvcc, or on a CPU DOGE_FAST_CUDA_EMULATE=1."""
    if device.type == "cpu" and os.environ.get("DOGE_FAST_CUDA_EMULATE", "0") in ("", "0"):
        return (
            "It drives GPUs of NVIDIA; DOGE_FAST_CUDA_EMULATE=1 runs its kernels on a CPU, slowly, "
            "to test them."
        )
    if device.type not in ("cpu", "cuda"):
        return f"It drives GPUs of NVIDIA, not {device}."
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "It drives GPUs of NVIDIA; this torch is built for AMD's, which Triton drives."
        if torch.version.cuda is None:
            return (
                f"Torch {torch.__version__} was built without CUDA; install one of its CUDA wheels."
            )
        if not torch.cuda.is_available():
            return "Torch finds no GPU of NVIDIA, or no driver for it; nvidia-smi tells which."
        if torch.cuda.get_device_capability(device) < LOWEST_CAPABILITY:
            return _TOO_OLD
    reason: str | None = unavailable_reason(CUDA if device.type == "cuda" else EMULATED)
    return reason


def of_triton(device: torch.device) -> str | None:
    """Needs a GPU and the triton package, or Triton's interpreter on a CPU."""
    if device.type not in ("cpu", "cuda"):
        return f"It drives GPUs of NVIDIA and AMD, not {device}."
    if not is_installed():
        return "The package triton is not installed."
    if is_interpreted() != (device.type == "cpu"):
        return (
            "Triton reaches CPU memory only in its interpreter; start with TRITON_INTERPRET=1."
            if device.type == "cpu"
            else "TRITON_INTERPRET=1 is set, and the interpreter reaches only CPU memory."
        )
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if is_nvidia and torch.cuda.get_device_capability(device) < LOWEST_CAPABILITY:
        return _TOO_OLD
    return None


REASONS: dict[str, Callable[[torch.device], str | None]] = {
    "cpp": of_cpp,
    "cuda": of_cuda,
    "triton": of_triton,
    # Plain torch runs everywhere.
    "torch": lambda device: None,
}
