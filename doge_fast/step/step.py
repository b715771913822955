"""The step under way, from the hook that sees a gradient to the combined one in `p.grad`.

`StepState` has the states of a step, and what moves it from one to the next. While a domain is open
its gradients go to a row of the flat buffer (`parameters` says when). A backward pass outside any
domain leaves a gradient that the next `domain()` or `step()` refuses.

A data-parallel rank learns what the others have entered when the step is combined.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial, reduce
from itertools import count
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from doge_fast import tracing
from doge_fast.distributed import exchange_of
from doge_fast.distributed.exchange import Columns, Exchange
from doge_fast.distributed.process_group import (
    Agreement,
    Entry,
    GroupArgument,
    Report,
    default_group,
)
from doge_fast.distributed.wrappers import bare, without_reduction
from doge_fast.flat_buffer import (
    Block,
    FlatBuffer,
    local_gradient,
    on_device,
    scale_combined,
)
from doge_fast.metric import Metric
from doge_fast.stacked.stacked import StackedModel, segments_of, sizes_of
from doge_fast.step import ownership
from doge_fast.step.parameters import TrackedParameters, have_other_hooks, on_host, weak_hook
from doge_fast.tracing import between_graphs, outside_graphs
from doge_fast.weights import checkpoint
from doge_fast.weights.rule import LastStep, Matrices
from doge_fast.weights.scores import clip_factors
from doge_fast.weights.state import DomainWeights
from doge_fast.weights.subset import Subset
from doge_fast.wrapper import optimizers_of, skip_reader, step_unless

LEAST_SHARE = 1e-3
"""Of a half whose examples have no targets: its product with the other is divided by its share."""


class StepState(Enum):
    """Where a step stands. `Step` changes it in the methods that are named here."""

    EMPTY = auto()
    """No domain has been entered.
    `_open` -> OPEN."""
    OPEN = auto()
    """Inside a domain, or inside the domains of a stacked pass.
    Left -> COLLECTED; left as the last domain -> COMBINED; an exception -> DROPPED."""
    COLLECTED = auto()
    """Between two domains; the rows of those that were left hold their gradients.
    `_open` -> OPEN; `combine` -> COMBINED; `clear` -> EMPTY."""
    COMBINED = auto()
    """The domain weights have moved, and the weighted gradient is in `p.grad`.
    `finish` and `clear` -> EMPTY; `_begin` -> EMPTY if `p.grad` was cleared without a step."""
    DROPPED = auto()
    """An exception in a domain has lost gradients of this step.
    `clear` -> EMPTY. Entering a domain comes back to this state; once every domain has been entered
    again, nothing is missing -> COMBINED."""


@dataclass
class OpenDomain:
    """The domain that is open, or the domains of a stacked pass."""

    counts: Mapping[str, float]
    """{domain: weight of this rank's gradient in the mean over ranks}."""
    row: int | None
    """Row of the buffer; None in a stacked pass, whose modules write the rows themselves."""
    weight: float
    """Of this pass in the gradient of each of its domains, up to a common factor."""
    half_weights_S: Tensor | None = None
    """The same of each half, if it was measured; of the rows in `ranges`."""
    ranges: Sequence[range] = ()
    has_received: bool = False


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
        process_group: GroupArgument,
    ) -> None:
        if absent not in ("error", "keep"):
            raise ValueError(f"absent must be 'error' or 'keep'; got {absent!r}.")
        self.micro_batches = micro_batches
        self.parameters = parameters
        self.subset = subset
        self._buffer_dtype = buffer_dtype
        self._weights = weights
        self._absent = absent
        self._scaler = scaler
        self._process_group = process_group
        self._num_halves = 2 if weights.rule.has_halves else 1
        self._start()

    def _start(self) -> None:
        self.state = StepState.EMPTY
        self._open_domain: OpenDomain | None = None
        # Domains that have been left in this step, in the order of the first time. On a
        # data-parallel rank this is also the order of the buffer's rows.
        self._entries: dict[str, Entry] = {}
        # [C] float64: what losses have measured, on their device, beside `Entry.half_weights`.
        self._half_weights_C: Tensor | None = None
        # The next place in the sequence of the step's domains.
        self._places = count()
        # Gram matrices of this step's columns, each with whether these enter W.
        self._grams: list[tuple[bool, Tensor]] = []
        # `num_rows` is C, the halves of B domains; 0 on a data-parallel rank until it enters one.
        self.buffer = FlatBuffer(self._num_halves * len(self.subset.names), self._buffer_dtype)
        self._exchange: Exchange | None = None
        # The default group and the kinds of parameters that the exchange was made for.
        self._made_for: object = None
        # Whether rank 0 has broadcast its weights, so that they need not be compared.
        self._has_agreed = False
        # Rules and forwards for the model of the last stacked pass.
        self._stacked_model: StackedModel | None = None
        inner = self.parameters.optimizer
        # Whether state that appears in the wrapped optimizer may have been loaded into it directly.
        self._may_be_loaded = not inner.state
        self._one_step = ownership.OneStep(optimizers_of(inner), self.buffer.is_combined)
        self.parameters.receive = torch.compiler.disable(weak_hook(self.receive))  # type: ignore[no-untyped-call]
        self.parameters.scan()

    _LASTING = (
        *("micro_batches", "parameters", "subset"),
        *("_weights", "_buffer_dtype", "_absent", "_scaler", "_process_group", "_num_halves"),
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
    def domain(
        self, name: str, count: float = 1.0, weight: float | Tensor | None = None
    ) -> Iterator[None]:
        """Gradients of backward passes inside belong to domain `name`.

        `weight` is that of this pass in the domain's gradient on this rank; None: `count`.
        """
        if not 0 < count < float("inf"):
            raise ValueError(f"count must be positive and finite; domain {name!r} has {count!r}.")
        self._enter((name,))
        self._assign_rows((name,))
        half = self._next_half(name)
        row = self._row_of(name, half)
        number = count if weight is None or isinstance(weight, Tensor) else weight
        with self._open({name: count}, {name: {half: 1}}, row, number) as domain:
            if isinstance(weight, Tensor):
                domain.half_weights_S = weight.double().view(1)
                domain.ranges = [range(row, row + 1)]
            yield

    @contextmanager
    def stacked(
        self, model: nn.Module, sizes: Mapping[str, int], keep_rows: bool
    ) -> Iterator[None]:
        """One backward pass inside, on a batch sorted by domain, gives each domain its gradient."""
        sizes_here = sizes_of(sizes)
        self._enter(tuple(sizes_here))
        if self.exchange.has_shards:
            raise RuntimeError(
                "stacked() needs whole parameters, and those of a sharded model are divided over "
                "ranks. Run one domain after another, with optimizer.domain(name)."
            )
        if have_other_hooks(self.parameters.params):
            raise RuntimeError(
                "stacked() runs no post-accumulate hook of a parameter beside its own. Use "
                "register_hook, or run one domain after another, with optimizer.domain(name)."
            )
        self._assign_rows(sizes_here)
        halves = {name: self._halves_of(name, size) for name, size in sizes_here.items()}
        parts = [
            (place, self._row_of(name, half), size)
            for place, (name, sizes_of_halves) in enumerate(halves.items())
            for half, size in sizes_of_halves.items()
        ]
        stacked_model = self._stacked_model_of(bare(model))
        may_read = self._weights.rule.has_mixture and self.exchange.num_ranks == 1
        read = self._read if may_read and not keep_rows else None
        has_halves = self._num_halves == 2
        # The loss of a pass is a mean, unless it measures the weights itself.
        with self._open(sizes_here, halves, None, 1.0) as domain:
            with stacked_model.recording(segments_of(parts), read, has_halves=has_halves) as batch:
                yield
            domain.has_received = stacked_model.has_written
            domain.half_weights_S = batch.weights_S
            domain.ranges = [run.row_range for run in batch.runs]

    def _stacked_model_of(self, model: nn.Module) -> StackedModel:
        tracked = {id(param): param for param in self.parameters.params}
        if self._stacked_model is None or not self._stacked_model.covers(model, tracked):
            self._stacked_model = StackedModel(model, self.buffer, tracked)
        return self._stacked_model

    @outside_graphs
    def _enter(self, names: Sequence[str]) -> None:
        """Check that these domains may be entered now; begin the step with the first."""
        if unknown := [name for name in names if name not in self.subset.row_of]:
            raise ValueError(
                f"domain {unknown[0]!r} is none of this step's, {list(self.subset.names)}. Name it "
                "in domains= or target=, or enter those in optimizer.domains_of_step."
            )
        self.refuse_inside_a_domain(f"domain({names[0]!r})")
        ownership.refuse_second(self)
        self.refuse_stray()
        if self.state is StepState.COMBINED or not self._entries:
            self._begin()
        for name in names:
            if self.micro_batches is not None and self._times(name) >= self.micro_batches:
                raise RuntimeError(
                    f"domain {name!r} has been entered micro_batches={self.micro_batches} times in "
                    "this step. Pass their number, micro_batches=N, or None for any number."
                )

    def _begin(self) -> None:
        # First, since fully_shard() may have replaced the parameters by shards.
        params = self.parameters.scan()
        self._settle_exchange()
        if any(param.grad is not None for param in params):
            raise RuntimeError(
                "a parameter still holds a gradient from before this domain. Call zero_grad(); "
                "step() before it if the domains are combined."
            )
        is_drawn = len(self.subset.domains) < len(self._weights.objective.domains)
        is_alone = self._one_step.is_alone
        self._one_step.begin()
        if is_alone and is_drawn:
            raise RuntimeError(
                "the wrapped optimizer has stepped alone, and would see the same few domains in "
                "every step. Call step() of the DoGEOptimizer, which draws the next ones."
            )
        if self._may_be_loaded:
            self._may_be_loaded = False
            checkpoint.warn_of_loading_in_place(self.parameters.optimizer)
        # The user may have loaded a state_dict of ours into the wrapped optimizer.
        checkpoint.add_empty_key(self.parameters.groups)
        if self.state is StepState.COMBINED:
            # p.grad was cleared without a step, as a scaler does on overflow. The draw of domains
            # stays: the loop has read `domains_of_step`.
            self.clear()

    def _times(self, name: str) -> int:
        return len(self._entries[name].places) if name in self._entries else 0

    def _assign_rows(self, names: Collection[str]) -> None:
        """Decide the rows of these domains; a data-parallel rank gives a new one the next."""
        self._order: Mapping[str, int] = self.subset.row_of
        if self.exchange.has_own_rows:
            entered = dict.fromkeys([*self._entries, *names])
            self._order = {name: index for index, name in enumerate(entered)}
            num_rows = self._num_halves * len(entered)
            self.buffer.num_rows = max(self.buffer.num_rows, num_rows)

    def _row_of(self, name: str, half: int) -> int:
        return self._num_halves * self._order[name] + half

    def _next_half(self, name: str) -> int:
        """Halves alternate from entry to entry of a domain, and from rank to rank."""
        return (self.exchange.first_half + self._times(name)) % self._num_halves

    def _halves_of(self, name: str, size: int) -> dict[int, int]:
        """{half: examples} of a domain in a stacked pass."""
        next_half = self._next_half(name)
        if self._num_halves == 1 or size == 1:
            return {next_half: size}
        # In the order of the rows, so that neighbouring rows are filled together.
        first = (size + next_half) // 2
        return {0: first, 1: size - first}

    @contextmanager
    def _open(
        self,
        counts: Mapping[str, float],
        halves: Mapping[str, Mapping[int, int]],
        row: int | None,
        weight: float,
    ) -> Iterator[OpenDomain]:
        """Collect the gradients of a domain, or of a stacked pass; combine after the last one."""
        has_dropped = self.state is StepState.DROPPED
        domain = self._open_domain = OpenDomain(counts, row, weight)
        self.state, ownership.this_thread.owner = StepState.OPEN, self
        try:
            with without_reduction():
                yield domain
                self._refuse_foreign()
            if self.parameters.has_noted:
                self._collect(domain)
            self.buffer.flush()
            if not domain.has_received:
                raise RuntimeError(
                    "no parameter of the optimizer received a gradient inside "
                    f"domain {' or '.join(map(repr, counts))}. Run forward and backward inside it, "
                    "with the model whose parameters the optimizer has."
                )
            for name, count in counts.items():
                entry = self._entries.setdefault(name, Entry())
                entry.places.append(next(self._places))
                for half, size in halves[name].items():
                    share = size / sum(halves[name].values())
                    entry.counts[half] += count * share
                    if domain.half_weights_S is None:
                        entry.half_weights[half] += domain.weight * share
            if domain.half_weights_S is not None:
                self._add_half_weights(domain.half_weights_S, domain.ranges)
            self.state = StepState.DROPPED if has_dropped else StepState.COLLECTED
            if self._is_complete:
                self._combine(None)
        except BaseException:
            self._drop()
            raise
        finally:
            self._open_domain = ownership.this_thread.owner = None

    def _add_half_weights(self, weights_S: Tensor, ranges: Sequence[range]) -> None:
        if self._half_weights_C is None:
            # A rank may get a row for each domain.
            num_rows = self._num_halves * len(self.subset.names)
            self._half_weights_C = weights_S.new_zeros(num_rows)
        parts = torch.split(weights_S, [*map(len, ranges)])
        for rows, part_S in zip(ranges, parts, strict=True):
            self._half_weights_C[rows.start : rows.stop] += part_S

    def _first_shares(self) -> dict[str, float | Tensor]:
        """As `Report.first_shares`; nothing waits for weights that lie on a device."""
        entries, measured_C = self._entries, self._half_weights_C
        by_count = {name: entry.counts[0] / sum(entry.counts) for name, entry in entries.items()}
        # Ranks exchange numbers of the host: there the shares of examples stand for the weights.
        is_measured = measured_C is None or measured_C.is_cpu or self.exchange.num_ranks == 1
        if self._num_halves == 1 or not entries or not is_measured:
            return {**by_count}
        names = list(self._order)
        halves = [entries[name].half_weights if name in entries else [0.0, 0.0] for name in names]
        weights_B2 = torch.tensor(halves, dtype=torch.float64, device="cpu")
        if measured_C is not None:
            # That of the Gram matrix.
            device = measured_C.device if measured_C.is_cpu else self.parameters.params[0].device
            measured_B2 = measured_C[: 2 * len(names)].view(-1, 2).to(device)
            # Not zeros: a captured CUDA graph has no copy from the host.
            if weights_B2.any():
                measured_B2 = measured_B2 + on_device(weights_B2, device, torch.float64)
            weights_B2 = measured_B2
        # Of a domain without any target a half.
        tiny = torch.finfo(torch.float64).tiny
        first_B = (weights_B2[:, 0] + tiny) / (weights_B2.sum(1) + 2 * tiny)
        first_B = first_B.clamp(LEAST_SHARE, 1 - LEAST_SHARE)
        shares = dict(zip(names, first_B.tolist() if first_B.is_cpu else first_B, strict=True))
        return {name: at if at in (0, 1) else shares[name] for name, at in by_count.items()}

    def _drop(self) -> None:
        """Lose the gradients of this step, after an exception."""
        if self.parameters.has_noted:
            # Clear `p.grad` of what backward passes inside the domain have left.
            self.parameters.take()
        self.clear()
        self.state = StepState.DROPPED

    def receive(self, param: Tensor) -> None:
        """Take the gradient that autograd has just put into `param.grad`."""
        domain = self._open_domain
        if domain is None:
            # Another DoGEOptimizer on the same parameters may still take it.
            if param.grad is not None:
                self.parameters.note(param)
            return
        grad, param.grad = param.grad, None
        if grad is None:
            # In a stacked pass the module has written the rows in its own backward.
            return
        if self.exchange.has_shards:
            grad = local_gradient(param, grad)
        self.buffer.receive(self._row_for(param, domain), param, grad)
        domain.has_received = True

    @outside_graphs
    @torch.no_grad()
    def _collect(self, domain: OpenDomain) -> None:
        """Take the gradients that are in `p.grad`."""
        params, grads = self.parameters.take()
        if self.exchange.has_shards:
            grads = list(map(local_gradient, params, grads))
        if params:
            self.buffer.receive_all(self._row_for(params[0], domain), params, grads)
            domain.has_received = True

    def _row_for(self, param: Tensor, domain: OpenDomain) -> int:
        if domain.row is None:
            raise RuntimeError(
                f"{self.parameters.name_of(param)} received a gradient of the whole batch, since "
                "it is used outside its own module's forward, where domains are not separate. Run "
                "one domain after another, with optimizer.domain(name)."
            )
        return domain.row

    @torch.no_grad()
    def _read(self, blocks: list[Block]) -> None:
        """Make Gram matrices and weighted sums of rows that are lost afterwards."""
        selected = self.parameters.selected_ids
        columns = self.exchange.complete(blocks, selected or ())
        with tracing.phase("doge_fast.gram"):
            self._grams += self._grams_of(columns, selected, self._weights.mixture_R)

    def _grams_of(
        self, columns: Columns, selected: Collection[int] | None, mixture_R: Tensor | None
    ) -> list[tuple[bool, Tensor]]:
        """Gram matrices, each with whether its columns enter W; with a mixture the sums, too."""
        rule, optimizer = self._weights.rule, self.parameters.optimizer
        metric = Metric(optimizer) if rule.is_preconditioned else None
        parts = [columns] if selected is None else columns.split(selected)
        return [
            (is_inside, self.exchange.gram(part, metric, mixture_R))
            for is_inside, part in zip((True, False), parts, strict=False)
            if part.rows
        ]

    # The end of a step.

    @property
    def _is_complete(self) -> bool:
        """Whether every domain has been entered as often as `micro_batches` says.

        Never on a data-parallel rank: the other ranks may still be inside their domains.
        """
        if self.micro_batches is None or not self._entries or self.exchange.has_own_rows:
            return False
        return all(self._times(name) == self.micro_batches for name in self.subset.names)

    def combine(self, grad_scale: float | Tensor | None) -> None:
        """As `DoGEOptimizer.combine`."""
        self.refuse_inside_a_domain("combine() and step()")
        if self.state is not StepState.COMBINED:
            self._combine(grad_scale)
        elif grad_scale is not None:
            raise RuntimeError(
                "the gradients of this step are combined already, without this grad_scale. Pass "
                "scaler=scaler to DoGEOptimizer, or micro_batches=None."
            )

    @outside_graphs
    @torch.no_grad()
    def _combine(self, grad_scale: float | Tensor | None) -> None:
        """Move the domain weights and write sum_j alpha'_j g_j into `p.grad`.

        Reads the rows twice, or once with a rule that knows its mixture before, and writes N
        elements, all on the device; nothing waits for it. A gradient that is not finite moves
        nothing and makes `p.grad` NaN, of one parameter at least.

        Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), Algorithms 1 and 2, eq. (update_dw).
        """
        exchange, selected = self.exchange, self.parameters.selected_ids
        lr = self.parameters.lr
        params = self._params_to_combine()
        scale = loss_scale(grad_scale, self._scaler, self.parameters.params[0].device)
        agreement = self._agree(params, scale)
        # A block [B, numel] for each parameter that has a gradient on some rank.
        blocks = self.buffer.touched(params, agreement.dtypes)
        # [B, columns] tensors: all rows of this rank's columns.
        columns = exchange.complete(blocks, selected or ())
        blocks += self.buffer.read_blocks()

        # A rule that knows it before has the sums made on the way of the Gram matrices.
        mixture_R = self._weights.mixture_R
        with tracing.phase("doge_fast.gram"):
            # The same on all ranks, to the bit.
            grams = self._grams_of(columns, selected, mixture_R)
            matrices = _matrices(self._grams + grams, self.parameters.params[0].device)

        with tracing.phase("doge_fast.reweight"):
            # From here on numbers of domains; else the rows are read once more, for their sum.
            last = self._weights.move(
                matrices,
                names_B=self.subset.names,
                first_shares=agreement.first_shares,
                lr=lr,
                grad_scale=scale,
            )
        self._read_skipped: Callable[[], bool]
        if last.skipped.is_cpu:
            self._read_skipped = partial(bool, last.skipped)
        else:
            # Before the weighted sum is queued, so that the host waits for the flag alone.
            self._read_skipped = skip_reader(last.skipped, self.parameters.optimizer)

        with tracing.phase("doge_fast.weighted_sum"):
            if mixture_R is None:
                exchange.deliver(columns, last.coefficients)
            for block in blocks:
                block.give()
            exchange.share(self._weights.state_S)
            if self._weights.rule.is_preconditioned:
                norm = exchange.norm(blocks).to(last.combined_norm.device) / scale
                # What was summed before may be finite, as that of an infinite target is.
                norm = torch.where(last.skipped, torch.nan, norm)
                if (max_grad_norm := self._weights.rule.max_grad_norm) is not None:
                    scale_combined(blocks, clip_factors(norm, max_grad_norm))
                else:
                    # A scaler looks for what is not finite: the smallest gradient is enough.
                    some = [block for block in blocks if block.num_columns]
                    unit = torch.where(last.skipped, torch.nan, torch.ones_like(norm))
                    scale_combined(some and [min(some, key=attrgetter("num_columns"))], unit)
                last = last._replace(combined_norm=norm)

        self._weights.last = last
        self.state = StepState.COMBINED
        if not self._entries:
            # `_begin` has done this, but not on a rank that has entered no domain.
            self._one_step.begin()

    def _params_to_combine(self) -> list[Tensor]:
        """The parameters to combine; refuses a step that may not be combined."""
        self.refuse_stray()
        # A parameter that was frozen after its gradient arrived still has rows.
        params = self.parameters.look_up({id(b.param) for b in self.buffer.blocks if b.written})
        given = next((param for param in params if param.grad is not None), None)
        if self._entries and given is not None:
            raise RuntimeError(
                f"{self.parameters.name_of(given)} has a p.grad that no domain gave. Run backward "
                "passes inside domains, and unfreeze parameters between steps."
            )
        is_whole = self._is_complete and self.exchange.num_ranks == 1
        if self.state is StepState.DROPPED and not is_whole:
            raise RuntimeError(
                "an exception inside a domain dropped this step's gradients. Call "
                "optimizer.zero_grad() and run the domains of this step again."
            )
        return params

    def _agree(self, params: list[Tensor], scale: float | Tensor) -> Agreement:
        """What all ranks together have; refuses a step without some domain."""
        report = Report(
            entries=self._entries,
            first_shares=self._first_shares(),
            params=params,
            dtypes=self.buffer.dtypes_of(params),
            settings=self._settings(params, scale) if self.exchange.num_ranks > 1 else {},
            is_first=not self._has_agreed,
        )
        agreement = self.exchange.agree(self.subset.names, report)
        self._has_agreed = True
        missing = [name for name in self.subset.names if name not in agreement.first_shares]
        if missing and (self._absent == "error" or not agreement.first_shares):
            needed = "some domain" if self._absent == "keep" else "every domain, or absent='keep'"
            raise RuntimeError(
                f"step() needs a gradient of {needed}; missing {missing}. Run their backward "
                "passes inside optimizer.domain(name)."
            )
        whole = [
            name
            for name, first in agreement.first_shares.items()
            if not isinstance(first, Tensor) and first in (0, 1)
        ]
        if self._num_halves == 2 and whole:
            raise RuntimeError(
                f"the rule {self._weights.rule.name!r} compares two halves of each domain's batch, "
                f"and {whole} came in one piece. Enter each domain twice in a step, each time with "
                "half of its batch (micro_batches=2), or run stacked() on two examples or more."
            )
        return agreement

    def _settings(self, params: Sequence[Tensor], scale: float | Tensor) -> dict[str, object]:
        """{name for messages: value that must be the same on all ranks}."""
        selected, objective = self.parameters.selected_ids, self._weights.objective
        return {
            "the domains or the target": [objective.domains, objective.target],
            "the settings of DoGEOptimizer": repr(self._weights.rule),
            # Compared only before rank 0's first broadcast: reading them waits for the device.
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

    @outside_graphs
    def is_plain(self) -> bool:
        """Whether `step()` is the wrapped optimizer's own, on gradients that no domain has."""
        self.refuse_inside_a_domain("combine() and step()")
        self.refuse_stray()
        if self.state is StepState.COMBINED:
            return False
        # A rate on a device counts as not zero: reading it would wait for the device.
        # torch.distributed.checkpoint makes an optimizer create its state by a step on zero
        # gradients at learning rate zero, even between two domains.
        has_rate = any(on_host(group.get("lr", 1)) != 0 for group in self.parameters.groups)
        if has_rate:
            self._may_be_loaded = False
        if has_rate and self.state is not StepState.EMPTY:
            return False
        given = [param for param in self.parameters.look_up() if param.grad is not None]
        if not given and not self.buffer.blocks:
            # A loop may step only to advance a schedule. On several ranks another one may have
            # entered a domain.
            return self.exchange.num_ranks == 1
        return not all(map(self.buffer.is_combined, given))

    @between_graphs
    def finish(self, loss: Any) -> None:
        """Combine unless that is done; step the wrapped optimizer unless the step is skipped."""
        last = self._combined()
        inner = self.parameters.optimizer
        with tracing.phase("doge_fast.inner_step"):
            step_unless(last.skipped, last.found_inf, inner, self._read_skipped, loss)
        self._end()

    @outside_graphs
    def _combined(self) -> LastStep:
        """Combine unless that is done; refuses a step that may not be taken."""
        if self.state is not StepState.COMBINED:
            least = self.micro_batches or 1
            partial = [name for name in self._entries if self._times(name) < least]
            if partial and self._absent == "error":
                raise RuntimeError(
                    f"step() needs every domain micro_batches={least} times; {partial} were "
                    "entered less often. combine() ends a step early."
                )
            self.combine(None)
        last = self._weights.last
        assert last is not None
        if self._weights.rule.mu is not None:
            # Other rules do not move the weights by the rate.
            self.parameters.refuse_other_lr(last)
        return last

    @outside_graphs
    def _end(self) -> None:
        """Begin the next step, after that of the wrapped optimizer."""
        # A wrapped optimizer may keep `p.grad`, as MARS does: then the gradients are its own.
        if self.buffer.forget_combined(self.parameters.optimizer) and self._exchange is not None:
            self._exchange.release()
        self.subset.draw(self.subset.draws + 1)
        self._one_step.is_ours = True
        self.clear()

    @outside_graphs
    def clear(self) -> None:
        """Start an empty step."""
        self.buffer.clear()
        self.parameters.forget()
        self._entries, self._places, self._grams = {}, count(), []
        self._half_weights_C = None
        self.state = StepState.EMPTY

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
            exchange = exchange_of(self._process_group, params, self._num_halves)
            self._exchange, self._made_for = exchange, made_for
            self._has_agreed = False
            # A data-parallel rank adds a row for each domain that it enters.
            rows = self._num_halves * len(self.subset.names)
            self.buffer.num_rows = 0 if exchange.has_own_rows else rows
        return self._exchange

    # What is refused.

    def refuse_inside_a_domain(self, what: str) -> None:
        """Raise RuntimeError if a domain is open."""
        if self.state is StepState.OPEN:
            assert self._open_domain is not None
            raise RuntimeError(
                f"{what} must be called outside domain(...); {list(self._open_domain.counts)} is "
                "active. Leave it first."
            )

    def refuse_stray(self) -> None:
        """Raise RuntimeError if a backward pass outside any domain has left a gradient."""
        if not self.parameters.has_noted:
            return
        if any(param.grad is not None for param in self.parameters.params):
            raise RuntimeError(
                "a backward pass ran outside any domain. Call zero_grad() and run it inside "
                "optimizer.domain(name); after release() the model trains without domains."
            )
        self.parameters.forget()

    def _refuse_foreign(self) -> None:
        """Raise RuntimeError if something has put reduced gradients back after our hooks ran."""
        if self.exchange.num_ranks > 1 and self.parameters.has_foreign:
            raise RuntimeError(
                "something has set p.grad inside a domain, as a wrapper that reduces gradients "
                "does. Run forward and backward inside the domain, in DistributedDataParallel or "
                "no wrapper."
            )


def _matrices(grams: Sequence[tuple[bool, Tensor]], device: torch.device) -> Matrices:
    """The sums over the columns that enter W, and over all for clipping, on `device`."""
    # Threads of several devices read rows in any order.
    ordered = sorted(grams, key=lambda each: str(each[1].device))
    inside = [gram.to(device) for is_inside, gram in ordered if is_inside]
    if not inside:
        raise RuntimeError(
            "no selected parameter received a gradient in this step; `selection` must name "
            "parameters that the domains touch."
        )
    outside = [gram.to(device) for is_inside, gram in ordered if not is_inside]
    gram = reduce(torch.add, inside)
    return Matrices(gram, reduce(torch.add, outside, gram))


def loss_scale(
    grad_scale: float | Tensor | None, scaler: GradScaler | None, device: torch.device
) -> float | Tensor:
    """The factor that multiplied the losses of a step: `grad_scale`, or the scaler's, or 1.

    ValueError if `grad_scale` is a number that is not positive and finite.
    """
    if grad_scale is None:
        # Not get_scale(), for which the host would wait.
        return 1.0 if scaler is None else scaler.scale(torch.ones((), device=device))
    # The host would wait for the value of a tensor.
    if not isinstance(grad_scale, Tensor) and not 0 < grad_scale < float("inf"):
        raise ValueError(
            f"grad_scale must be positive and finite; got {grad_scale!r}. Pass the factor that the "
            "losses were multiplied by, scaler.get_scale()."
        )
    return grad_scale
