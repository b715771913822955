"""The number of rows of each domain in a batch: a pure function of seed, step and weights.

The rows drawn by earlier batches are counted by arithmetic; no data is replayed.
"""

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from doge_fast.mixture.permutation import Ints, golden_rotation

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Phase:
    """Weights from `first_step` until the next phase begins."""

    first_step: int
    weights: Mapping[str, float]


class MixtureCounts:
    """The number of rows of each domain in every batch, and in all batches before it.

    Systematic sampling: c_k is B times the sum of the first k weights. Domain k gets the points
    u, u + 1, ..., u + B - 1 that fall into [c_{k-1}, c_k). The first offset u is drawn from the
    seed; successive offsets rotate by the golden ratio. With constant weights the rows drawn after
    t steps stay within a few rows of t * B * w. With independent offsets they would differ by
    about sqrt(t).

    Each count is the floor or the ceiling of B * w_k, and its expectation over seeds is B * w_k.
    With weights that change in every batch, the rounding errors can add up.

    The order of `names` is that of every axis K here; the first of the phases begins at step 0.

    Raises:
        ValueError: weights are not on the simplex, phases are not in order, or `batch_size` is not
            positive.
    """

    # The rows drawn before every so many steps are remembered.
    STEPS_PER_SUM = 1024

    def __init__(
        self, seed: int, phases: Sequence[Phase], batch_size: int, names: Sequence[str]
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"A batch needs batch_size >= 1; got {batch_size}.")
        self.batch_size = batch_size
        self.names = tuple(names)
        self._start = 0, np.zeros(len(self.names), dtype=np.int64)
        first_steps = [phase.first_step for phase in phases]
        weights_QK = [self.ordered(phase.weights) for phase in phases]
        self.restart(seed, first_steps, weights_QK, *self._start)

    def restart(
        self,
        seed: int,
        first_steps: Sequence[int],
        weights_QK: Sequence[npt.ArrayLike],
        step: int,
        drawn_K: Ints,
    ) -> None:
        """Replace seed and phases, and go on from the rows drawn before `step` without counting.

        Raises:
            ValueError: weights are not on the simplex or phases are not in order; nothing is
                changed then.
        """
        if list(first_steps[:1]) != [0] or list(first_steps) != sorted(set(first_steps)):
            raise ValueError(
                "The phases of a mixture must begin at step 0 and go on at increasing steps; they "
                f"begin at {list(first_steps)}."
            )
        self.weights_QK = [on_simplex(weights_K) for weights_K in weights_QK]
        self.first_steps = list(first_steps)
        self.seed = seed
        # (step, rows drawn before it), ascending. Other steps are counted from the nearest before.
        self._sums = [self._start, (step, drawn_K)] if step else [self._start]
        # The last result of `drawn`: a loader calls it for one step after another.
        self._latest = self._start

    def ordered(self, weights: Mapping[str, float]) -> Floats:
        """[K] the weights in the order of `names`.

        ValueError if they are of other domains or not on the simplex.
        """
        if weights.keys() != set(self.names):
            raise ValueError(f"weights must be of {list(self.names)}; got {list(weights)}.")
        # The weights may be tensors.
        return on_simplex([float(weights[name]) for name in self.names])

    def set_weights(self, first_step: int, weights_K: Floats) -> None:
        """Use these `ordered` weights from `first_step` until the next change."""
        index = bisect_right(self.first_steps, first_step)
        if np.array_equal(self.weights_QK[index - 1], weights_K):
            return
        if self.first_steps[index - 1] == first_step:
            self.weights_QK[index - 1] = weights_K
        else:
            self.first_steps.insert(index, first_step)
            self.weights_QK.insert(index, weights_K)
        self._sums = [(step, drawn_K) for step, drawn_K in self._sums if step <= first_step]
        if self._latest[0] > first_step:
            self._latest = self._start

    def weights(self, steps_T: Ints) -> Floats:
        """[T, K] weights of these batches."""
        phases = (bisect_right(self.first_steps, step) - 1 for step in steps_T.tolist())
        return np.stack([self.weights_QK[phase] for phase in phases])

    def counts(self, steps_T: Ints) -> Ints:
        """[T, K] rows of each domain in these batches; ValueError if a step is negative."""
        if not len(steps_T):
            return np.empty((0, len(self.names)), dtype=np.int64)
        if steps_T.min() < 0:
            raise ValueError(f"A batch needs step >= 0; got {steps_T.min()}.")
        cumulated_TK = np.cumsum(self.weights(steps_T), axis=-1)
        # Divided by the last sum: the last edge is exactly B, and trailing zero weights get no row.
        edges_TK = self.batch_size * (cumulated_TK / cumulated_TK[:, -1:])
        # u_t = frac(u_0 + t / golden ratio), in exact integer arithmetic.
        points_T = golden_rotation(steps_T, self.seed, "mixture") >> np.uint64(11)
        offsets_T = points_T.astype(np.float64) / 2.0**53
        reached_TK = np.ceil(edges_TK - offsets_T[:, None])
        return np.diff(reached_TK, axis=1, prepend=0).astype(np.int64)

    def drawn(self, step: int) -> Ints:
        """[K] rows of each domain in all batches before this one; ValueError if it is negative."""
        if step < 0:
            raise ValueError(f"A batch needs step >= 0; got {step}.")
        nearest = self._sums[bisect_right(self._sums, step, key=itemgetter(0)) - 1]
        first, drawn_K = self._latest if nearest[0] < self._latest[0] <= step else nearest
        while first < step:
            boundary = (first // self.STEPS_PER_SUM + 1) * self.STEPS_PER_SUM
            end = min(step, boundary)
            drawn_K = drawn_K + self.counts(np.arange(first, end)).sum(axis=0)
            first = end
            if end == boundary:
                insort(self._sums, (end, drawn_K), key=itemgetter(0))
        self._latest = step, drawn_K
        return drawn_K


def on_simplex(weights_K: npt.ArrayLike) -> Floats:
    """[K] float64, normalised; ValueError if they are not on the simplex."""
    array_K: Floats = np.asarray(weights_K, dtype=np.float64)
    total = float(array_K.sum())
    is_vector = array_K.ndim == 1 and array_K.size
    if not is_vector or not (array_K >= 0).all() or not abs(total - 1) <= 1e-5:
        raise ValueError(
            f"Domain weights must be >= 0 and sum to 1; they are {array_K.tolist()}, "
            f"with the sum {total:.6g}."
        )
    # Normalised weights are returned unchanged, so that a checkpoint resumes bitwise.
    return array_K if abs(total - 1) <= 1e-12 else array_K / total
