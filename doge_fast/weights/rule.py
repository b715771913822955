"""The rule by which domain weights move: the settings of Algorithms 1 and 2.

Their ranges are checked here and nowhere else: `scores` and `reweight` take numbers as they come.
"""

import math
from dataclasses import dataclass

from doge_fast.weights.defaults import DOMAIN_MAX_GRAD_NORM
from doge_fast.weights.scores import PAPER, Score


@dataclass(frozen=True)
class UpdateRule:
    """How domain weights move; constant over a run.

    Raises:
        ValueError: a setting is outside its range.
    """

    mu: float
    """> 0, Bregman coefficient."""
    score: Score = PAPER
    """What moves the weights; `PAPER` is W."""
    domain_max_grad_norm: float | None = DOMAIN_MAX_GRAD_NORM
    """> 0, norm to which every row is clipped first; None: not clipped."""
    max_grad_norm: float | None = None
    """> 0, norm to which the combined gradient is clipped; None: not clipped."""
    smoothing: float = 0.0
    """In [0, 1), mixture with uniform."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        # A number of numpy in a checkpoint is refused by torch.load(weights_only=True).
        object.__setattr__(self, "mu", float(self.mu))
        if not 0 < self.mu < math.inf:
            raise ValueError(
                f"mu must be positive and finite; got {self.mu!r}. With mu=None it is a multiple "
                "of the learning rate that the optimizer has when it is wrapped."
            )
        for name in ("domain_max_grad_norm", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, or None for no clip; got {value!r}.")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing must be in [0, 1); got {self.smoothing!r}.")
