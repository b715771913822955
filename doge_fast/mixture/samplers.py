"""A rank's share of a mixture's batches, as a batch sampler or an iterable dataset."""

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from doge_fast.mixture.counts import MixtureCounts
from doge_fast.mixture.permutation import spread_order
from doge_fast.mixture.rows import DomainRows, Draw
from doge_fast.mixture.workers import WorkerFile, already_begun


def batch_draws(counts: MixtureCounts, step: int) -> list[Draw]:
    """The rows of batch `step`, over all ranks, in order."""
    counts_K = counts.counts(np.array([step]))[0]
    domains_B = np.repeat(np.arange(len(counts_K)), counts_K)
    domains_B = domains_B[spread_order(counts.seed, step, counts.batch_size)]
    # A domain's positions ascend within the batch: streams are read forward.
    by_domain_B = np.argsort(domains_B, kind="stable")
    positions_B = np.empty_like(domains_B)
    positions_B[by_domain_B] = np.concatenate(
        [
            np.arange(first, first + number)
            for first, number in zip(counts.drawn(step), counts_K, strict=True)
        ]
    )
    return list(zip(domains_B.tolist(), positions_B.tolist(), strict=True))


class Progress:
    """The start of the next pass, and the batches that this process's loaders have taken.

    Args:
        num_steps: batches of the whole run; None: endless.
    """

    def __init__(self, num_steps: int | None) -> None:
        self.num_steps = num_steps
        self.num_rewinds = 0
        self.rewind(0)

    def rewind(self, step: int) -> None:
        """Let the next pass begin at this step."""
        self.start = step
        # The first batch that no loader has taken.
        self.end = step
        # Batches that samplers have yielded, minus batches read in this process.
        self.num_ahead = 0
        # A sampler begins another pass only if this has changed.
        self.num_rewinds += 1

    def steps(self) -> Iterable[int]:
        """The steps of the next pass."""
        return count(self.start) if self.num_steps is None else range(self.start, self.num_steps)

    def num_batches(self) -> int:
        """Batches of the next pass.

        Raises:
            TypeError: the pass is endless.
        """
        if self.num_steps is None:
            raise TypeError("a mixture without steps=... is endless and has no length.")
        return max(0, self.num_steps - self.start)

    def take(self, step: int) -> None:
        """Note that a loader takes this batch; new weights apply to later ones only."""
        self.end = max(self.end, step + 1)


class _Share:
    """A rank's share of the batches.

    Raises:
        ValueError: `rank` is out of range, or `world_size` does not divide the batch size.
    """

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
        self.world_size = world_size
        self.batch_size = counts.batch_size // world_size
        self._last_pass = 0

    def _begin(self, end: int) -> Iterable[int]:
        """The steps of a new pass; RuntimeError without a seek since the last one, to `end`."""
        if self._last_pass == self.progress.num_rewinds:
            raise RuntimeError(already_begun(end))
        self._last_pass = self.progress.num_rewinds
        return self.progress.steps()

    def _draws(self, step: int) -> list[Draw]:
        first = self.rank * self.batch_size
        return batch_draws(self.counts, step)[first : first + self.batch_size]


class MixtureBatches(_Share, Sampler[list[Draw]]):
    """Batches of one rank, for `DataLoader(mixture, batch_sampler=...)`.

    Made by `DomainMixture.batches`.
    """

    # Read by accelerate: no batch is shorter than the others.
    drop_last = True

    def __iter__(self) -> Iterator[list[Draw]]:
        """The draws of every batch from the mixture's start on."""
        for step in self._begin(self.progress.end):
            self.progress.take(step)
            self.progress.num_ahead += 1
            yield self._draws(step)

    def __len__(self) -> int:
        """Batches of the next pass."""
        return self.progress.num_batches()


class MixtureStream(_Share, IterableDataset[Any]):
    """Rows of one rank, batch after batch; made by `DomainMixture.stream`.

    The loader's batch_size must be this `batch_size`. Each of W workers makes every W-th batch; the
    loader asks them in turn, so the batches arrive in order.
    """

    def __init__(
        self,
        counts: MixtureCounts,
        progress: Progress,
        rows: DomainRows,
        rank: int,
        world_size: int,
    ) -> None:
        super().__init__(counts, progress, rank, world_size)
        self.rows = rows
        self.worker_file = WorkerFile(progress.start)

    def __iter__(self) -> Iterator[Any]:
        """Rows of the batches from the mixture's start on."""
        worker = get_worker_info()
        # The file counts the batches that workers have taken.
        steps = self._begin(max(self.progress.end, self.worker_file.progress().end))
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for step in islice(steps, first, None, stride):
            if worker is None:
                self.progress.take(step)
            else:
                # The workers of a pass have consecutive seeds.
                pass_seed = worker.seed - worker.id
                for first_step, weights in self.worker_file.take(
                    step, num_workers=worker.num_workers, pass_seed=pass_seed
                ):
                    self.counts.set_weights(first_step, np.array(weights))
            yield from self.rows.read(self._draws(step), self.counts.seed)

    def __len__(self) -> int:
        """Rows of the next pass."""
        return self.progress.num_batches() * self.batch_size
