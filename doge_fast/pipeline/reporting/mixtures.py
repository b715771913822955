"""What domain weights mean for text: how often each domain is read."""

import math

# More than four epochs of a domain are worth clearly less than fresh text
# (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models").
MAX_EPOCHS = 4.0


def epochs(weight: float, tokens: float, budget: float) -> float:
    """How often a training of `budget` tokens goes through a domain of so many at this weight."""
    return weight * budget / tokens if tokens else math.inf if weight else 0.0
