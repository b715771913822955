"""The table of operators, and the choice of an implementation on a device.

The first implementation that can run is chosen: on a CPU the compiled one (`cpp`), else plain
torch; on a GPU Triton, then CUDA, then plain torch, unless an operator's file has another order.
The choice is made on first use and remembered. `DOGE_FAST_BACKEND=auto|torch|cpp|triton|cuda` or
the argument `implementation=` forces an implementation; if it cannot run, the call raises. The
variable applies to all operators; an operator without that implementation runs in plain torch. A
warning, once per process, names a faster implementation and the reason why it cannot run.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from doge_fast.kernels.availability import REASONS

Run = Callable[..., Any]

AUTO = "auto"
IMPLEMENTATIONS = ("cpp", "cuda", "triton", "torch")
# Triton before CUDA, because it does not need nvcc. Triton's interpreter and the emulator of CUDA
# run only if they are forced.
PREFERENCE = {"cpu": ("cpp", "torch"), "cuda": ("triton", "cuda", "torch")}
PREFERENCE_ELSEWHERE = ("torch",)


@dataclass(frozen=True)
class Operator:
    """An operator; its implementations take the same positional arguments."""

    name: str
    implementations: Mapping[str, Run]
    """{name of `IMPLEMENTATIONS`: function}; plain torch is always one."""
    on_gpu: Callable[[], tuple[str, ...]] = lambda: PREFERENCE["cuda"]
    """Best first."""


OPERATORS: dict[str, Operator] = {}

_library = torch.library.Library("doge_fast", "DEF")  # type: ignore[no-untyped-call]
_reasons: dict[tuple[str, torch.device], str | None] = {}
_warned: set[str] = set()


def register(operator: Operator, signature: str, *, run: Run, fake: Run) -> Any:
    """Put an operator into the table, and into torch as `torch.ops.doge_fast.<name>`.

    It is opaque to `torch.compile`, and not differentiable: its inputs are gradients.

    Args:
        operator: the entry of the table.
        signature: the schema without the name.
        run: called by torch; calls an implementation from `runs`, and increments the versions of
            tensors that it has changed.
        fake: checks the arguments, and returns empty results.

    Returns:
        The operator of torch.
    """
    OPERATORS[operator.name] = operator
    _library.define(  # type: ignore[no-untyped-call]
        operator.name + signature,
        # Strides are part of the contract; a compiler must not choose others.
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
    )
    # For every device: this table, not torch's dispatcher, chooses the implementation.
    _library.impl(operator.name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"doge_fast::{operator.name}", fake, lib=_library)
    return getattr(torch.ops.doge_fast, operator.name).default


class _Runs(dict[tuple[str, torch.device, str | None, str | None], Run]):
    """{(operator, device, `implementation=`, DOGE_FAST_BACKEND): the function that runs}.

    A function is chosen when it is looked up first; the library of a compiled one is loaded then.

    Raises:
        ValueError: the operator has no implementation of the requested name.
        RuntimeError: a forced implementation cannot run.
    """

    def __missing__(self, key: tuple[str, torch.device, str | None, str | None]) -> Run:
        operator, device, implementation, _ = key
        requested = implementation or _requested_by_environment(operator)
        name = _resolve(operator, device, requested)
        if requested == AUTO:
            _warn_of_better_than(name, operator, device)
        self[key] = OPERATORS[operator].implementations[name]
        return self[key]


runs = _Runs()
# The last part of a key of `runs`.
requested_backend = partial(os.environ.get, "DOGE_FAST_BACKEND")


def choose(operator: str, device: torch.device, implementation: str | None = None) -> Run:
    """The function of `runs` for the environment as it is."""
    return runs[operator, device, implementation, requested_backend()]


def choose_without_cuda(operator: str, device: torch.device) -> Run:
    """The best implementation but `cuda`, for what its kernels do not take, such as float64."""
    others = [name for name in preference(operator, device) if name != "cuda"]
    best = next(name for name in others if unavailable_reason(name, device) is None)
    return choose(operator, device, best)


def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the tensors of each device, in order of first appearance."""
    groups: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(index)
    return list(groups.values())


def chosen(device: torch.device | str = "cpu", operator: str = "gram") -> str:
    """The implementation of `operator` that runs on `device` when a call forces none."""
    return _resolve(operator, torch.device(device), _requested_by_environment(operator))


def implementations(device: torch.device | str = "cpu") -> dict[str, str | None]:
    """{implementation: None if it can run on `device`, else the reason why not}.

    Compiles missing libraries, as the first use does.
    """
    return {name: unavailable_reason(name, torch.device(device)) for name in IMPLEMENTATIONS}


def unavailable_reason(name: str, device: torch.device) -> str | None:
    """The reason why an implementation cannot run on a device, as one sentence, or None.

    On a GPU this runs a small kernel, which finds old drivers and missing compilers.
    """
    key = (name, device)
    if key not in _reasons:
        reason = REASONS[name](device)
        if reason is None and device.type == "cuda" and name != "torch":
            reason = _failure_of_the_first_kernel(name, device)
        _reasons[key] = reason
    return _reasons[key]


def preference(operator: str, device: torch.device) -> tuple[str, ...]:
    """Implementations of `operator` on `device`, best first."""
    entry = OPERATORS[operator]
    is_gpu = device.type == "cuda"
    names = entry.on_gpu() if is_gpu else PREFERENCE.get(device.type, PREFERENCE_ELSEWHERE)
    return tuple(name for name in names if name in entry.implementations)


def _requested_by_environment(operator: str) -> str:
    """The implementation that DOGE_FAST_BACKEND requests for an operator."""
    name = os.environ.get("DOGE_FAST_BACKEND") or AUTO
    is_absent = name in IMPLEMENTATIONS and name not in OPERATORS[operator].implementations
    return "torch" if is_absent else name


def _resolve(operator: str, device: torch.device, requested: str) -> str:
    """The name of the implementation that runs; AUTO is the best that can."""
    if requested == AUTO:
        order = preference(operator, device)
        return next(name for name in order if unavailable_reason(name, device) is None)
    names = OPERATORS[operator].implementations
    if requested not in names:
        raise ValueError(
            f"The operator {operator} has the implementations {', '.join(names)}; got "
            f"{requested!r}. Correct the argument implementation= or DOGE_FAST_BACKEND, or leave "
            "the choice open with 'auto'."
        )
    reason = unavailable_reason(requested, device)
    if reason is not None:
        raise RuntimeError(
            f"The implementation {requested!r} was forced and cannot run on {device}: {reason} "
            "Remove the cause, or leave the choice open with 'auto'."
        )
    return requested


def _warn_of_better_than(chosen_name: str, operator: str, device: torch.device) -> None:
    """Warn once per process of a faster implementation that DOGE_FAST_NO_JIT did not turn off."""
    for name in preference(operator, device):
        if name == chosen_name:
            return
        is_off = name in ("cpp", "cuda") and os.environ.get("DOGE_FAST_NO_JIT") == "1"
        if name not in _warned and not is_off:
            _warned.add(name)
            warnings.warn(
                f"doge_fast runs {operator} on {device} with {chosen_name}, which is slower: "
                f"{name} cannot run. {unavailable_reason(name, device)} "
                f"DOGE_FAST_BACKEND={chosen_name} chooses it without this warning.",
                RuntimeWarning,
                stacklevel=2,
            )


def _failure_of_the_first_kernel(name: str, device: torch.device) -> str | None:
    try:
        OPERATORS["gram"].implementations[name]([torch.ones(1, 16, device=device)])
        torch.cuda.synchronize(device)
    # Drivers and compilers raise exceptions of any class.
    except Exception as error:
        first_line = (str(error).splitlines() or ["no reason given"])[0]
        return f"Its first kernel failed: {type(error).__name__}: {first_line}"
    return None
