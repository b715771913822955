"""What an exporter is given: checked shares, paths and phases, in the unit its framework counts.

Learned weights are shares of tokens. A framework that draws blocks of a fixed length takes them as
they are; one that draws documents needs them divided by the mean length of a document, and without
it would train on another mixture than the one that was learned.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from doge_fast.pipeline.exports.shares import largest_remainder, normalised

Rows = Literal["blocks", "documents"]
Split = Literal["train", "valid", "test"]
Paths = Mapping[str, str | Sequence[str] | Mapping[str, float]]
"""{domain: path, paths, or {path: its relative part of the domain}}."""
PathParts = dict[str, dict[str, Fraction | None]]

REMOTE = "://"


@dataclass(frozen=True)
class Settings:
    """What an export is asked for, beyond the weights and the paths."""

    decimals: int = 6
    """Places of every number."""
    rows: Rows | None = None
    """What one drawn item is: a block of equally many tokens, or a whole document."""
    mean_doc_tokens: Mapping[str, float] = field(default_factory=dict)
    """{domain: tokens of a document}; goes before what the record says."""
    seq_length: int | None = None
    """Tokens of a training sequence."""
    batch_size: int | None = None
    """Sequences in an optimizer step, over all devices."""
    budget_tokens: int | None = None
    """Tokens of the whole training."""
    steps: int | None = None
    """Optimizer steps of the whole training; None: those that budget, length and batch make."""
    seed: int = 0
    """Of the framework's own draws."""
    local_dir: str | None = None
    """Where remote streams are kept, one folder per domain."""
    is_constant: bool = False
    """Leave out the phases: the weights that the record has beside them, throughout."""

    def __post_init__(self) -> None:
        """Refuse numbers that no training has."""
        for name in ("seq_length", "batch_size", "budget_tokens", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}.")
        for name, tokens in self.mean_doc_tokens.items():
            if not (math.isfinite(tokens) and tokens > 0):
                raise ValueError(f"mean_doc_tokens must be above 0; that of {name} is {tokens}.")

    def tokens_per_step(self) -> int | None:
        """seq_length * batch_size, where both are known."""
        return self.seq_length * self.batch_size if self.seq_length and self.batch_size else None

    def total_steps(self) -> int | None:
        """Optimizer steps of the whole training, where they are known."""
        per_step = self.tokens_per_step()
        if self.steps or not (self.budget_tokens and per_step):
            return self.steps
        return max(1, self.budget_tokens // per_step)


@dataclass(frozen=True)
class Phase:
    """Weights from one optimizer step on."""

    first_step: int
    """Counted from 0."""
    parts: Mapping[str, Fraction]
    """{domain: exact share}, in the unit the framework counts; zeros included."""


@dataclass(frozen=True)
class Blend:
    """Shares, paths and phases that an exporter writes down; `building` has checked everything."""

    phases: tuple[Phase, ...]
    """In order, the first from step 0; one where the weights are constant."""
    entries: Mapping[str, Mapping[str, Any]]
    """The record's entry of every domain, by name."""
    paths: Mapping[Split, PathParts]
    """{split: {domain: {path: its part of the domain, or None where unknown}}}."""
    rows: Rows
    """What the shares count."""
    settings: Settings
    mean_doc_tokens: Mapping[str, float] = field(default_factory=dict)
    """{domain: tokens of a document}, where the shares count documents."""

    def shares(self, phase: int = 0) -> dict[str, Decimal]:
        """{domain: share} in a phase, sorted by name; positive, and sums to exactly 1."""
        rounded = largest_remainder(self.phases[phase].parts, self.settings.decimals)
        return {name: share for name, share in sorted(rounded.items()) if share}

    def numbers(self, phase: int = 0) -> dict[str, float]:
        """`shares` as Python floats, which some frameworks insist on."""
        return {name: float(share) for name, share in self.shares(phase).items()}

    def names(self) -> list[str]:
        """Domains with a share in some phase, sorted."""
        return sorted({name for phase in range(len(self.phases)) for name in self.shares(phase)})

    def paths_of(self, name: str, split: Split = "train") -> list[str]:
        """The paths of a domain, in the order given; empty where the split has none."""
        return list(self.paths[split].get(name, ()))

    def one_path(self, name: str) -> str:
        """The path of a domain, for a framework that takes one.

        Raises:
            ValueError: it has several.
        """
        paths = self.paths_of(name)
        if len(paths) != 1:
            raise ValueError(
                f"This target takes one path per domain; {name} has {len(paths)}: "
                f"{', '.join(paths)}. Merge them, or make each a domain."
            )
        return paths[0]

    def weighted_paths(self, phase: int = 0, split: Split = "train") -> list[tuple[Decimal, str]]:
        """[(share, path)] for a framework that weighs paths; sums to exactly 1.

        A domain of several paths shares its weight by the parts given with them, or by the size of
        the files where they can be seen. Validation and test sets take the training shares of the
        domains they have.

        Raises:
            ValueError: the parts of a domain's paths are not known, one rounds to zero, or no
                domain of the split has a weight.
        """
        parts = self.phases[phase].parts
        exact: dict[tuple[str, str], Fraction] = {}
        for name in self.shares(phase):
            known = self.paths[split].get(name, {})
            exact |= {(name, path): parts[name] * part for path, part in _known(name, known)}
        if not exact:
            names = ", ".join(self.paths[split])
            raise ValueError(f"The {split} paths are of domains without a weight: {names}.")
        rounded = largest_remainder(exact, self.settings.decimals)
        lost = [path for (_, path), share in rounded.items() if not share]
        if lost:
            raise ValueError(
                f"The share of {', '.join(lost)} rounds to 0 at {self.settings.decimals} decimals. "
                "Raise decimals, or merge it with the domain's other paths."
            )
        return [(share, path) for (_, path), share in rounded.items()]

    def passes(self, name: str, share: float) -> Fraction | None:
        """Epochs of a domain that the budget implies; None where budget or tokens are unknown."""
        budget, tokens = self.settings.budget_tokens, self.entries[name].get("tokens")
        return Fraction(budget) * Fraction(share) / Fraction(tokens) if budget and tokens else None

    def repetition(self, name: str) -> float:
        """Epochs of a domain to allow, at least 1: rounded up, for a token too few is refused."""
        budget, tokens = self.settings.budget_tokens, self.entries[name].get("tokens")
        if not (budget and tokens):
            return 1.0
        # The rest of a file that is no whole sequence is not used.
        rests = len(self.paths_of(name)) * (self.settings.seq_length or 0)
        passes = Fraction(budget) * Fraction(self.numbers()[name]) / max(1, int(tokens) - rests)
        return max(1.0, math.ceil(passes * 1000) / 1000)

    def require(self, *names: str, why: str) -> None:
        """Refuse where a setting that this target needs was not given.

        Raises:
            ValueError: one of `names` is None.
        """
        missing = [name for name in names if getattr(self.settings, name) is None]
        if missing:
            raise ValueError(f"This target needs {' and '.join(missing)}: {why}.")

    def rows_in_budget(self) -> int | None:
        """Rows that make the token budget; None where it or the length of a row is unknown."""
        budget, mean = self.settings.budget_tokens, Fraction(self.settings.seq_length or 0)
        if self.rows == "documents":
            parts = self.phases[0].parts
            tokens = [part * Fraction(self.mean_doc_tokens[n]) for n, part in parts.items() if part]
            mean = sum(tokens, Fraction(0))
        return max(1, int(budget / mean)) if budget and mean else None


def _known(name: str, paths: Mapping[str, Fraction | None]) -> list[tuple[str, Fraction]]:
    """The part of each of a domain's paths: as given, else by the bytes on disk."""
    parts = [(path, part) for path, part in paths.items() if part is not None]
    if len(parts) == len(paths):
        return parts
    sizes = {path: _bytes(path) for path in paths}
    unseen = [path for path, size in sizes.items() if not size]
    if unseen:
        raise ValueError(
            f"{name} has {len(paths)} paths and one weight, and this target weighs each path; how "
            f"much each holds is not known ({', '.join(unseen)} cannot be seen from here). Give "
            f"their parts in the paths file: {{{name!r}: {{path: tokens, ...}}}}."
        )
    return list(normalised({path: Fraction(size or 0) for path, size in sizes.items()}).items())


def _bytes(path: str) -> int | None:
    """Size of a file, or of a Megatron prefix's tokens."""
    for candidate in (Path(path), Path(f"{path}.bin")):
        if REMOTE not in path and candidate.is_file():
            return candidate.stat().st_size
    return None
