"""Domain weights within bounds: the nearest point of the simplex, on plain numbers.

Plain numbers, so that the command line can set bounds without importing torch.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

# Floors or caps that should sum to 1 do so up to the rounding of float32 or of printed decimals.
BOUNDS_TOLERANCE = 1e-6


def kl(weights: Sequence[float], others: Sequence[float]) -> float:
    """KL(w || v) = sum_j w_j log(w_j / v_j), in nats; 0 log 0 = 0.

    Infinite if a domain has v_j = 0 < w_j.
    """
    pairs = [(w, v) for w, v in zip(weights, others, strict=True) if w > 0]
    if any(v == 0 for _, v in pairs):
        return math.inf
    # For nearly equal points rounding gives about -1e-17.
    return max(0.0, math.fsum(w * math.log(w / v) for w, v in pairs))


def project(
    weights: Sequence[float], *, floors: Sequence[float], caps: Sequence[float]
) -> list[float]:
    """The point of the simplex between floors and caps that is nearest to `weights` in KL.

    q  =  argmin KL(q || w)    over    floor_j <= q_j <= cap_j,  sum_j q_j = 1
       =  clip(c w_j, floor_j, cap_j)    with the one c > 0 for which they sum to 1

    Domains strictly within their bounds keep their ratios to each other. There the Lagrangian is
    stationary in q_j: log(q_j / w_j) + 1 = lambda, so q_j = c w_j with one c for all. If c w_j is
    out of bounds, the nearer bound is optimal, because the objective is convex in q_j. KL(w || q)
    has the same minimum: its condition is w_j / q_j = lambda. (The mirror step uses KL(q || w).)

    A weight of zero becomes its floor, the limit for w_j -> 0; without a floor it stays zero, as in
    the mirror step.

    c is exact: the sum of the clipped weights is piecewise linear and nondecreasing in c, with
    kinks at floor_j / w_j and cap_j / w_j. It is solved between the two kinks where the sum
    passes 1.

    Args:
        weights: K numbers >= 0 with any positive sum.
        floors: K numbers, each in [0, cap_j].
        caps: K numbers, each in [floor_j, 1]; 1 means no cap.

    Returns:
        K numbers within their bounds to the last bit. They sum to 1 within K ulp, or within 1e-6 if
        all floors or all caps are reached.

    Raises:
        ValueError: the lengths differ; a number is negative, not finite or out of its range; floors
            sum to more than 1; or caps (floors for weights of zero) sum to less than 1.
    """
    _check(weights, floors, caps)
    domains = [_Domain(*each) for each in zip(weights, floors, caps, strict=True)]
    kinks = sorted(kink for each in domains if each.weight for kink in (each.low, each.high))
    first = bisect_left(kinks, 1.0, key=lambda c: math.fsum(each.clipped(c) for each in domains))
    if first == 0:
        # The floors sum to 1.
        return list(floors)
    if first == len(kinks):
        # The caps sum to 1.
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
        """For c up to this the domain is at its floor; infinite for a weight of zero."""
        return self.floor / self.weight if self.weight else math.inf

    @property
    def high(self) -> float:
        """For c from this on the domain is at its cap."""
        return self.cap / self.weight if self.weight else math.inf

    def clipped(self, c: float) -> float:
        """clip(c w, floor, cap)."""
        if self.low >= c:
            return self.floor
        return min(max(c * self.weight, self.floor), self.cap)

    def held(self, above: float) -> float:
        """The bound that holds at c just below `above`, for a domain that is not free there."""
        return self.floor if self.low >= above else self.cap


def _check(weights: Sequence[float], floors: Sequence[float], caps: Sequence[float]) -> None:
    if not len(weights) == len(floors) == len(caps):
        raise ValueError(
            "weights, floors and caps must have the same length; got "
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
            f"caps must sum to at least 1 over the domains with weight; with the floors of the "
            f"others they sum to {most:.6g}, {1 - most:.3g} is missing. Raise caps, or give a "
            "floor to a domain of weight zero."
        )
