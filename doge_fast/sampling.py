"""Which rows of which domain a step draws: a pure function of (seed, step), from counters.

Positions pass through a keyed permutation with random access. So resuming at any step, or
asking what step 4711 saw, replays nothing.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
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
    counts_K: Ints = _counts(seed, np.array([step]), checked_weights(weights_K), batch_size)[0]
    return counts_K


@dataclass(frozen=True)
class Stage:
    """Weights that hold from a step on, until the next stage's."""

    first_step: int
    weights: Mapping[str, float]


class MixtureCounts:
    """How many rows of each domain the batches of a mixture hold, and held so far.

    Args:
        seed: of the run.
        stages: weights in order, the first from step 0.
        batch_size: > 0; rows in a batch, over all domains.
        names: the domains, in the order of every [K] here.

    Raises:
        ValueError: the domains differ, weights are not on the simplex, or stages are not in order.
    """

    # So a step anywhere costs the sum over at most this many, some tens of microseconds.
    _STEPS_A_SUM = 1024

    def __init__(
        self, seed: int, stages: Sequence[Stage], batch_size: int, names: Sequence[str]
    ) -> None:
        _check_stages(stages)
        self.seed = seed
        self.batch_size = batch_size
        self.names = tuple(names)
        self.first_steps = [stage.first_step for stage in stages]
        self.weights_SK = [_weights_of(stage, names) for stage in stages]
        # What had been drawn at every `_STEPS_A_SUM`-th step, as far as anybody asked.
        self._sums: list[Ints] = [np.zeros(len(self.names), dtype=np.int64)]

    def weights(self, steps_T: Ints) -> Floats:
        """[T, K] weights that hold in each of these batches."""
        if not len(steps_T):
            return np.empty((0, len(self.names)))
        # Only the stages between the first and the last of the steps, of perhaps very many.
        low = bisect_right(self.first_steps, steps_T.min()) - 1
        high = bisect_right(self.first_steps, steps_T.max())
        stage_T = np.searchsorted(self.first_steps[low:high], steps_T, side="right") - 1
        weights_TK: Floats = np.stack(self.weights_SK[low:high])[stage_T]
        return weights_TK

    def counts(self, steps_T: Ints) -> Ints:
        """[T, K] rows of each domain in each of these batches."""
        return _counts(self.seed, steps_T, self.weights(steps_T), self.batch_size)

    def drawn(self, step: int) -> Ints:
        """[K] rows of each domain in all batches before this one."""
        whole = step // self._STEPS_A_SUM
        while len(self._sums) <= whole:
            first = (len(self._sums) - 1) * self._STEPS_A_SUM
            self._sums.append(
                self._sums[-1] + self._drawn_between(first, first + self._STEPS_A_SUM)
            )
        return self._sums[whole] + self._drawn_between(whole * self._STEPS_A_SUM, step)

    def _drawn_between(self, first: int, last: int) -> Ints:
        drawn_K: Ints = self.counts(np.arange(first, last)).sum(axis=0)
        return drawn_K


class Mixture(MixtureCounts):
    """Counts and blocks of mixed batches whose weights are known from the start."""

    def __init__(
        self,
        seed: int,
        weights: Mapping[str, float] | Sequence[Stage],
        batch_size: int,
        num_blocks: Mapping[str, int],
        stream: str = "train",
    ) -> None:
        stages = [Stage(0, weights)] if isinstance(weights, Mapping) else list(weights)
        super().__init__(seed, stages, batch_size, list(num_blocks))
        self.stream = stream
        self.num_blocks = dict(num_blocks)

    def blocks(self, step: int) -> dict[str, Ints]:
        """{domain: indices} of this batch."""
        counts_K = self.counts(np.array([step]))[0]
        counted = zip(self.num_blocks.items(), self.drawn(step), counts_K, strict=True)
        return {
            name: shuffled(self.seed, (self.stream, name), np.arange(first, first + count), size)
            for (name, size), first, count in counted
        }


@dataclass(frozen=True)
class Tally:
    """Where a mixture stood before a step."""

    step: int
    drawn_K: Ints
    """Rows drawn before it."""
    surplus_K: Ints
    """Rows drawn less rows asked for, in units of 2**-32 rows: integers, so that sums are exact
    and the same on every machine, however they were taken."""


_UNIT_BITS = 32


class SteeredCounts(MixtureCounts):
    """Counts of a mixture whose weights are set while it runs.

    The rotation of `mixture_counts` balances weights that stand still. Weights that move can fall
    into step with it, and what was drawn then strays without bound (a slow ramp of seven weights,
    batches of 512: 256 rows in 100,000 steps). So the surplus of every domain, rows drawn less
    rows asked for, is kept; a batch after which one would pass `LIMIT` rows is rounded by the
    surpluses instead: floors, and one row more for the domains that lack most. That holds the
    surpluses within a row of the limit under noise, ramps, and domains that come and go.

    Each count is the floor or the ceiling of B * w_k always; its expectation over seeds is
    B * w_k in every batch that the rotation rounds: all, where weights stand still; six in seven,
    where thirty weights are drawn anew for every batch.
    """

    # Weights that stand still reach it once in some 100,000 steps, if ever.
    LIMIT = 4

    def __init__(
        self, seed: int, stages: Sequence[Stage], batch_size: int, names: Sequence[str]
    ) -> None:
        super().__init__(seed, stages, batch_size, names)
        zeros_K = np.zeros(len(self.names), dtype=np.int64)
        # In order of their steps: the starting points of a walk to any other step.
        self._tallies = [Tally(0, zeros_K, zeros_K)]

    def plan(self, first_step: int, weights: Mapping[str, float]) -> Floats:
        """[K] these weights as they would hold from `first_step` on: checked and normalised.

        Raises:
            ValueError: weights of other domains, or not on the simplex.
        """
        return _weights_of(Stage(first_step, weights), self.names)

    def set_weights(self, first_step: int, weights_K: Floats) -> None:
        """Let planned weights hold from `first_step` until the next change."""
        index = bisect_right(self.first_steps, first_step)
        if np.array_equal(self.weights_SK[index - 1], weights_K):
            return
        if self.first_steps[index - 1] == first_step:
            self.weights_SK[index - 1] = weights_K
        else:
            self.first_steps.insert(index, first_step)
            self.weights_SK.insert(index, weights_K)
        self._tallies = [tally for tally in self._tallies if tally.step <= first_step]

    def counts(self, steps_T: Ints) -> Ints:
        """[T, K] rows of each domain in each of these batches."""
        if not len(steps_T):
            return super().counts(steps_T)
        first = int(steps_T.min())
        counts_TK, tally = self._walk(self.tally(first), int(steps_T.max()) + 1)
        self._keep(tally)
        return counts_TK[steps_T - first]

    def drawn(self, step: int) -> Ints:
        """[K] rows of each domain in all batches before this one."""
        return self.tally(step).drawn_K

    def tally(self, step: int) -> Tally:
        """Where the mixture stood before this step."""
        index = bisect_right(self._tallies, step, key=lambda tally: tally.step)
        tally = self._tallies[index - 1]
        while tally.step < step:
            boundary = (tally.step // self._STEPS_A_SUM + 1) * self._STEPS_A_SUM
            _, tally = self._walk(tally, min(step, boundary))
            self._keep(tally)
        return tally

    def start_from(self, tally: Tally) -> None:
        """Believe this tally, so that nothing before it need be counted again."""
        self._tallies = [each for each in self._tallies if each.step < tally.step] + [tally]

    def _keep(self, tally: Tally) -> None:
        """Keep those at boundaries and the last two: a run asks for one step and the next."""
        if tally.step <= self._tallies[-1].step:
            return
        if len(self._tallies) > 2 and self._tallies[-2].step % self._STEPS_A_SUM:
            del self._tallies[-2]
        self._tallies.append(tally)

    def _walk(self, tally: Tally, end: int) -> tuple[Ints, Tally]:
        """[T, K] counts of the batches from a tally's on and before `end`, and the tally there."""
        steps_T = np.arange(tally.step, end)
        weights_TK = self.weights(steps_T)
        counts_TK = _counts(self.seed, steps_T, weights_TK, self.batch_size)
        asked_TK = np.rint(weights_TK * (self.batch_size << _UNIT_BITS)).astype(np.int64)
        surplus_TK = tally.surplus_K + np.cumsum((counts_TK << _UNIT_BITS) - asked_TK, axis=0)
        step = 0
        while (step := _first_beyond(surplus_TK, self.LIMIT, step)) < len(steps_T):
            before_K = surplus_TK[step - 1] if step else tally.surplus_K
            counts_K = _largest_lack(asked_TK[step], before_K, self.batch_size)
            # One batch rounded otherwise shifts all surpluses after it by as much.
            surplus_TK[step:] += (counts_K - counts_TK[step]) << _UNIT_BITS
            counts_TK[step] = counts_K
            step += 1
        surplus_K = surplus_TK[-1] if len(steps_T) else tally.surplus_K
        return counts_TK, Tally(end, tally.drawn_K + counts_TK.sum(axis=0), surplus_K)


def _first_beyond(surplus_TK: Ints, limit: int, start: int) -> int:
    """The first step from `start` on after which a surplus passes the limit, or T."""
    found = np.flatnonzero(np.abs(surplus_TK[start:]).max(axis=1) > limit << _UNIT_BITS)
    return start + int(found[0]) if len(found) else len(surplus_TK)


def _largest_lack(asked_K: Ints, surplus_K: Ints, batch_size: int) -> Ints:
    """[K] floors of what is asked, one more where that leaves the largest lack."""
    floors_K = asked_K >> _UNIT_BITS
    parts_K = asked_K - (floors_K << _UNIT_BITS)
    # A domain without a fractional part has no ceiling above its floor; it comes last.
    excess_K = np.where(parts_K > 0, surplus_K - parts_K, np.iinfo(np.int64).max)
    raised = np.argsort(excess_K, kind="stable")[: batch_size - floors_K.sum()]
    counts_K = floors_K.copy()
    counts_K[raised] += 1
    return counts_K


def _check_stages(stages: Sequence[Stage]) -> None:
    firsts = [stage.first_step for stage in stages]
    if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise ValueError(
            f"The stages of a mixture begin at step 0 and go up; they begin at {firsts}."
        )


def _weights_of(stage: Stage, names: Sequence[str]) -> Floats:
    """[K] a stage's weights, checked and in the order of the names."""
    if set(stage.weights) != set(names):
        raise ValueError(
            f"A mixture weighs exactly the domains {', '.join(names)}; from step "
            f"{stage.first_step} on it weighs {', '.join(stage.weights)}."
        )
    return checked_weights([stage.weights[name] for name in names])


def checked_weights(weights_K: npt.ArrayLike) -> Floats:
    """[K] float64 on the simplex, normalised."""
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


def _counts(seed: int, steps_T: Ints, weights: Floats, batch_size: int) -> Ints:
    """[T, K] counts of systematic sampling at [K] or [T, K] weights; see `mixture_counts`."""
    if batch_size < 1 or steps_T.min(initial=0) < 0:
        raise ValueError(
            f"A batch needs batch_size >= 1 and step >= 0; they are {batch_size} and "
            f"{steps_T.min(initial=0)}."
        )
    cumulated = np.cumsum(weights, axis=-1)
    # Divided by its own end, so that the last edge is B exactly, and trailing zeros stay empty.
    edges = batch_size * (cumulated / cumulated[..., -1:])
    reached_TK = np.ceil(edges - _offsets(seed, steps_T)[:, None])
    counts_TK: Ints = np.diff(reached_TK, axis=1, prepend=0).astype(np.int64)
    return counts_TK


# 2**64 over the golden ratio: multiples of it, modulo 2**64, spread most evenly.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _offsets(seed: int, steps_T: Ints) -> Floats:
    """[T] in [0, 1): u_t = frac(u_0 + t / golden ratio), in exact integer arithmetic."""
    turned_T = round_keys(seed, "mixture")[:1] + steps_T.astype(np.uint64) * _GOLDEN
    return (turned_T >> np.uint64(11)).astype(np.float64) / 2.0**53


def spread_order(seed: int, step: int, batch_size: int) -> Ints:
    """[B] an order of the rows of a batch in which every slice meets all domains in proportion.

    Row j of the batch is the one that j turns by the golden ratio arrive at, of the rows sorted by
    domain; a batch begins at a place of its own. Any few turns in a row lie evenly on the circle,
    so a slice holds its share of every domain within three rows, in batches of up to 4096.
    """
    turned_B = (
        round_keys(seed, "order", step)[:1] + np.arange(batch_size, dtype=np.uint64) * _GOLDEN
    )
    order_B: Ints = np.argsort(np.argsort(turned_B))
    return order_B


def shuffled(seed: int, stream: Sequence[str], positions: Ints, num_blocks: int) -> Ints:
    """Blocks at these positions of the endless stream: every epoch a permutation of its own."""
    if num_blocks < 1:
        raise ValueError(f"{stream[-1]} has no blocks to draw from.")
    epochs, offsets = np.divmod(positions, num_blocks)
    blocks = np.empty(len(positions), dtype=np.int64)
    for epoch in np.unique(epochs):
        is_here = epochs == epoch
        keys = round_keys(seed, *stream, int(epoch))
        blocks[is_here] = permute(offsets[is_here], num_blocks, keys)
    return blocks


def round_keys(*name: object) -> npt.NDArray[np.uint64]:
    """Eight independent 64-bit keys of this name: BLAKE2b, the same on every machine."""
    digest = hashlib.blake2b(json.dumps(name).encode()).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(positions: Ints, size: int, keys: npt.NDArray[np.uint64]) -> Ints:
    """Where a keyed permutation of range(size) sends the positions, without making it.

    A Feistel network permutes a power of four that is at least `size` and at most four times
    it; values past the end walk on along their cycle until they come back inside.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (is_outside := values >= size).any():
        values[is_outside] = _feistel(values[is_outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], half_bits: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """A keyed permutation of range(4 ** half_bits), one round a key."""
    bits = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_scramble(right ^ key) & mask)
    return (left << bits) | right


def _scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A 64-bit integer hash, every output bit depending on every input bit.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood; OOPSLA 2014), variant 13.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
