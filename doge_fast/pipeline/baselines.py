"""Domain weights that need no proxy: what learned weights are compared with."""

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
