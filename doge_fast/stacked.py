"""One backward for all domains: each layer writes every domain's weight gradient by itself.

In a batch sorted by domain each token contributes to one domain's gradient, so all K weight
gradients of a layer cost what its ordinary one costs: the same products, cut at the borders of the
domains. While a `StackedModel` records, the `forward` of every module that owns trained parameters
is replaced: forward and the gradient of the input are as before, over all tokens; the weight
gradient of each domain goes straight into its row of the flat buffer, and autograd sees none.

Modules without a rule of their own are run once per domain, on slices of their input and with
aliases of their parameters, which is exact for everything that treats examples one by one. What
couples examples (batch statistics) has no gradient per domain in such a batch and is refused.

The writing is one opaque operator, `torch.ops.doge_fast.fill_rows_`: a compiler sees that it
changes a token and keeps it, and the blocks behind it may be allocated when the first gradient
appears.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from doge_fast.flat_buffer import FlatBuffer
from doge_fast.subset import is_integer

Forward = Callable[..., Any]
# Writes the rows of one module's parameters from what its backward has at hand.
Fill = Callable[["StackedModel", Any, Sequence[Tensor]], None]
# Makes the forward of a module of a class that is known.
Rule = Callable[["StackedModel", Any], Forward]

# Elements of a weight up to which the products of all domains are one call, where that is not
# always faster: on a CPU a large product keeps all cores busy by itself.
MOST_BATCHED = {"cpu": 1 << 20}


class Segment(NamedTuple):
    """The examples of one domain: `first` up to `last` of the batch, and its row of the buffer."""

    row: int
    first: int
    last: int


def segments_of(sizes: Mapping[str, int], slot_of: Callable[[str], int]) -> list[Segment]:
    """Where each domain lies in the batch."""
    if not isinstance(sizes, Mapping):
        raise ValueError(
            f"sizes must be a dict {{domain: number of examples}}, in the order of the batch; "
            f"got {sizes!r}."
        )
    for name, size in sizes.items():
        if not is_integer(size) or size < 0:
            raise ValueError(f"sizes must be numbers of examples; {name!r} has {size!r}.")
    if not sum(sizes.values()):
        raise ValueError(f"stacked() needs a batch with at least one example; got {sizes}.")
    segments, first = [], 0
    for name, size in sizes.items():
        if size:
            segments.append(Segment(slot_of(name), first, first + size))
        first += size
    return segments


class Run(NamedTuple):
    """Domains one after another, of equal size and with rows one after another."""

    first_row: int
    num_rows: int
    tokens: slice

    def cut(self, values_TF: Tensor) -> Tensor:
        """[rows, tokens of a domain, ...] of [tokens of the batch, ...]."""
        return values_TF[self.tokens].view(self.num_rows, -1, *values_TF.shape[1:])


class StackedModel:
    """Replaces the forwards of a model's modules, and writes what they find into the buffer.

    Args:
        model: whose modules fill the rows.
        buffer: whose rows are filled.
        tracked: the parameters that are trained, by id.

    Raises:
        ValueError: a module couples the examples of a batch.
    """

    def __init__(self, model: nn.Module, buffer: FlatBuffer, tracked: Mapping[int, Tensor]) -> None:
        self._buffer = buffer
        self._tracked = frozenset(tracked)
        self._segments: tuple[Segment, ...] = ()
        self._run_borders: tuple[tuple[int, int], ...] = ()
        # Tokens per example that were seen in this pass: what else a flattened batch may hold.
        self._lengths: set[int] = set()
        self.has_written = False
        self._rules = self._rules_of(model)
        self._forwards = {
            module: rule(self, module) if rule else _by_slices(self, module)
            for module, (_, rule) in self._rules.items()
        }

    def covers(self, model: nn.Module, tracked: Mapping[int, Tensor]) -> bool:
        """Whether this was made for `model` as it is now, and for these parameters."""
        return self._tracked == frozenset(tracked) and self._rules == self._rules_of(model)

    def _rules_of(self, model: nn.Module) -> dict[nn.Module, tuple[Any, "Rule | None"]]:
        """What each module that owns trained parameters is, and how its rows are filled."""
        return {
            module: (module.__dict__.get("forward", type(module)), self._rule_of(module))
            for module, _ in self._owners(model, "")
        }

    def _rule_of(self, module: nn.Module) -> "Rule | None":
        params = module.parameters(recurse=False)
        if any(param.requires_grad and not self.owns(param) for param in params):
            # Somebody else trains it, and wants a gradient of autograd.
            return None
        return _rule_of(module)

    @contextmanager
    def recording(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Let the modules fill the rows of `segments`; afterwards they are as they were."""
        self._segments, self._lengths, self.has_written = tuple(segments), set(), False
        self._run_borders = tuple(_run_borders(segments))
        before = {module: module.__dict__.get("forward") for module in self._forwards}
        _listening.append(self)
        try:
            for module, forward in self._forwards.items():
                module.forward = forward
            yield
        finally:
            _listening.remove(self)
            self._segments = ()
            for module, original in before.items():
                if original is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.forward = original

    @property
    def num_examples(self) -> int:
        """Of the batch under way; 0 outside one."""
        return self._segments[-1].last if self._segments else 0

    def owns(self, param: Tensor | None) -> bool:
        """Whether the optimizer trains `param`."""
        return param is not None and id(param) in self._tracked

    def runs(self, num_tokens: int) -> Iterator[Run]:
        """The domains of `num_tokens`, as many for each example, as few runs as there can be."""
        segments = self.slices()
        each = num_tokens // self.num_examples
        for first, last in self._run_borders:
            start, end = segments[first], segments[last]
            yield Run(start.row, last - first + 1, slice(start.first * each, end.last * each))

    def write(
        self,
        param: Tensor,
        run: Run,
        dtype: torch.dtype,
        product: Callable[[Tensor, bool], object],
    ) -> None:
        """Have `product(out, adds)` fill `param`'s rows of a run, or add to them.

        Args:
            param: whose gradient it is; `out` is [rows of the run, *its shape].
            run: of domains.
            dtype: in which the gradient is computed, and of `out`.
            product: writes `out`, adding to what is there if `adds`.
        """
        self.has_written = True
        rows_GN, adds = self._buffer.slots(run.first_row, run.num_rows, param, dtype)
        if rows_GN.dtype == dtype:
            product(rows_GN.view(-1, *param.shape), adds)
            return
        value = torch.empty(run.num_rows, *param.shape, dtype=dtype, device=param.device)
        product(value, False)
        if adds:
            rows_GN.add_(value.flatten(1))
        else:
            rows_GN.copy_(value.flatten(1))

    def receive(self, param: Tensor, row: int, grad: Tensor) -> None:
        """Take a gradient that autograd has made of one domain alone."""
        self.has_written = True
        self._buffer.receive(row, param, grad)

    def batch_first(self, x: Tensor, module: nn.Module) -> Tensor:
        """`x` with the examples of the batch in front, repeated where it is the same for all.

        Raises:
            RuntimeError: the first dimension is something else.
        """
        size = self.num_examples
        if x.shape[0] == size:
            if x.dim() > 2:
                self._lengths.add(x.shape[1])
            return x
        if x.shape[0] == 1:
            return x.expand(size, *x.shape[1:])
        if x.dim() == 2 and x.shape[0] % size == 0 and x.shape[0] // size in self._lengths:
            return x
        raise RuntimeError(
            f"stacked mode needs the {size} examples that the sizes add up to in the first "
            f"dimension; a {type(module).__name__} got shape {list(x.shape)}. Give the sizes of "
            "this batch, or run one domain after another, with optimizer.domain(name)."
        )

    def ids_with_batch(self, ids: Tensor) -> tuple[Tensor, int]:
        """Indices as [B, ...] or [1, L], and how often the latter stand for an example.

        Positions come without a batch, [L] or [1, L]; one index per example as [B].

        Raises:
            RuntimeError: it cannot be told which of them this is, or it is neither.
        """
        size = self.num_examples
        if ids.dim() == 1 and len(ids) == size and (not self._lengths or size in self._lengths):
            raise RuntimeError(
                f"stacked mode cannot tell {size} positions from one index for each of the {size} "
                f"examples: an Embedding got shape {list(ids.shape)}. Give positions as [1, L], or "
                "one index per example as [B, 1]."
            )
        if ids.dim() == 1 and len(ids) != size:
            ids = ids[None]
        if len(ids) == 1:
            return ids, size
        if len(ids) != size:
            raise RuntimeError(
                f"stacked mode needs the {size} examples that the sizes add up to in the first "
                f"dimension; an Embedding got indices of shape {list(ids.shape)}. Give the sizes "
                "of this batch, or run one domain after another, with optimizer.domain(name)."
            )
        if ids.dim() > 1:
            self._lengths.add(ids.shape[1])
        return ids, 1

    def slices(self) -> tuple[Segment, ...]:
        """The segments of the batch under way.

        Raises:
            RuntimeError: there is none.
        """
        if not self._segments:
            raise RuntimeError(
                "a backward pass of a stacked batch ran outside its context, where nobody knows "
                "which token is whose. Call loss.backward() inside optimizer.stacked(...)."
            )
        return self._segments

    def _owners(self, module: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
        """Modules that own trained parameters and fill their rows, with their names."""
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}, whose statistics mix the "
                "examples of all domains: no domain has a gradient of its own. Run one domain "
                "after another, with optimizer.domain(name), or put it in eval mode."
            )
        if any(self.owns(param) for param in module.parameters(recurse=False)):
            yield module, name
            if self._rule_of(module) is None:
                # Its children run inside it, domain by domain; only look for what is refused.
                for child_name, child in module.named_modules():
                    if isinstance(child, _BatchNorm) and child.training and child is not module:
                        yield from self._owners(child, f"{name}.{child_name}")
                return
        for child_name, child in module.named_children():
            yield from self._owners(child, f"{name}.{child_name}".lstrip("."))


_listening: list[StackedModel] = []


def listener_of(param: Tensor) -> StackedModel | None:
    """Who wants the gradient of `param` domain by domain at the moment."""
    return next((stack for stack in reversed(_listening) if stack.owns(param)), None)


# What a backward pass calls, by number: a compiler may hold a number, not a module.
_fills: dict[int, tuple["weakref.ref[StackedModel]", "weakref.ref[nn.Module]", Fill]] = {}
_numbers = count()


def _registered(stack: StackedModel, module: nn.Module, fill: Fill) -> int:
    number = next(_numbers)
    _fills[number] = weakref.ref(stack), weakref.ref(module), fill
    weakref.finalize(stack, _fills.pop, number, None)
    return number


@torch.library.custom_op("doge_fast::fill_rows_", mutates_args={"token"})
def fill_rows_(tensors: list[Tensor], token: Tensor, number: int) -> None:
    """Write rows of the flat buffer from what a module's backward has at hand.

    Args:
        tensors: gradient of the output first, then what the module's rule has saved.
        token: changes, in the eyes of a compiler; nothing is written to it.
        number: of the module.
    """
    stack_ref, module_ref, fill = _fills[number]
    stack, module = stack_ref(), module_ref()
    assert stack is not None
    assert module is not None
    fill(stack, module, tensors)


@fill_rows_.register_fake
def _(tensors: list[Tensor], token: Tensor, number: int) -> None:
    return None


def _fill(tensors: list[Tensor], token: Tensor, number: int) -> None:
    if torch.compiler.is_compiling():
        fill_rows_(tensors, token, number)
    else:
        stack_ref, module_ref, fill = _fills[number]
        fill(stack_ref(), module_ref(), tensors)  # type: ignore[arg-type]


def _token(module: nn.Module) -> Tensor:
    return torch.zeros(1, device=next(module.parameters(recurse=False)).device)


def _flat(x: Tensor, num_last: int = 1) -> Tensor:
    """[tokens, features]: the last `num_last` dimensions as one, the others as one."""
    return x.flatten(-num_last).flatten(0, -2) if x.dim() > num_last else x.flatten()[None]


def _input(x: Tensor | None, named: Mapping[str, Tensor]) -> Tensor:
    """The one argument of a forward, under whichever name the module has for it."""
    return next(iter(named.values())) if x is None else x


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _run_borders(segments: Sequence[Segment]) -> Iterator[tuple[int, int]]:
    """First and last segment of each run."""
    first = 0
    for i, (before, after) in enumerate(pairwise(segments), start=1):
        is_equal = after.last - after.first == before.last - before.first
        if not is_equal or after.row != before.row + 1:
            yield first, i - 1
            first = i
    if segments:
        yield first, len(segments) - 1


def put(gradient: Tensor) -> Callable[[Tensor, bool], object]:
    """A gradient that is there already, as a product that `StackedModel.write` takes."""

    def product(out: Tensor, adds: bool) -> None:
        value = gradient.view(out.shape)
        if adds:
            out.add_(value)
        else:
            out.copy_(value)

    return product


def _sum_into(values_GTF: Tensor) -> Callable[[Tensor, bool], object]:
    """Sum over tokens, as a product that `StackedModel.write` takes."""

    def product(out: Tensor, adds: bool) -> None:
        if adds:
            out.add_(values_GTF.sum(1).view(out.shape))
        else:
            torch.sum(values_GTF, 1, out=out.flatten(1))

    return product


def _matmul_into(left_G: Tensor, right_G: Tensor) -> Callable[[Tensor, bool], object]:
    """left @ right of each domain, as a product that `StackedModel.write` takes."""

    def product(out: Tensor, adds: bool) -> None:
        if len(out) > 1 and out[0].numel() <= MOST_BATCHED.get(out.device.type, out[0].numel()):
            if adds:
                out.baddbmm_(left_G, right_G)
            else:
                torch.bmm(left_G, right_G, out=out)
            return
        for each, left, right in zip(out, left_G, right_G, strict=True):
            if adds:
                each.addmm_(left, right)
            else:
                torch.mm(left, right, out=each)

    return product


# Linear, and the same with a transposed weight.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token: Tensor,
        number: int,
        is_transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.token, ctx.number, ctx.is_transposed = token, number, is_transposed
        return F.linear(x, weight.t() if is_transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        _fill([grad, x], ctx.token, ctx.number)
        grad_x = None
        if ctx.needs_input_grad[0]:
            weight = weight.to(grad.dtype)
            grad_x = grad @ (weight.t() if ctx.is_transposed else weight)
        return grad_x, None, None, None, None, None


def _fill_linear(stack: StackedModel, module: Any, tensors: Sequence[Tensor]) -> None:
    grad_TO, x_TI = _flat(tensors[0]), _flat(tensors[1])
    is_transposed = not isinstance(module, nn.Linear)
    for run in stack.runs(len(x_TI)):
        grad, x = run.cut(grad_TO), run.cut(x_TI)
        if stack.owns(module.weight):
            pair = (x.mT, grad) if is_transposed else (grad.mT, x)
            stack.write(module.weight, run, grad.dtype, _matmul_into(*pair))
        if stack.owns(module.bias):
            stack.write(module.bias, run, grad.dtype, _sum_into(grad))


def _linear(stack: StackedModel, module: Any) -> Forward:
    number, token = _registered(stack, module, _fill_linear), _token(module)
    original, is_transposed = module.forward, not isinstance(module, nn.Linear)

    def forward(x: Tensor | None = None, **named: Tensor) -> Tensor:
        x = _input(x, named)
        if not torch.is_grad_enabled():
            output: Tensor = original(x)
            return output
        x = stack.batch_first(x, module)
        dtype = _autocast_dtype(x)
        x = x if dtype is None else x.to(dtype)
        output = _Linear.apply(x, module.weight, module.bias, token, number, is_transposed)  # type: ignore[no-untyped-call]
        return output

    return forward


# Embedding.


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, token: Tensor, number: int, num_repeats: int
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.token, ctx.number = token, number
        vectors = F.embedding(ids, weight)
        return vectors.expand(num_repeats, *vectors.shape[1:]) if num_repeats > 1 else vectors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        _fill([grad, ids], ctx.token, ctx.number)
        return None, None, None, None, None


def _fill_embedding(stack: StackedModel, module: Any, tensors: Sequence[Tensor]) -> None:
    grad, ids = tensors
    grad_BLD = grad.flatten(1, -2) if grad.dim() > 3 else grad.view(len(grad), -1, grad.shape[-1])
    ids_BL = ids.reshape(len(ids), -1)
    # The same for all examples, as positions are: their gradients add up first.
    is_shared = len(ids_BL) < len(grad_BLD)
    for run in stack.runs(len(grad_BLD)):
        grad_GBLD = run.cut(grad_BLD)
        grad_GLD = grad_GBLD.sum(1) if is_shared else grad_GBLD.flatten(1, 2)
        ids_GL = ids_BL.expand(run.num_rows, -1) if is_shared else run.cut(ids_BL).flatten(1)
        stack.write(module.weight, run, grad.dtype, _scatter_into(grad_GLD, ids_GL, module))


def _scatter_into(
    grad_GLD: Tensor, ids_GL: Tensor, module: Any
) -> Callable[[Tensor, bool], object]:
    if module.padding_idx is not None:
        grad_GLD = grad_GLD.masked_fill((ids_GL == module.padding_idx)[..., None], 0)

    def product(out: Tensor, adds: bool) -> None:
        if not adds:
            out.zero_()
        for each, ids_L, grad_LD in zip(out, ids_GL, grad_GLD, strict=True):
            each.index_add_(0, ids_L, grad_LD)

    return product


def _embedding(stack: StackedModel, module: Any) -> Forward:
    number, token = _registered(stack, module, _fill_embedding), _token(module)
    original = module.forward

    def forward(ids: Tensor | None = None, **named: Tensor) -> Tensor:
        ids = _input(ids, named)
        if not torch.is_grad_enabled():
            output: Tensor = original(ids)
            return output
        ids, num_repeats = stack.ids_with_batch(ids)
        output = _Embedding.apply(ids, module.weight, token, number, num_repeats)  # type: ignore[no-untyped-call]
        return output

    return forward


# Norms.


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token: Tensor,
        number: int,
        shape: list[int],
        eps: float,
    ) -> Tensor:
        output, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.token, ctx.number, ctx.shape = token, number, shape
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, mean, rstd, weight = ctx.saved_tensors
        _fill([grad, x, mean, rstd], ctx.token, ctx.number)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.aten.native_layer_norm_backward(
                grad, x, ctx.shape, mean, rstd, weight, None, [True, False, False]
            )[0]
        return grad_x, None, None, None, None, None, None


def _fill_layer_norm(stack: StackedModel, module: Any, tensors: Sequence[Tensor]) -> None:
    shape, num_last = list(module.normalized_shape), len(module.normalized_shape)
    grad_TF, x_TF = (_flat(tensor, num_last) for tensor in tensors[:2])
    mean_T, rstd_T = (tensor.reshape(-1, 1) for tensor in tensors[2:])
    wanted = [False, stack.owns(module.weight), stack.owns(module.bias)]
    for run in stack.runs(len(x_TF)):
        found = [
            torch.ops.aten.native_layer_norm_backward(
                grad.unflatten(1, shape),
                x.unflatten(1, shape),
                shape,
                mean.view(-1, *[1] * num_last),
                rstd.view(-1, *[1] * num_last),
                module.weight,
                module.bias,
                wanted,
            )
            for grad, x, mean, rstd in zip(
                *(run.cut(tensor) for tensor in (grad_TF, x_TF, mean_T, rstd_T)), strict=True
            )
        ]
        _, weights_G, biases_G = zip(*found, strict=True)
        for param, values_G in ((module.weight, weights_G), (module.bias, biases_G)):
            if stack.owns(param):
                values_GF = torch.stack(values_G)
                stack.write(param, run, values_GF.dtype, put(values_GF))


def _layer_norm(stack: StackedModel, module: Any) -> Forward:
    number, token = _registered(stack, module, _fill_layer_norm), _token(module)
    original, shape = module.forward, list(module.normalized_shape)

    def forward(x: Tensor | None = None, **named: Tensor) -> Tensor:
        x = _input(x, named)
        if not torch.is_grad_enabled():
            output: Tensor = original(x)
            return output
        x = stack.batch_first(x, module)
        weight, bias = module.weight, module.bias
        # Autocast widens it on a GPU, and leaves it alone on a CPU.
        if _autocast_dtype(x) is not None and x.device.type != "cpu":
            x, weight = x.float(), weight.float()
            bias = None if bias is None else bias.float()
        output = _LayerNorm.apply(x, weight, bias, token, number, shape, module.eps)  # type: ignore[no-untyped-call]
        return output

    return forward


class _Scale(torch.autograd.Function):
    """x * weight, the weight along the last dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, token: Tensor, number: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.token, ctx.number = token, number
        return x * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        _fill([grad, x], ctx.token, ctx.number)
        return grad * weight if ctx.needs_input_grad[0] else None, None, None, None


def _fill_scale(stack: StackedModel, module: Any, tensors: Sequence[Tensor]) -> None:
    grad_TF, x_TF = (_flat(tensor, module.weight.dim()) for tensor in tensors)
    for run in stack.runs(len(x_TF)):
        grad = run.cut(grad_TF)
        stack.write(module.weight, run, grad.dtype, _sum_into(grad * run.cut(x_TF)))


def _rms_norm(stack: StackedModel, module: Any) -> Forward:
    def normal(x: Tensor) -> Tensor:
        # Torch rounds once, behind the weight.
        wide = x.float() if x.dtype.itemsize < 4 else x
        return F.rms_norm(wide, module.normalized_shape, None, module.eps)

    return _scaled(stack, module, normal, rounds_once=True)


def _rms_norm_of_llama(stack: StackedModel, module: Any) -> Forward:
    """As in transformers: in float32, and back before the weight."""

    def normal(x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        return (wide * scale).to(x.dtype)

    return _scaled(stack, module, normal, rounds_once=False)


def _scaled(
    stack: StackedModel, module: Any, normal: Callable[[Tensor], Tensor], *, rounds_once: bool
) -> Forward:
    number, token = _registered(stack, module, _fill_scale), _token(module)
    original = module.forward

    def forward(x: Tensor | None = None, **named: Tensor) -> Tensor:
        x = _input(x, named)
        if not torch.is_grad_enabled():
            output: Tensor = original(x)
            return output
        x = stack.batch_first(x, module)
        output = _Scale.apply(normal(x), module.weight, token, number)  # type: ignore[no-untyped-call]
        return output.to(x.dtype) if rounds_once else output

    return forward


# Everything else.


def _by_slices(stack: StackedModel, module: nn.Module) -> Forward:
    """Run `module` once per domain, with parameters that tell the domains apart."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        _refuse_time_first(module, args, kwargs)
        outputs = []
        for segment in stack.slices():
            taken_args, taken_kwargs = _taken(stack, module, segment, args, kwargs)
            with _aliased(stack, module, segment.row):
                outputs.append(original(*taken_args, **taken_kwargs))
        return _joined(module, outputs, [each.last - each.first for each in stack.slices()])

    return forward


def _refuse_time_first(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Recurrent networks and attention may have the batch behind, where nothing can be cut."""
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if getattr(module, "batch_first", True) is False and given and given[0].dim() == 3:
        raise RuntimeError(
            "stacked mode needs the examples of the batch in the first dimension; "
            f"{type(module).__name__} was made with batch_first=False and has them in the second. "
            "Make it with batch_first=True, or run one domain after another, with "
            "optimizer.domain(name)."
        )


def _taken(
    stack: StackedModel, module: nn.Module, segment: Segment, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """The arguments of one domain: tensors of the whole batch are cut."""
    size = stack.num_examples
    num_cut = 0

    def cut(value: Any) -> Any:
        nonlocal num_cut
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == size:
            num_cut += 1
            return value[segment.first : segment.last]
        return value

    taken = pytree.tree_map(cut, (args, kwargs))
    if not num_cut:
        raise RuntimeError(
            f"stacked mode runs {type(module).__name__} once per domain and found no argument "
            f"with the {size} examples of the batch in front. Run one domain after another, with "
            "optimizer.domain(name)."
        )
    return taken  # type: ignore[no-any-return]


@contextmanager
def _aliased(stack: StackedModel, module: nn.Module, row: int) -> Iterator[None]:
    """Parameters of `module` as leaves of their own, whose gradients belong to one row."""
    aliases: dict[int, Tensor] = {}
    swapped = []
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None and stack.owns(param):
                alias = aliases.get(id(param))
                if alias is None:
                    alias = aliases[id(param)] = _alias(stack, param, row)
                swapped.append((owner, name, param))
                owner._parameters[name] = alias  # type: ignore[assignment]
    try:
        yield
    finally:
        for owner, name, param in swapped:
            owner._parameters[name] = param


def _alias(stack: StackedModel, param: Tensor, row: int) -> Tensor:
    alias = param.detach().requires_grad_()

    def receive(leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        stack.receive(param, row, grad)

    alias.register_post_accumulate_grad_hook(receive)  # type: ignore[no-untyped-call]
    return alias


def _joined(module: nn.Module, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The outputs of all domains as one: tensors end to end, the rest as the first has it."""
    leaves_DP, specs = zip(*map(pytree.tree_flatten, outputs), strict=True)
    joined = []
    for index, leaves in enumerate(zip(*leaves_DP, strict=True)):
        first = leaves[0]
        if not isinstance(first, Tensor):
            joined.append(first)
            continue
        # What a recurrent network remembers has its layers in front.
        is_state = isinstance(module, nn.RNNBase) and index > 0 and first.dim() == 3
        dim = 1 if is_state else 0
        lengths = [leaf.shape[dim] if leaf.dim() else 0 for leaf in leaves]
        each = lengths[0] // sizes[0]
        if each == 0 or lengths != [each * size for size in sizes]:
            raise RuntimeError(
                f"stacked mode runs {type(module).__name__} once per domain and cannot join its "
                f"output of shape {list(first.shape)}, which has not the {sizes[0]} examples of "
                "the domain in front. Run one domain after another, with optimizer.domain(name)."
            )
        joined.append(torch.cat(leaves, dim))
    return pytree.tree_unflatten(joined, specs[0])


def _is_plain_embedding(module: Any) -> bool:
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


# By the class itself: a subclass may do something else.
_RULES: dict[str, Rule] = {
    "torch.nn.modules.linear.Linear": _linear,
    "transformers.pytorch_utils.Conv1D": _linear,
    "torch.nn.modules.sparse.Embedding": _embedding,
    "torch.nn.modules.normalization.LayerNorm": _layer_norm,
    "torch.nn.modules.normalization.RMSNorm": _rms_norm,
    "transformers.models.llama.modeling_llama.LlamaRMSNorm": _rms_norm_of_llama,
    "transformers.models.mistral.modeling_mistral.MistralRMSNorm": _rms_norm_of_llama,
    "transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm": _rms_norm_of_llama,
}


def _rule_of(module: nn.Module) -> Rule | None:
    if "forward" in module.__dict__:
        # Somebody has replaced it.
        return None
    kind = type(module)
    rule = _RULES.get(f"{kind.__module__}.{kind.__qualname__}")
    if rule is _embedding and not _is_plain_embedding(module):
        return None
    if rule is _linear and isinstance(module, nn.Linear) and module.weight.dim() != 2:
        return None
    # A parametrized or pruned weight is computed, not owned.
    is_plain = "weight" in module._parameters and module._parameters["weight"] is not None
    return rule if is_plain else None
