"""Which domains a step has: all of them, or a few of many, drawn anew for each step.

With S of K training domains in a step, S drawn uniformly without replacement, each is there with
probability S / K and each pair with S (S - 1) / (K (K - 1)). What is estimated, without bias over
the draws at given parameters and weights, per-domain and global clipping aside:

    W_j   of a domain in the step:  tau_j ||g_j||^2
              + (K - 1) / (S - 1) sum over its other training domains i of  tau_i <g_j, g_i>
              + sum over the measured targets r of  tau_r <g_j, g_r>
    sum_j alpha_j g_j:              K / S  sum over the step's domains j of  alpha_j g_j

Both factors are applied by `doge_fast.weights.reweight`. Domains outside the step keep the score
they last had, and all K weights move; so they follow a score that is up to some K / S steps old
(the published code's partial update). The softmax of unbiased scores is not unbiased itself; the
variance of both estimates falls with S.
"""

import random

from doge_fast.weights.objective import Objective
from doge_fast.weights.simplex import is_integer


class Subset:
    """The domains of a step and the rows of the buffer that they have.

    Args:
        objective: all domains.
        num_domains: S, training domains of a step; None: all.
        seed: of the draws.

    Raises:
        ValueError: S is not in [2, K], nor is it 1 where training domains are no targets; or the
            seed is negative; or either is no integer.
    """

    def __init__(self, objective: Objective, num_domains: int | None, seed: int) -> None:
        if not is_integer(seed) or seed < 0:
            raise ValueError(f"seed must be an integer, at least 0; got {seed!r}.")
        self._objective = objective
        self._num_domains = _checked_number(objective, num_domains)
        self._seed = seed
        self.draw(0)

    def draw(self, number: int) -> None:
        """Take the subset of draw `number`, a function of it and of the seed."""
        self.draws = number
        names = self._objective.domains
        if self._num_domains < len(names):
            # Keyed by both, so that draw t needs none of those before it.
            generator = random.Random(f"{self._seed} {number}")
            chosen = generator.sample(range(len(names)), self._num_domains)
            names = tuple(names[index] for index in sorted(chosen))
        self.domains: tuple[str, ...] = names
        """The S training domains of the step."""
        self.rows: tuple[str, ...] = names + self._objective.measured
        """Names of the buffer's rows."""
        self._slots = {name: slot for slot, name in enumerate(self.rows)}

    @property
    def all_rows(self) -> tuple[str, ...]:
        """Names of all rows, those of other steps too."""
        return self._objective.rows

    @property
    def num_rows(self) -> int:
        """Rows of the buffer that a step needs: S + M."""
        return len(self.rows)

    def holds(self, name: str) -> bool:
        """Whether a row of the step is `name`'s."""
        return name in self._slots

    def slot_of(self, name: str) -> int:
        """The row of the buffer with that name, one of `rows`."""
        return self._slots[name]


def _checked_number(objective: Objective, num_domains: int | None) -> int:
    """S, which is K where None was asked for."""
    names = objective.domains
    if num_domains is None or num_domains == len(names):
        return len(names)
    # With one domain alone its effect on the others cannot be measured.
    least = 2 if any(objective.tau[: len(names)]) else 1
    if not is_integer(num_domains) or not least <= num_domains <= len(names):
        raise ValueError(
            f"domains_per_step must be an integer between {least} and the {len(names)} training "
            f"domains; got {num_domains!r}."
            + " With one domain alone its effect on the others cannot be measured."
            * (num_domains == 1)
        )
    return num_domains
