"""DomainMixture: batches drawn from named domains at weights that may change while it runs.

Batch t is a pure function of the seed, t, and the weights set for steps up to t. So any number of
workers and ranks sees the same batches, and a run that stopped goes on to the bit.
"""

import bisect
import functools
import itertools
import math
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from doge_fast.changes import Changes, Taken, already_begun
from doge_fast.rows import SizedRows, rows_of
from doge_fast.sampling import Stage, SteeredCounts, Tally, checked_weights, spread_order

STATE_VERSION = 1

Draw = tuple[int, int]
"""A domain by its number, and a position in the endless sequence of its rows."""


class DomainMixture(Dataset[Any]):
    """Rows of named domains, drawn at weights that can be set while they are drawn.

    Every batch holds the floor or the ceiling of batch_size * weight rows of each domain. In
    expectation over seeds it is that product, as long as weights stand still or move slowly. And
    what was drawn so far stays within five rows of what was asked for, however they move
    (`doge_fast.sampling.SteeredCounts`). A domain with rows by number shows each once an epoch,
    every epoch in an order of its own; a stream is read in its order and begun again at its end.
    Rows of a domain are spread evenly through the batch, so that the parts of ranks and of
    micro-batches are mixed like the whole.

    It is a map-style dataset for a loader with one of its samplers:

        loader = DataLoader(mixture, batch_sampler=mixture.batches(), num_workers=4)

    and `stream()` is an iterable one for loops that take no sampler, such as Hugging Face's
    Trainer (with `max_steps`; to resume, load the state and set `ignore_data_skip`, with which
    Trainer does not restore random generators: a model with dropout draws other masks then). Under
    accelerate, which shares a sampler out among processes itself, leave `rank` and `world_size`
    alone; `batch_size` is then that of one process, or with `split_batches` that of all.

    Loaders take batches ahead of the loop: num_workers * prefetch_factor of them (2 per worker
    unless told otherwise), accelerate one more. New weights hold from the first batch that nobody
    has taken, which is the next one where nothing is taken ahead, or from the step that the loop
    names, whatever the number of workers.

    Args:
        domains: {name: rows}. A list, a `torch.utils.data.Dataset`, a `datasets.Dataset`, or a
            stream that can be read again and again (`IterableDataset`).
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
        self.steps = steps
        self.domain_key = domain_key
        self._rows = [rows_of(name, rows) for name, rows in domains.items()]
        start = weights if weights is not None else dict.fromkeys(domains, 1 / len(domains))
        self._counts = SteeredCounts(seed, [Stage(0, _floats(start))], batch_size, self.names)
        self._check_has_rows(self._counts.weights_SK[0].tolist())
        self._streams: weakref.WeakSet[MixtureStream] = weakref.WeakSet()
        self._has_warned = False
        self._start_from(0)

    def _start_from(self, step: int) -> None:
        self._start = step
        self._handed_out = step
        # Batches that samplers gave to loaders, and that were fetched in this process.
        self._num_given = 0
        self._num_fetched = 0
        # Who began a pass before this moment may begin another.
        self._seek = object()
        for stream in self._streams:
            stream.changes.rewind(step)

    # Rows.

    @property
    def sizes(self) -> dict[str, int | None]:
        """Rows of each domain; None where it is a stream."""
        return {rows.name: rows.size for rows in self._rows}

    def __len__(self) -> int:
        """Rows of all domains, one after another."""
        return self._ends[-1]

    def __getitem__(self, index: int | Draw) -> Any:
        """A row by its number among the rows of all domains, or what a sampler asks for."""
        return self._fetch([index])[0]

    def __getitems__(self, indices: Sequence[int | Draw]) -> list[Any]:
        """The rows of a batch; each domain is read once.

        Warns:
            UserWarning: once, where they come by their numbers, as from a loader with a sampler of
                its own: the weights then decide nothing.
        """
        self._num_fetched += 1
        if not self._has_warned and not all(isinstance(index, tuple) for index in indices):
            self._has_warned = True
            warnings.warn(
                "A loader reads this mixture by row numbers, all rows alike, and its weights "
                "decide nothing. Pass batch_sampler=mixture.batches() to the DataLoader, or "
                "mixture.stream() where no sampler can be passed, as to Trainer.",
                stacklevel=2,
            )
        return self._fetch(indices)

    def _fetch(self, indices: Sequence[int | Draw]) -> list[Any]:
        found: list[Any] = [None] * len(indices)
        asked: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            is_draw = isinstance(index, tuple)
            domain, position = index if isinstance(index, tuple) else self._numbered(index)
            asked.setdefault((domain, is_draw), []).append((position, place))
        for (domain, is_draw), wanted in asked.items():
            wanted.sort()
            positions = [position for position, _ in wanted]
            rows = self._rows[domain]
            if is_draw:
                read = rows.at(positions, self._counts.seed)
            else:
                assert isinstance(rows, SizedRows)
                read = rows.numbered(positions)
            for (_, place), row in zip(wanted, read, strict=True):
                found[place] = self._labelled(row, domain)
        return found

    def _labelled(self, row: Any, domain: int) -> Any:
        if self.domain_key is None:
            return row
        if not isinstance(row, Mapping):
            raise ValueError(
                f"domain_key={self.domain_key!r} needs rows that are dicts; {self.names[domain]} "
                f"has rows of type {type(row).__name__}."
            )
        return {**row, self.domain_key: domain}

    def _numbered(self, index: int) -> Draw:
        """Domain and row of a number among the rows of all domains."""
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"a mixture of {len(self)} rows has no row {index}.")
        domain = bisect.bisect_right(self._ends, number)
        return domain, number - (self._ends[domain - 1] if domain else 0)

    @functools.cached_property
    def _ends(self) -> list[int]:
        """Rows in the domains up to and with each."""
        sizes = [rows.size for rows in self._rows if rows.size is not None]
        if len(sizes) < len(self._rows):
            streams = [rows.name for rows in self._rows if rows.size is None]
            raise TypeError(
                f"a mixture with streams has no length, and no rows by number; {', '.join(streams)}"
                " cannot be counted. Draw batches with batches() or stream()."
            )
        return list(itertools.accumulate(sizes))

    # Weights.

    @property
    def step(self) -> int:
        """The first batch that nobody has taken; new weights hold from it on."""
        return max([self._handed_out, *(stream.taken().end for stream in self._streams)])

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
        changes = zip(self._counts.first_steps, self._counts.weights_SK, strict=True)
        return [(first_step, self._named(weights_K)) for first_step, weights_K in changes]

    def set_weights(self, weights: Mapping[str, float], *, from_step: int | None = None) -> int:
        """Draw at these weights from a step on, until the next change.

        With several ranks, call it on each with the same weights. A run repeats itself with another
        number of workers only if its changes name their step; with streams in workers on several
        ranks they must, for nobody knows how far the workers of the others are.

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
        with ExitStack() as held:
            streams = [
                (stream.changes, held.enter_context(stream.changes.locked()))
                for stream in self._streams
            ]
            taken = [changes.taken(file) for changes, file in streams]
            earliest = max([self._handed_out, *(each.end for each in taken)])
            if from_step is None and any(each.num_workers for each in taken):
                self._check_is_one_rank(earliest)
            first_step = earliest if from_step is None else from_step
            if first_step < earliest:
                raise ValueError(
                    f"New weights can hold from step {earliest} on; got from_step={from_step}. "
                    "Loaders take batches before the loop does: name a later step, or take fewer "
                    "ahead (num_workers * prefetch_factor)."
                )
            weights_K = self._counts.plan(first_step, _floats(weights))
            self._check_has_rows(weights_K.tolist())
            self._counts.set_weights(first_step, weights_K)
            for changes, file in streams:
                changes.post(file, (first_step, weights_K.tolist()))
        return first_step

    def _check_is_one_rank(self, earliest: int) -> None:
        if any(stream.world_size > 1 for stream in self._streams):
            raise ValueError(
                "Workers of a stream run ahead on each rank as they please. So that all ranks "
                "change at one step, set_weights needs from_step, later than what their loaders "
                f"have taken (here: {earliest})."
            )

    def _check_has_rows(self, weights_K: Sequence[float]) -> None:
        empty = [
            rows.name
            for rows, weight in zip(self._rows, weights_K, strict=True)
            if rows.size == 0 and weight > 0
        ]
        if empty:
            raise ValueError(
                f"A domain with a weight needs rows; {', '.join(empty)} has none. "
                "Give it the weight 0 or leave it out."
            )

    # What is drawn.

    def counts(self, step: int) -> dict[str, int]:
        """Rows of each domain in batch `step`."""
        return self._named(self._counts.counts(np.array([self._checked(step)]))[0])

    def drawn(self, step: int | None = None) -> dict[str, int]:
        """Rows of each domain in all batches before `step`, over all ranks; None: before `step`.

        `step` is then that of this object: loaders may have taken batches ahead of the loop.
        """
        return self._named(self._counts.drawn(self.step if step is None else self._checked(step)))

    def shares(self, step: int | None = None) -> dict[str, float]:
        """Share of each domain in what was `drawn`; zeros before the first batch."""
        drawn = self.drawn(step)
        total = max(1, sum(drawn.values()))
        return {name: rows / total for name, rows in drawn.items()}

    def epochs(self, step: int | None = None) -> dict[str, float]:
        """How often each domain was passed over by what was `drawn`; NaN where it is a stream."""
        return {
            name: math.nan if size is None else rows / max(1, size)
            for (name, rows), size in zip(
                self.drawn(step).items(), self.sizes.values(), strict=True
            )
        }

    def draws(self, step: int) -> list[Draw]:
        """What batch `step` holds, over all ranks, in order: dataset[draw] is the row."""
        counts_K = self._counts.counts(np.array([self._checked(step)]))[0]
        domains_B = np.repeat(np.arange(len(counts_K)), counts_K)
        domains_B = domains_B[spread_order(self.seed, step, self.batch_size)]
        # Positions follow the order of the batch, so that whoever reads a stream reads forward.
        by_domain_B = np.argsort(domains_B, kind="stable")
        positions_B = np.empty_like(domains_B)
        positions_B[by_domain_B] = np.concatenate(
            [
                np.arange(first, first + count)
                for first, count in zip(self._counts.drawn(step), counts_K, strict=True)
            ]
        )
        return list(zip(domains_B.tolist(), positions_B.tolist(), strict=True))

    def _checked(self, step: int) -> int:
        if step < 0:
            raise ValueError(f"A batch needs step >= 0; got {step}.")
        return step

    def _named(self, values_K: Any) -> dict[str, Any]:
        return dict(zip(self.names, values_K.tolist(), strict=True))

    # Passes.

    def batches(self, rank: int = 0, world_size: int = 1) -> "MixtureBatches":
        """The sampler of this rank's share of the batches, for `DataLoader(batch_sampler=...)`.

        Args:
            rank: in [0, world_size); of `torch.distributed.get_rank()`, say.
            world_size: processes that share each batch, in equal parts.

        Raises:
            ValueError: no such rank, or `batch_size` is not a multiple of `world_size`.
        """
        return MixtureBatches(self, rank, world_size)

    def stream(self, rank: int = 0, world_size: int = 1) -> "MixtureStream":
        """This rank's share of the rows, batch after batch, as an iterable dataset.

        For a `DataLoader` whose batch_size is that of the stream; workers are told of new weights
        through a small temporary file.

        Args:
            rank: in [0, world_size); of `torch.distributed.get_rank()`, say.
            world_size: processes that share each batch, in equal parts.

        Raises:
            ValueError: no such rank, or `batch_size` is not a multiple of `world_size`.
        """
        stream = MixtureStream(self, rank, world_size)
        self._streams.add(stream)
        return stream

    def seek(self, step: int) -> None:
        """Let the next pass over a sampler or stream begin at this step.

        Needed where a pass was broken off: its loader may have taken more than the loop has used,
        so only the loop knows where to go on.
        """
        self._start_from(self._checked(step))

    def _span(self) -> Iterator[int]:
        end = itertools.count(self._start) if self.steps is None else range(self._start, self.steps)
        return iter(end)

    def _hand_out(self, step: int) -> None:
        self._handed_out = max(self._handed_out, step + 1)
        self._num_given += 1

    # State.

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Everything that decides the batches from `step` on, as JSON has words for it.

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
            self._check_nothing_ahead()
            step = self.step
        tally = self._counts.tally(self._checked(step))
        changes = zip(self._counts.first_steps, self._counts.weights_SK, strict=True)
        return {
            "version": STATE_VERSION,
            "domains": list(self.names),
            "sizes": list(self.sizes.values()),
            "seed": self.seed,
            "batch_size": self.batch_size,
            "step": step,
            "history": [[first_step, weights_K.tolist()] for first_step, weights_K in changes],
            "drawn": tally.drawn_K.tolist(),
            "surplus": tally.surplus_K.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken: the next pass begins at its step, with its seed.

        The number of workers and ranks may be another one.

        Raises:
            ValueError: it was not written by `state_dict`, by a later version, or for other
                domains, sizes or batches; nothing has been changed.
        """
        self._check_state(state)
        first_steps = [first_step for first_step, _ in state["history"]]
        weights_SK = [np.array(weights, dtype=np.float64) for _, weights in state["history"]]
        start = Stage(0, self._named(weights_SK[0]))
        counts = SteeredCounts(state["seed"], [start], self.batch_size, self.names)
        # As they were, to the bit: dividing by their sum once more might change the last one.
        counts.first_steps, counts.weights_SK = first_steps, weights_SK
        counts.start_from(
            Tally(state["step"], *(np.array(state[key], np.int64) for key in ("drawn", "surplus")))
        )
        self._counts = counts
        self._start_from(state["step"])

    def _check_nothing_ahead(self) -> None:
        has_workers = any(stream.taken().num_workers for stream in self._streams)
        # A worker's copy is asked by loaders that keep states of their own; it hands out nothing.
        is_copy = get_worker_info() is not None
        if not is_copy and (has_workers or self._num_given != self._num_fetched):
            raise ValueError(
                f"Loaders have taken the batches up to step {self.step}, and only the loop knows "
                "how many of them it has finished: say state_dict(step=...)."
            )

    def _check_state(self, state: Mapping[str, Any]) -> None:
        keys = ("domains", "sizes", "seed", "batch_size", "step", "history", "drawn", "surplus")
        missing = [key for key in ("version", *keys) if key not in state]
        if missing:
            raise ValueError(
                f"A mixture's state is what state_dict() returns; this one lacks {missing}."
            )
        if state["version"] > STATE_VERSION:
            raise ValueError(
                f"The state has version {state['version']}; this library reads up to "
                f"{STATE_VERSION}. Update doge_fast."
            )
        ours = {
            "domains": list(self.names),
            "sizes": list(self.sizes.values()),
            "batch_size": self.batch_size,
        }
        for key, value in ours.items():
            if state[key] != value:
                raise ValueError(
                    f"The state is of a mixture with {key} {state[key]}; this one has {value}. "
                    "Only the same rows in batches of the same size go on to the bit."
                )
        steps = [first_step for first_step, _ in state["history"]]
        if steps[:1] != [0] or steps != sorted(set(steps)):
            raise ValueError(f"The state's history must begin at step 0 and go up; it has {steps}.")
        vectors = [weights for _, weights in state["history"]]
        for weights in vectors:
            checked_weights(weights)
        lengths = {len(vector) for vector in (*vectors, state["drawn"], state["surplus"])}
        if lengths != {len(self.names)}:
            raise ValueError(
                f"The state's weights and counts must have {len(self.names)} numbers, one for each "
                f"domain; they have {sorted(lengths)}."
            )
        if sum(state["drawn"]) != state["step"] * self.batch_size:
            raise ValueError(
                f"The state's {state['step']} batches of {self.batch_size} rows must add up; it "
                f"counts {sum(state['drawn'])} rows."
            )

    def __getstate__(self) -> dict[str, Any]:
        """What a worker needs: all but the streams, of which each has its mixture."""
        return {key: value for key, value in self.__dict__.items() if key != "_streams"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._streams = weakref.WeakSet()


class _Share:
    """A rank's share of a mixture's batches."""

    def __init__(self, mixture: DomainMixture, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"A rank must be in [0, world_size); got {rank} of {world_size}.")
        if mixture.batch_size % world_size:
            raise ValueError(
                f"batch_size, the rows of all ranks, must be a multiple of world_size; got "
                f"{mixture.batch_size} and {world_size}."
            )
        self.mixture = mixture
        self.rank = rank
        self.world_size = world_size
        self.batch_size = mixture.batch_size // world_size
        self._begun: object = None

    def _begin(self) -> Iterator[int]:
        """The steps of a pass.

        Raises:
            RuntimeError: there was one before, and nobody said where the next one begins.
        """
        if self._begun is self.mixture._seek:
            raise RuntimeError(already_begun(self._end()))
        self._begun = self.mixture._seek
        return self.mixture._span()

    def _end(self) -> int:
        """The first batch that no loader has taken."""
        return self.mixture.step

    def _draws(self, step: int) -> list[Draw]:
        first = self.rank * self.batch_size
        return self.mixture.draws(step)[first : first + self.batch_size]

    def _num_batches(self) -> int:
        if self.mixture.steps is None:
            raise TypeError("a mixture without steps=... is endless and has no length.")
        return max(0, self.mixture.steps - self.mixture._start)


class MixtureBatches(_Share, Sampler[list[Draw]]):
    """Batches of one rank, for `DataLoader(mixture, batch_sampler=...)`.

    Made by `DomainMixture.batches`.
    """

    # What accelerate asks of a batch sampler: no batch is shorter than the others.
    drop_last = True

    def __iter__(self) -> Iterator[list[Draw]]:
        """What each batch from the mixture's start on holds."""
        for step in self._begin():
            # Weights set from now on are for later batches.
            self.mixture._hand_out(step)
            yield self._draws(step)

    def __len__(self) -> int:
        """Batches of the next pass."""
        return self._num_batches()


class MixtureStream(_Share, IterableDataset[Any]):
    """Rows of one rank, batch after batch; made by `DomainMixture.stream`.

    The loader's batch_size must be `batch_size` here. Of W workers each makes every W-th batch,
    and the loader takes them in turn, so the batches come in order.
    """

    def __init__(self, mixture: DomainMixture, rank: int, world_size: int) -> None:
        super().__init__(mixture, rank, world_size)
        self.changes = Changes(mixture._start)

    def taken(self) -> Taken:
        """How far the workers are."""
        with self.changes.locked() as file:
            return self.changes.taken(file)

    def _end(self) -> int:
        # A worker's copy of the mixture does not know what was handed out; the file does.
        return max(super()._end(), self.taken().end)

    def __iter__(self) -> Iterator[Any]:
        """Rows of the batches from the mixture's start on."""
        worker = get_worker_info()
        if worker is not None:
            self.changes.check_lineage(self.taken())
        steps = self._begin()
        if worker is None:
            for step in steps:
                self.mixture._hand_out(step)
                yield from self.mixture.__getitems__(self._draws(step))
        else:
            # Workers of one pass have seeds in a row.
            loading = worker.seed - worker.id
            for step in itertools.islice(steps, worker.id, None, worker.num_workers):
                self._catch_up(step, worker.num_workers, loading)
                yield from self.mixture.__getitems__(self._draws(step))

    def _catch_up(self, step: int, num_workers: int, loading: int) -> None:
        changes = self.changes.take(step, num_workers=num_workers, loading=loading)
        for first_step, weights in changes:
            self.mixture._counts.set_weights(first_step, np.array(weights))

    def __len__(self) -> int:
        """Rows of the next pass."""
        return self._num_batches() * self.batch_size


def _floats(weights: Mapping[str, float]) -> dict[str, float]:
    return {name: float(weight) for name, weight in weights.items()}
