"""The objective: a weighted sum of the losses of targets.

A target is a training domain, or a domain that is held out: measured and never trained on.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Target = str | Sequence[str] | Mapping[str, float]

UNIVERSAL: Literal["universal"] = "universal"


@dataclass(frozen=True)
class Objective:
    """sum_r tau_r l_r over R names: the K training domains, then the M held-out targets."""

    domains: tuple[str, ...]
    """The K training domains, in the order of the simplex."""
    names: tuple[str, ...]
    """The training domains, then the M held-out targets."""
    tau: tuple[float, ...]
    """[R] weights >= 0, in the order of `names`."""
    is_universal: bool
    """Whether the target was given as "universal" (Algorithm 1)."""

    @classmethod
    def of(cls, domains: Sequence[str], target: Target = UNIVERSAL) -> "Objective":
        """The objective of training domains and a target, in the order of `names`.

        Args:
            domains: distinct names, at least one.
            target: "universal": every training domain, weight one. A name, several names (weight
                one each) or {name: weight >= 0}; names outside `domains` are held out.

        Raises:
            ValueError: names are no list, none, or not distinct; or a weight is not allowed.
            TypeError: a name is no string.
        """
        if isinstance(domains, Mapping):
            raise ValueError(
                f"domains must be a list of names; got {domains!r}. If its values are weights to "
                "start from, pass them as initial."
            )
        trained = _distinct(domains, "domains")
        is_universal = isinstance(target, str) and target == UNIVERSAL
        if is_universal:
            target = trained
        elif isinstance(target, str):
            target = [target]
        weights = target.values() if isinstance(target, Mapping) else [1.0] * len(target)
        targets = _distinct(list(target) if isinstance(target, Mapping) else target, "target")
        tau = dict(zip(targets, map(float, weights), strict=True))
        if not all(0 <= value < math.inf for value in tau.values()) or not any(tau.values()):
            raise ValueError(
                f"target weights must be finite and >= 0, and one of them positive; got {tau}."
            )
        names = trained + tuple(name for name in targets if name not in trained)
        return cls(
            domains=trained,
            names=names,
            tau=tuple(tau.get(name, 0.0) for name in names),
            is_universal=is_universal,
        )

    @property
    def measured(self) -> tuple[str, ...]:
        """The M held-out targets: measured and never trained on."""
        return self.names[len(self.domains) :]

    @property
    def target(self) -> str | dict[str, float]:
        """As a user would write it: "universal", or {name: tau} of the targets that count."""
        return UNIVERSAL if self.is_universal else self._weighed()

    @property
    def needed(self) -> tuple[str, ...]:
        """The held-out targets that count; without any, the targets, of which one suffices."""
        weighed = self._weighed()
        return tuple(name for name in self.measured if name in weighed) or tuple(weighed)

    @property
    def has_equal_targets(self) -> bool:
        """Whether the targets are the training domains, all of one weight."""
        return not self.measured and len(set(self.tau)) == 1

    def _weighed(self) -> dict[str, float]:
        return {name: tau for name, tau in zip(self.names, self.tau, strict=True) if tau > 0}


def _distinct(names: Iterable[str], argument: str) -> tuple[str, ...]:
    """The names as they are, if they are a list of distinct ones."""
    # Not str(), which gives an enum's member its name in the class. A checkpoint that is read with
    # weights_only=True holds no strings of numpy, nor an enum's members.
    checked = () if isinstance(names, str) else tuple(map(str.__str__, names))
    # A set has another order in another process.
    is_ordered = not isinstance(names, set | frozenset)
    if not checked or not is_ordered or len({*checked, UNIVERSAL, ""}) < len(checked) + 2:
        raise ValueError(
            f"{argument} must be a list of distinct, non-empty names; {UNIVERSAL!r} stands alone "
            f"and means all training domains. Got {names!r}."
        )
    return checked
