"""What an export target is, and what it writes down: checked shares and paths, in its unit.

Learned weights are shares of tokens; a framework that draws documents needs them divided by the
mean length of a document. Each weight rounded by itself gives sums like 0.9999, which some loaders
refuse and others renormalise in silence, so the arithmetic is rational and the rounding by largest
remainder: the printed decimals sum to one.
"""

import glob
import posixpath
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic.dataclasses
from annotated_types import Le

from doge_fast.pipeline import named
from doge_fast.pipeline.config.ranges import Count, Positive, Seed
from doge_fast.pipeline.failures import UserError

Key = TypeVar("Key")
Rows = Literal["blocks", "documents"]
BlendSplit = Literal["train", "valid", "test"]
DomainPaths = Mapping[str, str | Sequence[str]]
"""{domain: path or paths}."""
Parts = Mapping[str, Fraction]
"""{domain: exact share}."""

# float64 repeats a decimal of so many places.
MAX_DECIMALS = 15
REMOTE = "://"


def normalised(weights: Mapping[Key, float | Fraction]) -> dict[Key, Fraction]:
    """w_j / sum_i w_i, exactly, of weights >= 0; UserError where all are zero."""
    total = sum((Fraction(weight) for weight in weights.values()), Fraction(0))
    if not total:
        raise UserError(f"At least one weight must be above zero; all {len(weights)} are zero.")
    return {key: Fraction(weight) / total for key, weight in weights.items()}


def largest_remainder(weights: Mapping[Key, float | Fraction], decimals: int) -> dict[Key, Decimal]:
    """Round to so many decimals that sum to exactly one.

    Every weight is rounded down; what is missing goes, one unit of the last place each, to those
    that lost most. So each is within one unit of its weight, and none changes its place with one
    that is larger. Equal losses are served in the order of their keys, not of the mapping.

    Args:
        weights: {key: weight >= 0}, in any scale.
        decimals: places after the point, 1 to 15.

    Returns:
        {key: Decimal >= 0}, in the order of `weights`.

    Raises:
        UserError: all weights are zero.
    """
    scale = 10**decimals
    exact = {key: part * scale for key, part in normalised(weights).items()}
    units = {key: int(part) for key, part in exact.items()}
    by_loss = sorted(exact, key=lambda key: (units[key] - exact[key], str(key)))
    for key in by_loss[: scale - sum(units.values())]:
        units[key] += 1
    return {key: Decimal(count).scaleb(-decimals) for key, count in units.items()}


def by_document(parts: Parts, mean_doc_tokens: Mapping[str, float]) -> dict[str, Fraction]:
    """Shares of documents that make given shares of tokens.

    q_j  =  (w_j / l_j) / sum_i (w_i / l_i),     l_j the mean tokens of a document

    Args:
        parts: {domain: w_j}, shares of tokens.
        mean_doc_tokens: {domain: l_j > 0}, of every domain with w_j > 0.
    """
    return normalised(
        {n: part / Fraction(mean_doc_tokens[n]) if part else part for n, part in parts.items()}
    )


@pydantic.dataclasses.dataclass(frozen=True)
class Blend:
    """Checked shares and paths, ready to be written down."""

    parts: Parts
    """{domain: exact share}, in the unit the framework counts; zeros included."""
    paths: Mapping[BlendSplit, Mapping[str, Sequence[str]]]
    """{split: {domain: its paths}}."""
    rows: Rows
    """What the shares count."""
    mean_doc_tokens: Mapping[str, Positive] = field(default_factory=dict)
    """{domain: tokens of a document}, where the shares count documents."""
    decimals: Annotated[Count, Le(MAX_DECIMALS)] = 6
    """Places of every number."""
    seq_length: Count | None = None
    """Tokens of a training sequence."""
    batch_size: Count | None = None
    """Sequences in an optimizer step, over all devices."""
    seed: Seed = 0
    """Seed of the framework's sampling."""

    def shares(self) -> dict[str, Decimal]:
        """{domain: share}, sorted by name; positive, and sums to exactly 1."""
        rounded = largest_remainder(self.parts, self.decimals)
        return {name: share for name, share in sorted(rounded.items()) if share}

    def numbers(self) -> dict[str, float]:
        """`shares` as Python floats, which some frameworks insist on."""
        return {name: float(share) for name, share in self.shares().items()}

    def paths_of(self, name: str) -> list[str]:
        """The paths of a domain, in the order given; empty where it has none."""
        return list(self.paths["train"].get(name, ()))

    def one_path(self, name: str) -> str:
        """The path of a domain, for a framework that takes one; UserError where it has several."""
        paths = self.paths_of(name)
        if len(paths) != 1:
            raise UserError(
                f"This target takes one path per domain; {name} has {len(paths)}: "
                f"{', '.join(paths)}. Merge them, or make each a domain."
            )
        return paths[0]

    def weighted_paths(self, split: BlendSplit = "train") -> list[tuple[Decimal, str]]:
        """[(share, path)] for a framework that weighs paths; sums to exactly 1.

        A domain of several paths shares its weight by the size of the files. Validation and test
        sets take the training shares of the domains they have; a split without paths has none.
        UserError where a size is not known or a share rounds to zero, or no domain of the split
        has a weight.
        """
        given = self.paths[split]
        if not given:
            return []
        exact: dict[tuple[str, str], Fraction] = {}
        for name in self.shares():
            parts = _parts_of(name, given.get(name, ()))
            exact |= {(name, path): self.parts[name] * part for path, part in parts.items()}
        if not exact:
            raise UserError(
                f"The {split} paths are of domains without a weight: {', '.join(given)}."
            )
        rounded = largest_remainder(exact, self.decimals)
        lost = [path for (_, path), share in rounded.items() if not share]
        if lost:
            raise UserError(
                f"The share of {', '.join(lost)} rounds to 0 at {self.decimals} decimals. "
                "Raise decimals, or merge it with the domain's other paths."
            )
        return [(share, path) for (_, path), share in rounded.items()]

    def require(self, name: str, why: str) -> None:
        """Refuse, with a UserError, where a setting that this target needs was not given."""
        if getattr(self, name) is None:
            option = name.replace("_", "-")
            raise UserError(f"This target needs {name} (--{option}): {why}.")


def listed_paths(
    split: BlendSplit, given: DomainPaths, names: Collection[str]
) -> dict[str, list[str]]:
    """{domain: its paths}; UserError where they are none, or one is there twice."""
    named.check_known("paths", given, names, "the weights")
    by_domain = {name: _listed(name, paths) for name, paths in given.items()}
    owners: dict[str, str] = {}
    for name, paths in by_domain.items():
        for path in paths:
            owner = owners.setdefault(_normal(path), name)
            # It would count for both.
            if owner != name:
                raise UserError(
                    f"A path belongs to one domain; {path} is given to {owner}, {name} ({split})."
                )
    return by_domain


def _normal(path: str) -> str:
    """One spelling of a path; of a remote one `//` is another."""
    return path.rstrip("/") if REMOTE in path else posixpath.normpath(path)


def _listed(name: str, given: Any) -> list[str]:
    paths = [given] if isinstance(given, str) else given
    is_listed = isinstance(paths, Sequence) and len(paths) > 0
    if not is_listed or not all(isinstance(path, str) and path for path in paths):
        raise UserError(f"A domain needs a path, or a list of them; {name} has {given!r}.")
    for path in paths:
        if named.visible(path) != path:
            raise UserError(
                f"A path must be of characters that are written; {name} has {path!a}. Rename it."
            )
    if len(set(map(_normal, paths))) < len(paths):
        raise UserError(f"The paths of {name} name one twice: {', '.join(paths)}.")
    return list(paths)


def _parts_of(name: str, paths: Sequence[str]) -> dict[str, Fraction]:
    """The part of each of a domain's paths, by the bytes on disk."""
    if len(paths) < 2:
        return dict.fromkeys(paths, Fraction(1))
    sizes = {}
    for path in paths:
        # A file, or a Megatron prefix's tokens.
        here = [file for file in (Path(path), Path(f"{path}.bin")) if file.is_file()]
        sizes[path] = here[0].stat().st_size if here and REMOTE not in path else 0
    if unseen := [path for path, size in sizes.items() if not size]:
        raise UserError(
            f"{name} has {len(paths)} paths, and this target needs a weight for each; the number "
            f"of tokens in each is not known ({', '.join(unseen)} cannot be read here). Merge "
            "them, or make each a domain, with its part of the weight."
        )
    return normalised(sizes)


_MAGIC = re.compile(r"[*?\[]")


def name_of_file(path: str, reader: str, *, is_pattern: bool, can_escape: bool = False) -> str:
    """A path as a reader takes it that has patterns (* ? [ ]) and addresses (:: ://).

    `is_pattern`: the target's paths may be patterns; then one that is a file is refused.
    `can_escape`: the reader takes escaped names.

    Raises:
        UserError: it would read another file than the one that is named.
    """
    is_here = Path(path).exists()
    if is_here and REMOTE in path:
        raise UserError(f"{path} is a file here and an address to {reader}. Rename it.")
    if "::" in path:
        raise UserError(f"{path} has ::, which chains addresses for {reader}. Rename it.")
    if not _MAGIC.search(path) or (is_pattern and not is_here):
        return path
    if can_escape and is_here:
        return glob.escape(path)
    problem = f"{path} has one of * ? [, which are a pattern for {reader}"
    if is_here:
        raise UserError(f"{problem}: it would read other files. Rename it, or link to it.")
    raise UserError(f"{problem}, and is no file here. Name the files one by one (NAME=PATH ...).")


@dataclass(frozen=True)
class ExportTarget:
    """A framework, or one of its ways to take a mixture."""

    name: str
    """As in `--to`."""
    title: str
    """What is printed, in a few words."""
    write: Callable[[Blend], str | Mapping[str, object]]
    """The text, or the words of its template and their values. Raises UserError
    for what the framework would not take."""
    template: str = ""
    """Text with $words."""
    takes: str = ""
    """What a path is; empty where none is needed."""
    checked: str = ""
    """The version or commit of the framework whose own code was read or run, and when."""
    rows: Sequence[Rows] = ("blocks",)
    """What the framework's numbers may count, the default first; one where it decides itself."""
    takes_patterns: bool = False
    """Whether a path may be a pattern of * ? [ ]."""
    traps: Sequence[str] = ()
    """What a newcomer runs into, one sentence each."""
