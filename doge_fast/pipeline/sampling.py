"""Which blocks step t of a stage sees: a pure function of (seed, t)."""

from collections.abc import Mapping, Sequence

import numpy as np

from doge_fast.sampling import Ints, Mixture, Stage, mixture_counts, shuffled

__all__ = ["Ints", "Mixture", "Stage", "domain_blocks", "mixture_blocks", "mixture_counts"]


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
    return shuffled(seed, ("train", domain), np.arange(first, first + size), num_blocks)


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
