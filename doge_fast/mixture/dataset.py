"""DomainMixture: batches drawn from named domains at weights that may change while it runs.

Batch t is a pure function of the seed, t, and the weights set for steps up to t. So the batches do
not depend on the number of workers and ranks, and a stopped run resumes bitwise.
"""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from doge_fast.mixture.counts import MixtureCounts, Phase
from doge_fast.mixture.permutation import shuffled
from doge_fast.mixture.samplers import Draw, MixtureBatches, Progress, batch_draws

STATE_VERSION = 2


class DomainMixture(Dataset[Any]):
    """Rows of named domains, drawn at weights that can change during the run.

    Every batch holds the floor or the ceiling of batch_size * weight rows of each domain; the
    expectation over seeds is that product (`doge_fast.mixture.counts.MixtureCounts`). A domain is
    shuffled anew in every epoch and gives each row once per epoch. The rows of a domain are spread
    evenly over the batch, so the slices for ranks and micro-batches have the mixture of the whole.

    It is a map-style dataset for a loader with one of its samplers::

        loader = DataLoader(mixture, batch_sampler=mixture.batches(), num_workers=4)

    docs/how-to/changing-mixture.md has loaders of Trainer and accelerate. Loaders prefetch: they
    take num_workers * prefetch_factor batches ahead of the loop (2 per worker by default),
    accelerate one more. New weights apply from the first batch that no loader has taken, or from a
    later step that the loop names.

    Args:
        domains: {name: rows}. Rows are indexable: a list, a map-style `torch.utils.data.Dataset`
            or a `datasets.Dataset`.
        weights: {name: weight >= 0}, sum 1; None: uniform.
        batch_size: > 0; rows of a batch, over all ranks.
        seed: decides the order of rows and the rounding of weights.
        steps: batches of the whole run; None: endless.
        domain_key: add the index of the row's domain in `names` to each row under this key;
            rows must then be dicts.

    Raises:
        ValueError: the weights are not on the simplex, or `batch_size` is not positive.

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
        self.names = tuple(domains)
        # index(): JSON takes no integers of numpy, and int() would round.
        self.batch_size = index(batch_size)
        self.sizes = {name: len(rows) for name, rows in domains.items()}
        """Rows of each domain."""
        self._domains = list(domains.values())
        self._domain_key = domain_key
        if weights is None:
            weights = dict.fromkeys(domains, 1 / len(domains))
        self._counts = MixtureCounts(index(seed), [Phase(0, weights)], self.batch_size, self.names)
        self._progress = Progress(steps)

    # Rows. A mixture has no length: samplers of row numbers would ignore its weights.

    def __getitem__(self, draw: Draw) -> Any:
        """The row of a draw."""
        return self._read([draw])[0]

    def __getitems__(self, draws: Sequence[Draw]) -> list[Any]:
        """The rows of a batch, in one read per domain."""
        self._progress.num_ahead = max(0, self._progress.num_ahead - 1)
        return self._read(draws)

    def _read(self, draws: Sequence[Draw]) -> list[Any]:
        batch: list[Any] = [None] * len(draws)
        places_of: dict[int, list[int]] = {}
        for place, (domain, _) in enumerate(draws):
            places_of.setdefault(domain, []).append(place)
        for domain, places in places_of.items():
            name, rows, key = self.names[domain], self._domains[domain], self._domain_key
            positions = np.array([draws[place][1] for place in places])
            # The name of the pipeline's stream: one seed gives both the same order.
            numbers = shuffled(self.seed, ("train", name), positions, self.sizes[name]).tolist()
            if hasattr(rows, "__getitems__"):
                # One call for all rows.
                drawn = rows.__getitems__(numbers)
            else:
                drawn = [rows[number] for number in numbers]
            for place, row in zip(places, drawn, strict=True):
                batch[place] = row if key is None else {**row, key: domain}
        return batch

    # Weights.

    @property
    def step(self) -> int:
        """The first batch that no loader has taken; new weights apply from it on."""
        return self._progress.next_step

    @property
    def seed(self) -> int:
        """The seed of the order of rows and of the rounding."""
        return self._counts.seed

    @property
    def weights(self) -> dict[str, float]:
        """The weights of batch `step`."""
        return self._named(self._counts.weights(np.array([self.step]))[0])

    @property
    def history(self) -> list[tuple[int, dict[str, float]]]:
        """All changes of weights, past and planned, as (first step, weights)."""
        changes = zip(self._counts.first_steps, self._counts.weights_QK, strict=True)
        return [(first_step, self._named(weights_K)) for first_step, weights_K in changes]

    def set_weights(self, weights: Mapping[str, float], *, from_step: int | None = None) -> int:
        """Draw at these weights from a step on, until the next change; returns the first such step.

        With several ranks, call it on each with the same weights. Pass `from_step` to get the same
        run with another number of workers.

        Args:
            weights: {name: weight >= 0} of all domains, sum 1: for example `DoGEOptimizer.weights`.
            from_step: the first batch with these weights, at least `step`; None: `step`.

        Raises:
            ValueError: the weights are not on the simplex, or a loader has taken batch `from_step`.
        """
        first_step = self.step if from_step is None else index(from_step)
        if first_step < self.step:
            raise ValueError(
                f"New weights can apply from step {self.step} on; got from_step={from_step}. "
                "Loaders take batches ahead of the loop: pass a later step, or let them take "
                "fewer (num_workers * prefetch_factor)."
            )
        self._counts.set_weights(first_step, self._counts.ordered(weights))
        return first_step

    # What is drawn.

    def counts(self, step: int) -> dict[str, int]:
        """Rows of each domain in batch `step`."""
        return self._named(self._counts.counts(np.array([step]))[0])

    def drawn(self, step: int | None = None) -> dict[str, int]:
        """Rows of each domain in all batches before `step`, over all ranks.

        None: the property `step`, which counts batches that loaders have taken ahead of the loop.
        """
        return self._named(self._counts.drawn(self.step if step is None else step))

    def draws(self, step: int) -> list[Draw]:
        """The draws of batch `step` over all ranks, in order; mixture[draw] is the row."""
        return batch_draws(self._counts, step)

    def _named(self, values_K: Any) -> dict[str, Any]:
        return dict(zip(self.names, values_K.tolist(), strict=True))

    # Passes.

    def batches(self, rank: int = 0, world_size: int = 1) -> MixtureBatches:
        """The sampler of this rank's share of the batches, for `DataLoader(batch_sampler=...)`.

        Accelerate divides a sampler among processes itself: leave both at their defaults there.

        Args:
            rank: in [0, world_size).
            world_size: processes that share each batch, in equal parts.

        Raises:
            ValueError: no such rank, or `batch_size` is not a multiple of `world_size`.
        """
        return MixtureBatches(self._counts, self._progress, rank, world_size)

    def seek(self, step: int) -> None:
        """Let the next pass over a sampler begin at this step.

        Required after an interrupted pass, whose loader may have taken more batches than the loop
        has used.
        """
        self._progress.rewind(step)

    # State.

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Everything that decides the batches from `step` on, in the types of JSON.

        It is the same on every rank and needs no loader's state. Where accelerate divides the
        sampler, loading that of torchdata's StatefulDataLoader as well would skip batches twice.

        Args:
            step: the number of batches that the loop has finished. None: the number that loaders
                have taken, which is larger if a loader prefetches (accelerate's takes one ahead).

        Returns:
            "version", "domains", "sizes", "seed", "batch_size", "step", "history" ([first step,
            weights] of all changes, past and planned) and "drawn" (rows before `step`).

        Raises:
            ValueError: `step` is None and workers have taken batches ahead.
        """
        if step is None:
            if self._progress.num_ahead:
                raise ValueError(
                    f"Loaders have taken {self.step} batches, and the loop may have finished "
                    "fewer. Call state_dict(step=...) with the number that it has finished."
                )
            step = self.step
        step = index(step)
        return {
            "version": STATE_VERSION,
            "domains": list(self.names),
            "sizes": list(self.sizes.values()),
            "seed": self.seed,
            "batch_size": self.batch_size,
            "step": step,
            "history": [[first_step, [*weights.values()]] for first_step, weights in self.history],
            "drawn": self._counts.drawn(step).tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: the next pass begins at its step, with its seed.

        The numbers of workers and ranks may differ.

        Raises:
            ValueError: the state is from another version, of other domains, sizes or batch size, or
                of another seed than a pass that has begun; nothing is changed then.
        """
        # Another mixture could not resume bitwise.
        expected = {
            "version": STATE_VERSION,
            "domains": list(self.names),
            "sizes": list(self.sizes.values()),
            "batch_size": self.batch_size,
        }
        if self._progress.has_ever_begun:
            # Workers that live on have copies of the mixture.
            expected["seed"] = self.seed
        for key, value in expected.items():
            if state[key] != value:
                raise ValueError(
                    f"The state is of a mixture of {key} {state[key]}; this one has {value}."
                )
        first_steps, weights_QK = zip(*state["history"], strict=True)
        drawn_K = np.array(state["drawn"], dtype=np.int64)
        step, seed = index(state["step"]), index(state["seed"])
        if drawn_K.sum() != step * self.batch_size:
            raise ValueError(
                f"The state has drawn {drawn_K.tolist()} rows in {step} batches of "
                f"{self.batch_size}; load what state_dict() returned."
            )
        self._counts.restart(seed, first_steps, weights_QK, step, drawn_K)
        self.seek(step)
