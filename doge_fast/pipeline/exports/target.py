"""What a target is: who writes it, what its numbers mean, and what goes wrong with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from doge_fast.pipeline.exports.mixture import Mixture, Rows


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
    write: Callable[[Mixture], str]
    """The text, without comments. Raises ValueError for what the framework would not take."""
    takes: str = ""
    """What a path is; empty where paths are not needed."""
    rows: tuple[Rows, ...] = ("blocks",)
    """What the framework's numbers may count; one where that is the framework's own decision."""
    default_rows: Rows | None = "blocks"
    """Which of them, unless it is said; None: it must be said, or the lengths known."""
    cuts_blocks: bool = False
    """Whether with seq_length the framework cuts the rows into blocks itself."""
    has_phases: bool = False
    """Whether weights may change during the training."""
    phases_in: Literal["steps", "tokens"] = "steps"
    """What its text counts where a phase begins, as `read` returns it."""
    needs_paths: bool = True
    """Whether every domain needs a path."""
    has_paths: bool = True
    """Whether paths are of any use."""
    comment: str | None = "# "
    """How the text says a comment; None where it cannot."""
    traps: Sequence[str] = field(default_factory=tuple)
    """What a newcomer runs into, one sentence each."""
    read: Callable[[str], Phases] | None = None
    """The mixture in such a text; None where it is not read back. Raises ValueError."""
