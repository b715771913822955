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
    """sum_r tau_r l_r over the rows."""

    domains: tuple[str, ...]
    """The K training domains, in the order of the simplex."""
    names: tuple[str, ...]
    """The training domains, then the M held-out targets."""
    tau: tuple[float, ...]
    """[R] weights >= 0, one per row."""
    is_universal: bool
    """Whether the target was given as "universal" (Algorithm 1)."""

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
        if isinstance(domains, Mapping):
            raise ValueError(
                f"domains must be a list of names; got {domains!r}. If its values are weights to "
                f"start from, pass domains={list(domains)} and initial={{name: weight}}."
            )
        names = _checked_names(domains, "domains")
        is_universal = isinstance(target, str) and target == UNIVERSAL
        if is_universal:
            target = names
        elif isinstance(target, str):
            target = [target]
        targets = _checked_names(target, "target")
        tau = dict(target) if isinstance(target, Mapping) else dict.fromkeys(targets, 1.0)
        for name, value in tau.items():
            if not simplex.is_number(value) or not 0 <= value < float("inf"):
                raise ValueError(f"target weights must be finite and >= 0; {name!r} has {value!r}.")
        if not any(value > 0 for value in tau.values()):
            raise ValueError(f"a target must have a positive weight; got {target!r}.")
        every = names + tuple(name for name in targets if name not in names)
        return cls(
            domains=names,
            names=every,
            tau=tuple(float(tau.get(name, 0.0)) for name in every),
            is_universal=is_universal,
        )

    @property
    def measured(self) -> tuple[str, ...]:
        """The M rows that are measured and never trained on."""
        return self.names[len(self.domains) :]

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
        return {name: tau for name, tau in zip(self.names, self.tau, strict=True) if tau > 0}


def _checked_names(names: Iterable[str], what: str) -> tuple[str, ...]:
    # A set has no order, a string's letters are no names, and numpy's strings no checkpoint's.
    if isinstance(names, str | set | frozenset) or not isinstance(names, Iterable):
        raise ValueError(f"{what} must be a list of names; got {names!r}.")
    checked = tuple(names)
    if not checked:
        raise ValueError(f"{what} must be at least one name; got none.")
    for name in checked:
        if not isinstance(name, str) or not name or name == UNIVERSAL:
            raise ValueError(
                f"{what} must be non-empty names, and {UNIVERSAL!r} stands alone: it means all "
                f"training domains. Got {name!r} in {checked}."
            )
    if len(set(checked)) < len(checked):
        raise ValueError(f"{what} must be distinct names; got {list(checked)}.")
    # Not str(), which gives an enum's member its name in the class.
    return tuple(map(str.__str__, checked))
