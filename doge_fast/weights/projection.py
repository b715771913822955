"""Domain weights within bounds: the nearest point of the simplex, on plain numbers.

Not tensors: bounds are set once, by hand, and a command that does so need not import torch.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

# Floors meant to fill the simplex do so within the rounding of float32 or of printed decimals.
BOUNDS_TOLERANCE = 1e-6


def kl(weights: Sequence[float], others: Sequence[float]) -> float:
    """KL(w || v) = sum_j w_j log(w_j / v_j), in nats; 0 log 0 = 0.

    Infinite where `weights` has weight on a domain of which `others` has none.
    """
    pairs = [(w, v) for w, v in zip(weights, others, strict=True) if w > 0]
    if any(v == 0 for _, v in pairs):
        return math.inf
    # Rounding makes the divergence of neighbours a negative number of some 1e-17.
    return max(0.0, math.fsum(w * math.log(w / v) for w, v in pairs))


def project(
    weights: Sequence[float], *, floors: Sequence[float], caps: Sequence[float]
) -> list[float]:
    """The point of the simplex between floors and caps that is nearest to `weights` in KL.

    q  =  argmin KL(q || w)    over    floor_j <= q_j <= cap_j,  sum_j q_j = 1
       =  clip(c w_j, floor_j, cap_j)    with the one c > 0 for which they sum to 1

    Domains that no bound holds keep their ratios to each other. For there the Lagrangian is
    stationary in q_j: log(q_j / w_j) + 1 = lambda, so q_j = c w_j with one c for all; where that
    leaves the interval, the objective being convex in q_j alone, its nearer end is best. Which way
    round the divergence is taken does not matter: KL(w || q) asks for w_j / q_j = lambda, which is
    the same. (KL(q || w) is the one that the mirror step moves by.)

    A weight of zero stays zero, as in the mirror step, unless a floor lifts it: to the floor and no
    higher, the limit of ever smaller weights.

    c is exact: the sum of the clipped weights is piecewise linear in c and does not fall, with
    kinks at floor_j / w_j and cap_j / w_j; between the kinks where it passes 1 it is solved.

    Args:
        weights: K numbers >= 0 with a positive sum, which need not be 1.
        floors: K numbers, each in [0, cap_j].
        caps: K numbers, each in [floor_j, 1]; 1 where there is none.

    Returns:
        K numbers within their bounds to the last bit; they sum to 1 within K ulp (within 1e-6 where
        the bounds themselves do so and leave no room).

    Raises:
        ValueError: the lengths differ; a number is negative, not finite or out of its range; floors
            sum to more than 1; or caps of the domains that may have weight to less than 1.
    """
    _check(weights, floors, caps)
    domains = [_Domain(*each) for each in zip(weights, floors, caps, strict=True)]
    kinks = sorted(kink for each in domains if each.weight for kink in (each.low, each.high))
    first = bisect_left(kinks, 1.0, key=lambda c: math.fsum(each.clipped(c) for each in domains))
    if first == 0:
        # Floors leave nothing to share out.
        return list(floors)
    if first == len(kinks):
        # Caps hold just enough.
        return [each.clipped(math.inf) for each in domains]
    below, above = kinks[first - 1], kinks[first]
    is_free = [each.low < above and each.high > below for each in domains]
    pairs = list(zip(domains, is_free, strict=True))
    rest = 1 - math.fsum(each.held(above) for each, free in pairs if not free)
    c = rest / math.fsum(each.weight for each, free in pairs if free)
    return [each.clipped(c) if free else each.held(above) for each, free in pairs]


class _Domain(NamedTuple):
    weight: float
    floor: float
    cap: float

    @property
    def low(self) -> float:
        """The c up to which it has its floor: any, if it has no weight."""
        return self.floor / self.weight if self.weight else math.inf

    @property
    def high(self) -> float:
        """The c from which on it has its cap."""
        return self.cap / self.weight if self.weight else math.inf

    def clipped(self, c: float) -> float:
        """clip(c w, floor, cap)."""
        if self.low >= c:
            return self.floor
        return min(max(c * self.weight, self.floor), self.cap)

    def held(self, above: float) -> float:
        """Of a domain that is held: its floor where it has that up to `above`, else its cap."""
        return self.floor if self.low >= above else self.cap


def _check(weights: Sequence[float], floors: Sequence[float], caps: Sequence[float]) -> None:
    if not len(weights) == len(floors) == len(caps):
        raise ValueError(
            "weights, floors and caps must be of one length; got "
            f"{len(weights)}, {len(floors)} and {len(caps)}."
        )
    if not all(0 <= w < math.inf for w in weights) or not sum(weights) > 0:
        raise ValueError(
            f"weights to project must be finite, >= 0 and not all zero; got {list(weights)}."
        )
    for j, (floor, cap) in enumerate(zip(floors, caps, strict=True)):
        if not 0 <= floor <= cap <= 1:
            raise ValueError(
                f"bounds of a weight must satisfy 0 <= floor <= cap <= 1; got floor {floor:g} and "
                f"cap {cap:g} at position {j}."
            )
    least = math.fsum(floors)
    if least > 1 + BOUNDS_TOLERANCE:
        raise ValueError(
            f"floors must leave room on the simplex; they sum to {least:.6g}, {least - 1:.3g} too "
            "much. Lower them."
        )
    most = math.fsum(
        cap if w > 0 else floor for w, floor, cap in zip(weights, floors, caps, strict=True)
    )
    if most < 1 - BOUNDS_TOLERANCE:
        raise ValueError(
            f"caps must leave room for all of the simplex; domains that have weight or a floor may "
            f"hold {most:.6g} in all, {1 - most:.3g} is missing. Raise caps, or give a floor to a "
            "domain of weight zero."
        )
