"""Which blocks step t sees: a pure function of (seed, t), computed from counters.

Positions pass through a keyed permutation with random access. So resuming at any step, or
asking what step 4711 saw, replays nothing.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def domain_blocks(seed: int, step: int, *, domain: str, num_blocks: int, size: int) -> Ints:
    """Which of a domain's blocks proxy batch `step` holds.

    Positions step * size, ..., step * size + size - 1 of an endless stream that shows every
    block once an epoch, in an order drawn anew each epoch. The order depends on the seed and
    the domain's name alone, so other domains come and go without changing it.

    Args:
        seed: of the run.
        step: >= 0; batches before this one.
        domain: its name.
        num_blocks: > 0; blocks of the domain.
        size: >= 0; blocks in the batch.

    Returns:
        [size] int64 in [0, num_blocks); distinct within an epoch.

    Raises:
        ValueError: `num_blocks` < 1, or `step` or `size` < 0.
    """
    if step < 0 or size < 0:
        raise ValueError(f"A batch needs step >= 0 and size >= 0; they are {step} and {size}.")
    first = step * size
    return _shuffled(seed, ("train", domain), np.arange(first, first + size), num_blocks)


def mixture_counts(seed: int, step: int, weights_K: npt.ArrayLike, batch_size: int) -> Ints:
    """How many blocks of each domain base batch `step` holds.

    Systematic sampling: with c_k the cumulated weights times B, domain k gets the points
    u, u + 1, ..., u + B - 1 that fall into [c_{k-1}, c_k). The offsets u of successive steps
    rotate by the golden ratio from one drawn from the seed, so what has been drawn after t
    steps stays within a few blocks of t * B * w, where independent offsets would stray by sqrt(t).

    Args:
        seed: of the run.
        step: >= 0; batches before this one.
        weights_K: [K], >= 0, sum 1 within 1e-5; normalised here.
        batch_size: B > 0; blocks in the batch.

    Returns:
        [K] int64; sums to B; each the floor or the ceiling of B * w_k, and B * w_k in
        expectation over seeds.

    Raises:
        ValueError: the weights are not on the simplex, or a number is out of range.
    """
    counts_K: Ints = _counts(seed, np.array([step]), _checked_weights(weights_K), batch_size)[0]
    return counts_K


@dataclass(frozen=True)
class Stage:
    """Weights that hold from a step on, until the next stage's."""

    first_step: int
    weights: Mapping[str, float]


def mixture_blocks(
    seed: int,
    step: int,
    weights: Mapping[str, float] | Sequence[Stage],
    batch_size: int,
    *,
    num_blocks: Mapping[str, int],
) -> dict[str, Ints]:
    """Which blocks of each domain base batch `step` holds.

    `mixture_counts` says how many. Which ones follows from how many blocks of the domain all
    earlier batches held, an arithmetic sum: no data is replayed.

    Args:
        seed: of the run.
        step: >= 0; batches before this one.
        weights: {domain: weight}, or a curriculum: stages in order, the first from step 0.
        batch_size: > 0; blocks in the batch, over all domains.
        num_blocks: {domain: blocks it has}, the same domains in the order of the batch.

    Returns:
        {domain: int64 indices}, in the order of `num_blocks`; empty arrays included.

    Raises:
        ValueError: the domains differ, weights are not on the simplex, stages are not in
            order, or a number is out of range.
    """
    return Mixture(seed, weights, batch_size, num_blocks).blocks(step)


class Mixture:
    """Counts and blocks of mixed batches."""

    # So a step anywhere costs the sum over at most this many, some tens of microseconds.
    _STEPS_A_SUM = 1024

    def __init__(
        self,
        seed: int,
        weights: Mapping[str, float] | Sequence[Stage],
        batch_size: int,
        num_blocks: Mapping[str, int],
        stream: str = "train",
    ) -> None:
        self.seed = seed
        self.stream = stream
        self.batch_size = batch_size
        self.num_blocks = dict(num_blocks)
        stages = [Stage(0, weights)] if isinstance(weights, Mapping) else list(weights)
        _check_stages(stages, list(num_blocks))
        self.first_steps = [stage.first_step for stage in stages]
        self.weights_SK = [
            _checked_weights([stage.weights[name] for name in num_blocks]) for stage in stages
        ]
        # What had been drawn at every `_STEPS_A_SUM`-th step, as far as anybody asked.
        self._sums: list[Ints] = [np.zeros(len(self.num_blocks), dtype=np.int64)]

    def counts(self, steps_T: Ints) -> Ints:
        """[T, K] blocks of each domain in each of these batches."""
        stage_T = np.searchsorted(self.first_steps, steps_T, side="right") - 1
        counts_TK = np.empty((len(steps_T), len(self.num_blocks)), dtype=np.int64)
        for stage in np.unique(stage_T):
            is_here = stage_T == stage
            weights_K = self.weights_SK[stage]
            counts_TK[is_here] = _counts(self.seed, steps_T[is_here], weights_K, self.batch_size)
        return counts_TK

    def drawn(self, step: int) -> Ints:
        """[K] blocks of each domain in all batches before this one."""
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

    def blocks(self, step: int) -> dict[str, Ints]:
        """{domain: indices} of this batch."""
        counts_K = self.counts(np.array([step]))[0]
        counted = zip(self.num_blocks.items(), self.drawn(step), counts_K, strict=True)
        return {
            name: _shuffled(self.seed, (self.stream, name), np.arange(first, first + count), size)
            for (name, size), first, count in counted
        }


def _check_stages(stages: Sequence[Stage], names: Sequence[str]) -> None:
    firsts = [stage.first_step for stage in stages]
    if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise ValueError(
            f"The stages of a mixture begin at step 0 and go up; they begin at {firsts}."
        )
    for stage in stages:
        if set(stage.weights) != set(names):
            raise ValueError(
                f"A mixture weighs exactly the domains {', '.join(names)}; from step "
                f"{stage.first_step} on it weighs {', '.join(stage.weights)}."
            )


def _checked_weights(weights_K: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """[K] float64 on the simplex, normalised."""
    array_K = np.asarray(weights_K, dtype=np.float64)
    total = float(array_K.sum())
    is_simplex = array_K.ndim == 1 and array_K.size and (array_K >= 0).all()
    if not is_simplex or not abs(total - 1) <= 1e-5:
        raise ValueError(
            f"Domain weights must be >= 0 and sum to 1; they are {array_K.tolist()}, "
            f"with the sum {total:.6g}."
        )
    normalised_K: npt.NDArray[np.float64] = array_K / total
    return normalised_K


def _counts(seed: int, steps_T: Ints, weights_K: npt.NDArray[np.float64], batch_size: int) -> Ints:
    """[T, K] counts of systematic sampling; see `mixture_counts`."""
    if batch_size < 1 or steps_T.min(initial=0) < 0:
        raise ValueError(
            f"A batch needs batch_size >= 1 and step >= 0; they are {batch_size} and "
            f"{steps_T.min(initial=0)}."
        )
    cumulated_K = np.cumsum(weights_K)
    # Divided by its own end, so that the last edge is B exactly, and trailing zeros stay empty.
    edges_K = batch_size * (cumulated_K / cumulated_K[-1])
    reached_TK = np.ceil(edges_K - _offsets(seed, steps_T)[:, None])
    counts_TK: Ints = np.diff(reached_TK, axis=1, prepend=0).astype(np.int64)
    return counts_TK


# 2**64 over the golden ratio: multiples of it, modulo 2**64, spread most evenly.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _offsets(seed: int, steps_T: Ints) -> npt.NDArray[np.float64]:
    """[T] in [0, 1): u_t = frac(u_0 + t / golden ratio), in exact integer arithmetic."""
    turned_T = _round_keys(seed, "mixture")[:1] + steps_T.astype(np.uint64) * _GOLDEN
    return (turned_T >> np.uint64(11)).astype(np.float64) / 2.0**53


def _shuffled(seed: int, stream: Sequence[str], positions: Ints, num_blocks: int) -> Ints:
    """Blocks at these positions of the endless stream: every epoch a permutation of its own."""
    if num_blocks < 1:
        raise ValueError(f"{stream[-1]} has no blocks to draw from.")
    epochs, offsets = np.divmod(positions, num_blocks)
    blocks = np.empty(len(positions), dtype=np.int64)
    for epoch in np.unique(epochs):
        is_here = epochs == epoch
        keys = _round_keys(seed, *stream, int(epoch))
        blocks[is_here] = _permute(offsets[is_here], num_blocks, keys)
    return blocks


def _round_keys(*name: object) -> npt.NDArray[np.uint64]:
    """Eight independent 64-bit keys of this name: BLAKE2b, the same on every machine."""
    digest = hashlib.blake2b(json.dumps(name).encode()).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _permute(positions: Ints, size: int, keys: npt.NDArray[np.uint64]) -> Ints:
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
