"""What domain weights mean for text: how many domains they amount to, how often each is read."""

import math
from collections.abc import Iterable

# More than four epochs of a domain are worth clearly less than fresh text
# (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models").
MAX_EPOCHS = 4.0


def effective_domains(weights: Iterable[float]) -> float:
    """exp of the entropy: K at uniform weights, 1 where one domain gets everything."""
    return math.exp(-math.fsum(weight * math.log(weight) for weight in weights if weight > 0))


def epochs(weight: float, tokens: float, budget: float) -> float:
    """How often a training of `budget` tokens goes through a domain of so many at this weight."""
    return weight * budget / tokens if tokens else math.inf if weight else 0.0
