"""Orders that are computed from a key and a position, so that nothing is stored or replayed.

Positions pass through a keyed permutation with random access. Resuming at any step, or asking
which rows step 4711 drew, costs the same as the next step.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

# 2**64 over the golden ratio: its multiples modulo 2**64 are as even as a sequence can be.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def round_keys(*name: object) -> Keys:
    """Eight independent 64-bit keys of this name: BLAKE2b, the same on every machine."""
    digest = hashlib.blake2b(json.dumps(name).encode()).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def golden_rotation(turns_T: Ints, *name: object) -> Keys:
    """[T] uint64: a point of the circle of 2**64, drawn by the name, after so many turns."""
    points_T: Keys = round_keys(*name)[:1] + turns_T.astype(np.uint64) * _GOLDEN
    return points_T


def spread_order(seed: int, step: int, batch_size: int) -> Ints:
    """[B] an order of the rows of a batch in which every slice holds all domains in proportion.

    Row j of the batch is the one that j turns by the golden ratio arrive at, of the rows sorted by
    domain; every batch begins at a point of its own. Consecutive turns lie evenly on the circle,
    so a slice holds its share of every domain within three rows, in batches of up to 4096.
    """
    points_B = golden_rotation(np.arange(batch_size), seed, "order", step)
    order_B: Ints = np.argsort(np.argsort(points_B))
    return order_B


def shuffled(seed: int, stream: Sequence[str], positions: Ints, num_blocks: int) -> Ints:
    """Blocks at these positions of an endless stream in which every epoch is a new permutation.

    The last part of the stream's name is the domain's.
    """
    if num_blocks < 1:
        raise ValueError(f"{stream[-1]} has no blocks to draw from.")
    epochs, offsets = np.divmod(positions, num_blocks)
    blocks = np.empty(len(positions), dtype=np.int64)
    for epoch in np.unique(epochs):
        is_in_epoch = epochs == epoch
        keys = round_keys(seed, *stream, int(epoch))
        blocks[is_in_epoch] = permute(offsets[is_in_epoch], num_blocks, keys)
    return blocks


def permute(positions: Ints, size: int, keys: Keys) -> Ints:
    """Images of the positions under a keyed permutation of range(size), which is never stored.

    A Feistel network permutes a power of four that is at least `size` and at most four times it.
    A value past the end is permuted again until it is below `size`.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (is_outside := values >= size).any():
        values[is_outside] = _feistel(values[is_outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: Keys, half_bits: int, keys: Keys) -> Keys:
    """A keyed permutation of range(4 ** half_bits), one round a key."""
    bits = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_scramble(right ^ key) & mask)
    return (left << bits) | right


def _scramble(values: Keys) -> Keys:
    """A 64-bit integer hash, every output bit depending on every input bit.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood; OOPSLA 2014), variant 13.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
