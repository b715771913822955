"""Defaults that the optimizer, the trainer integration and the command line share."""

DOMAIN_MAX_GRAD_NORM = 1.0
"""Default norm to which each domain's gradient is clipped."""


def default_mu(learning_rate: float, sum_of_targets: float) -> float:
    """The default Bregman coefficient, 20 lr (T + 1) / 2.

    The weights' logarithms move by lr W / mu, so mu is proportional to the peak learning rate. For
    one target, 20 lr is 0.01 at the paper's 5e-4: the published code's value for its held-out mix.
    W is a sum over targets, so mu grows with the sum T of their weights (docs/evidence.md).
    """
    return 20 * learning_rate * (sum_of_targets + 1) / 2
