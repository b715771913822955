"""What a target is: who writes it, what its numbers mean, and what goes wrong with it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from doge_fast.pipeline.exports.blend import Blend, Rows


@dataclass(frozen=True)
class Found:
    """A share of a mixture, as a framework's file holds it."""

    weight: float
    """Relative to the others of its phase."""
    name: str | None = None
    """The domain, where the format names domains."""
    path: str | None = None
    """Where its data lies, where the format says so."""


Phases = Sequence[tuple[int, Sequence[Found]]]
"""[(first step or token, shares)]; one from 0 where the weights are constant."""


def named(weights: Iterable[tuple[Any, Any]]) -> list[Found]:
    """The shares of a format that names domains, from its (name, weight)."""
    return [Found(float(weight), name=name) for name, weight in weights]


def placed(weights: Iterable[tuple[Any, Any]]) -> list[Found]:
    """The shares of a format that has only paths, from its (weight, path)."""
    return [Found(float(weight), path=path) for weight, path in weights]


@dataclass(frozen=True)
class Target:
    """A framework, or one of its ways to take a mixture.

    Made by packages outside this one too: an object of this class under the entry point group
    `doge_fast.exporters` is a target of `export` like any other.
    """

    name: str
    """As in `--to`."""
    title: str
    """What is printed, in a few words."""
    write: Callable[[Blend], str]
    """The text, without comments. Raises ValueError for what the framework would not take."""
    takes: str = ""
    """What a path is; empty where paths are of no use."""
    checked: str = ""
    """The version or commit of the framework whose own code was read or run, and when."""
    rows: tuple[Rows, ...] = ("blocks",)
    """What the framework's numbers may count, the default first; one where it decides itself."""
    has_phases: bool = False
    """Whether weights may change during the training."""
    phases_in: Literal["steps", "tokens"] = "steps"
    """What its text counts where a phase begins, as `read` returns it."""
    needs_paths: bool = True
    """Whether every domain needs a path."""
    comment: str | None = "# "
    """How the text says a comment; None where it cannot."""
    traps: Sequence[str] = ()
    """What a newcomer runs into, one sentence each."""
    read: Callable[[str], Phases] | None = None
    """The mixture in such a text; None where it is not read back. What it raises (ValueError,
    KeyError, TypeError ...) means that the text is not the format."""
