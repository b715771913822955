"""Domain weights that need no proxy, and the epochs that weights imply."""

import math
from collections.abc import Callable, Mapping


def uniform(tokens: Mapping[str, int]) -> dict[str, float]:
    """{domain: 1/K}, the paper's baseline; `tokens` is used for its names alone."""
    return dict.fromkeys(tokens, 1 / len(tokens))


def natural(tokens: Mapping[str, int]) -> dict[str, float]:
    """{domain: n_j / sum_i n_i} for `tokens` {domain: training tokens n_j}."""
    total = sum(tokens.values())
    return {name: count / total for name, count in tokens.items()}


BASELINES: dict[str, Callable[[Mapping[str, int]], dict[str, float]]] = {
    "uniform": uniform,
    "natural": natural,
}
"""{name: function from {domain: training tokens} to {domain: weight}}."""

# Text repeated more than four times is worth clearly less than fresh text
# (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models").
MAX_EPOCHS = 4.0


def epochs(weight: float, tokens: float, budget: float) -> float:
    """Epochs over a domain of `tokens` tokens in a training of `budget` tokens at this weight."""
    return weight * budget / tokens if tokens else math.inf if weight else 0.0
