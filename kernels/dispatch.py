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
    check: Run
    """Takes an implementation's arguments and raises ValueError about them."""
    checks_itself: tuple[str, ...] = ()
    """Implementations that call `check` themselves, once for each new list of blocks."""
    on_gpu: Callable[[], tuple[str, ...]] = lambda: PREFERENCE["cuda"]
    """Best first."""


OPERATORS: dict[str, Operator] = {}

_library = torch.library.Library("doge_fast", "DEF")  # type: ignore[no-untyped-call]
_chosen: dict[tuple[str, torch.device, str | None, str | None, bool], Run] = {}
_reasons: dict[tuple[str, torch.device], str | None] = {}
_warned: set[str] = set()


def register(operator: Operator, signature: str, *, run: Run, fake: Run) -> Any:
    """Put an operator into the table, and into torch as `torch.ops.doge_fast.<name>`.

    It is opaque to `torch.compile`, and not differentiable: its inputs are gradients.

    Args:
        operator: the entry of the table.
        signature: the schema without the name.
        run: called by torch; calls the implementation from `choose`, and increments the versions
            of tensors that it has changed.
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


def choose(
    operator: str, device: torch.device, implementation: str | None, *, is_checked: bool = True
) -> Run:
    """The implementation of `operator` on `device`; with `is_checked` it checks its arguments.

    The library of a compiled implementation is loaded when it is chosen.

    Raises:
        ValueError: the operator has no implementation of the requested name.
        RuntimeError: a forced implementation cannot run.
    """
    key = (operator, device, implementation, os.environ.get("DOGE_FAST_BACKEND"), is_checked)
    run = _chosen.get(key)
    if run is None:
        requested = implementation or _requested_by_environment(operator)
        name = _resolve(operator, device, requested)
        if requested == AUTO:
            _warn_of_better_than(name, operator, device)
        entry = OPERATORS[operator]
        run = _checked(entry, name) if is_checked else entry.implementations[name]
        _chosen[key] = run
    return run


def choose_without_cuda(operator: str, device: torch.device) -> Run:
    """The best implementation but `cuda`, for what its kernels do not take, such as float64."""
    others = [name for name in preference(operator, device) if name != "cuda"]
    best = next(name for name in others if unavailable_reason(name, device) is None)
    return choose(operator, device, best)


def is_one_device(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are on one device; True for an empty list."""
    if torch.compiler.is_compiling():
        return all(tensor.device == tensors[0].device for tensor in tensors)
    # In half the time of .device, which makes an object for each tensor. It is -1 on a CPU.
    return len(set(map(Tensor.get_device, tensors))) <= 1


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


def _checked(operator: Operator, name: str) -> Run:
    run, check = operator.implementations[name], operator.check

    def check_and_run(*args: Any) -> Any:
        check(*args)
        return run(*args)

    def run_and_explain(*args: Any) -> Any:
        try:
            return run(*args)
        except RuntimeError:
            check(*args)
            raise

    if name in operator.checks_itself:
        return run
    # C++ checks its arguments in a tenth of the time. If it refuses them, `check` raises the
    # message that all implementations share.
    return run_and_explain if name == "cpp" else check_and_run
