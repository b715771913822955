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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize

from doge_fast.flat_buffer import FlatBuffer
from doge_fast.stacked.layers.batch import (
    DomainRun,
    ExampleAxis,
    Segment,
    only_input,
    refuse_coupled_examples,
    runs_of,
)
from doge_fast.stacked.layers.by_slices import outputs_by_slices
from doge_fast.stacked.layers.registry import rule_of
from doge_fast.stacked.layers.rule import LayerRule
from doge_fast.weights.simplex import is_integer


def sizes_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """{domain: number of examples} in the order of the batch, without domains of size 0.

    ValueError if `sizes` is no mapping to integers >= 0, or all are zero.
    """
    are_numbers = isinstance(sizes, Mapping) and all(
        is_integer(size) and size >= 0 for size in sizes.values()
    )
    if not are_numbers or not any(sizes.values()):
        raise ValueError(
            "sizes must be a dict {domain: number of examples}, in the order of the batch, which "
            f"has at least one example; got {sizes!r}."
        )
    return {name: size for name, size in sizes.items() if size}


def segments_of(sizes: Mapping[str, int], row_of: Callable[[str], int]) -> list[Segment]:
    """Where each domain lies in a batch that is sorted by domain, and its row of the buffer."""
    ends = accumulate(sizes.values())
    pairs = zip(sizes.items(), ends, strict=True)
    return [Segment(row_of(name), end - size, end) for (name, size), end in pairs]


class StackedModel:
    """Replaces the forwards of a model's modules, so that one backward fills all rows of `buffer`.

    `tracked` are the ids of the parameters that are trained. ValueError if a module mixes the
    examples of a batch.
    """

    def __init__(self, model: nn.Module, buffer: FlatBuffer, tracked: Collection[int]) -> None:
        self.buffer = buffer
        self._tracked = frozenset(tracked)
        self._segments: list[Segment] = []
        self._runs: list[DomainRun] = []
        self.examples = ExampleAxis(0)
        self.has_written = False
        """Whether any row was written since `recording` was entered."""
        self._rules = self._rules_of(model)
        self._forwards = {
            module: self._forward_of(module, rule) for module, (rule, *_) in self._rules.items()
        }

    def covers(self, model: nn.Module, tracked: Collection[int]) -> bool:
        """Whether `model` and the trained parameters are unchanged since this was made."""
        return self._tracked == frozenset(tracked) and self._rules == self._rules_of(model)

    @contextmanager
    def recording(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Have forward and backward passes fill the rows of `segments`."""
        self._segments, self._runs = list(segments), runs_of(segments)
        self.examples = ExampleAxis(segments[-1].last)
        self.has_written = False
        before = {module: module.__dict__.get("forward") for module in self._forwards}
        _recording.append(self)
        try:
            for module, forward in self._forwards.items():
                module.forward = forward
            yield
        finally:
            _recording.remove(self)
            self._segments, self._runs, self.examples = [], [], ExampleAxis(0)
            for module, original in before.items():
                if original is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.forward = original

    @property
    def segments(self) -> list[Segment]:
        """The domains of the batch under way; RuntimeError if there is none."""
        if not self._segments:
            self.check_pass(None)
        return self._segments

    @property
    def runs(self) -> list[DomainRun]:
        """The domains of `segments` in as few runs as possible; raises as `segments` does."""
        return self._runs if self.segments else []

    def check_pass(self, examples: ExampleAxis | None) -> None:
        """Raise RuntimeError if the pass under way is not that whose `examples` these are."""
        if examples is not self.examples:
            raise RuntimeError(
                "the backward pass of a stacked batch ran outside its optimizer.stacked(...), "
                "where its domains are not known. Call loss.backward() inside it."
            )

    def is_tracked(self, param: Tensor) -> bool:
        """Whether `param` is trained, and has rows."""
        return id(param) in self._tracked

    def claim(self, param: Tensor, rows: range, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Neighbouring rows of a parameter, which the caller must write or add to.

        Returns [len(rows), *param.shape] in the buffer's dtype, and whether they hold gradients.
        """
        self.has_written = True
        rows_GN, adds = self.buffer.claim(rows.start, len(rows), param, dtype)
        return rows_GN.view(len(rows), *param.shape), adds

    def _receive(self, examples: ExampleAxis, row: int, param: Tensor, grad: Tensor) -> None:
        self.check_pass(examples)
        self.has_written = True
        self.buffer.receive(row, param, grad)

    def _forward_of(self, module: nn.Module, rule: LayerRule | None) -> Callable[..., Any]:
        if rule is not None:
            return _StackedLayer(self, module, rule).forward
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            for x in (*args, *kwargs.values()) if isinstance(module, nn.Embedding) else ():
                if isinstance(x, Tensor) and not x.is_floating_point():
                    # Refuses what may be positions.
                    self.examples.in_front(x, module)
            return outputs_by_slices(
                *(module, original, args, kwargs),
                segments=self.segments,
                tracked=self._tracked,
                receive=partial(self._receive, self.examples),
            )

        return forward

    def _rules_of(self, model: nn.Module) -> dict[nn.Module, tuple[Any, ...]]:
        """{module: (its rule, its forward or class, its parameters)} of those that are trained."""
        refuse_coupled_examples(model)
        return {
            module: (
                self._rule_of(module),
                module.__dict__.get("forward", type(module)),
                *map(id, module._parameters.values()),
            )
            for module in self._owners(model)
        }

    def _rule_of(self, module: nn.Module) -> LayerRule | None:
        params = module.parameters(recurse=False)
        # autograd must compute the gradient of what another optimizer trains, and run hooks on it.
        if any(p.requires_grad and (not self.is_tracked(p) or p._backward_hooks) for p in params):
            return None
        return rule_of(module)

    def _owners(self, module: nn.Module) -> Iterator[nn.Module]:
        """Modules whose forward is replaced."""
        if any(
            id(p) in self._tracked for own in _holders(module) for p in own._parameters.values()
        ):
            yield module
            if self._rule_of(module) is None:
                # Its children run inside it, domain by domain.
                return
        for child in module.children():
            yield from self._owners(child)


def _holders(module: nn.Module) -> list[nn.Module]:
    """The module, and containers of its parameters, which have no forward of their own."""
    containers = (nn.ParameterList, nn.ParameterDict)
    lists = [each for each in module._modules.values() if isinstance(each, containers)]
    if parametrize.is_parametrized(module):
        lists.extend(module.parametrizations.values())  # type: ignore[operator]
    return [module, *lists]


# The passes under way, the innermost last. Like autocast, a pass covers its context.
_recording: list[StackedModel] = []


def pass_of(param: Tensor) -> StackedModel | None:
    """The innermost stacked pass under way that trains `param`; None if there is none.

    For functions that use a parameter without its module, as `linear_domain_losses` does. They
    write the parameter's rows (`StackedModel.claim`) and return no gradient of it to autograd.
    """
    passes = [each for each in reversed(_recording) if each.is_tracked(param)]
    return passes[0] if passes and not param._backward_hooks else None


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
        self._params = [*module.parameters(recurse=False)]
        self._token = torch.zeros(1, device=self._params[0].device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output: by autograd where functional_call has put other tensors there."""
        params = self.module.parameters(recurse=False)
        is_own = all(param is own for param, own in zip(params, self._params, strict=True))
        if not (torch.is_grad_enabled() and is_own):
            return self._original(*args, **kwargs)
        given = only_input(self.module, args, kwargs)
        x = self.rule.prepare(self.module, self.stacked.examples.in_front(given, self.module))
        output = _Layer.apply(self, x, self._token, *self._params)  # type: ignore[no-untyped-call]
        dtype = self.rule.output_dtype(given)
        return output if dtype is None else output.to(dtype)

    def fill_rows(self, tensors: list[Tensor], are_asked: list[bool]) -> None:
        """Write the rows of the module's parameters that are asked for, in its backward."""
        stacked, runs = self.stacked, self.stacked.runs
        pairs = zip(self._params, are_asked, strict=True)
        asked = {id(param) for param, is_asked in pairs if is_asked and stacked.is_tracked(param)}
        gradients = [
            (param, gradient)
            for param, gradient in self.rule.gradients(self.module, *tensors)
            if param is not None and id(param) in asked
        ]
        for run in runs:
            for param, each in gradients:
                if not param.numel():
                    # Its rows count as written. There is nothing to write.
                    stacked.claim(param, run.rows, each.dtype)
            # One after another: a second gradient of a parameter may move its rows.
            full = [(param, each) for param, each in gradients if param.numel()]
            places = (stacked.claim(param, run.rows, each.dtype) for param, each in full)
            self.rule.write([gradient for _, gradient in full], run, places)


class _Layer(torch.autograd.Function):
    """A rule's forward and input gradient."""

    # The parameters are inputs so that the output requires a gradient even if x does not.

    @staticmethod
    def forward(
        ctx: Any, layer: _StackedLayer, x: Tensor, token: Tensor, *params: Tensor | None
    ) -> Tensor:
        output, saved = layer.rule.forward(layer.module, x)
        ctx.save_for_backward(x, *saved)
        ctx.layer, ctx.token, ctx.num_others = layer, token, 1 + len(params)
        if not torch.compiler.is_compiling():
            ctx.examples = layer.stacked.examples
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer, tensors = ctx.layer, [grad, *ctx.saved_tensors]
        if torch.compiler.is_compiling():
            # All that is known there: what was trained in the forward pass.
            fill_rows_(tensors, ctx.token, layer.number, [*ctx.needs_input_grad[3:]])
        else:
            layer.stacked.check_pass(ctx.examples)
            layer.fill_rows(tensors, [is_asked(ctx, 1 + i) for i in range(1, ctx.num_others)])
        grad_x = None
        if ctx.needs_input_grad[1]:
            grad_x = layer.rule.input_gradient(layer.module, *tensors)
        return None, grad_x, *[None] * ctx.num_others


def is_asked(ctx: Any, index: int) -> bool:
    """Whether the backward pass under way adds to the gradient of a function's tensor `index`.

    It does not if that was frozen in the forward pass, nor in `autograd.grad(loss, x)`.
    """
    node = ctx.next_functions[index][0]
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # autograd.grad(loss, parameters) returns the gradient instead.
        return False


_layers: WeakValueDictionary[int, _StackedLayer] = WeakValueDictionary()
_numbers = count()


# Opaque, because the host allocates the buffer's blocks and notes which rows are written. A CUDA
# graph would replay the kernels without these notes; the tag keeps the operator out of one.
@torch.library.custom_op(
    "doge_fast::fill_rows_", mutates_args={"token"}, tags=[torch.Tag.cudagraph_unsafe]
)
def fill_rows_(tensors: list[Tensor], token: Tensor, number: int, are_asked: list[bool]) -> None:
    """Write rows of the flat buffer in the backward of a module.

    `tensors` are the gradient of the output, x, and what the module's rule saved; `number` is that
    of its `_StackedLayer`. `token` is declared as changed, so that a compiler keeps the call; it is
    not written.
    """
    _layers[number].fill_rows(tensors, are_asked)


@fill_rows_.register_fake
def _(tensors: list[Tensor], token: Tensor, number: int, are_asked: list[bool]) -> None:
    return None
