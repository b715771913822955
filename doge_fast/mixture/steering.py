"""Counts that follow weights which are set while the mixture runs."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from doge_fast.mixture.counts import BatchCounts, Floats, Phase, systematic_counts
from doge_fast.mixture.permutation import Ints

# Surpluses are integers in units of 2**-32 rows, so that their sums are exact and the same on
# every machine, in whatever order they are added up.
_UNIT_BITS = 32


@dataclass(frozen=True)
class Totals:
    """What all batches before a step drew."""

    step: int
    drawn_K: Ints
    """Rows drawn."""
    surplus_K: Ints
    """Rows drawn less rows asked for, in units of 2**-32 rows."""


class SteeredCounts(BatchCounts):
    """Counts of a mixture whose weights are set while it runs.

    The rotation of `mixture_counts` balances weights that stand still. Weights that move can fall
    into step with it, and what was drawn then strays without bound (a slow ramp of seven weights,
    batches of 512: 256 rows in 100,000 steps). So the surplus of every domain is kept: rows drawn
    less rows asked for. A batch after which a surplus would pass `LIMIT` rows is rounded by the
    surpluses instead: floors, and one row more for the domains that lack most. That holds the
    surpluses within a row of the limit under noise, ramps, and domains that come and go.

    Each count is the floor or the ceiling of B * w_k always; its expectation over seeds is
    B * w_k in every batch that the rotation rounds: all, where weights stand still; six in seven,
    where thirty weights are drawn anew for every batch.
    """

    # Weights that stand still reach it once in some 100,000 steps, if ever.
    LIMIT = 4

    def __init__(
        self, seed: int, phases: Sequence[Phase], batch_size: int, names: Sequence[str]
    ) -> None:
        super().__init__(seed, phases, batch_size, names)
        zeros_K = np.zeros(len(self.names), dtype=np.int64)
        # In ascending order of steps. The totals at any other step are counted from one of these.
        self._totals = [Totals(0, zeros_K, zeros_K)]

    def restore(
        self, seed: int, first_steps: list[int], weights_PK: list[Floats], totals: Totals
    ) -> None:
        """Continue other counts to the bit: their seed, weights as they were normalised, totals."""
        self.seed = seed
        self.first_steps = first_steps
        self.weights_PK = weights_PK
        self._totals = self._totals[:1]
        self.start_from(totals)

    def set_weights(self, first_step: int, weights_K: Floats) -> None:
        """Let normalised weights hold from `first_step` until the next change."""
        index = bisect_right(self.first_steps, first_step)
        if np.array_equal(self.weights_PK[index - 1], weights_K):
            return
        if self.first_steps[index - 1] == first_step:
            self.weights_PK[index - 1] = weights_K
        else:
            self.first_steps.insert(index, first_step)
            self.weights_PK.insert(index, weights_K)
        self._totals = [totals for totals in self._totals if totals.step <= first_step]

    def counts(self, steps_T: Ints) -> Ints:
        """[T, K] rows of each domain in these batches."""
        if not len(steps_T):
            return super().counts(steps_T)
        first = int(steps_T.min())
        counts_TK, totals = self._count(self.totals(first), int(steps_T.max()) + 1)
        self._keep(totals)
        return counts_TK[steps_T - first]

    def drawn(self, step: int) -> Ints:
        """[K] rows of each domain in all batches before this one."""
        return self.totals(step).drawn_K

    def totals(self, step: int) -> Totals:
        """What all batches before this one drew."""
        index = bisect_right(self._totals, step, key=lambda totals: totals.step)
        totals = self._totals[index - 1]
        while totals.step < step:
            boundary = (totals.step // self.STEPS_A_SUM + 1) * self.STEPS_A_SUM
            _, totals = self._count(totals, min(step, boundary))
            self._keep(totals)
        return totals

    def start_from(self, totals: Totals) -> None:
        """Start from these totals without counting earlier batches."""
        self._totals = [kept for kept in self._totals if kept.step < totals.step] + [totals]

    def _keep(self, totals: Totals) -> None:
        """Keep those at boundaries and the last two: a run asks for one step and the next."""
        if totals.step <= self._totals[-1].step:
            return
        if len(self._totals) > 2 and self._totals[-2].step % self.STEPS_A_SUM:
            del self._totals[-2]
        self._totals.append(totals)

    def _count(self, start: Totals, end: int) -> tuple[Ints, Totals]:
        """[T, K] counts of the batches from `start` on and before step `end`; the totals there."""
        steps_T = np.arange(start.step, end)
        weights_TK = self.weights(steps_T)
        counts_TK = systematic_counts(self.seed, steps_T, weights_TK, self.batch_size)
        asked_TK = np.rint(weights_TK * (self.batch_size << _UNIT_BITS)).astype(np.int64)
        surplus_TK = start.surplus_K + np.cumsum((counts_TK << _UNIT_BITS) - asked_TK, axis=0)
        step = 0
        while (step := _first_beyond(surplus_TK, self.LIMIT, step)) < len(steps_T):
            before_K = surplus_TK[step - 1] if step else start.surplus_K
            counts_K = _largest_lack(asked_TK[step], before_K, self.batch_size)
            # One batch rounded otherwise shifts all surpluses after it by as much.
            surplus_TK[step:] += (counts_K - counts_TK[step]) << _UNIT_BITS
            counts_TK[step] = counts_K
            step += 1
        surplus_K = surplus_TK[-1] if len(steps_T) else start.surplus_K
        return counts_TK, Totals(end, start.drawn_K + counts_TK.sum(axis=0), surplus_K)


def _first_beyond(surplus_TK: Ints, limit: int, start: int) -> int:
    """The first step from `start` on after which a surplus passes the limit, or T."""
    beyond = np.flatnonzero(np.abs(surplus_TK[start:]).max(axis=1) > limit << _UNIT_BITS)
    return start + int(beyond[0]) if len(beyond) else len(surplus_TK)


def _largest_lack(asked_K: Ints, surplus_K: Ints, batch_size: int) -> Ints:
    """[K] floors of what is asked, and one more for the domains that then lack most."""
    floors_K = asked_K >> _UNIT_BITS
    parts_K = asked_K - (floors_K << _UNIT_BITS)
    # A domain without a fractional part has no ceiling above its floor; it comes last.
    excess_K = np.where(parts_K > 0, surplus_K - parts_K, np.iinfo(np.int64).max)
    raised = np.argsort(excess_K, kind="stable")[: batch_size - floors_K.sum()]
    counts_K = floors_K.copy()
    counts_K[raised] += 1
    return counts_K
