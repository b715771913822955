"""Domain weights within bounds: the nearest point of the simplex. How many domains are in use.

On plain numbers, so that the command which sets bounds need not import torch.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Floors or caps that should sum to 1 do so within the rounding of float32 or printed decimals.
BOUNDS_TOLERANCE = 1e-6


def effective_domains(weights: Iterable[float]) -> float:
    """exp of the entropy: K at uniform weights, 1 where one domain has all the weight."""
    return math.exp(-math.fsum(weight * math.log(weight) for weight in weights if weight > 0))


def kl(weights: Sequence[float], others: Sequence[float]) -> float:
    """KL(w || v) = sum_j w_j log(w_j / v_j), in nats; 0 log 0 = 0.

    Infinite if some w_j > 0 where v_j = 0.
    """
    pairs = [(w, v) for w, v in zip(weights, others, strict=True) if w > 0]
    if any(v == 0 for _, v in pairs):
        return math.inf
    # Rounding may give about -1e-17 for nearly equal weights.
    return max(0.0, math.fsum(w * math.log(w / v) for w, v in pairs))


def project(
    weights: Sequence[float], *, floors: Sequence[float], caps: Sequence[float]
) -> list[float]:
    """The point of the simplex between floors and caps that is nearest to `weights` in KL.

    q  =  argmin KL(q || w)    over    floor_j <= q_j <= cap_j,  sum_j q_j = 1
       =  clip(c w_j, floor_j, cap_j)    with the one c > 0 for which they sum to 1

    Inside its bounds a domain has a stationary Lagrangian, log(q_j / w_j) + 1 = lambda, so
    q_j = c w_j with one c for all: such domains keep their ratios to each other. Outside, the
    nearer bound is best, since the objective is convex in q_j. A weight of zero stays zero, as in
    the mirror step, unless it has a floor: then it gets the floor. c is exact: the sum of the
    clipped weights is piecewise linear and non-decreasing in c, and is solved for 1 between two
    neighbouring kinks.

    Args:
        weights: K numbers >= 0 with a positive sum, which need not be 1.
        floors: K numbers, each in [0, cap_j], that sum to at most 1.
        caps: K numbers, each in [floor_j, 1]; those of domains with a weight or a floor sum to at
            least 1.

    Returns:
        K numbers, exactly within their bounds; they sum to 1 within K ulp (within
        `BOUNDS_TOLERANCE` if the bounds leave a single point).
    """
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
        """The domain is at its floor up to this c; always, if it has no weight."""
        return self.floor / self.weight if self.weight else math.inf

    @property
    def high(self) -> float:
        """The domain is at its cap from this c on."""
        return self.cap / self.weight if self.weight else math.inf

    def clipped(self, c: float) -> float:
        if self.low >= c:
            return self.floor
        return min(max(c * self.weight, self.floor), self.cap)

    def held(self, above: float) -> float:
        """The bound of a domain that is not free: its floor if it is there up to `above`."""
        return self.floor if self.low >= above else self.cap
