"""How many rows of each domain a batch holds: a pure function of the seed, the step, the weights.

The counts of all earlier batches are an arithmetic sum, so no data is replayed.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from doge_fast.mixture.permutation import Ints, golden_rotation

Floats = npt.NDArray[np.float64]


def mixture_counts(seed: int, step: int, weights_K: npt.ArrayLike, batch_size: int) -> Ints:
    """How many rows of each domain batch `step` of a mixture holds.

    Systematic sampling: with c_k the cumulated weights times B, domain k gets the points
    u, u + 1, ..., u + B - 1 that fall into [c_{k-1}, c_k). The offsets u of successive steps
    rotate by the golden ratio from one drawn from the seed, so what has been drawn after t
    steps stays within a few rows of t * B * w, where independent offsets would stray by sqrt(t).

    Args:
        seed: of the run.
        step: >= 0; batches before this one.
        weights_K: [K], >= 0, sum 1 within 1e-5; normalised here.
        batch_size: B > 0; rows in the batch.

    Returns:
        [K] int64; sums to B; each the floor or the ceiling of B * w_k, and B * w_k in
        expectation over seeds.

    Raises:
        ValueError: the weights are not on the simplex, or a number is out of range.
    """
    weights_TK = checked_weights(weights_K)[None]
    counts_K: Ints = systematic_counts(seed, np.array([step]), weights_TK, batch_size)[0]
    return counts_K


@dataclass(frozen=True)
class Phase:
    """A part of a curriculum: weights that hold from a step until the next phase begins."""

    first_step: int
    weights: Mapping[str, float]

    def weights_of(self, names: Sequence[str]) -> Floats:
        """[K] the weights in the order of `names`, normalised.

        Raises:
            ValueError: they are of other domains or not on the simplex.
        """
        if set(self.weights) != set(names):
            raise ValueError(
                f"The weights of a mixture must name exactly the domains {', '.join(names)}; from "
                f"step {self.first_step} on they name {', '.join(self.weights)}."
            )
        return checked_weights([self.weights[name] for name in names])


class BatchCounts:
    """How many rows of each domain every batch holds, and all batches before it.

    Args:
        seed: of the run.
        phases: weights in order, the first from step 0.
        batch_size: > 0; rows in a batch, over all domains.
        names: the domains, in the order of every [K] here.

    Raises:
        ValueError: the domains differ, weights are not on the simplex, or phases are not in order.
    """

    # A sum at any step adds up at most this many batches, which takes some tens of microseconds.
    STEPS_A_SUM = 1024

    def __init__(
        self, seed: int, phases: Sequence[Phase], batch_size: int, names: Sequence[str]
    ) -> None:
        first_steps = [phase.first_step for phase in phases]
        if first_steps[:1] != [0] or first_steps != sorted(set(first_steps)):
            raise ValueError(
                "The phases of a mixture must begin at step 0 and go on at increasing steps; they "
                f"begin at {first_steps}."
            )
        self.seed = seed
        self.batch_size = batch_size
        self.names = tuple(names)
        self.first_steps = first_steps
        self.weights_PK = [phase.weights_of(names) for phase in phases]
        # Rows drawn before every `STEPS_A_SUM`-th step, up to the last one that was asked for.
        self._sums: list[Ints] = [np.zeros(len(self.names), dtype=np.int64)]

    def weights(self, steps_T: Ints) -> Floats:
        """[T, K] weights that hold in these batches."""
        if not len(steps_T):
            return np.empty((0, len(self.names)))
        # Only the phases between the first and the last of the steps: there may be very many.
        low = bisect_right(self.first_steps, steps_T.min()) - 1
        high = bisect_right(self.first_steps, steps_T.max())
        phase_T = np.searchsorted(self.first_steps[low:high], steps_T, side="right") - 1
        weights_TK: Floats = np.stack(self.weights_PK[low:high])[phase_T]
        return weights_TK

    def counts(self, steps_T: Ints) -> Ints:
        """[T, K] rows of each domain in these batches."""
        return systematic_counts(self.seed, steps_T, self.weights(steps_T), self.batch_size)

    def drawn(self, step: int) -> Ints:
        """[K] rows of each domain in all batches before this one."""
        whole = step // self.STEPS_A_SUM
        while len(self._sums) <= whole:
            first = (len(self._sums) - 1) * self.STEPS_A_SUM
            self._sums.append(self._sums[-1] + self._drawn_between(first, first + self.STEPS_A_SUM))
        return self._sums[whole] + self._drawn_between(whole * self.STEPS_A_SUM, step)

    def _drawn_between(self, first: int, end: int) -> Ints:
        drawn_K: Ints = self.counts(np.arange(first, end)).sum(axis=0)
        return drawn_K


def checked_weights(weights_K: npt.ArrayLike) -> Floats:
    """[K] float64, normalised.

    Raises:
        ValueError: they are not on the simplex.
    """
    array_K = np.asarray(weights_K, dtype=np.float64)
    total = float(array_K.sum())
    if (array_K < 0).any():
        raise ValueError(
            f"Domain weights must be >= 0; they are {array_K.tolist()}, and one is negative."
        )
    is_simplex = array_K.ndim == 1 and array_K.size and (array_K >= 0).all()
    if not is_simplex or not abs(total - 1) <= 1e-5:
        raise ValueError(
            f"Domain weights must be >= 0 and sum to 1; they are {array_K.tolist()}, "
            f"with the sum {total:.6g}."
        )
    normalised_K: Floats = array_K / total
    return normalised_K


def systematic_counts(seed: int, steps_T: Ints, weights_TK: Floats, batch_size: int) -> Ints:
    """[T, K] the counts of `mixture_counts` at the weights of every step.

    Raises:
        ValueError: `batch_size` < 1, or a step < 0.
    """
    if batch_size < 1 or steps_T.min(initial=0) < 0:
        raise ValueError(
            f"A batch needs batch_size >= 1 and step >= 0; they are {batch_size} and "
            f"{steps_T.min(initial=0)}."
        )
    cumulated_TK = np.cumsum(weights_TK, axis=-1)
    # Divided by its own end, so that the last edge is B exactly, and trailing zeros stay empty.
    edges_TK = batch_size * (cumulated_TK / cumulated_TK[..., -1:])
    reached_TK = np.ceil(edges_TK - _offsets(seed, steps_T)[:, None])
    counts_TK: Ints = np.diff(reached_TK, axis=1, prepend=0).astype(np.int64)
    return counts_TK


def _offsets(seed: int, steps_T: Ints) -> Floats:
    """[T] in [0, 1): u_t = frac(u_0 + t / golden ratio), in exact integer arithmetic."""
    points_T = golden_rotation(steps_T, seed, "mixture")
    return (points_T >> np.uint64(11)).astype(np.float64) / 2.0**53
