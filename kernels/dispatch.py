"""The table of operators: which implementation of one runs on a device, how to force it, and why.

The first implementation that can run on a device wins: on a CPU the compiled one (`cpp`), else
plain torch; on a GPU Triton, then CUDA, then plain torch, unless an operator's own file says
otherwise. The choice is made on first use and kept. `DOGE_FAST_BACKEND=auto|torch|cpp|triton|cuda`
or the argument `implementation=` forces one, and a forced implementation that cannot run raises
instead of giving way. The variable is for all operators: one that was never written in that
implementation runs in plain torch. A warning, once per process, names what would be faster and the
reason it cannot run.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from doge_fast.kernels.availability import REASONS

Run = Callable[..., Any]

AUTO = "auto"
IMPLEMENTATIONS = ("cpp", "cuda", "triton", "torch")
# Triton before CUDA, since nothing has to be compiled by nvcc. Triton's interpreter and the
# emulator of CUDA run only where they are forced.
PREFERENCE = {"cpu": ("cpp", "torch"), "cuda": ("triton", "cuda", "torch")}
PREFERENCE_ELSEWHERE = ("torch",)


@dataclass(frozen=True)
class Operator:
    """An operator, as its file describes it.

    An implementation takes the positional arguments of the schema.
    """

    name: str
    implementations: Mapping[str, Run]
    """Of `IMPLEMENTATIONS` those that it is written in; plain torch is always among them."""
    check: Run
    """Raises ValueError about arguments; takes what an implementation takes."""
    checks_itself: tuple[str, ...] = ()
    """Implementations that run `check` where something is new to them, not at each call."""
    on_gpu: Callable[[], tuple[str, ...]] = lambda: PREFERENCE["cuda"]
    """Best first."""


OPERATORS: dict[str, Operator] = {}

_library = torch.library.Library("doge_fast", "DEF")  # type: ignore[no-untyped-call]
_chosen: dict[tuple[str, torch.device, str | None, str | None, bool], Run] = {}
_reasons: dict[tuple[str, torch.device], str | None] = {}
_warned: set[str] = set()


def register(operator: Operator, signature: str, *, run: Run, fake: Run) -> Any:
    """Put an operator into the table, and into torch as `torch.ops.doge_fast.<name>`.

    It is opaque to `torch.compile`, and not differentiable: gradients are its data.

    Args:
        operator: the entry.
        signature: of the schema, without the name.
        run: what torch calls; it asks `choose` for the implementation, and says what has changed.
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
    # For every device: this table, not torch's, settles which implementation runs.
    _library.impl(operator.name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"doge_fast::{operator.name}", fake, lib=_library)
    return getattr(torch.ops.doge_fast, operator.name).default


def choose(
    operator: str, device: torch.device, implementation: str | None, *, is_checked: bool = True
) -> Run:
    """The callable that runs `operator` on `device`, and checks its arguments if asked.

    Raises:
        ValueError: no implementation of the operator has the name that was asked for.
        RuntimeError: a forced implementation cannot run.
    """
    key = (operator, device, implementation, os.environ.get("DOGE_FAST_BACKEND"), is_checked)
    run = _chosen.get(key)
    if run is None:
        requested = implementation or _of_environment(operator)
        name = _settle(operator, device, requested)
        if requested == AUTO:
            _warn_of_better_than(name, operator, device)
        entry = OPERATORS[operator]
        run = _chosen[key] = _checked(entry, name) if is_checked else entry.implementations[name]
    return run


def chosen(device: torch.device | str = "cpu", operator: str = "gram") -> str:
    """The implementation of `operator` that runs on `device` when a call forces none."""
    return _settle(operator, torch.device(device), _of_environment(operator))


def implementations(device: torch.device | str = "cpu") -> dict[str, str | None]:
    """Every implementation, and None if it can run on `device`, else the reason it cannot.

    Asking compiles what is missing, as the first use would.
    """
    return {name: unavailable_reason(name, torch.device(device)) for name in IMPLEMENTATIONS}


def unavailable_reason(name: str, device: torch.device) -> str | None:
    """Why an implementation cannot run on a device, as one sentence; None where it can.

    On a GPU it runs one small kernel: old drivers and missing compilers show only there.
    """
    key = (name, device)
    if key not in _reasons:
        reason = REASONS[name](device)
        if reason is None and device.type == "cuda" and name != "torch":
            reason = _failure_of_the_first_kernel(name, device)
        _reasons[key] = reason
    return _reasons[key]


def explain(device: torch.device | str | None = None) -> str:
    """What runs where, and why not something else, one line per device and implementation.

    Args:
        device: None: the CPU, and the current GPU where there is one.
    """
    devices = [device] if device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return "\n".join(line for name in devices for line in _explanation(torch.device(name)))


def preference(operator: str, device: torch.device) -> tuple[str, ...]:
    """Implementations of `operator` on `device`, best first."""
    entry = OPERATORS[operator]
    is_gpu = device.type == "cuda"
    names = entry.on_gpu() if is_gpu else PREFERENCE.get(device.type, PREFERENCE_ELSEWHERE)
    return tuple(name for name in names if name in entry.implementations)


def _of_environment(operator: str) -> str:
    """What DOGE_FAST_BACKEND says for an operator."""
    name = os.environ.get("DOGE_FAST_BACKEND") or AUTO
    is_written = name not in IMPLEMENTATIONS or name in OPERATORS[operator].implementations
    return name if is_written else "torch"


def _explanation(device: torch.device) -> list[str]:
    requested = os.environ.get("DOGE_FAST_BACKEND") or AUTO
    how = "chosen" if requested == AUTO else f"forced by DOGE_FAST_BACKEND={requested}"
    reasons = implementations(device)
    try:
        names = {operator: chosen(device, operator) for operator in OPERATORS}
    except (ValueError, RuntimeError) as error:
        lines = [f"{device}: none: {error}"]
    else:
        first = names["gram"]
        others = [f"{operator} {name}" for operator, name in names.items() if name != first]
        lines = [f"{device}: {', '.join([first, *others])} ({how})"]
    return lines + [f"  {name}: {reason or 'can run'}" for name, reason in reasons.items()]


def _settle(operator: str, device: torch.device, requested: str) -> str:
    if requested == AUTO:
        order = preference(operator, device)
        return next(name for name in order if unavailable_reason(name, device) is None)
    if requested not in IMPLEMENTATIONS:
        raise ValueError(
            f"An operator's implementation is one of {', '.join((AUTO, *IMPLEMENTATIONS))}; got "
            f"{requested!r}. Correct the argument implementation= or DOGE_FAST_BACKEND."
        )
    written = OPERATORS[operator].implementations
    if requested not in written:
        raise ValueError(
            f"The operator {operator} is not written in {requested}, but in {', '.join(written)}. "
            "Name one of these, or leave the choice open with 'auto'."
        )
    reason = unavailable_reason(requested, device)
    if reason is not None:
        raise RuntimeError(
            f"The implementation {requested!r} was forced and cannot run on {device}: {reason} "
            "Remove the cause, or leave the choice open with 'auto'."
        )
    return requested


def _warn_of_better_than(chosen_name: str, operator: str, device: torch.device) -> None:
    """Say once per process what would be faster, except of what DOGE_FAST_NO_JIT turned off."""
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
    # Whatever a driver or a compiler throws at the first kernel is a reason, not an error of ours.
    except Exception as error:
        line = (str(error).splitlines() or ["no reason given"])[0]
        return f"Its first kernel failed: {type(error).__name__}: {line}"
    return None


def _checked(operator: Operator, name: str) -> Run:
    run, check = operator.implementations[name], operator.check

    def run_checked(*args: Any) -> Any:
        check(*args)
        return run(*args)

    def run_explained(*args: Any) -> Any:
        try:
            return run(*args)
        except RuntimeError:
            check(*args)
            raise

    if name in operator.checks_itself:
        return run
    # C++ checks for itself, at a tenth of the price; the sentence of a refusal is made here.
    return run_explained if name == "cpp" else run_checked
