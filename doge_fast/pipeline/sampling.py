"""Which blocks of a domain a step of a run holds: a pure function of the seed and the step."""

from collections.abc import Mapping, Sequence

import numpy as np

from doge_fast.mixture.counts import BatchCounts, Phase
from doge_fast.mixture.permutation import Ints, shuffled


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


class BlockSampler(BatchCounts):
    """Which blocks of each domain the batches of stage two hold.

    `mixture_counts` says how many. Which ones follows from how many blocks of the domain all
    earlier batches held, an arithmetic sum: no data is replayed.

    Args:
        seed: of the run.
        weights: {domain: weight}, or a curriculum: phases in order, the first from step 0.
        batch_size: > 0; blocks in a batch, over all domains.
        num_blocks: {domain: blocks it has}, in the order of the batch.
        stream: runs of one seed draw the same order from streams of the same name.

    Raises:
        ValueError: the domains differ, weights are not on the simplex, or phases are not in
            order.
    """

    def __init__(
        self,
        seed: int,
        weights: Mapping[str, float] | Sequence[Phase],
        batch_size: int,
        num_blocks: Mapping[str, int],
        stream: str = "train",
    ) -> None:
        phases = [Phase(0, weights)] if isinstance(weights, Mapping) else list(weights)
        super().__init__(seed, phases, batch_size, list(num_blocks))
        self.stream = stream
        self.num_blocks = dict(num_blocks)

    def blocks(self, step: int) -> dict[str, Ints]:
        """{domain: int64 indices} of batch `step`, in the order of `num_blocks`; some empty."""
        counts_K = self.counts(np.array([step]))[0]
        counted = zip(self.num_blocks.items(), self.drawn(step), counts_K, strict=True)
        return {
            name: shuffled(self.seed, (self.stream, name), np.arange(first, first + count), size)
            for (name, size), first, count in counted
        }
