"""Where a device has several implementations: which runs, how to force one, and why.

For each operator the first implementation that can run on a device wins: on a CPU the compiled one
(`cpp`), else plain torch; on a GPU Triton or CUDA, whichever `measured.json` says was faster on
such a GPU, else plain torch. The choice is made on first use and kept.
`DOGE_FAST_BACKEND=auto|torch|cpp|triton|cuda` or the argument `implementation=` forces one, and a
forced implementation that cannot run raises instead of giving way. The variable is for all
operators: one that was never written in that implementation runs in plain torch. A warning, once
per process, names what would be faster and the reason it cannot run.
"""

import importlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from doge_fast._layout import KERNELS_DIR
from doge_fast.kernels.build import CUDA, is_built
from doge_fast.kernels.obstacles import OBSTACLES
from doge_fast.kernels.schema import (
    NAMESPACE,
    SIGNATURES,
    check_accumulate,
    check_gram,
    check_segment_sum,
    check_weighted_sum,
)

Run = Callable[..., Any]

AUTO = "auto"
IMPLEMENTATIONS = ("cpp", "cuda", "triton", "torch")


@dataclass(frozen=True)
class Operator:
    """An operator that another package writes, and registers here.

    An implementation takes the positional arguments of the schema.
    """

    name: str
    implementations: Mapping[str, Run]
    """Of `IMPLEMENTATIONS` those that it is written in; plain torch is always among them."""
    check: Run
    """Raises ValueError about arguments; takes what an implementation takes."""


OPERATORS: dict[str, Operator | None] = dict.fromkeys(SIGNATURES)
"""Those that `register` has got, with their entries, and those of this package."""
# A CPU sums segments by torch's own kernels (doge_fast.stacked.layers), and calls none of ours.
UNWRITTEN = (("segment_sum", "cpp"), ("segment_sum", "cuda"))
# (operator, implementation) -> module, which has a function of the operator's name. The files have
# an underscore, since a folder with a torch.py would hide torch from what runs there.
MODULES = {
    (operator, name): f"doge_fast.kernels.{operator}.{name}_"
    for operator in OPERATORS
    for name in IMPLEMENTATIONS
    if (operator, name) not in UNWRITTEN
}
# Now, not at first use: the import of a folder puts it in the place of the function of the same
# name in doge_fast.kernels, unless it comes before the function.
for _operator in OPERATORS:
    importlib.import_module(MODULES[_operator, "torch"])

# Best first, where nothing was measured. Triton before CUDA, since nothing has to be compiled by
# nvcc. Triton's interpreter runs only where it is forced.
PREFERENCE = {"cpu": ("cpp", "torch"), "cuda": ("triton", "cuda", "torch")}
# Gradients to accumulate are at other addresses in every step: CUDA's kernel and torch's foreach
# operators take them as arguments, where Triton needs a table on the device. CUDA's has several
# times the blocks, but nobody waits a minute for nvcc because of it, or is told to: it comes first
# where it was compiled for something else.
PREFERENCE_TO_ACCUMULATE = {True: ("cuda", "torch", "triton"), False: ("torch", "cuda", "triton")}
PREFERENCE_ELSEWHERE = ("torch",)
# {"sm_90": {"gram": "cuda", ..., "source": "benchmarks/results/..."}, ...}, where there is one.
MEASURED = KERNELS_DIR / "measured.json"

_CHECKS: dict[str, Run] = {
    "gram": check_gram,
    "weighted_sum": check_weighted_sum,
    "accumulate": lambda grads, rows, add: check_accumulate(grads, rows),
    "segment_sum": check_segment_sum,
}

# These check a list of blocks once, where they make its tables: `chunks.spans_by_dtype`.
CHECK_THEMSELVES = {(o, name) for o in ("gram", "weighted_sum") for name in ("cuda", "triton")}

library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_chosen: dict[tuple[str, torch.device, str | None, str | None, bool], Run] = {}
_obstacles: dict[tuple[str, torch.device], str | None] = {}
_warned: set[str] = set()


def register(operator: Operator, signature: str, *, run: Run, fake: Run) -> Any:
    """Put an operator into the table, and into torch as `torch.ops.doge_fast.<name>`.

    Args:
        operator: the entry.
        signature: of the schema, without the name.
        run: what torch calls; it asks `choose` for the implementation, and says what has changed.
        fake: checks the arguments, and returns empty results.

    Returns:
        The operator of torch.
    """
    OPERATORS[operator.name] = operator
    for name in operator.implementations:
        MODULES[operator.name, name] = operator.check.__module__
    _CHECKS[operator.name] = operator.check
    library.define(  # type: ignore[no-untyped-call]
        operator.name + signature,
        # Strides are part of the contract; a compiler must not choose others.
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
    )
    # For every device: our dispatcher, not torch's, settles which implementation runs.
    library.impl(operator.name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{operator.name}", fake, lib=library)
    return getattr(getattr(torch.ops, NAMESPACE), operator.name).default


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
        wish = implementation or _of_environment(operator)
        name = _settle(operator, device, wish)
        if wish == AUTO:
            _warn_of_better_than(name, operator, device)
        run = _chosen[key] = (_checked if is_checked else _written)(operator, name)
    return run


def chosen(device: torch.device | str = "cpu", operator: str = "gram") -> str:
    """The implementation of `operator` that runs on `device` when a call forces none."""
    return _settle(operator, torch.device(device), _of_environment(operator))


def _of_environment(operator: str) -> str:
    """What DOGE_FAST_BACKEND says for an operator."""
    name = os.environ.get("DOGE_FAST_BACKEND") or AUTO
    is_written = name not in IMPLEMENTATIONS or (operator, name) in MODULES
    return name if is_written else "torch"


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
    return "\n".join(line for name in devices for line in _explanation(torch.device(name)))


def _explanation(device: torch.device) -> list[str]:
    wish = os.environ.get("DOGE_FAST_BACKEND") or AUTO
    how = "chosen" if wish == AUTO else f"forced by DOGE_FAST_BACKEND={wish}"
    obstacles = implementations(device)
    try:
        names = {operator: chosen(device, operator) for operator in OPERATORS}
    except (ValueError, RuntimeError) as error:
        lines = [f"{device}: none: {error}"]
    else:
        first = names["gram"]
        others = [f"{operator} {name}" for operator, name in names.items() if name != first]
        lines = [f"{device}: {', '.join([first, *others])} ({how})"]
    return lines + [f"  {name}: {reason or 'can run'}" for name, reason in obstacles.items()]


def _settle(operator: str, device: torch.device, wish: str) -> str:
    if wish == AUTO:
        return _best(operator, device)
    if wish not in IMPLEMENTATIONS:
        raise ValueError(
            f"An operator's implementation is one of {', '.join((AUTO, *IMPLEMENTATIONS))}; got "
            f"{wish!r}. Correct the argument implementation= or the variable DOGE_FAST_BACKEND."
        )
    if (operator, wish) not in MODULES:
        written = ", ".join(name for name in IMPLEMENTATIONS if (operator, name) in MODULES)
        raise ValueError(
            f"The operator {operator} is not written in {wish}, but in {written}. Name one of "
            "these, or leave the choice open with 'auto'."
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
    usual = PREFERENCE.get(device.type, PREFERENCE_ELSEWHERE)
    order = usual
    if (device.type, operator) == ("cuda", "accumulate"):
        order = PREFERENCE_TO_ACCUMULATE[is_built(CUDA)]
    best = measured(device).get(operator)
    names = order if best is None else (best, *order)
    return tuple(name for name in dict.fromkeys(names) if (operator, name) in MODULES)


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
    records: dict[str, dict[str, str]] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return records


def _architecture(device: torch.device) -> str:
    """ "sm_90" or "gfx942"; "" for a device that is no GPU."""
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
    """Say once per process what would be faster, except of what DOGE_FAST_NO_JIT turned off."""
    for name in preference(operator, device):
        if name == chosen_name:
            return
        is_wished = name in ("cpp", "cuda") and os.environ.get("DOGE_FAST_NO_JIT") == "1"
        if name not in _warned and not is_wished:
            _warned.add(name)
            warnings.warn(
                f"doge_fast runs {operator} on {device} with {chosen_name}, which is slower: "
                f"{name} cannot run. {_obstacle(name, device)} DOGE_FAST_BACKEND={chosen_name} "
                "chooses it without this warning.",
                RuntimeWarning,
                stacklevel=2,
            )


def _obstacle(name: str, device: torch.device) -> str | None:
    key = (name, device)
    if key not in _obstacles:
        _obstacles[key] = OBSTACLES[name](device)
    return _obstacles[key]


def _written(operator: str, name: str) -> Run:
    entry = OPERATORS[operator]
    if entry is not None:
        return entry.implementations[name]
    # By name: what drives a GPU is imported where it runs.
    run: Run = getattr(importlib.import_module(MODULES[operator, name]), operator)
    return run


def _checked(operator: str, name: str) -> Run:
    run = _written(operator, name)
    check = _CHECKS[operator]

    def run_checked(*args: Any) -> Any:
        check(*args)
        return run(*args)

    def run_explained(*args: Any) -> Any:
        try:
            return run(*args)
        except RuntimeError:
            check(*args)
            raise

    if (operator, name) in CHECK_THEMSELVES:
        return run
    # C++ checks for itself, at a tenth of the price; the sentence of a refusal is made here.
    return run_explained if name == "cpp" else run_checked
