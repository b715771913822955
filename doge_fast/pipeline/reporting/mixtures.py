"""What domain weights mean for text: how many domains they amount to, how often each is read."""

import math
from collections.abc import Mapping

from doge_fast.pipeline.reporting.wording import Stat

# More than four epochs of a domain are worth clearly less than fresh text
# (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models").
MAX_EPOCHS = 4.0


def effective_domains(weights: Mapping[str, Stat] | Mapping[str, float]) -> float:
    """exp of the entropy: K at uniform weights, 1 where one domain gets everything."""
    means = [each.mean if isinstance(each, Stat) else each for each in weights.values()]
    return math.exp(-math.fsum(mean * math.log(mean) for mean in means if mean > 0))


def epochs(weights: Mapping[str, Stat], tokens: Mapping[str, int], budget: int) -> dict[str, float]:
    """How often `budget` tokens at these weights go through each domain."""
    return {
        name: stat.mean * budget / tokens[name] if tokens[name] else math.inf
        for name, stat in weights.items()
    }


def uniform(tokens: Mapping[str, int]) -> dict[str, Stat]:
    """The same weight for each domain."""
    return {name: Stat(1 / len(tokens)) for name in tokens}


def natural(tokens: Mapping[str, int]) -> dict[str, Stat]:
    """Weights that follow the tokens there are; uniform where there are none."""
    total = sum(tokens.values())
    return (
        {name: Stat(count / total) for name, count in tokens.items()} if total else uniform(tokens)
    )
