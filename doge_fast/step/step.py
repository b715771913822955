"""The step under way, from the hook that sees a gradient to the combined one in `p.grad`.

A step is empty until its first domain is entered, open while one is, collected between domains,
and combined once the weighted gradient is in `p.grad`::

    empty -> open -> collected -> open -> collected -> ... -> combined -> empty

While a domain is open its gradients go to a row of the flat buffer (`parameters` says when). A
backward pass outside any domain leaves a gradient that the next `domain()` or `step()` refuses.

A data-parallel rank learns what the others have entered when the step is combined.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from doge_fast.distributed import exchange_of
from doge_fast.distributed.exchange import Columns, Exchange
from doge_fast.distributed.process_group import Agreement, Ranks, Report, default_group
from doge_fast.distributed.wrappers import bare, without_reduction
from doge_fast.flat_buffer import FlatBuffer, local_gradient
from doge_fast.stacked.stacked import StackedModel, segments_of, sizes_of
from doge_fast.step import ownership
from doge_fast.step.parameters import TrackedParameters, have_other_hooks, on_host, weakly
from doge_fast.tracing import outside_graphs, phase
from doge_fast.weights import checkpoint, simplex
from doge_fast.weights.state import DomainWeights
from doge_fast.weights.subset import Subset
from doge_fast.wrapper import each_of, loss_scale, skip_reader, step_unless

WAY_TO_ACCUMULATE = (
    "To accumulate micro-batches, pass their number, DoGEOptimizer(..., micro_batches=N), or None "
    "for any number, with which combine() or step() ends the step."
)

DROPPED = (
    "an exception inside a domain dropped this step's gradients. Call optimizer.zero_grad() and "
    "run the domains of this step again."
)


@dataclass
class OpenDomain:
    """The domain that is open, or the domains of a stacked pass."""

    counts: Mapping[str, float]
    """{domain: weight of this rank's gradient in the mean over ranks}."""
    row: int | None
    """Row of the buffer; None in a stacked pass, whose modules write the rows themselves."""
    has_received: bool = False


@dataclass
class Received:
    """What this rank has received in this step so far."""

    order: list[str] = field(default_factory=list)
    """Names of the domains in order of entry, one for each micro-batch."""
    times: Counter[str] = field(default_factory=Counter)
    """{domain: how often it has been left}."""
    counts: dict[str, float] = field(default_factory=dict)
    """{domain: weight in the mean over ranks; 0 until it is left}, in the order of own rows."""
    is_dropped: bool = False
    """Whether an exception inside a domain has dropped the step."""


class Step:
    """The step under way. Arguments are those of `DoGEOptimizer`, or are made from them."""

    def __init__(
        self,
        parameters: TrackedParameters,
        weights: DomainWeights,
        subset: Subset,
        *,
        buffer_dtype: torch.dtype | None,
        absent: Literal["error", "keep"],
        micro_batches: int | None,
        scaler: GradScaler | None,
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
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"scaler must be a torch.amp.GradScaler or None; got {scaler!r}.")
        self.micro_batches = micro_batches
        self.parameters = parameters
        self.subset = subset
        self._buffer_dtype = buffer_dtype
        self._weights = weights
        self._absent = absent
        self._scaler = scaler
        self._ranks = ranks
        self._start()

    def _start(self) -> None:
        self.buffer = FlatBuffer(len(self.subset.names), self._buffer_dtype)
        self._exchange: Exchange | None = None
        # The default group and the kinds of parameters that the exchange was made for.
        self._made_for: object = None
        self._has_agreed = False
        self._stacked_model: StackedModel | None = None
        # Whether the weighted gradient is in `p.grad`. Until a domain is left the step is empty.
        self._is_combined = False
        self._open: OpenDomain | None = None
        self._received = Received()
        self._has_entered = False
        inner = self.parameters.optimizer
        # Whether state that appears in the wrapped optimizer may have been loaded into it directly.
        self._may_be_loaded = not inner.state
        self._one_step = ownership.OneStep(each_of(inner), self.buffer.is_combined)
        self.parameters.receive = torch.compiler.disable(weakly(self.receive))  # type: ignore[no-untyped-call]
        self.parameters.scan()

    _LASTING = (
        *("micro_batches", "parameters", "subset"),
        *("_weights", "_buffer_dtype", "_absent", "_scaler", "_ranks"),
    )

    def __getstate__(self) -> dict[str, Any]:
        """The parts that last from step to step: a copy starts with an empty step."""
        return {name: getattr(self, name) for name in self._LASTING}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start an empty step, with hooks on the parameters again."""
        self.__dict__.update(state)
        self._start()

    # A domain.

    @contextmanager
    def domain(self, name: str, count: float = 1.0) -> Iterator[None]:
        """Gradients of backward passes inside belong to domain `name`."""
        if not simplex.is_number(count) or not 0 < count < float("inf"):
            raise ValueError(f"count must be positive and finite; domain {name!r} has {count!r}.")
        self._enter((name,))
        with self._opened({name: count}, self._row_of(name)):
            yield

    @contextmanager
    def stacked(self, model: nn.Module, sizes: Mapping[str, int]) -> Iterator[None]:
        """One backward pass inside, on a batch sorted by domain, gives each domain its gradient."""
        sizes_here = sizes_of(sizes)
        self._enter(tuple(sizes_here))
        if self.exchange.has_shards:
            raise RuntimeError(
                "stacked() needs whole parameters, and those of a sharded model are divided "
                "over ranks. Run one domain after another, with optimizer.domain(name)."
            )
        if have_other_hooks(self.parameters.params):
            raise RuntimeError(
                "stacked() runs no post-accumulate hook of a parameter beside its own. Use "
                "register_hook, or run one domain after another, with optimizer.domain(name)."
            )
        segments = segments_of(sizes_here, self._row_of)
        stacked_model = self._stacked_model_of(bare(model))
        with self._opened(sizes_here, None) as opened:
            with stacked_model.recording(segments):
                yield
            opened.has_received = stacked_model.has_written

    def _stacked_model_of(self, model: nn.Module) -> StackedModel:
        tracked = {id(param): param for param in self.parameters.params}
        if self._stacked_model is None or not self._stacked_model.covers(model, tracked):
            self._stacked_model = StackedModel(model, self.buffer, tracked)
        return self._stacked_model

    @outside_graphs
    def _enter(self, names: Sequence[str]) -> None:
        """Check that these domains may be entered now, and begin the step with the first."""
        if unknown := [name for name in names if name not in self.subset.row_of]:
            raise ValueError(
                f"domain {unknown[0]!r} is none of this step's, {list(self.subset.names)}, of "
                f"{list(self._weights.objective.names)}. Name it in domains= or target=; with "
                "domains_per_step run those in optimizer.domains_of_step."
            )
        self.refuse_inside_a_domain(f"domain({names[0]!r})")
        ownership.refuse_second(self)
        self.refuse_stray()
        if self._is_combined or not self._received.times:
            self._begin()
        for name in names:
            if self.micro_batches is not None and self._received.times[name] >= self.micro_batches:
                raise RuntimeError(
                    f"domain {name!r} has been entered micro_batches={self.micro_batches} times in "
                    f"this step already. {WAY_TO_ACCUMULATE}"
                )
        self._has_entered = True
        self._received.order.extend(names)

    def _begin(self) -> None:
        # First, since fully_shard() may have replaced the parameters by shards.
        params = self.parameters.scan()
        self._settle_exchange()
        if any(param.grad is not None for param in params):
            raise RuntimeError(
                "a parameter still holds a gradient from before this domain; call "
                "optimizer.step() if the domains of the step are combined, and zero_grad(). "
                + WAY_TO_ACCUMULATE
            )
        is_drawn = len(self.subset.domains) < len(self._weights.objective.domains)
        if self._one_step.ended_alone() and is_drawn:
            raise RuntimeError(
                "the wrapped optimizer has stepped alone, and would see the same few domains in "
                "every step. Call step() of the DoGEOptimizer, which draws the next ones."
            )
        if self._may_be_loaded:
            self._may_be_loaded = False
            checkpoint.warn_of_loading_in_place(self.parameters.optimizer)
        if self._is_combined:
            # p.grad was cleared without a step, as a scaler does on overflow. The draw of domains
            # stays: the loop has read `domains_of_step`.
            self.clear()

    def _row_of(self, name: str) -> int:
        self._received.counts.setdefault(name, 0.0)
        if not self.exchange.has_own_rows:
            return self.subset.row_of[name]
        self.buffer.num_rows = max(self.buffer.num_rows, len(self._received.counts))
        return list(self._received.counts).index(name)

    @contextmanager
    def _opened(self, counts: Mapping[str, float], row: int | None) -> Iterator[OpenDomain]:
        opened = self._open = OpenDomain(counts, row)
        try:
            with self._dropped_on_failure(), without_reduction():
                with ownership.opened(self):
                    yield opened
                if self.exchange.num_ranks > 1 and self.parameters.has_foreign:
                    # A wrapper has reduced gradients and put them back after our hooks ran.
                    raise RuntimeError(
                        "something has set p.grad inside a domain, as torch's replicate() does, or "
                        "DistributedDataParallel after a forward pass before it. Run forward and "
                        "backward inside the domain, in DistributedDataParallel or no wrapper."
                    )
                if self.parameters.has_noted:
                    self._collect(opened)
                self.buffer.flush()
                if not opened.has_received:
                    raise RuntimeError(
                        "no parameter of the optimizer received a gradient inside "
                        f"domain {' or '.join(map(repr, counts))}. Run forward and "
                        "loss.backward() inside it, in stacked() on the model that it was given. "
                        "If the model's parameters were replaced, build the optimizer again. "
                        "Under fully_shard the last backward pass of each domain must reduce."
                    )
        finally:
            self._open = None
        for name, count in counts.items():
            self._received.times[name] += 1
            self._received.counts[name] += count
        if self._is_complete:
            with self._dropped_on_failure():
                self._combine(None)

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
            # In a stacked pass its module has written the rows.
            return
        if self.exchange.has_shards:
            grad = local_gradient(param, grad)
        self.buffer.receive(self._row_for(param, opened), param, grad)
        opened.has_received = True

    @outside_graphs
    @torch.no_grad()
    def _collect(self, opened: OpenDomain) -> None:
        """Take the gradients that are in `p.grad`."""
        params, grads = self.parameters.take()
        if self.exchange.has_shards:
            grads = list(map(local_gradient, params, grads))
        if params:
            self.buffer.receive_all(self._row_for(params[0], opened), params, grads)
            opened.has_received = True

    def _row_for(self, param: Tensor, opened: OpenDomain) -> int:
        if opened.row is None:
            raise RuntimeError(
                f"{self.parameters.name_of(param)} received a gradient of the whole batch, since "
                "it is used outside its own module's forward, where domains are not separate. Run "
                "one domain after another, with optimizer.domain(name)."
            )
        return opened.row

    # The end of a step.

    @property
    def _is_complete(self) -> bool:
        """Whether every domain has been entered as often as `micro_batches` says.

        Never on a data-parallel rank: the other ranks may still be inside their domains.
        """
        if self.micro_batches is None or not self._received.times or self.exchange.has_own_rows:
            return False
        return all(self._received.times[name] == self.micro_batches for name in self.subset.names)

    def combine(self, grad_scale: float | Tensor | None) -> None:
        """As `DoGEOptimizer.combine`; does nothing if the last domain has combined."""
        self.refuse_inside_a_domain("combine() and step()")
        if not self._is_combined or not self._is_complete:
            self._combine(grad_scale)
        elif grad_scale is not None:
            raise RuntimeError(
                "the gradients were combined at the end of the last domain, without this "
                "grad_scale. Pass scaler=scaler to DoGEOptimizer, or micro_batches=None."
            )

    @outside_graphs
    @torch.no_grad()
    def _combine(self, grad_scale: float | Tensor | None) -> None:
        """Move the domain weights and write sum_j alpha'_j g_j into `p.grad`.

        Reads the rows twice and writes N elements, all on the device; nothing waits for it. A
        gradient that is not finite moves nothing and makes `p.grad` NaN.

        Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), Algorithms 1 and 2, eq. (update_dw).
        """
        selected = self.parameters.selected_ids
        lr = self.parameters.lr

        params = self._params_to_combine()
        scale = loss_scale(grad_scale, self._scaler, self.parameters.params[0].device)
        agreement = self._agree(params, scale)
        # All rows of this rank's columns.
        blocks = self.buffer.touched(params, agreement.dtypes)
        columns = self.exchange.complete(blocks, selected or ())

        with phase("gram"):
            gram_BB, full_BB = _gram_matrices(columns, self.exchange, selected)

        with phase("reweight"):
            last = self._weights.move(
                gram_BB,
                full_BB,
                names_B=self.subset.names,
                present=agreement.seen,
                lr=lr,
                grad_scale=scale,
            )
        self._is_skipped = skip_reader(last.skipped, self.parameters.optimizer)

        with phase("weighted_sum"):
            # The sum goes into `p.grad` on all ranks.
            self.exchange.deliver(columns, last.coefficients, self._weights.state_S)

        self._weights.last = last
        self._is_combined = True
        self._one_step.begin()
        # The user may have loaded a state_dict of ours into the wrapped optimizer.
        checkpoint.mark(self.parameters.groups)

    def _params_to_combine(self) -> list[Tensor]:
        """The parameters to combine; refuses a step that may not be combined."""
        if self._is_combined:
            raise RuntimeError("combine() has been called in this step; call step() next.")
        self.refuse_stray()
        # One that was frozen after its gradient came has its rows all the same.
        params = self.parameters.look_up({id(b.param) for b in self.buffer.blocks if b.written})
        given = next((param for param in params if param.grad is not None), None)
        if self._received.counts and given is not None:
            raise RuntimeError(
                f"{self.parameters.name_of(given)} has a p.grad from outside the domains, or one "
                "that was assigned. Run that backward pass inside a domain, or step before. "
                "Unfreeze parameters between steps."
            )
        if self._received.is_dropped and (self.exchange.num_ranks > 1 or not self._is_complete):
            # Before the ranks agree. Of micro-batches nobody would miss those that were dropped.
            raise RuntimeError(DROPPED)
        return params

    def _agree(self, params: list[Tensor], scale: float | Tensor) -> Agreement:
        """What all ranks together have; refuses a step without some domain."""
        report = Report(
            counts=self._received.counts,
            order=self._received.order,
            params=params,
            dtypes=self.buffer.dtypes_of(params),
            settings=self._settings(params, scale) if self.exchange.num_ranks > 1 else {},
            is_first=not self._has_agreed,
        )
        agreement = self.exchange.agree(self.subset.names, report)
        self._has_agreed = True
        missing = [name for name in self.subset.names if name not in agreement.seen]
        if missing and (self._absent == "error" or not agreement.seen):
            needed, way = "at least one", ""
            if self._absent == "error":
                needed = "every"
                way = ", or pass absent='keep' to allow a step without some domains"
            raise RuntimeError(
                f"step() needs a gradient from {needed} domain; missing {missing} of "
                f"{list(self.subset.names)}. Run backward for them inside optimizer.domain(name)"
                f"{way}."
            )
        return agreement

    def _settings(self, params: Sequence[Tensor], scale: float | Tensor) -> dict[str, object]:
        """{name for messages: value that must be the same on all ranks}."""
        selected, objective = self.parameters.selected_ids, self._weights.objective
        return {
            "the domains or the target": [objective.domains, objective.target],
            "the settings of DoGEOptimizer": repr(self._weights.rule),
            # Reading them waits for the device: until rank 0 has broadcast its own.
            "the domain weights": None if self._has_agreed else self._weights.state_S.tolist(),
            "grad_scale": on_host(scale),
            "the learning rate": [on_host(group.get("lr")) for group in self.parameters.groups],
            "micro_batches or absent": [self.micro_batches, self._absent],
            "their number of steps, or the draw of domains_per_step": (
                f"{self.subset.draws} {self.subset.names}"
            ),
            "the parameters that are trained": [list(param.shape) for param in params],
            "the selection": selected and [id(param) in selected for param in params],
        }

    def is_of_others(self) -> bool:
        """Whether `step()` should run the wrapped optimizer alone, on gradients of no domain."""
        # torch.distributed.checkpoint makes an optimizer create its state by a step on zero
        # gradients at learning rate zero, even between two domains.
        self.refuse_inside_a_domain("combine() and step()")
        self.refuse_stray()
        if self._is_combined:
            return False
        # A rate on a device counts as not zero: reading it would wait for the device.
        has_rate = any(on_host(group.get("lr", 1)) != 0 for group in self.parameters.groups)
        if has_rate:
            self._may_be_loaded = False
        if has_rate and (self._received.times or self._received.is_dropped):
            return False
        given = [param for param in self.parameters.look_up() if param.grad is not None]
        if not given and not self._has_entered:
            # As when a schedule is run through without training. On several ranks another one
            # may have entered a domain.
            return self.exchange.num_ranks == 1
        return not all(map(self.buffer.is_combined, given))

    def finish(self, loss: Any) -> None:
        """Combine unless that is done; step the wrapped optimizer unless the step is skipped."""
        if not self._is_combined:
            most = self.micro_batches or 1
            partial = [name for name, times in self._received.times.items() if times < most]
            if partial and self._absent == "error":
                raise RuntimeError(
                    f"step() needs every domain micro_batches={most} times; {partial} were "
                    "entered less often. To end a step early call combine(), or pass "
                    "micro_batches=None."
                )
            self.combine(None)
        last = self._weights.last
        assert last is not None
        self.parameters.refuse_other_lr(last)
        inner = self.parameters.optimizer
        with phase("inner_step"):
            step_unless(last.skipped, last.found_inf, inner, self._is_skipped, loss)
        self._spare_kept()
        self.subset.draw(self.subset.draws + 1)
        self._one_step.is_ours = True
        self.clear()

    @outside_graphs
    def _spare_kept(self) -> None:
        """Leave alone what the wrapped optimizer keeps of `p.grad`."""
        if self.buffer.forget_combined(self.parameters.optimizer) and self._exchange is not None:
            self._exchange.release()

    @outside_graphs
    def clear(self) -> None:
        """Start an empty step."""
        self.buffer.clear()
        self.parameters.forget()
        self._is_combined = False
        self._received = Received()

    def begin_loaded(self) -> None:
        """Start an empty step after `load_state_dict`."""
        self._may_be_loaded = self._has_agreed = False
        self.clear()

    def release(self) -> None:
        """Remove the hooks and free the buffer's memory."""
        self.refuse_inside_a_domain("release()")
        self.clear()
        self.buffer.release()
        if self._exchange is not None:
            self._exchange.release()
        self.parameters.release()

    @contextmanager
    def _dropped_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.parameters.has_noted:
                # Clear `p.grad` of what backward passes inside the domain have left.
                self.parameters.take()
            self.clear()
            self._received = Received(is_dropped=True)
            raise

    # Other ranks.

    @property
    def exchange(self) -> Exchange:
        """The exchange between ranks."""
        return self._exchange or self._settle_exchange()

    def _settle_exchange(self) -> Exchange:
        """Make the exchange anew if the process group or the kind of parameters has changed."""
        # Looked up: a trainer may have replaced the parameters found at construction.
        params = self.parameters.look_up()
        made_for = default_group(), frozenset(map(type, params))
        if self._exchange is None or self._made_for != made_for:
            self._exchange, self._made_for = exchange_of(self._ranks, params), made_for
            self._has_agreed = False
            # A data-parallel rank adds a row for each domain that it enters.
            self.buffer.num_rows = 0 if self._exchange.has_own_rows else len(self.subset.names)
        return self._exchange

    # What is refused.

    def refuse_inside_a_domain(self, what: str) -> None:
        """Raise RuntimeError if a domain is open."""
        if self._open is not None:
            raise RuntimeError(
                f"{what} must be called outside domain(...); {list(self._open.counts)} is active. "
                "Leave it first."
            )

    def refuse_stray(self) -> None:
        """Raise RuntimeError if a backward pass outside any domain has left a gradient."""
        if not self.parameters.has_noted:
            return
        # Inside a domain, `p.grad` may belong to that domain.
        self.refuse_inside_a_domain("combine() and step()")
        if any(param.grad is not None for param in self.parameters.params):
            raise RuntimeError(
                "a backward pass ran outside any domain, so its gradient belongs to none of "
                f"{list(self._weights.objective.names)}. Call optimizer.zero_grad() and run it "
                "inside optimizer.domain(name), or call optimizer.release() to train without "
                "domains."
            )
        self.parameters.forget()


def _gram_matrices(
    columns: Columns, exchange: Exchange, selected: Collection[int] | None
) -> tuple[Tensor, Tensor]:
    """Gram matrices [B, B] over the columns that enter W, and over all for clipping."""
    if selected is None:
        gram_BB = exchange.gram(columns.rows)
        return gram_BB, gram_BB
    inside, outside = columns.split(selected)
    if not inside:
        raise RuntimeError(
            "no selected parameter received a gradient in this step; `selection` must name "
            "parameters that the domains touch."
        )
    gram_BB = exchange.gram(inside)
    if not outside:
        return gram_BB, gram_BB
    # The other parameters may be on another device.
    return gram_BB, gram_BB + exchange.gram(outside).to(gram_BB.device)
