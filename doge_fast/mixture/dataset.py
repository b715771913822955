"""DomainMixture: batches drawn from named domains at weights that may change while it runs.

Batch t is a pure function of the seed, t, and the weights set for steps up to t. So any number of
workers and ranks sees the same batches, and a run that stopped goes on to the bit.
"""

import math
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from torch.utils.data import Dataset, get_worker_info

from doge_fast.mixture.counts import MixtureCounts, Phase
from doge_fast.mixture.rows import DomainRows, Draw
from doge_fast.mixture.samplers import MixtureBatches, MixtureStream, Progress, batch_draws
from doge_fast.mixture.state import restore, state_of
from doge_fast.mixture.workers import WorkerFile


class DomainMixture(Dataset[Any]):
    """Rows of named domains, drawn at weights that can be set while they are drawn.

    Every batch holds the floor or the ceiling of batch_size * weight rows of each domain. In
    expectation over seeds it is that product, as long as weights stand still or move slowly. What
    was drawn so far stays within five rows of what was asked for, however the weights move
    (`doge_fast.mixture.counts.MixtureCounts`). A domain with rows by number shows each row once
    an epoch, every epoch in an order of its own; a stream is read in its order and begun again at
    its end. Rows of a domain lie evenly through the batch, so that the parts of ranks and of
    micro-batches are mixed like the whole.

    It is a map-style dataset for a loader with one of its samplers:

        loader = DataLoader(mixture, batch_sampler=mixture.batches(), num_workers=4)

    `stream()` is an iterable dataset for loops that take no sampler, such as Hugging Face's
    Trainer. Give Trainer `max_steps`; to resume, load the state and set `ignore_data_skip`. Trainer
    then does not restore random generators, so a model with dropout draws other masks. Under
    accelerate, which shares a sampler out among processes itself, leave `rank` and `world_size`
    alone; `batch_size` is then that of one process, or with `split_batches` that of all.

    Loaders prefetch: they take num_workers * prefetch_factor batches ahead of the loop (2 per
    worker by default), accelerate one more. New weights hold from the first batch that no
    loader has taken, or from the step that the loop names, whatever the number of workers.

    Every worker reads all rows of a stream and keeps those of its batches. A loader with workers
    therefore refuses an `IterableDataset` of torch, which may divide its rows among the workers;
    it takes iterables of other classes, and the streams of Hugging Face's datasets.

    Args:
        domains: {name: rows}. A list, a `torch.utils.data.Dataset`, a `datasets.Dataset`, or a
            stream that can be read repeatedly (an `IterableDataset`, or any iterable).
        weights: {name: weight >= 0}, sum 1; None: all the same. Zero is allowed.
        batch_size: > 0; rows of a batch, over all ranks.
        seed: decides the order of rows and the rounding of weights.
        steps: batches of the whole run; None: endless.
        domain_key: rows, which must be dicts, get the number of their domain in `names` under
            this key.

    Raises:
        ValueError: a domain cannot be read, the weights are not on the simplex or are of other
            domains, a domain without rows has a weight, or a number is out of range.

    Example:
        >>> mixture = DomainMixture(
        ...     {"web": range(100, 200), "code": range(10)},
        ...     weights={"web": 0.75, "code": 0.25},
        ...     batch_size=8,
        ... )
        >>> mixture.counts(step=0)
        {'web': 6, 'code': 2}
        >>> mixture.set_weights({"web": 0.5, "code": 0.5}, from_step=100)
        100
        >>> mixture.drawn(step=200)
        {'web': 1000, 'code': 600}
    """

    def __init__(
        self,
        domains: Mapping[str, Any],
        *,
        weights: Mapping[str, float] | None = None,
        batch_size: int,
        seed: int = 0,
        steps: int | None = None,
        domain_key: str | None = None,
    ) -> None:
        if not domains:
            raise ValueError("A mixture needs at least one domain; got none.")
        if batch_size < 1 or (steps is not None and steps < 1):
            raise ValueError(
                f"batch_size and steps must be at least 1; got {batch_size} and {steps}."
            )
        self.names = tuple(domains)
        self.batch_size = batch_size
        self._rows = DomainRows(domains, domain_key)
        if weights is None:
            weights = dict.fromkeys(domains, 1 / len(domains))
        self._counts = MixtureCounts(seed, [Phase(0, weights)], batch_size, self.names)
        self._rows.check_weights(self._counts.weights_PK[0].tolist())
        self._progress = Progress(steps)
        self._streams: weakref.WeakSet[MixtureStream] = weakref.WeakSet()

    # Rows.

    @property
    def sizes(self) -> dict[str, int | None]:
        """Rows of each domain; None where it is a stream."""
        return self._rows.sizes

    @property
    def steps(self) -> int | None:
        """Batches of the whole run; None: endless."""
        return self._progress.num_steps

    def __len__(self) -> int:
        raise TypeError(
            "a mixture is not read by row numbers, where its weights would decide nothing. Pass "
            "batch_sampler=mixture.batches() to the DataLoader, or mixture.stream() where no "
            "sampler can be passed, as to Trainer."
        )

    def __getitem__(self, draw: Draw) -> Any:
        """The row of a draw."""
        return self._rows.read([draw], self.seed)[0]

    def __getitems__(self, draws: Sequence[Draw]) -> list[Any]:
        """The rows of a batch; each domain is read once."""
        self._progress.num_ahead = max(0, self._progress.num_ahead - 1)
        return self._rows.read(draws, self.seed)

    # Weights.

    @property
    def step(self) -> int:
        """The first batch that no loader has taken; new weights hold from it on."""
        ends = [stream.worker_file.progress().end for stream in self._streams]
        return max([self._progress.end, *ends])

    @property
    def seed(self) -> int:
        """Of the order of rows and of the rounding."""
        return self._counts.seed

    @property
    def weights(self) -> dict[str, float]:
        """The weights of batch `step`."""
        return self._named(self._counts.weights(np.array([self.step]))[0])

    @property
    def history(self) -> list[tuple[int, dict[str, float]]]:
        """Every (first step, weights) so far, and those planned."""
        changes = zip(self._counts.first_steps, self._counts.weights_PK, strict=True)
        return [(first_step, self._named(weights_K)) for first_step, weights_K in changes]

    def set_weights(self, weights: Mapping[str, float], *, from_step: int | None = None) -> int:
        """Draw at these weights from a step on, until the next change.

        With several ranks, call it on each with the same weights. A run repeats itself with another
        number of workers only if its changes name their step. Streams in workers on several ranks
        require that: a rank does not know how far the workers of the others are.

        Args:
            weights: {name: weight >= 0} of all domains, sum 1: for example `DoGEOptimizer.weights`.
            from_step: the first batch that is drawn at them, among those that no loader has taken;
                None: the first of those, which is the property `step`.

        Returns:
            The first batch that is drawn at them.

        Raises:
            ValueError: weights of other domains or not on the simplex, a domain without rows has a
                weight, batch `from_step` has been taken, or it must be named.
        """
        with ExitStack() as locks:
            # The workers of all streams wait until they can know the change.
            files = [
                (stream.worker_file, locks.enter_context(stream.worker_file.locked()))
                for stream in self._streams
            ]
            workers = [shared.progress_in(file) for shared, file in files]
            earliest = max([self._progress.end, *(progress.end for progress in workers)])
            if from_step is None and any(progress.num_workers for progress in workers):
                self._check_is_one_rank(earliest)
            first_step = earliest if from_step is None else from_step
            if first_step < earliest:
                raise ValueError(
                    f"New weights can apply from step {earliest} on; got from_step={from_step}. "
                    "Loaders take batches ahead of the loop: pass a later step, or let them take "
                    "fewer (num_workers * prefetch_factor)."
                )
            weights_K = self._counts.ordered(weights, first_step)
            self._rows.check_weights(weights_K.tolist())
            self._counts.set_weights(first_step, weights_K)
            for shared, file in files:
                shared.post(file, (first_step, weights_K.tolist()))
        return first_step

    def _check_is_one_rank(self, earliest: int) -> None:
        if any(stream.world_size > 1 for stream in self._streams):
            raise ValueError(
                "The workers of a stream take a different number of batches ahead on every rank. "
                "So that all ranks change at the same step, set_weights needs from_step, later "
                f"than the batches that their loaders have taken (here: {earliest})."
            )

    # What is drawn.

    def counts(self, step: int) -> dict[str, int]:
        """Rows of each domain in batch `step`."""
        return self._named(self._counts.counts(np.array([step]))[0])

    def drawn(self, step: int | None = None) -> dict[str, int]:
        """Rows of each domain in all batches before `step`, over all ranks.

        None: before the property `step`; loaders may have taken batches ahead of the loop.
        """
        return self._named(self._counts.drawn(self.step if step is None else step))

    def shares(self, step: int | None = None) -> dict[str, float]:
        """Share of each domain in what was `drawn`; zeros before the first batch."""
        drawn = self.drawn(step)
        total = max(1, sum(drawn.values()))
        return {name: rows / total for name, rows in drawn.items()}

    def epochs(self, step: int | None = None) -> dict[str, float]:
        """How often each domain was passed over by what was `drawn`; NaN where it is a stream."""
        drawn = self.drawn(step)
        return {
            name: math.nan if size is None else drawn[name] / max(1, size)
            for name, size in self.sizes.items()
        }

    def draws(self, step: int) -> list[Draw]:
        """What batch `step` holds, over all ranks, in order: dataset[draw] is the row."""
        return batch_draws(self._counts, step)

    def _named(self, values_K: Any) -> dict[str, Any]:
        return dict(zip(self.names, values_K.tolist(), strict=True))

    # Passes.

    def batches(self, rank: int = 0, world_size: int = 1) -> MixtureBatches:
        """The sampler of this rank's share of the batches, for `DataLoader(batch_sampler=...)`.

        Args:
            rank: in [0, world_size); of `torch.distributed.get_rank()`, say.
            world_size: processes that share each batch, in equal parts.

        Raises:
            ValueError: no such rank, or `batch_size` is not a multiple of `world_size`.
        """
        return MixtureBatches(self._counts, self._progress, rank, world_size)

    def stream(self, rank: int = 0, world_size: int = 1) -> MixtureStream:
        """This rank's share of the rows, batch after batch, as an iterable dataset.

        For a `DataLoader` whose batch_size is that of the stream; workers read new weights
        from a small temporary file.

        Args:
            rank: in [0, world_size); of `torch.distributed.get_rank()`, say.
            world_size: processes that share each batch, in equal parts.

        Raises:
            ValueError: no such rank, or `batch_size` is not a multiple of `world_size`.
        """
        stream = MixtureStream(self._counts, self._progress, self._rows, rank, world_size)
        self._streams.add(stream)
        return stream

    def seek(self, step: int) -> None:
        """Let the next pass over a sampler or stream begin at this step.

        Needed after a pass that was broken off: its loader may have taken more batches than the
        loop has used.
        """
        if step < 0:
            raise ValueError(f"A pass begins at step >= 0; got {step}.")
        self._progress.rewind(step)
        for stream in self._streams:
            stream.worker_file = WorkerFile(step)

    # State.

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Everything that decides the batches from `step` on, in the types of JSON.

        It is the same on every rank, and the whole state: do not also load that of a loader which
        keeps one (torchdata's StatefulDataLoader), or batches are skipped twice.

        Args:
            step: batches that the loop has finished. None: all that were taken, which is the same
                only where no loader takes batches ahead; accelerate's takes one.

        Returns:
            "version", "domains", "sizes", "seed", "batch_size", "step", "history" ([first step,
            weights] of every change, those planned included), "drawn" and "surplus" (rows drawn
            before the step, and 2**32 times their difference to the rows asked for).

        Raises:
            ValueError: `step` is None and workers have taken batches ahead.
        """
        if step is None:
            self._check_none_ahead()
            step = self.step
        return state_of(self._counts, self.sizes, step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken: the next pass begins at its step, with its seed.

        The number of workers and ranks may be another one.

        Raises:
            ValueError: it was not written by `state_dict`, by a later version, or for other
                domains, sizes or batches; nothing has been changed.
        """
        restore(self._counts, self.sizes, state)
        self.seek(state["step"])

    def _check_none_ahead(self) -> None:
        has_workers = any(stream.worker_file.progress().num_workers for stream in self._streams)
        # Loaders that keep states of their own ask a worker's copy, which gives no batches.
        is_copy = get_worker_info() is not None
        if not is_copy and (has_workers or self._progress.num_ahead):
            raise ValueError(
                f"Loaders have taken the batches up to step {self.step}, of which the loop may "
                "have finished fewer: call state_dict(step=...)."
            )

    def __getstate__(self) -> dict[str, Any]:
        """What a worker needs: all but the streams."""
        return {key: value for key, value in self.__dict__.items() if key != "_streams"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._streams = weakref.WeakSet()
