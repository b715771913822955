"""The step under way: what the domains have collected, and whether it is complete.

A step is empty until its first domain is entered, open while a domain is, collected between
domains, and combined once its gradients have become the weighted one::

    empty -> open(name) -> collected -> open(name) -> ... -> combined -> empty

The parameters are looked up when the first domain is entered, and once more for combining. While a
domain is open, a hook on each of them takes the gradient the moment autograd has finished it and
hands it to the flat buffer, so that `p.grad` stays None; elsewhere than on a CPU gradients stay in
`p.grad` until the domain is left, and then go to the buffer in one call. Outside a domain `p.grad`
is left alone; the next `domain()` or `step()` refuses what a backward pass has put there.
"""

import enum
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from doge_fast.distributed.exchanges import Ranks
from doge_fast.distributed.wrappers import bare, without_reduction
from doge_fast.flat_buffer import Block, FlatBuffer, local_gradient
from doge_fast.stacked.stacked import StackedModel, segments_of, sizes_of
from doge_fast.step.entries import WAY_TO_ACCUMULATE, Absent, Entries, check_count
from doge_fast.step.parameters import TrackedParameters
from doge_fast.tracing import outside_graphs
from doge_fast.weights.subset import Subset
from doge_fast.wrapper import SkipFlag


class StepState(enum.Enum):
    """Where a step stands while no domain is open."""

    EMPTY = enum.auto()
    ZEROED = enum.auto()
    """Empty, and `p.grad` holds the zeros of zero_grad(set_to_none=False)."""
    COLLECTED = enum.auto()
    DROPPED = enum.auto()
    """An exception inside a domain dropped what had been collected."""
    COMBINED = enum.auto()


@dataclass
class OpenDomain:
    """The domain that is open, or the domains of a stacked pass."""

    counts: Mapping[str, float]
    """By domain; what weighs this rank's gradient in the mean over ranks."""
    row: int | None
    """Of the buffer; None in a stacked pass, whose modules write the rows themselves."""
    has_received: bool = False

    def row_for(self, param: Tensor, parameters: TrackedParameters) -> int:
        """The row of what autograd has put into `param.grad`."""
        if self.row is None:
            raise RuntimeError(
                f"{parameters.name_of(param)} received a gradient of the whole batch: it is used "
                "outside of the forward of the module that owns it, where domains are not "
                "separate. Run one domain after another, with optimizer.domain(name)."
            )
        return self.row


class Step:
    """The step under way.

    Args:
        parameters: those that the wrapped optimizer trains.
        subset: the domains of a step and their rows.
        buffer_dtype: of the rows; None: that of each gradient.
        absent: "error" or "keep": what `blocks` does about a domain that was not entered.
        micro_batches: times that each domain is entered in a step; None: any number.
        ranks: that learn together.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        parameters: TrackedParameters,
        subset: Subset,
        *,
        buffer_dtype: torch.dtype | None,
        absent: Absent,
        micro_batches: int | None,
        ranks: Ranks,
    ) -> None:
        self.parameters = parameters
        self.subset = subset
        self.buffer = FlatBuffer(subset.num_rows, buffer_dtype)
        self.entries = Entries(
            parameters,
            subset,
            self.buffer,
            absent=absent,
            micro_batches=micro_batches,
            ranks=ranks,
        )
        self._start()

    def _start(self) -> None:
        self.state = StepState.EMPTY
        self.entries.clear()
        self._open: OpenDomain | None = None
        self._stacked_model: StackedModel | None = None
        self.flag = SkipFlag()
        """Whether the step is skipped."""
        self.parameters.receive = _receiver(weakref.ref(self))
        self._hook()

    def __getstate__(self) -> dict[str, Any]:
        """What is kept between steps. A copy starts with an empty step."""
        lasting = ("parameters", "subset", "buffer", "entries")
        return {name: getattr(self, name) for name in lasting}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """An empty step that receives the gradients of the parameters again."""
        self.__dict__.update(state)
        self._start()

    @outside_graphs
    def _hook(self) -> list[Tensor]:
        """The parameters that are trained now, each with a hook that calls `receive`."""
        return self.parameters.scan()

    # Domains.

    def domain(self, name: str, count: float = 1.0) -> AbstractContextManager[OpenDomain]:
        """Gradients of backward passes inside belong to domain `name`."""
        with self._told():
            check_count(name, count)
            self._prepare((name,))
        return self._opened({name: count}, self.entries.next_row(name, count))

    @contextmanager
    def stacked(self, model: nn.Module, sizes: Mapping[str, int]) -> Iterator[None]:
        """One backward pass inside gives every domain of a batch sorted by domain its gradient."""
        with self._told():
            sizes_here = sizes_of(sizes)
            self.subset.refuse_odd(sizes_here)
            self._prepare(tuple(sizes_here))
            self._refuse_shards()
            segments = segments_of(sizes_here, lambda name: self.entries.rows_of(name)[0])
            stacked_model = self._stacked_model_of(bare(model))
        with self._opened(sizes_here, None) as opened:
            with stacked_model.recording(segments):
                yield
            opened.has_received = stacked_model.has_written

    @contextmanager
    def _opened(self, counts: Mapping[str, float], row: int | None) -> Iterator[OpenDomain]:
        opened = self._open = OpenDomain(counts, row)
        try:
            with self.dropped_on_failure(), self.entries.told_on_failure(), without_reduction():
                yield opened
                if self.parameters.has_noted:
                    self._collect(opened)
                self.buffer.flush()
                self._refuse_reduced()
                if not opened.has_received:
                    raise RuntimeError(_nothing_received(opened))
                self.entries.add(counts, is_whole=row is None)
        finally:
            self._open = None
        if self.state is not StepState.DROPPED:
            self.state = StepState.COLLECTED

    def _told(self) -> AbstractContextManager[None]:
        """Tell the other ranks of a failure inside, but where an open domain does."""
        return self.entries.told_on_failure() if self._open is None else nullcontext()

    def receive(self, param: Tensor) -> None:
        """Take the gradient that autograd has just put into `param.grad`."""
        opened = self._open
        if opened is None:
            # Another DoGEOptimizer on the same parameters may still take it.
            if param.grad is not None:
                self.parameters.note(param)
            return
        grad, param.grad = param.grad, None
        if grad is None:
            # Its module has written the rows by itself.
            return
        row = opened.row_for(param, self.parameters)
        if self.entries.exchange.has_shards:
            for each, part in self.entries.exchange.parts(row, param, grad):
                self.buffer.receive(each, param, part)
        else:
            self.buffer.receive(row, param, grad)
        opened.has_received = True

    @outside_graphs
    @torch.no_grad()
    def _collect(self, opened: OpenDomain) -> None:
        """Take the gradients that are in `p.grad`."""
        params, grads = self.parameters.take()
        if self.entries.exchange.has_shards:
            grads = list(map(local_gradient, params, grads))
        if params:
            self.buffer.receive_all(opened.row_for(params[0], self.parameters), params, grads)
            opened.has_received = True

    def _check_name(self, name: str) -> None:
        """Refuse a domain that is not one of this step's."""
        if self.subset.holds(name):
            return
        if name in self.subset.all_rows:
            raise ValueError(
                f"domain {name!r} is not one of this step's domains, {list(self.subset.domains)}: "
                "domains_per_step draws new ones for every step. Run those in "
                "optimizer.domains_of_step."
            )
        raise ValueError(
            f"unknown domain {name!r}; the optimizer knows {list(self.subset.all_rows)}. "
            "Name it in domains= (trained on) or in target= (measured only)."
        )

    @outside_graphs
    def _prepare(self, names: Sequence[str]) -> None:
        """Check that these domains may be entered now, and begin the step with the first."""
        for name in names:
            self._check_name(name)
        if self._open is not None:
            raise RuntimeError(
                f"domain({names[0]!r}) was entered inside domain({self._name_of_open()!r}); a "
                "gradient belongs to one domain. Leave the first before entering the next."
            )
        self.refuse_stray()
        if self.state is StepState.COMBINED:
            self._refuse_after_combining()
            # Cleared without a step, as a scaler does on overflow. The loop has read the domains
            # of this step, so they stay.
            self._clear_rows()
        if self.state in (StepState.EMPTY, StepState.ZEROED):
            self._begin()
        for name in names:
            self.entries.refuse_entry(name)

    def _begin(self) -> None:
        params = self._hook()  # First: a host may have put shards in their place.
        self.entries.meet()
        for param in params:
            if param.grad is None:
                continue
            if self.state is not StepState.ZEROED:
                raise RuntimeError(
                    "a parameter still holds a gradient from before this domain; call "
                    "optimizer.zero_grad() after step() and before the next domain."
                )
            param.grad = None

    def _refuse_after_combining(self) -> None:
        has_grad = any(param.grad is not None for param in self.parameters.params)
        if has_grad or not self.entries.exchange.gives_gradients:
            most = self.entries.micro_batches
            how = (
                "combine() has been called"
                if most is None
                else f"every domain has been entered micro_batches={most} times"
            )
            raise RuntimeError(
                f"{how} in this step, so its gradients are combined: call optimizer.step() and "
                "zero_grad() before the next domain. " + WAY_TO_ACCUMULATE
            )

    def _stacked_model_of(self, model: nn.Module) -> StackedModel:
        tracked = {id(param): param for param in self.parameters.params}
        if self._stacked_model is None or not self._stacked_model.covers(model, tracked):
            self._stacked_model = StackedModel(model, self.buffer, tracked)
        return self._stacked_model

    def _name_of_open(self) -> str:
        return "" if self._open is None else ", ".join(self._open.counts)

    # What has been collected.

    def _refuse_shards(self) -> None:
        if self.entries.exchange.has_shards:
            raise RuntimeError(
                "stacked() needs whole parameters, and those of a sharded model are divided over "
                "ranks. Run one domain after another, with optimizer.domain(name)."
            )

    def _refuse_reduced(self) -> None:
        """Refuse gradients that something between ranks has put back behind our hooks."""
        if self.entries.exchange.num_ranks > 1 and any(
            param.grad is not None for param in self.parameters.params
        ):
            raise RuntimeError(
                "something has set p.grad inside a domain, as wrappers do that reduce gradients "
                "over ranks themselves: torch's replicate(), and DistributedDataParallel if its "
                "forward pass ran before the domain. Run forward and backward inside the domain, "
                "on a model in DistributedDataParallel or in no wrapper."
            )

    @property
    def has_combined_by_itself(self) -> bool:
        """Whether the step was complete and has been combined."""
        return self.state is StepState.COMBINED and self.entries.are_complete

    def blocks(self, settings: Mapping[str, object]) -> list[Block]:
        """The rows of all parameters that a domain gave a gradient, for combining.

        Args:
            settings: what must be the same on all ranks.

        Raises:
            RuntimeError: the step is combined already, a domain is missing, a parameter has a
                `p.grad` that no domain gave it; or the ranks differ, or one has failed.
        """
        with self.entries.told_on_failure():
            if self.state is StepState.COMBINED:
                raise RuntimeError("combine() has been called in this step; call step() next.")
            self.refuse_stray()
            params = self.parameters.look_up()
            if self.entries.any_here:
                self._refuse_given(params)
        is_dropped = self.state is StepState.DROPPED
        dtypes = self.entries.agree(params, settings, is_dropped=is_dropped)
        return self.buffer.touched(params, dtypes)

    def _refuse_given(self, params: Sequence[Tensor]) -> None:
        if (param := next((p for p in params if p.grad is not None), None)) is not None:
            raise RuntimeError(
                f"{self.parameters.name_of(param)} has a p.grad from outside the domains, which "
                "would be used unweighted or be replaced. Run that backward pass inside a domain "
                "as well, or take a step with it before the domains of this step."
            )

    def is_of_others(self) -> bool:
        """Whether `step()` should run the wrapped optimizer alone, on gradients of no domain.

        Code that saves checkpoints has an optimizer make its state by a step on zeros at learning
        rate zero, also between two domains.
        """
        self.refuse_inside_a_domain("combine() and step()")
        with self.entries.told_on_failure():
            self.refuse_stray()
            if self.state is StepState.COMBINED:
                return False  # Before a rate that is on the device would be waited for.
            has_rate = any(group.get("lr", 1) for group in self.parameters.groups)
            if self.state in (StepState.COLLECTED, StepState.DROPPED) and has_rate:
                return False
            given = (param for param in self.parameters.look_up() if param.grad is not None)
            is_of_others = not all(map(self.buffer.is_combined, given))
            if is_of_others and has_rate and not self.entries.exchange.gives_gradients:
                raise RuntimeError(
                    "with shard_optimizer=True a gradient from outside the domains cannot be used: "
                    "the optimizer's state is divided over ranks. Run its backward in a domain."
                )
            return is_of_others

    def refuse_stray(self) -> None:
        """Raise RuntimeError if a backward pass outside any domain has left a gradient."""
        if not self.parameters.has_noted:
            return
        # There, `p.grad` may be the open domain's.
        self.refuse_inside_a_domain("combine() and step()")
        if any(param.grad is not None for param in self.parameters.params):
            raise RuntimeError(
                "a backward pass ran outside any domain, so its gradient belongs to none of "
                f"{list(self.subset.all_rows)}. Call optimizer.zero_grad() and run it inside `with "
                "optimizer.domain(name):`, or call optimizer.release() when the model is to train "
                "without domains."
            )
        self.parameters.forget()

    def refuse_inside_a_domain(self, what: str) -> None:
        """Raise RuntimeError if a domain is open."""
        if self._open is not None:
            raise RuntimeError(
                f"{what} must be called outside domain(...); {self._name_of_open()!r} is active. "
                "Leave it first."
            )

    # The end of a step.

    @outside_graphs
    def clear(self, *, is_stepped: bool = False, are_zeros_left: bool = False) -> None:
        """Start an empty step.

        Args:
            is_stepped: the step has been taken or skipped, and the next one has other domains.
            are_zeros_left: `p.grad` holds zeros, which the next domain may overwrite.
        """
        if is_stepped:
            self.subset.draw(self.subset.draws + 1)
        self._clear_rows()
        if are_zeros_left:
            self.state = StepState.ZEROED

    def release(self) -> None:
        """Take the hooks off the parameters and give the buffer's memory back."""
        self.refuse_inside_a_domain("release()")
        self.clear()
        self.buffer.release()
        self.entries.release()
        self.parameters.release()

    @contextmanager
    def dropped_on_failure(self) -> Iterator[None]:
        """Drop what has been collected if the block raises."""
        try:
            yield
        except BaseException:
            if self.parameters.has_noted:
                # Backward passes inside the domain have left them.
                self.parameters.take()
            self.clear()
            self.state = StepState.DROPPED
            raise

    def _clear_rows(self) -> None:
        self.buffer.clear()
        self.entries.clear()
        self.parameters.forget()
        self.state = StepState.EMPTY


def _receiver(ref: "weakref.ref[Step]") -> Callable[[Tensor], None]:
    """A hook that does not keep its step, and so the buffer, alive."""

    def on_gradient(param: Tensor) -> None:
        step = ref()
        if step is not None:
            step.receive(param)

    hook: Callable[[Tensor], None] = torch.compiler.disable(on_gradient)  # type: ignore[no-untyped-call]
    return hook


def _nothing_received(opened: OpenDomain) -> str:
    if opened.row is None:
        return (
            "no parameter of the optimizer received a gradient inside stacked(). Run the forward "
            "and loss.backward() inside it, on the model that it was given."
        )
    return (
        "no parameter of the optimizer received a gradient inside "
        f"domain({next(iter(opened.counts))!r}). "
        "Run loss.backward() inside it. If you did, the model's parameters were replaced after "
        "the optimizer was built: build it from the model's present ones; or another "
        "DoGEOptimizer on the same parameters, inside a domain of its own, has taken the gradient."
    )
