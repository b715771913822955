"""One backward for all domains: each layer writes every domain's weight gradient by itself.

In a batch sorted by domain each token contributes to one domain's gradient. All K weight gradients
of a layer therefore cost as much as one ordinary gradient: the same products, split by domain.
While a `StackedModel` records, it replaces the forward of every module that owns trained
parameters:

- A module whose class has a rule (`doge_fast.stacked.layers`) runs once, over all tokens. Its
  backward returns the gradient of the input to autograd, as before, and writes the weight gradient
  of each domain into its row of the flat buffer. Autograd sees no weight gradient.
- Any other module runs once per domain, on slices of its input (`layers/by_slices.py`).

Modules that mix examples (batch statistics) are refused: no domain has a gradient of its own there.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling
from torch.nn.utils import parametrize

from doge_fast.flat_buffer import Block, FlatBuffer
from doge_fast.kernels.schema import sum_dtype
from doge_fast.stacked.layers.batch import Segment, SortedBatch, refuse_coupled_examples
from doge_fast.stacked.layers.by_slices import outputs_by_slices
from doge_fast.stacked.layers.registry import rule_of
from doge_fast.stacked.layers.rule import LayerRule
from doge_fast.stacked.layers.token_sums import Sum
from doge_fast.tracing import outside_graphs

ReadRows = Callable[[list[Block]], None]
"""`read(blocks)` makes the Gram matrix and the combined gradients of rows that are lost then."""


def sizes_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """{domain: number of examples} in the order of the batch, without domains of size 0.

    ValueError if a size is negative, or all are zero.
    """
    if min(sizes.values(), default=0) < 0 or not any(sizes.values()):
        raise ValueError(
            "sizes must be {domain: number of examples >= 0}, in the order of the batch, which has "
            f"at least one example; got {dict(sizes)}."
        )
    return {name: size for name, size in sizes.items() if size}


def segments_of(parts: Sequence[tuple[int, int, int]]) -> list[Segment]:
    """The segments of a batch, in its order: (domain, row of the buffer, examples) each."""
    ends = accumulate(size for *_, size in parts)
    return [
        Segment(domain, row, end - size, end)
        for (domain, row, size), end in zip(parts, ends, strict=True)
    ]


class _Replaced(NamedTuple):
    """What decides how a module's forward is replaced."""

    rule: LayerRule | None
    """None: the module runs once per domain."""
    forward: object
    """The forward that someone has set on the module itself, else its class."""
    param_ids: tuple[int, ...]


class StackedModel:
    """Replaces the forwards of a model's modules, so that one backward fills all rows of `buffer`.

    `tracked` are the parameters that are trained, by id. ValueError if a module mixes the examples
    of a batch.
    """

    def __init__(self, model: nn.Module, buffer: FlatBuffer, tracked: Mapping[int, Tensor]) -> None:
        self.buffer = buffer
        self._tracked = frozenset(tracked)
        self._read: ReadRows | None = None
        self._number = next(_numbers)
        self.has_written = False
        """Whether any row was written since `recording` was entered."""
        self._replaced = self._find_replaced(model)
        # A module that is there twice counts twice.
        owners = (module for _, module in model.named_modules(remove_duplicate=False))
        params = chain.from_iterable(owner._parameters.values() for owner in owners)
        self._num_owners = Counter(map(id, params))
        lent = (each for each in tracked.values() if self._num_owners[id(each)] <= 1)
        self._num_bytes = sum(buffer.bytes_of(each, each.dtype) for each in lent)
        self._forwards = {
            module: self._forward_of(module, replaced.rule)
            for module, replaced in self._replaced.items()
        }

    @property
    def batch(self) -> SortedBatch | None:
        """The batch of the pass under way; None outside `recording`."""
        return _batches.get(self._number)

    def covers(self, model: nn.Module, tracked: Collection[int]) -> bool:
        """Whether `model` and the trained parameters are unchanged since this was made."""
        return self._tracked == frozenset(tracked) and self._replaced == self._find_replaced(model)

    @contextmanager
    def recording(
        self,
        segments: Sequence[Segment],
        read: ReadRows | None = None,
        *,
        has_halves: bool = False,
    ) -> Iterator[SortedBatch]:
        """Have forward and backward passes fill the rows of `segments`.

        With `read`, rows that are complete need not stay until the end of the pass (`lend`). With
        `has_halves`, losses measure how much each segment weighs (`SortedBatch.weights_S`).
        """
        batch = _batches[self._number] = SortedBatch(segments, has_halves=has_halves)
        self.has_written, self._read = False, read
        # A forward that someone has set on the module itself comes back afterwards.
        before = {module: module.__dict__.get("forward") for module in self._forwards}
        _recording.append(self)
        try:
            for module, forward in self._forwards.items():
                module.forward = forward
            yield batch
            batch.check()
        finally:
            self._read = None
            _recording.remove(self)
            del _batches[self._number]
            for module, original in before.items():
                if original is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.forward = original

    def require_open(self, batch: SortedBatch | None) -> SortedBatch:
        """Return `batch`, that of a forward pass; RuntimeError if its pass is over."""
        if batch is None or batch is not self.batch:
            raise RuntimeError(
                "the backward pass of a stacked batch ran outside its optimizer.stacked(...), "
                "where its domains are not known. Call loss.backward() inside it."
            )
        return batch

    def is_tracked(self, param: Tensor) -> bool:
        """Whether `param` is trained, and has rows."""
        return id(param) in self._tracked

    def lend(self, batch: SortedBatch, kinds: Sequence[tuple[Tensor, torch.dtype]]) -> None:
        """Have a layer's rows in memory that others use after them, where the pass allows it.

        Not those of a parameter that is used again in this pass, as far as it is known: a compiled
        graph does not tell its calls. There a gradient that comes too late is refused.
        """
        if self._read is None:
            return
        once = [
            (param, dtype)
            for param, dtype in kinds
            if max(self._num_owners[id(param)], batch.num_uses[id(param)]) <= 1
        ]
        self.buffer.lend(once, self._num_bytes, self._read)

    def claim(self, param: Tensor, row_range: range, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Mark rows of a parameter as written, for the caller to write or add to.

        Returns [len(row_range), *param.shape] in the buffer's dtype, and whether the rows hold
        gradients.
        """
        self.has_written = True
        rows_GN, adds = self.buffer.claim(row_range.start, len(row_range), param, dtype)
        return rows_GN.view(len(row_range), *param.shape), adds

    def _receive(self, batch: SortedBatch, row: int, param: Tensor, grad: Tensor) -> None:
        self.require_open(batch)
        self.has_written = True
        self.buffer.receive(row, param, grad)

    def _forward_of(self, module: nn.Module, rule: LayerRule | None) -> Callable[..., Any]:
        if rule is not None:
            return _StackedLayer(self, module, rule).forward
        original = module.forward

        # Every size of a domain would need a graph of its own.
        @outside_graphs
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            batch = self.require_open(self.batch)
            for x in (*args, *kwargs.values()) if isinstance(module, nn.Embedding) else ():
                if isinstance(x, Tensor) and not x.is_floating_point():
                    # Positions [L] are not sliced if L is the number of examples: refused.
                    batch.expand(x, module)
            return outputs_by_slices(
                *(module, original, args, kwargs),
                segments=batch.segments,
                tracked=self._tracked,
                receive=partial(self._receive, batch),
            )

        return forward

    def _find_replaced(self, model: nn.Module) -> dict[nn.Module, _Replaced]:
        refuse_coupled_examples(model)
        return {
            module: _Replaced(
                self._rule_of(module),
                module.__dict__.get("forward", type(module)),
                tuple(map(id, module._parameters.values())),
            )
            for module in self._modules_to_replace(model)
        }

    def _rule_of(self, module: nn.Module) -> LayerRule | None:
        params = module.parameters(recurse=False)
        # Autograd must compute the gradient of what another optimizer trains, and run hooks on it.
        if any(p.requires_grad and (not self.is_tracked(p) or p._backward_hooks) for p in params):
            return None
        return rule_of(module)

    def _modules_to_replace(self, module: nn.Module) -> Iterator[nn.Module]:
        """Modules that own trained parameters and do not run inside one without a rule."""
        if any(
            id(param) in self._tracked
            for owner in _parameter_owners(module)
            for param in owner._parameters.values()
        ):
            yield module
            if self._rule_of(module) is None:
                # Its children run inside it, domain by domain.
                return
        for child in module.children():
            yield from self._modules_to_replace(child)


def _parameter_owners(module: nn.Module) -> list[nn.Module]:
    """The module, and the containers of its parameters that have no forward of their own."""
    containers = (nn.ParameterList, nn.ParameterDict)
    owners = [child for child in module._modules.values() if isinstance(child, containers)]
    if parametrize.is_parametrized(module):
        owners.extend(module.parametrizations.values())  # type: ignore[operator]
    return [module, *owners]


_numbers = count()
# {number of a model: the batch of its pass under way}. Not an attribute of the model, since
# `torch.compile` takes the sizes of tensors that it reaches through torch's modules for constants.
_batches: dict[int, SortedBatch] = {}
# The models that record, the innermost last. Like autocast, `recording` covers its context.
_recording: list[StackedModel] = []


def recording_model(param: Tensor) -> StackedModel | None:
    """The innermost model that records and trains `param`; None if there is none.

    For functions that use a parameter without its module, as `linear_domain_losses` does. They
    write the parameter's rows (`StackedModel.claim`) and return no gradient of it to autograd.
    """
    # Autograd must run hooks on the gradient.
    if param._backward_hooks:
        return None
    return next((model for model in reversed(_recording) if model.is_tracked(param)), None)


def batches_with_halves() -> list[SortedBatch]:
    """Those of the passes under way; none in a compiled graph, which cannot change them."""
    if is_compiling():
        return []
    batches = (model.batch for model in _recording)
    return [batch for batch in batches if batch is not None and batch.has_halves]


class _StackedLayer:
    """Runs a module by its rule: one forward for all examples, rows in the backward."""

    def __init__(self, stacked: StackedModel, module: nn.Module, rule: LayerRule) -> None:
        self.module = module
        self.rule = rule
        self.stacked = stacked
        self._original = module.forward
        # A compiled graph cannot hold an object; it holds this number.
        self.number = next(_numbers)
        _layers[self.number] = self
        names_params = [*module.named_parameters(recurse=False)]
        self._names = [name for name, _ in names_params]
        self._params = [param for _, param in names_params]
        self._tracked = [stacked.is_tracked(param) for param in self._params]
        self._token = torch.zeros(1, device=self._params[0].device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, by its rule."""
        batch = self.stacked.batch
        # Of a reentrant checkpoint this is the forward pass, though autograd does not see it.
        if batch is not None and not is_compiling() and not is_in_backward():
            batch.num_uses.update(map(id, self._params))
        params = self.module.parameters(recurse=False)
        # functional_call has put other tensors there: those are autograd's.
        is_unchanged = all(new is old for new, old in zip(params, self._params, strict=True))
        if not (torch.is_grad_enabled() and is_unchanged):
            return self._original(*args, **kwargs)
        batch = self.stacked.require_open(batch)
        (x,) = (*args, *kwargs.values())
        prepared = self.rule.prepare(self.module, batch.expand(x, self.module))
        output = _Layer.apply(self, batch.num_examples, prepared, self._token, *self._params)  # type: ignore[no-untyped-call]
        dtype = self.rule.output_dtype(x)
        return output if dtype is None else output.to(dtype)

    def fill_rows(
        self,
        batch: SortedBatch | None,
        tensors: Sequence[Tensor],
        needs_grad: Sequence[bool],
        sums: Mapping[int, Tensor],
    ) -> None:
        """Write the rows of the module's parameters that need a gradient, in its backward.

        `sums` are [B, *shape], of each example, by the place of the parameter: those that a graph
        has made. `tensors` are empty if these are all.
        """
        stacked, batch = self.stacked, self.stacked.require_open(batch)
        pairs = zip(self._params, needs_grad, strict=True)
        wanted = {id(param) for param, needs in pairs if needs and stacked.is_tracked(param)}
        summed = [(self._params[place], Sum(values)) for place, values in sums.items()]
        wanted -= {id(param) for param, _ in summed}
        gradients = [
            (param, gradient)
            for param, gradient in (self.rule.gradients(self.module, *tensors) if tensors else ())
            if param is not None and id(param) in wanted
        ]
        # Rows of a parameter without elements count as written. There is nothing to write.
        empty = [(param, gradient) for param, gradient in gradients if not param.numel()]
        filled = [(param, gradient) for param, gradient in gradients if param.numel()]
        stacked.lend(batch, [(param, each.dtype) for param, each in (*filled, *summed)])
        for run in batch.runs:
            for param, gradient in empty:
                stacked.claim(param, run.row_range, gradient.dtype)
            # Claimed one after another: a second gradient of a parameter may move its rows.
            outs = (stacked.claim(param, run.row_range, g.dtype) for param, g in filled)
            self.rule.write([gradient for _, gradient in filled], run, outs)
            for param, gradient in summed:
                gradient.write(run, *stacked.claim(param, run.row_range, gradient.dtype))

    def sums(
        self, num_examples: int, tensors: Sequence[Tensor], needs_grad: Sequence[bool]
    ) -> tuple[list[int], list[Tensor]]:
        """The places of parameters whose rule has terms, and each example's sum, [B, *shape].

        Both are empty if the first dimension does not hold the examples: `SortedBatch.note` refuses
        that.
        """
        grad = tensors[0]
        if grad.dim() == 1 or grad.shape[0] % num_examples:
            return [], []
        terms = self.rule.terms(self.module, *tensors)
        wanted = [tracks and needs for tracks, needs in zip(self._tracked, needs_grad, strict=True)]
        places = [
            place
            for place, name in enumerate(self._names)
            if name in terms and wanted[place] and self._params[place].numel()
        ]
        sums = []
        for place in places:
            values = terms[self._names[place]]
            values = values.reshape(num_examples, -1, *self._params[place].shape)
            sums.append(values.sum(1, dtype=sum_dtype(values.dtype)))
        return places, sums


class _Layer(torch.autograd.Function):
    """A rule's forward and input gradient."""

    # The parameters are inputs so that the output requires a gradient even if x does not.

    @staticmethod
    def forward(
        ctx: Any,
        layer: _StackedLayer,
        num_examples: int,
        x: Tensor,
        token: Tensor,
        *params: Tensor | None,
    ) -> Tensor:
        output, saved = layer.rule.forward(layer.module, x)
        ctx.save_for_backward(x, *saved)
        ctx.layer, ctx.token, ctx.num_params = layer, token, len(params)
        ctx.num_examples = num_examples
        if not is_compiling():
            ctx.batch = layer.stacked.batch
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer, tensors = ctx.layer, [grad, *ctx.saved_tensors]
        grad_x = None
        if is_compiling():
            # First, so that the sums read the narrow `grad` of its product.
            if ctx.needs_input_grad[2]:
                grad_x = layer.rule.input_gradient(layer.module, *tensors)
            # A graph knows only which parameters were trained in the forward pass: inputs 4 and on.
            needs_grad = [*ctx.needs_input_grad[4:]]
            places, sums = layer.sums(ctx.num_examples, tensors, needs_grad)
            others = [] if len(sums) == sum(needs_grad) else tensors
            fill_rows_(tensors[1], others, sums, ctx.token, layer.number, places, needs_grad)
        else:
            # The tensors among the inputs are x, token, and the parameters.
            needs_grad = [will_receive_grad(ctx, 2 + i) for i in range(ctx.num_params)]
            layer.fill_rows(ctx.batch, tensors, needs_grad, {})
            if ctx.needs_input_grad[2]:
                grad_x = layer.rule.input_gradient(layer.module, *tensors)
        return None, None, grad_x, None, *[None] * ctx.num_params


def is_in_backward() -> bool:
    """Whether a backward pass runs, which computes what was checkpointed once more."""
    return torch._C._current_graph_task_id() != -1


def will_receive_grad(ctx: Any, index: int) -> bool:
    """Whether the backward pass under way adds to the gradient of a function's tensor `index`.

    False if the tensor was frozen in the forward pass, and in `autograd.grad(loss, x)`.
    """
    node = ctx.next_functions[index][0]
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # autograd.grad(loss, parameters) returns the gradient instead.
        return False


_layers: WeakValueDictionary[int, _StackedLayer] = WeakValueDictionary()


# Opaque, because the host allocates the buffer's blocks and notes which rows are written. A CUDA
# graph would replay the kernels without these notes; the tag keeps the operator out of one.
@torch.library.custom_op(
    "doge_fast::fill_rows_", mutates_args={"token"}, tags=[torch.Tag.cudagraph_unsafe]
)
def fill_rows_(
    x: Tensor,
    tensors: list[Tensor],
    sums: list[Tensor],
    token: Tensor,
    number: int,
    places: list[int],
    needs_grad: list[bool],
) -> None:
    """Write rows of the flat buffer in the backward of a module.

    `tensors` are the gradient of the output, x, and what the module's rule saved; empty if `sums`,
    of the parameters at `places`, are all gradients. `number` is that of its `_StackedLayer`.
    `token` is declared as changed, so that a compiler keeps the call; it is not written.
    """
    layer = _layers[number]
    batch = layer.stacked.require_open(layer.stacked.batch)
    batch.note(x, layer.module)
    layer.fill_rows(batch, tensors, needs_grad, dict(zip(places, sums, strict=True)))


@fill_rows_.register_fake
def _(*arguments: Any) -> None:
    return None
