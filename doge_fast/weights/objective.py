"""The objective: a weighted sum of target losses, over training domains and held-out targets.

The K training domains are the first rows and span the simplex. Then come M rows that are measured
and never trained on, one for each target outside the training domains.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from doge_fast.weights import simplex

Target = str | Sequence[str] | Mapping[str, float]

UNIVERSAL: Literal["universal"] = "universal"


@dataclass(frozen=True)
class Objective:
    """sum_r tau_r l_r over the rows.

    Args:
        domains: the K training domains, in the order of the simplex.
        rows: the training domains, then the M held-out targets.
        tau: [R] weights >= 0, one per row.
        is_universal: whether the target was given as "universal" (Algorithm 1).
    """

    domains: tuple[str, ...]
    rows: tuple[str, ...]
    tau: tuple[float, ...]
    is_universal: bool

    @classmethod
    def of(cls, domains: Sequence[str], target: Target = UNIVERSAL) -> "Objective":
        """Check names and weights and put the rows in order.

        Args:
            domains: distinct non-empty names, at least one.
            target: "universal": every training domain, weight one. A name, several names (weight
                one each) or {name: weight >= 0}; names outside `domains` become held-out rows.

        Raises:
            ValueError: a name or weight is not allowed.
        """
        names = _checked_domains(domains)
        tau = _checked_target(target, names)
        rows = names + tuple(name for name in tau if name not in names)
        return cls(
            domains=names,
            rows=rows,
            tau=tuple(tau.get(name, 0.0) for name in rows),
            is_universal=isinstance(target, str) and target == UNIVERSAL,
        )

    @property
    def measured(self) -> tuple[str, ...]:
        """The M rows that are measured and never trained on."""
        return self.rows[len(self.domains) :]

    @property
    def target(self) -> str | dict[str, float]:
        """As a user would write it: "universal", or {name: tau} of the rows that count."""
        return UNIVERSAL if self.is_universal else self._weighed()

    @property
    def needed(self) -> tuple[str, ...]:
        """Targets whose gradients a score needs: all held-out ones, or else one of these."""
        weighed = self._weighed()
        return tuple(name for name in self.measured if name in weighed) or tuple(weighed)

    def _weighed(self) -> dict[str, float]:
        return {name: tau for name, tau in zip(self.rows, self.tau, strict=True) if tau > 0}


def _checked_domains(domains: Sequence[str]) -> tuple[str, ...]:
    if isinstance(domains, str):
        raise ValueError(f"domains must be a sequence of names; got the string {domains!r}.")
    if isinstance(domains, set | frozenset):
        raise ValueError(
            f"domains must have an order, that of the simplex; got the set {domains!r}. "
            "Pass a list."
        )
    if isinstance(domains, Mapping):
        raise ValueError(
            f"domains must be a sequence of names; got the dict {domains!r}. Pass "
            f"domains={list(domains)} and, if its values are weights to start from, "
            "initial={name: weight}."
        )
    if not isinstance(domains, Iterable):
        raise ValueError(f"domains must be a sequence of names; got {domains!r}.")
    names = tuple(domains)
    if not names:
        raise ValueError("domains must name at least one training domain; got none.")
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"a domain name must be a non-empty string; got {name!r} in {names}.")
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f"domain names must be distinct; {duplicates} occur more than once.")
    if UNIVERSAL in names:
        raise ValueError(
            f"{UNIVERSAL!r} means all training domains and cannot name one; rename the domain."
        )
    return names


def _checked_target(target: Target, domains: tuple[str, ...]) -> dict[str, float]:
    """{name: tau}, tau >= 0, some tau > 0."""
    tau: dict[str, float]
    if isinstance(target, str):
        tau = dict.fromkeys(domains, 1.0) if target == UNIVERSAL else {target: 1.0}
    elif isinstance(target, Mapping):
        tau = dict(target)
    elif isinstance(target, Sequence):
        _check_target_names(target)
        tau = dict.fromkeys(target, 1.0)
        if len(tau) != len(target):
            raise ValueError(f"target names must be distinct; got {list(target)}.")
    else:
        raise ValueError(
            "target must be 'universal', a name, a list of names or {name: weight}; "
            f"got {target!r}."
        )
    _check_target_names(tau)
    for name, value in tau.items():
        if not simplex.is_number(value) or not 0 <= value < float("inf"):
            raise ValueError(f"target weights must be finite and >= 0; {name!r} has {value!r}.")
    if not any(value > 0 for value in tau.values()):
        raise ValueError(f"target needs at least one name with a positive weight; got {target!r}.")
    return {name: float(value) for name, value in tau.items()}


def _check_target_names(names: Iterable[str]) -> None:
    for name in names:
        if not isinstance(name, str) or not name or name == UNIVERSAL:
            raise ValueError(
                f"a target must be a non-empty name, and {UNIVERSAL!r} stands alone; "
                f"got {name!r} in {names!r}."
            )
