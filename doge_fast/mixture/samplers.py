"""Which rows each batch has, and which batches a rank's loader takes."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count

import numpy as np
from torch.utils.data import Sampler

from doge_fast.mixture.counts import MixtureCounts
from doge_fast.mixture.permutation import spread_order

Draw = tuple[int, int]
"""(index of the domain, position in the endless sequence of its rows)"""


def batch_draws(counts: MixtureCounts, step: int) -> list[Draw]:
    """The rows of batch `step`, over all ranks, in order."""
    counts_K = counts.counts(np.array([step]))[0]
    domains_B = np.repeat(np.arange(len(counts_K)), counts_K)
    domains_B = domains_B[spread_order(counts.seed, step, counts.batch_size)]
    # A domain's positions ascend within the batch.
    by_domain_B = np.argsort(domains_B, kind="stable")
    positions_B = np.empty_like(domains_B)
    first_K = counts.drawn(step)
    positions_B[by_domain_B] = np.concatenate([*map(np.arange, first_K, first_K + counts_K)])
    return list(zip(domains_B.tolist(), positions_B.tolist(), strict=True))


class Progress:
    """The pass under way: where it begins, and which batches this process's loaders have taken.

    `num_steps` is the number of batches of the whole run; None: endless.
    """

    def __init__(self, num_steps: int | None) -> None:
        self.num_steps = num_steps
        self.has_ever_begun = False
        """Whether any pass has begun, before a `rewind` too."""
        self.rewind(0)

    def rewind(self, step: int) -> None:
        """Let the next pass begin at this step."""
        self.first_step = self.next_step = step
        self.has_begun = False
        # Batches that samplers have yielded, minus batches read in this process.
        self.num_ahead = 0

    def begin(self) -> Iterable[int]:
        """Begin a pass and return its steps; RuntimeError without a `rewind` since the last."""
        if self.has_begun:
            raise RuntimeError(
                "There was a pass over this mixture already. Its loader has taken the batches up "
                f"to step {self.next_step}, and the loop may have used fewer. Call "
                "mixture.seek(step) with the step at which another pass begins."
            )
        self.has_begun = self.has_ever_begun = True
        if self.num_steps is None:
            return count(self.first_step)
        return range(self.first_step, self.num_steps)

    def take(self, step: int) -> None:
        """Note that a loader takes batch `step`: new weights apply to later ones only."""
        self.next_step = step + 1
        self.num_ahead += 1


class MixtureBatches(Sampler[list[Draw]]):
    """Batches of one rank for a loader; made by `DomainMixture.batches`.

    Raises:
        ValueError: `rank` is out of range, or `world_size` does not divide the batch size.
    """

    # Read by accelerate: no batch is shorter than the others.
    drop_last = True

    def __init__(
        self, counts: MixtureCounts, progress: Progress, rank: int, world_size: int
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"A rank must be in [0, world_size); got {rank} of {world_size}.")
        if counts.batch_size % world_size:
            raise ValueError(
                f"batch_size, the rows of all ranks, must be a multiple of world_size; got "
                f"{counts.batch_size} and {world_size}."
            )
        self.counts = counts
        self.progress = progress
        self.rank = rank
        self.batch_size = counts.batch_size // world_size

    def __iter__(self) -> Iterator[list[Draw]]:
        """This rank's draws of every batch of the pass."""
        first = self.rank * self.batch_size
        for step in self.progress.begin():
            self.progress.take(step)
            yield batch_draws(self.counts, step)[first : first + self.batch_size]

    # torchdata's StatefulDataLoader saves and restores the sampler by these. Without them it skips
    # the batches that it has read, beginning where the mixture's own state begins.

    def state_dict(self) -> dict[str, int]:
        """The first batch that the loader has not taken."""
        return {"step": self.progress.next_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next pass begin at that batch."""
        self.progress.rewind(state["step"])

    def __len__(self) -> int:
        """Batches of the next pass; TypeError if it is endless."""
        if self.progress.num_steps is None:
            raise TypeError("a mixture without steps=... is endless and has no length.")
        return max(0, self.progress.num_steps - self.progress.first_step)
