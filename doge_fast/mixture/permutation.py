"""Orders computed from a key and a position, so that nothing is stored or replayed.

A keyed permutation maps positions with random access: every step costs the same, in any order.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

# 2**64 over the golden ratio: its multiples modulo 2**64 are spread most evenly.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def round_keys(*name: object) -> Keys:
    """Eight 64-bit keys from BLAKE2b of the name, the same on every machine."""
    digest = hashlib.blake2b(json.dumps(name).encode()).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def golden_rotation(turns_T: Ints, *name: object) -> Keys:
    """[T] uint64: (start + turns * 2**64 / golden ratio) mod 2**64; `name` decides the start."""
    return round_keys(*name)[:1] + turns_T.astype(np.uint64) * _GOLDEN


def spread_order(seed: int, step: int, batch_size: int) -> Ints:
    """[B] an order of a batch's rows such that every slice holds all domains in proportion.

    Entry j is the rank of point j of a golden rotation, an index into the rows sorted by domain.
    A slice has the right number of rows of every domain within three, in batches of up to 4096.
    """
    points_B = golden_rotation(np.arange(batch_size), seed, "order", step)
    return np.argsort(np.argsort(points_B))


def shuffled(seed: int, stream: Sequence[str], positions: Ints, num_blocks: int) -> Ints:
    """Blocks at these positions of an endless stream; every epoch is a new permutation.

    `stream` names the stream; its last part is the domain.
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
    """A keyed permutation of range(4 ** half_bits), with one round per key."""
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
