"""What holds where a user names nothing, of the optimizer, the trainer and the command line."""

DOMAIN_MAX_GRAD_NORM = 1.0
"""Norm to which each domain's gradient is clipped where nothing else is asked for."""


def default_mu(learning_rate: float, sum_of_targets: float) -> float:
    """The Bregman coefficient where none is named: 20 lr (T + 1) / 2.

    The weights' logarithms move by lr W / mu, so mu follows the peak learning rate; 20 times it is
    0.01 at the paper's 5e-4, which is what the published code takes towards its held-out mix. W is
    a sum over targets and spreads with them: where their weights sum to T, mu is (T + 1) / 2 times
    as much, four times for all of seven domains at once
    (docs/evidence-tables.md).

    Args:
        learning_rate: > 0, the peak one of the proxy.
        sum_of_targets: T > 0; K for all domains at once.

    Raises:
        ValueError: the learning rate is not positive and finite.
    """
    if not 0 < learning_rate < float("inf"):
        raise ValueError(
            "mu=None is computed from the learning rate, which must be positive when the optimizer "
            f"is built; it is {learning_rate!r}. Pass mu=."
        )
    return 20 * learning_rate * (sum_of_targets + 1) / 2
