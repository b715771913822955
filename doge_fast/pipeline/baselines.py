"""Domain weights that need no proxy: what learned weights are compared with."""

from collections.abc import Callable, Mapping


def uniform(tokens: Mapping[str, int]) -> dict[str, float]:
    """{domain: 1/K}: the paper's baseline for universal generalization.

    Args:
        tokens: {domain: training tokens}; only the names matter here.

    Raises:
        ValueError: no domain.
    """
    _check(tokens)
    return dict.fromkeys(tokens, 1 / len(tokens))


def natural(tokens: Mapping[str, int]) -> dict[str, float]:
    """{domain: n_j / sum_i n_i}: every token of the corpus counts alike.

    Args:
        tokens: {domain: training tokens n_j}, each > 0.

    Raises:
        ValueError: no domain, or one without tokens.
    """
    _check(tokens)
    total = sum(tokens.values())
    return {name: count / total for name, count in tokens.items()}


def _check(tokens: Mapping[str, int]) -> None:
    empty = [name for name, count in tokens.items() if count <= 0]
    if empty or not tokens:
        raise ValueError(
            f"Baseline weights need at least one domain, each with tokens; got {dict(tokens)}. "
            f"Leave out {empty or 'nothing: name a domain'}."
        )


BASELINES: dict[str, Callable[[Mapping[str, int]], dict[str, float]]] = {
    "uniform": uniform,
    "natural": natural,
}
"""Name -> how it weighs domains, given the number of training tokens of each."""
