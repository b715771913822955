"""Domain weights within bounds: the nearest point of the simplex. How many domains are in use.

On plain numbers, so that the command which sets bounds need not import torch.
"""

import math
from collections.abc import Iterable, Sequence

# Floors or caps that should sum to 1 do so within the rounding of float32 or printed decimals.
BOUNDS_TOLERANCE = 1e-6


def effective_domains(weights: Iterable[float]) -> float:
    """exp of the entropy: K at uniform weights, 1 where one domain has all the weight."""
    return math.exp(-math.fsum(weight * math.log(weight) for weight in weights if weight > 0))


def project(
    weights: Sequence[float], *, floors: Sequence[float], caps: Sequence[float]
) -> list[float]:
    """The point of the simplex between floors and caps that is nearest to `weights` in KL.

    q  =  argmin KL(q || w)    over    floor_j <= q_j <= cap_j,  sum_j q_j = 1
       =  clip(c w_j, floor_j, cap_j)    with the one c > 0 for which they sum to 1

    Inside its bounds a domain has a stationary Lagrangian, log(q_j / w_j) + 1 = lambda, so
    q_j = c w_j with one c for all: such domains keep their ratios to each other. Outside, the
    nearer bound is best, since the objective is convex in q_j. A weight of zero stays zero, as in
    the mirror step, unless it has a floor: then it gets the floor.

    Args:
        weights: K numbers >= 0 with a positive sum, which need not be 1.
        floors: K numbers, each in [0, cap_j], that sum to at most 1.
        caps: K numbers, each in [floor_j, 1]; those of domains with a weight or a floor sum to at
            least 1.

    Returns:
        K numbers, exactly within their bounds; they sum to 1 within K ulp (within
        `BOUNDS_TOLERANCE` if the bounds leave a single point).

    Source: Bitran and Hax, Management Science 27 (1981), for any convex separable objective.
    """
    points = list(floors)
    free = {j for j, weight in enumerate(weights) if weight > 0}
    while free:
        rest = 1 - math.fsum(point for j, point in enumerate(points) if j not in free)
        total = math.fsum(weights[j] for j in free)
        for j in free:
            points[j] = rest * (weights[j] / total)
        low = {j for j in free if points[j] < floors[j]}
        high = {j for j in free if points[j] > caps[j]}
        lacking = math.fsum(floors[j] - points[j] for j in low)
        surplus = math.fsum(points[j] - caps[j] for j in high)
        # Clipped, the points would sum to 1 + lacking - surplus. If that is at least 1, c can only
        # fall, and those below their floors stay there; else those above their caps do.
        held, bounds = (low, floors) if lacking >= surplus else (high, caps)
        if not held:
            break
        for j in held:
            points[j] = bounds[j]
        free -= held
    return points
