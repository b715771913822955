"""Domain weights that need no proxy, and how often weights read each domain."""

import math
from collections.abc import Callable, Mapping


def uniform(tokens: Mapping[str, int]) -> dict[str, float]:
    """{domain: 1/K}: the paper's baseline; of {domain: training tokens} only the names matter."""
    return dict.fromkeys(tokens, 1 / len(tokens))


def natural(tokens: Mapping[str, int]) -> dict[str, float]:
    """{domain: n_j / sum_i n_i} of {domain: training tokens n_j}: every token counts alike."""
    total = sum(tokens.values())
    return {name: count / total for name, count in tokens.items()}


BASELINES: dict[str, Callable[[Mapping[str, int]], dict[str, float]]] = {
    "uniform": uniform,
    "natural": natural,
}
"""Name -> how it weighs domains, given the number of training tokens of each."""

# More than four epochs of a domain are worth clearly less than fresh text
# (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models").
MAX_EPOCHS = 4.0


def epochs(weight: float, tokens: float, budget: float) -> float:
    """How often a training of `budget` tokens goes through a domain of so many at this weight."""
    return weight * budget / tokens if tokens else math.inf if weight else 0.0
