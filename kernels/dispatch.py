"""Where a device has several implementations: which runs, how to force one, and why.

On a device the first implementation that can run wins: on a CPU the compiled one (`cpp`),
else plain torch; on a GPU Triton, else plain torch. The choice is made on first use and kept.
`DOGE_FAST_BACKEND=auto|torch|cpp|triton` or the argument `implementation=` forces one, and a
forced implementation that cannot run raises instead of giving way. Going without the
preferred one is said once per process, in one warning that names the reason.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from doge_fast.kernels.accumulate import launch as accumulate_launch
from doge_fast.kernels.accumulate import torch_kernel as accumulate_torch
from doge_fast.kernels.build import BuildError, load_cpp
from doge_fast.kernels.gram import launch as gram_launch
from doge_fast.kernels.gram import torch_kernel as gram_torch
from doge_fast.kernels.schema import (
    CPP_NAMESPACE,
    check_accumulate,
    check_gram,
    check_weighted_sum,
)
from doge_fast.kernels.triton_support import is_installed, is_interpreted
from doge_fast.kernels.weighted_sum import launch as weighted_sum_launch
from doge_fast.kernels.weighted_sum import torch_kernel as weighted_sum_torch

Run = Callable[..., Any]

AUTO = "auto"
IMPLEMENTATIONS = ("cpp", "triton", "torch")
# Best first. Triton's interpreter is no implementation anybody wants unasked.
PREFERENCE = {"cpu": ("cpp", "torch"), "cuda": ("triton", "torch")}
PREFERENCE_ELSEWHERE = ("torch",)

_CHECKS: dict[str, Run] = {
    "gram": check_gram,
    "weighted_sum": check_weighted_sum,
    "accumulate": lambda grads, rows, add: check_accumulate(grads, rows),
}
_PYTHON: dict[tuple[str, str], Run] = {
    ("gram", "torch"): gram_torch.gram,
    ("gram", "triton"): gram_launch.gram,
    ("weighted_sum", "torch"): weighted_sum_torch.weighted_sum,
    ("weighted_sum", "triton"): weighted_sum_launch.weighted_sum,
    ("accumulate", "torch"): accumulate_torch.accumulate,
    ("accumulate", "triton"): accumulate_launch.accumulate,
}

_chosen: dict[tuple[str, torch.device, str], Run] = {}
_obstacles: dict[tuple[str, torch.device], str | None] = {}
_warned: set[str] = set()


def choose(operator: str, device: torch.device, implementation: str | None) -> Run:
    """The callable that runs `operator` on `device`, its arguments checked.

    Raises:
        ValueError: no implementation has the name that was asked for.
        RuntimeError: a forced implementation cannot run.
    """
    wish = implementation or os.environ.get("DOGE_FAST_BACKEND") or AUTO
    key = (operator, device, wish)
    run = _chosen.get(key)
    if run is None:
        name = _settle(device, wish)
        if wish == AUTO:
            _warn_of_better_than(name, device)
        run = _chosen[key] = _guarded(operator, name)
    return run


def chosen(device: torch.device | str = "cpu") -> str:
    """The name of the implementation that runs on `device` when a call forces none."""
    return _settle(torch.device(device), os.environ.get("DOGE_FAST_BACKEND") or AUTO)


def implementations(device: torch.device | str = "cpu") -> dict[str, str | None]:
    """Every implementation, and None if it can run on `device`, else the reason it cannot.

    Asking compiles what is missing, as the first use would.
    """
    return {name: _obstacle(name, torch.device(device)) for name in IMPLEMENTATIONS}


def explain(device: torch.device | str | None = None) -> str:
    """What runs where, and why not something else, one line per device and implementation.

    Args:
        device: None: the CPU, and the current GPU where there is one.
    """
    devices = [device] if device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return "\n".join(line for each in devices for line in _explanation(torch.device(each)))


def _explanation(device: torch.device) -> list[str]:
    wish = os.environ.get("DOGE_FAST_BACKEND") or AUTO
    how = "chosen" if wish == AUTO else f"forced by DOGE_FAST_BACKEND={wish}"
    obstacles = implementations(device)
    try:
        name = _settle(device, wish)
    except (ValueError, RuntimeError) as error:
        lines = [f"{device}: none: {error}"]
    else:
        lines = [f"{device}: {name} ({how})"]
    return lines + [f"  {each}: {reason or 'can run'}" for each, reason in obstacles.items()]


def _settle(device: torch.device, wish: str) -> str:
    if wish == AUTO:
        return _best(device)
    if wish not in IMPLEMENTATIONS:
        raise ValueError(
            f"An operator's implementation is one of {', '.join((AUTO, *IMPLEMENTATIONS))}; got "
            f"{wish!r}. Correct the argument implementation= or the variable DOGE_FAST_BACKEND."
        )
    reason = _obstacle(wish, device)
    if reason is not None:
        raise RuntimeError(
            f"The implementation {wish!r} was forced and cannot run on {device}: {reason} "
            "Remove the cause, or leave the choice open with 'auto'."
        )
    return wish


def _best(device: torch.device) -> str:
    for name in PREFERENCE.get(device.type, PREFERENCE_ELSEWHERE):
        if _obstacle(name, device) is None:
            return name
    raise AssertionError("plain torch runs everywhere")


def _warn_of_better_than(chosen_name: str, device: torch.device) -> None:
    """Say once per process what the device goes without; silence was asked for by NO_JIT."""
    for name in PREFERENCE.get(device.type, PREFERENCE_ELSEWHERE):
        if name == chosen_name:
            return
        is_wished = name == "cpp" and os.environ.get("DOGE_FAST_NO_JIT") == "1"
        if name not in _warned and not is_wished:
            _warned.add(name)
            warnings.warn(
                f"doge_fast runs its operators on {device} with {chosen_name}, which is slower: "
                f"{name} cannot run. {_obstacle(name, device)} DOGE_FAST_BACKEND={chosen_name} "
                "asks for this and says nothing.",
                RuntimeWarning,
                stacklevel=2,
            )


def _obstacle(name: str, device: torch.device) -> str | None:
    key = (name, device)
    if key not in _obstacles:
        _obstacles[key] = _FINDERS[name](device) if name in _FINDERS else None
    return _obstacles[key]


def _cpp_obstacle(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"It works on CPU memory, not on {device}."
    try:
        load_cpp()
    except BuildError as error:
        return str(error)
    return None


def _triton_obstacle(device: torch.device) -> str | None:
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
    return None if device.type == "cpu" else _triton_failure(device)


def _triton_failure(device: torch.device) -> str | None:
    """What a first small product says: old GPUs and missing compilers show only there."""
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "It needs bfloat16 matrix units, compute capability 8.0 or later."
    try:
        gram_launch.gram([torch.ones(1, 16, device=device)])
    except Exception as error:
        return f"Its first kernel failed: {type(error).__name__}: {error}"
    return None


# Plain torch meets no obstacle.
_FINDERS = {"cpp": _cpp_obstacle, "triton": _triton_obstacle}


def _guarded(operator: str, name: str) -> Run:
    if name == "cpp":
        namespace = getattr(torch.ops, CPP_NAMESPACE)
        return _explained(getattr(namespace, operator).default, _CHECKS[operator])
    return _checked(_PYTHON[operator, name], _CHECKS[operator])


def _checked(run: Run, check: Run) -> Run:
    def run_checked(*args: Any) -> Any:
        check(*args)
        return run(*args)

    return run_checked


def _explained(run: Run, check: Run) -> Run:
    """Compiled code checks for itself, at a tenth of the price; its refusals are worded here."""

    def run_explained(*args: Any) -> Any:
        try:
            return run(*args)
        except RuntimeError:
            check(*args)
            raise

    return run_explained
