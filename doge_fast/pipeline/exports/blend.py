"""What an exporter is given: checked shares, paths and phases, in the unit its framework counts.

Learned weights are shares of tokens. A framework that draws blocks of a fixed length takes them as
they are; one that draws documents needs them divided by the mean length of a document, and without
it would train on another mixture than the one that was learned.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from doge_fast.pipeline.exports.shares import by_document, largest_remainder, normalised
from doge_fast.pipeline.weights_fields import check_fields

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
class Mixture:
    """Shares, paths and phases that an exporter writes down; everything has been checked."""

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
            mean = sum(
                (part * Fraction(self.mean_doc_tokens[name]) for name, part in parts.items()),
                Fraction(0),
            )
        return max(1, int(budget / mean)) if budget and mean else None


def build(
    record: Mapping[str, Any],
    *,
    rows: Rows,
    has_phases: bool,
    paths: Mapping[Split, Paths],
    needs_paths: bool,
    settings: Settings,
) -> tuple[Mixture, list[str]]:
    """Check everything that an exporter relies on.

    Args:
        record: as `records.read_weights` returns it.
        rows: what the framework's numbers count.
        has_phases: whether it takes weights that change.
        paths: {split: {domain: ...}}.
        needs_paths: whether every domain with a weight needs a path for training.
        settings: what else was asked for.

    Returns:
        The mixture, and in words what was left out.

    Raises:
        ValueError: a field is not what it should be, a path belongs to no domain, a domain has no
            path, or the mean length of a document is needed and not known.
    """
    check_fields(record, "The weights")
    entries = {entry["name"]: entry for entry in record["domains"]}
    planned, notes = _phases(record, has_phases, settings)
    exact = [(first, normalised(weights)) for first, weights in planned]
    lengths: dict[str, float] = {}
    if rows == "documents":
        lengths = _lengths(entries, exact, settings)
        exact = [(first, by_document(_positive(parts), lengths)) for first, parts in exact]
    _check_shared(paths)
    mixture = Mixture(
        phases=tuple(Phase(first, parts) for first, parts in exact),
        entries=entries,
        paths={split: _path_parts(entries, given) for split, given in paths.items()},
        rows=rows,
        settings=settings,
        mean_doc_tokens=lengths,
    )
    kept = mixture.names()
    if needs_paths:
        _check_paths(kept, mixture.paths["train"])
    return mixture, [*_dropped(record, planned, kept, settings), *notes]


def read_phases(record: Mapping[str, Any]) -> list[tuple[int, dict[str, float]]]:
    """[(first step, {domain: weight})] of a record that has phases; empty where it has none.

    Under "phases", or under "stages" as a base run writes them: [{"first_step", "weights"}].
    """
    given = record.get("phases") or record.get("stages") or []
    return [(int(each["first_step"]), dict(each["weights"])) for each in given]


def _phases(
    record: Mapping[str, Any], has_phases: bool, settings: Settings
) -> tuple[list[tuple[int, dict[str, float]]], list[str]]:
    """The phases that are written, and what is said about them or about those that are not."""
    found = read_phases(record)
    if found and has_phases and not settings.is_constant:
        return _stretched(found, record.get("steps"), settings.total_steps())
    constant = [(0, {entry["name"]: float(entry["weight"]) for entry in record["domains"]})]
    # They may be the phases' mean, their last, or of another file altogether.
    note = (
        f"Left out: {len(found)} phases. These are the weights that the record has beside them, "
        "constant throughout."
    )
    return constant, [note] if found else []


def _stretched(
    phases: list[tuple[int, dict[str, float]]], recorded: int | None, asked: int | None
) -> tuple[list[tuple[int, dict[str, float]]], list[str]]:
    """Phases at the like parts of a training that is longer or shorter than the recorded one."""
    if not recorded or recorded == asked or len(phases) == 1:
        return _within(phases, asked), []
    if not asked:
        return phases, [
            f"Phases begin at steps of the recorded run, which has {recorded}. Give the steps of "
            "yours (steps), and they begin at the like parts of it."
        ]
    moved = [(first * asked // recorded, weights) for first, weights in phases]
    if len({first for first, _ in moved}) < len(moved):
        raise ValueError(
            f"{len(moved)} phases of a run of {recorded} steps do not fit in one of {asked}: some "
            "would begin at one step. Give more steps, or fewer phases."
        )
    return _within(moved, asked), [
        f"Phases of a run of {recorded} steps, at the like parts of {asked}."
    ]


def _within(
    phases: list[tuple[int, dict[str, float]]], steps: int | None
) -> list[tuple[int, dict[str, float]]]:
    """The phases, if the training is long enough to see the last of them."""
    last = phases[-1][0]
    if steps is not None and last >= steps:
        raise ValueError(
            f"The last phase begins at step {last}, and the training has {steps}: it would never "
            "come. Give the steps of the whole training, or fewer phases."
        )
    return phases


def _positive(parts: Mapping[str, Fraction]) -> dict[str, Fraction]:
    return {name: part for name, part in parts.items() if part}


def _lengths(
    entries: Mapping[str, Mapping[str, Any]],
    phases: Iterable[tuple[int, Mapping[str, Fraction]]],
    settings: Settings,
) -> dict[str, float]:
    """Mean tokens of a document of every domain that has a weight."""
    needed = sorted({name for _, parts in phases for name in _positive(parts)})
    return mean_doc_tokens(needed, entries, settings.mean_doc_tokens)


def mean_doc_tokens(
    needed: Sequence[str],
    entries: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, float],
) -> dict[str, float]:
    """{domain: mean tokens of a document}: as given, else as the record says.

    Raises:
        ValueError: it is not known of one that is needed, or is given of an unknown domain.
    """
    unknown = sorted(set(given) - set(entries))
    if unknown:
        raise ValueError(
            f"mean_doc_tokens names {', '.join(unknown)}; the domains are "
            f"{', '.join(sorted(entries))}."
        )
    found = {name: given.get(name) or _recorded_length(entries[name]) for name in needed}
    missing = [name for name, tokens in found.items() if not tokens]
    if missing:
        raise ValueError(
            "This framework draws documents, and learned weights are shares of tokens: to convert "
            "them it takes the mean tokens of a document, which the file does not have for "
            f"{', '.join(missing)}. Give mean_doc_tokens (--mean-doc-tokens NAME=NUMBER ...), or "
            "rows='blocks' (--rows blocks) if every row of the data holds equally many tokens."
        )
    return {name: float(tokens) for name, tokens in found.items() if tokens}


def _recorded_length(entry: Mapping[str, Any]) -> float | None:
    if entry.get("mean_doc_tokens"):
        return float(entry["mean_doc_tokens"])
    if entry.get("tokens") and entry.get("documents"):
        return float(entry["tokens"]) / float(entry["documents"])
    return None


def _dropped(
    record: Mapping[str, Any],
    planned: Sequence[tuple[int, Mapping[str, float]]],
    kept: Sequence[str],
    settings: Settings,
) -> list[str]:
    """Which domains are left out, and why."""
    names = [entry["name"] for entry in record["domains"] if entry["name"] not in kept]
    zeros = sorted(name for name in names if not any(weights[name] for _, weights in planned))
    small = sorted(set(names) - set(zeros))
    notes = [f"Left out, for the weight is 0: {', '.join(zeros)}."] if zeros else []
    if small:
        notes.append(
            f"Left out, for the share rounds to 0 at {settings.decimals} decimals: "
            f"{', '.join(small)}. More decimals keep them."
        )
    return notes


def _path_parts(entries: Mapping[str, Any], given: Paths) -> PathParts:
    unknown = sorted(set(given) - set(entries))
    if unknown:
        raise ValueError(
            f"paths name {', '.join(unknown)}, which the weights do not have; their domains are "
            f"{', '.join(sorted(entries))}."
        )
    return {name: _parts_of(name, paths) for name, paths in given.items()}


def _parts_of(
    name: str, paths: str | Sequence[str] | Mapping[str, float]
) -> dict[str, Fraction | None]:
    if isinstance(paths, str):
        paths = [paths]
    if isinstance(paths, Mapping) and paths:
        if not all(isinstance(part, int | float) and part > 0 for part in paths.values()):
            raise ValueError(f"The parts of {name}'s paths must be above 0; they are {paths}.")
        return dict(normalised(paths))
    is_list = isinstance(paths, Sequence) and all(isinstance(path, str) and path for path in paths)
    if not paths or not is_list:
        raise ValueError(f"A domain needs a path, or a list of them; {name} has {paths!r}.")
    if len(set(paths)) < len(paths):
        raise ValueError(f"The paths of {name} name one twice: {', '.join(paths)}.")
    return {path: Fraction(1) if len(paths) == 1 else None for path in paths}


def _check_shared(paths: Mapping[Split, Paths]) -> None:
    """A path that two domains had would count for both."""
    for split, given in paths.items():
        owners: dict[str, list[str]] = {}
        for name, found in given.items():
            listed = [found] if isinstance(found, str) else found
            for path in listed if isinstance(listed, Iterable) else ():
                owners.setdefault(str(path).rstrip("/"), []).append(name)
        for path, names in owners.items():
            if len(set(names)) > 1:
                raise ValueError(
                    f"A path belongs to one domain; {path} is given to {', '.join(names)}"
                    f"{'' if split == 'train' else f' ({split})'}."
                )


def _check_paths(kept: Sequence[str], paths: PathParts) -> None:
    missing = [name for name in kept if name not in paths]
    if missing:
        raise ValueError(
            f"Every domain with a weight needs a path; there is none for {', '.join(missing)}. "
            "Give them as paths={name: path} (--paths NAME=PATH ..., or a JSON or YAML file)."
        )


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
