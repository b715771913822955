"""Which domains of a step have been entered, on this rank and on the others.

A domain is entered `micro_batches` times in a step. With several ranks each has domains of its own,
and no rank knows what another has entered until they tell each other, once, when the step is
combined.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from doge_fast.distributed import Exchange, Ranks, Report, default_group, exchange_of
from doge_fast.flat_buffer import FlatBuffer
from doge_fast.step.parameters import TrackedParameters, on_host
from doge_fast.weights import simplex
from doge_fast.weights.subset import Subset

Absent = Literal["error", "keep"]

WAY_TO_ACCUMULATE = (
    "To accumulate micro-batches, pass their number, DoGEOptimizer(..., micro_batches=N), or None "
    "for any number, with which combine() or step() ends the step."
)

DROPPED = "an exception inside a domain dropped this step's gradients"
WAY_ON = ". Call optimizer.zero_grad() and run the domains of this step again."


def check_count(name: str, count: float) -> None:
    """Refuse what cannot weigh a domain's gradient."""
    if not simplex.is_number(count) or not 0 < count < float("inf"):
        raise ValueError(f"count must be positive and finite; domain {name!r} has {count!r}.")


class _Row(NamedTuple):
    """What a row of the buffer has got in this step."""

    weight: float
    """Counts of what was added to it."""
    times: int


_NO_ROW = _Row(0.0, 0)


class Entries:
    """The domains that have been entered in the step under way.

    Args:
        parameters: those that the wrapped optimizer trains.
        subset: the domains of a step.
        buffer: whose rows the domains have.
        absent: "error" or "keep": what becomes of a step without some domain.
        micro_batches: times that each domain is entered in a step; None: any number.
        ranks: that learn together.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        parameters: TrackedParameters,
        subset: Subset,
        buffer: FlatBuffer,
        *,
        absent: Absent,
        micro_batches: int | None,
        ranks: Ranks,
    ) -> None:
        if absent not in ("error", "keep"):
            raise ValueError(f"absent must be 'error' or 'keep'; got {absent!r}.")
        if micro_batches is not None and not (
            simplex.is_integer(micro_batches) and micro_batches > 0
        ):
            raise ValueError(
                "micro_batches must be the number of times that each domain is entered in a step, "
                f"at least 1, or None for any number; got {micro_batches!r}."
            )
        self.micro_batches = micro_batches
        self._absent = absent
        self._trained = parameters
        self._subset = subset
        self._buffer = buffer
        self._ranks = ranks
        # With the default group and the kind of parameters that it was settled for.
        self._exchange: tuple[object, Exchange] | None = None
        self._times: Counter[str] = Counter()
        # By row, in the order of the rows of the buffer; a domain in halves has two.
        self._rows: dict[str, _Row] = {}
        # Names of rows, one for each time that one was begun.
        self._order: list[str] = []
        self.seen: frozenset[str] = frozenset()
        """The domains that have a gradient on some rank, as last agreed on."""

    @property
    def exchange(self) -> Exchange:
        """Between the ranks."""
        if self._exchange is None:
            self.meet()
        assert self._exchange is not None
        return self._exchange[1]

    def meet(self) -> None:
        """Settle who the ranks are, at the begin of a step: a group, or shards, may be new."""
        # Before the first step a host may have replaced those that are known.
        params = self._trained.look_up() if self._exchange is None else self._trained.params
        world = default_group(), frozenset(map(type, params))
        if self._exchange is None or self._exchange[0] != world:
            exchange = exchange_of(self._ranks, params)
            self._exchange = world, exchange
            # Of its own domains alone where a rank has whole gradients.
            self._buffer.num_rows = 0 if exchange.has_own_rows else self._subset.num_rows

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the other ranks: a copy may be used by other processes."""
        return self.__dict__ | {"_exchange": None}

    def release(self) -> None:
        """Give the memory of what ranks have exchanged back."""
        if self._exchange is not None:
            self._exchange[1].release()

    @property
    def has_own_rows(self) -> bool:
        """Whether this is one of several ranks with domains of their own, as far as is known."""
        return self._exchange is not None and self._exchange[1].has_own_rows

    @property
    def any_here(self) -> bool:
        """Whether a domain has been entered on this rank."""
        return bool(self._rows)

    @property
    def are_complete(self) -> bool:
        """Whether every domain has been entered as often as `micro_batches` says.

        Of ranks with domains of their own none knows: one that has entered all of them must not
        combine where others go on.
        """
        most = self.micro_batches
        if most is None or not self._times or self.exchange.has_own_rows:
            return False
        return all(self._times[name] == most for name in self._subset.rows)

    def next_row(self, name: str) -> int:
        """The row of this rank's buffer that a domain fills next; its halves by turns."""
        return self._row_of(self._next_half(name))

    def rows_of(self, name: str) -> list[int]:
        """The rows of this rank's buffer that are the domain's."""
        return [self._row_of(half) for half in self._subset.halves_of(name)]

    def _next_half(self, name: str) -> str:
        return min(self._subset.halves_of(name), key=self._times_of)

    def _times_of(self, half: str) -> int:
        return self._rows.get(half, _NO_ROW).times

    def _row_of(self, half: str) -> int:
        self._rows.setdefault(half, _NO_ROW)
        self._order.append(half)
        if not self.exchange.has_own_rows:
            return self._subset.slot_of(half)
        self._buffer.num_rows = max(self._buffer.num_rows, len(self._rows))
        return list(self._rows).index(half)

    def add(self, counts: Mapping[str, float], *, is_whole: bool) -> None:
        """Note that domains have been left, with what counts for each.

        Args:
            counts: by domain.
            is_whole: whether all rows of each domain have been filled, or its next one.
        """
        self._times.update(counts.keys())
        for name, count in counts.items():
            halves = self._subset.halves_of(name)
            filled = halves if is_whole else (self._next_half(name),)
            for half in filled:
                row = self._rows[half]
                self._rows[half] = _Row(row.weight + count / len(filled), row.times + 1)

    def clear(self) -> None:
        """Begin another step."""
        self._times.clear()
        self._rows.clear()
        self._order.clear()

    # What is refused.

    def refuse_entry(self, name: str) -> None:
        """Raise RuntimeError where the domain may not be entered now.

        It has been as often as agreed, or accelerate, in the middle of an accumulation, divides its
        loss by another number of micro-batches than the domain has.
        """
        self._refuse_division(name)
        if self.micro_batches is not None and self._times[name] >= self.micro_batches:
            raise RuntimeError(
                f"domain {name!r} has been entered micro_batches={self.micro_batches} times in "
                f"this step already. {WAY_TO_ACCUMULATE}"
            )

    def _refuse_division(self, name: str) -> None:
        accelerate = sys.modules.get("accelerate.state")
        if accelerate is None or self.micro_batches is None:
            return
        # One for all Accelerators of the process.
        host = accelerate.GradientState()
        if not host.sync_gradients and host.num_steps not in (1, self.micro_batches):
            raise RuntimeError(
                f"accelerate divides losses by gradient_accumulation_steps={host.num_steps}, and "
                f"domain {name!r} is entered micro_batches={self.micro_batches} times in a step: "
                "its gradient would be the wrong size. Enter every domain inside each "
                "`accelerator.accumulate`, and give both numbers the same value."
            )

    def refuse_partial(self) -> None:
        """Raise RuntimeError if some domain has been entered, and less often than agreed."""
        most = self.micro_batches or 1
        partial = [name for name, times in self._times.items() if times < most]
        with self.told_on_failure():
            if partial and self._absent == "error":
                raise RuntimeError(
                    f"step() needs every domain micro_batches={most} times; {partial} were entered "
                    "less often. If a step ends early, as at the end of an epoch, call combine(), "
                    "or pass micro_batches=None."
                )

    def _refuse_one_half(self) -> None:
        times = {
            name: set(map(self._times_of, self._subset.halves_of(name))) for name in self._times
        }
        if odd := [name for name, each in times.items() if len(each) > 1]:
            raise RuntimeError(
                "a score that is_unbiased compares the halves of each domain's batch, and "
                f"{odd} were entered an odd number of times. Enter each domain twice in a step, "
                "with half of its batch each time and micro_batches=2, or use stacked()."
            )

    def _refuse_missing(self, *, is_dropped: bool) -> None:
        missing = [name for name in self._subset.rows if name not in self.seen]
        if missing and is_dropped:
            raise RuntimeError(f"{DROPPED}; missing {missing}{WAY_ON}")
        if missing and (self._absent == "error" or not self.seen):
            raise RuntimeError(
                f"step() needs a gradient from every domain; missing {missing} of "
                f"{list(self._subset.rows)}. Run backward for them inside optimizer.domain(name), "
                "or pass absent='keep' to allow a step without some domains."
            )

    # With the other ranks.

    def agree(
        self, params: Sequence[Tensor], settings: Mapping[str, object], *, is_dropped: bool
    ) -> Sequence[torch.dtype | None]:
        """Tell the other ranks what has been entered, and hear what they have.

        Args:
            params: that are trained.
            settings: what must be the same on all ranks, by the name that a message gives it.
            is_dropped: an exception has dropped what had been collected here.

        Returns:
            Of each parameter's rows the dtype on all ranks; None where it has no gradient anywhere.

        Raises:
            RuntimeError: a domain is missing; or the ranks differ, or one has failed.
        """
        with self.told_on_failure():
            if is_dropped and self.exchange.num_ranks > 1:
                # Later, where domains are missing, this rank would raise alone.
                raise RuntimeError(DROPPED + WAY_ON)
            self._refuse_one_half()
        dtypes = self._buffer.dtypes_of(params)
        if self.exchange.num_ranks > 1:
            settings = {**settings, **self._settings(params)}
        report = Report(self._weights_of_rows(), list(self._order), params, dtypes, settings)
        agreement = self.exchange.agree(self._subset.slots, report)
        halves_of, here = self._subset.halves_of, agreement.seen
        self.seen = frozenset(
            name for name in self._subset.rows if here.issuperset(halves_of(name))
        )
        self._refuse_missing(is_dropped=is_dropped)
        return agreement.dtypes

    def _weights_of_rows(self) -> dict[str, float]:
        """What each row weighs in the mean over ranks; 0 for one that was begun and not left.

        Halves weigh alike, or their sum would not be the mean of the ranks' gradients.
        """
        weights: dict[str, float] = {}
        for halves in map(self._subset.halves_of, self._subset.rows):
            count = sum((self._rows.get(half, _NO_ROW).weight for half in halves), 0.0)
            weights |= dict.fromkeys(halves, count)
        return {half: weights[half] for half in self._rows}

    def _settings(self, params: Sequence[Tensor]) -> dict[str, object]:
        """What must be the same on all ranks, by the name that a message gives it."""
        selected = self._trained.selected_ids()
        chosen = None if selected is None else [id(param) in selected for param in params]
        return {
            "the learning rate": [on_host(group.get("lr")) for group in self._trained.groups],
            "micro_batches or absent": [self.micro_batches, self._absent],
            "their number of steps, or the draw of domains_per_step": [
                *(self._subset.draws, self._subset.rows)
            ],
            "the parameters that are trained": [list(param.shape) for param in params],
            "the selection": chosen,
        }

    @contextmanager
    def told_on_failure(self) -> Iterator[None]:
        """Tell the other ranks if the block raises: they would wait for this one."""
        try:
            yield
        except Exception as error:
            lost = self.exchange.fail()
            if lost:
                error.add_note(lost)
            raise
