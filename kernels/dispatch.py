"""Where a device has several implementations: which runs, how to force one, and why.

For each operator the first implementation that can run on a device wins: on a CPU the compiled one
(`cpp`), else plain torch; on a GPU Triton or CUDA, whichever `measured.json` says was faster on
such a GPU, else plain torch. The choice is made on first use and kept.
`DOGE_FAST_BACKEND=auto|torch|cpp|triton|cuda` or the argument `implementation=` forces one, and a
forced implementation that cannot run raises instead of giving way. Going without the
preferred one is said once per process, in one warning that names the reason.
"""

import importlib
import json
import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from doge_fast._layout import KERNELS_DIR
from doge_fast.kernels.accumulate.torch_kernel import accumulate
from doge_fast.kernels.build import BuildError, load_cpp
from doge_fast.kernels.build_cuda import why_not_cuda
from doge_fast.kernels.gram.torch_kernel import gram
from doge_fast.kernels.reweight.torch_kernel import reweight
from doge_fast.kernels.schema import (
    CPP_NAMESPACE,
    SIGNATURES,
    check_accumulate,
    check_gram,
    check_reweight,
    check_weighted_sum,
)
from doge_fast.kernels.triton_support import is_installed, is_interpreted
from doge_fast.kernels.weighted_sum.torch_kernel import weighted_sum

Run = Callable[..., Any]

AUTO = "auto"
IMPLEMENTATIONS = ("cpp", "cuda", "triton", "torch")
OPERATORS = tuple(SIGNATURES)
# Best first, where nothing was measured. Triton before CUDA, since the interpreter tests the very
# code that runs; gradients to accumulate are at other addresses in every step, for which torch's
# foreach operators need no table on the device. Triton's interpreter nobody wants unasked.
PREFERENCE = {"cpu": ("cpp", "torch"), "cuda": ("triton", "cuda", "torch")}
PREFERENCE_FOR = {("cuda", "accumulate"): ("torch", "cuda", "triton")}
PREFERENCE_ELSEWHERE = ("torch",)
# {"sm_90": {"gram": "cuda", ..., "source": "benchmarks/results/..."}, ...}, where there is one.
MEASURED = KERNELS_DIR / "measured.json"

_CHECKS: dict[str, Run] = {
    "gram": check_gram,
    "weighted_sum": check_weighted_sum,
    "accumulate": lambda grads, rows, add: check_accumulate(grads, rows),
    "reweight": check_reweight,
}
_TORCH: dict[str, Run] = {
    "gram": gram,
    "weighted_sum": weighted_sum,
    "accumulate": accumulate,
    "reweight": reweight,
}
# The file of an operator's folder that drives a GPU; it has a function of the operator's name.
_MODULES = {"triton": "launch", "cuda": "cuda"}

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
        name = _settle(operator, device, wish)
        if wish == AUTO:
            _warn_of_better_than(name, operator, device)
        run = _chosen[key] = _guarded(operator, name)
    return run


def chosen(device: torch.device | str = "cpu", operator: str = "gram") -> str:
    """The implementation of `operator` that runs on `device` when a call forces none."""
    return _settle(operator, torch.device(device), os.environ.get("DOGE_FAST_BACKEND") or AUTO)


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
        names = {operator: _settle(operator, device, wish) for operator in OPERATORS}
    except (ValueError, RuntimeError) as error:
        lines = [f"{device}: none: {error}"]
    else:
        first = names["gram"]
        others = [f"{operator} {name}" for operator, name in names.items() if name != first]
        lines = [f"{device}: {', '.join([first, *others])} ({how})"]
    return lines + [f"  {each}: {reason or 'can run'}" for each, reason in obstacles.items()]


def _settle(operator: str, device: torch.device, wish: str) -> str:
    if wish == AUTO:
        return _best(operator, device)
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


def preference(operator: str, device: torch.device) -> tuple[str, ...]:
    """Implementations of `operator` on `device`, best first; as measured if it was."""
    named = PREFERENCE_FOR.get((device.type, operator)) or PREFERENCE.get(
        device.type, PREFERENCE_ELSEWHERE
    )
    best = measured(device).get(operator)
    return named if best is None else (best, *(name for name in named if name != best))


def measured(device: torch.device) -> dict[str, str]:
    """The fastest implementation of each operator on such a device, and the record that says so.

    Returns:
        {operator: implementation, ..., "source": path}; empty where nothing was measured.
    """
    return _measured().get(_architecture(device), {})


@cache
def _measured() -> dict[str, dict[str, str]]:
    if not MEASURED.is_file():
        return {}
    found: dict[str, dict[str, str]] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return found


def _architecture(device: torch.device) -> str:
    """ "sm_90", "gfx942" or "" for what has no name of this kind."""
    if device.type != "cuda":
        return ""
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def _best(operator: str, device: torch.device) -> str:
    for name in preference(operator, device):
        if _obstacle(name, device) is None:
            return name
    raise AssertionError("plain torch runs everywhere")


def _warn_of_better_than(chosen_name: str, operator: str, device: torch.device) -> None:
    """Say once per process what the device goes without; silence was asked for by NO_JIT."""
    for name in preference(operator, device):
        if name == chosen_name:
            return
        is_wished = name in ("cpp", "cuda") and os.environ.get("DOGE_FAST_NO_JIT") == "1"
        if name not in _warned and not is_wished:
            _warned.add(name)
            warnings.warn(
                f"doge_fast runs {operator} on {device} with {chosen_name}, which is slower: "
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
        # It refuses a level that it was asked for and that the CPU does not have.
        getattr(torch.ops, CPP_NAMESPACE).level()
    except BuildError as error:
        return str(error)
    except RuntimeError as error:
        return str(error).splitlines()[0]
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
        _python("gram", "triton")([torch.ones(1, 16, device=device)])
    except Exception as error:
        return f"Its first kernel failed: {type(error).__name__}: {error}"
    return None


# Plain torch meets no obstacle.
_FINDERS = {"cpp": _cpp_obstacle, "triton": _triton_obstacle, "cuda": why_not_cuda}


def _guarded(operator: str, name: str) -> Run:
    if name == "cpp":
        namespace = getattr(torch.ops, CPP_NAMESPACE)
        return _explained(getattr(namespace, operator).default, _CHECKS[operator])
    return _checked(_python(operator, name), _CHECKS[operator])


def _python(operator: str, name: str) -> Run:
    if name == "torch":
        return _TORCH[operator]
    # By name: what drives a GPU is imported where it runs.
    module = importlib.import_module(f"doge_fast.kernels.{operator}.{_MODULES[name]}")
    run: Run = getattr(module, operator)
    return run


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
