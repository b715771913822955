"""Two mistakes with several optimizers that would otherwise pass in silence.

Two DoGEOptimizers inside one `with` each learn a mixture from a part of the gradient: refused. If
only one of two optimizers is wrapped, the other steps with the unweighted sum over domains: warned
of once, since it may train another model on purpose.
"""

import gc
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from doge_fast.tracing import outside_graphs

NUM_NAMED = 3
# Modules whose frames lie between the user's loop and the warning.
_IS_BETWEEN = re.compile(r"(doge_fast|torch|contextlib)\b").match


class _Open(threading.local):
    """The owner of the domain that is open on this thread. Two threads may train two models."""

    owner: object | None = None


_open = _Open()


def refuse_second(owner: object) -> None:
    """Raise RuntimeError if another DoGEOptimizer has a domain open on this thread."""
    if _open.owner is not None and _open.owner is not owner:
        raise RuntimeError(
            "a domain of another DoGEOptimizer is open; the two would learn separate mixtures, "
            "each from a part of the gradient. Pass both optimizers to one: "
            "DoGEOptimizer([muon, adamw], domains=...)."
        )


@contextmanager
def opened(owner: object) -> Iterator[None]:
    """Mark `owner` as having a domain open, for `refuse_second`."""
    _open.owner = owner
    try:
        yield
    finally:
        _open.owner = None


@contextmanager
def watching(groups: Sequence[dict[str, list[Tensor]]], model: nn.Module | None) -> Iterator[None]:
    """Warn if parameters that no wrapped optimizer owns receive a gradient inside.

    The backward pass inside trains `model`; None: every module with a parameter of `groups`, the
    wrapped optimizer's.
    """
    unowned = _unowned(groups, model)
    yield
    _warn_of(unowned)


@outside_graphs
def _unowned(
    groups: Sequence[dict[str, list[Tensor]]], model: nn.Module | None
) -> dict[str, Tensor]:
    """{name: parameter} of trained parameters that no group has and that have no gradient yet."""
    owned = {id(param) for group in groups for param in group["params"]}
    found: dict[int, tuple[str, Tensor]] = {}
    for module in _modules_with(owned) if model is None else [model]:
        for name, param in module.named_parameters():
            if param.requires_grad and param.grad is None and id(param) not in owned:
                # A submodule gives a shorter name than the whole model.
                known = found.get(id(param))
                if known is None or len(known[0]) < len(name):
                    found[id(param)] = name, param
    return dict(found.values())


def _modules_with(owned: set[int]) -> Iterable[nn.Module]:
    """All living modules that have one of these parameters, directly or in a submodule."""
    # The garbage collector knows all modules. A hook on every forward would find them too, but
    # compiled models would be compiled again.
    # Not isinstance, on which lazy proxies import what they stand for.
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    return [
        module for module in modules if any(id(param) in owned for param in module.parameters())
    ]


@outside_graphs
def _warn_of(unowned: dict[str, Tensor]) -> None:
    names = [name for name, param in unowned.items() if param.grad is not None]
    if not names:
        return
    warnings.warn(
        f"parameters that no wrapped optimizer owns received a gradient inside a domain: "
        f"{', '.join(names[:NUM_NAMED])} ({len(names)} in all). The optimizer that steps them sees "
        "the unweighted sum over domains, and W does not see them. Wrap both, "
        "DoGEOptimizer([optimizer, other], domains=...); or freeze them, or run their backward "
        "pass outside the domain.",
        stacklevel=_level_of_the_caller(),
    )


def _level_of_the_caller() -> int:
    """The `stacklevel` at which a warning of the calling function names the loop's own line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _IS_BETWEEN(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level
