"""Which domains a step has: all of them, or a few of many, drawn anew for each step.

S of the K training domains are drawn uniformly without replacement. A domain is in the step with
probability S / K, a pair with probability S (S - 1) / (K (K - 1)). At given parameters and weights,
and without clipping, these estimates are unbiased over the draws:

    W_j   of a domain in the step:  tau_j ||g_j||^2
              + (K - 1) / (S - 1) sum over its other training domains i of  tau_i <g_j, g_i>
              + sum over the held-out targets r of  tau_r <g_j, g_r>
    sum_j alpha_j g_j:              K / S  sum over the step's domains j of  alpha_j g_j

`doge_fast.weights.reweight` applies both factors. A domain outside the step keeps its last score,
which is about K / S steps old, and all K weights move (the published code's partial update).
The softmax of unbiased scores is not unbiased. The variance of both estimates falls with S.
"""

import random

from doge_fast.weights.objective import Objective


class Subset:
    """The domains of a step, and the buffer's row of each.

    `num_domains` is S, the number of training domains of a step; None: all. ValueError if it is
    outside [2, K], or outside [1, K] where no training domain is a target.
    """

    def __init__(self, objective: Objective, num_domains: int | None, seed: int) -> None:
        self._objective = objective
        names = objective.domains
        self._num_domains = len(names) if num_domains is None else num_domains
        # The effect of a step's only domain on the other domains cannot be measured.
        least = min(2, len(names)) if any(objective.tau[: len(names)]) else 1
        if not least <= self._num_domains <= len(names):
            raise ValueError(
                f"domains_per_step must be between {least} and the {len(names)} training domains; "
                f"got {num_domains!r}."
            )
        self._seed = seed
        self.draw(0)

    def draw(self, number: int) -> None:
        """Take the subset of draw `number`."""
        # A checkpoint may hold a tensor, whose text would be another key.
        self.draws = int(number)
        names = self._objective.domains
        if self._num_domains < len(names):
            # Keyed by seed and number, so that draw t does not depend on the draws before.
            generator = random.Random(f"{self._seed} {self.draws}")
            chosen = generator.sample(range(len(names)), self._num_domains)
            names = tuple(names[index] for index in sorted(chosen))
        self.domains: tuple[str, ...] = names
        """The S training domains of the step."""
        self.names: tuple[str, ...] = names + self._objective.measured
        """The names of the B rows of the buffer: these domains, then the M held-out targets."""
        self.row_of = {name: row for row, name in enumerate(self.names)}
        """{name: its row of the buffer}."""
