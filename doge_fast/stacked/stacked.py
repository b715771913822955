"""One backward for all domains: each layer writes every domain's weight gradient by itself.

In a batch sorted by domain each token contributes to one domain's gradient, so all K weight
gradients of a layer cost what its ordinary one costs: the same products, cut at the borders of the
domains. While a `StackedModel` records, the `forward` of every module that owns trained parameters
is replaced: forward and the gradient of the input are as before, over all tokens at once; the
weight gradient of each domain goes straight into its row of the flat buffer, and autograd sees
none.

`doge_fast.stacked.layers` has a rule for each module class that is known; modules without one run
once per domain, on slices of their input. What couples examples (batch statistics) has no gradient per
domain in such a batch and is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from doge_fast.flat_buffer import FlatBuffer
from doge_fast.stacked.layers.batch import ExampleAxis, Segment, SortedBatch, couples_examples
from doge_fast.stacked.layers.by_slices import outputs_by_slices
from doge_fast.stacked.layers.registry import rule_of
from doge_fast.stacked.layers.rule import LayerRule
from doge_fast.stacked.layers.stacked_layer import StackedLayer
from doge_fast.stacked.layers.token_sums import Fill, TokenSum
from doge_fast.weights.simplex import is_integer


def sizes_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """The domains that have examples in a batch, and their numbers.

    Args:
        sizes: number of examples of each domain, in the order of the batch.

    Raises:
        ValueError: it is no mapping, a size is no number of examples, or all are zero.
    """
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
    return {name: size for name, size in sizes.items() if size}


def segments_of(sizes: Mapping[str, int], row_of: Callable[[str], int]) -> list[Segment]:
    """Where each domain lies in a batch that is sorted by domain.

    Args:
        sizes: as `sizes_of` gives them.
        row_of: the row of the buffer of a domain.
    """
    segments, first = [], 0
    for name, size in sizes.items():
        segments.append(Segment(row_of(name), first, first + size))
        first += size
    return segments


class StackedModel:
    """Replaces the forwards of a model's modules, so that one backward fills all rows.

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
        self._batch: SortedBatch | None = None
        self._examples = ExampleAxis(
            "stacked mode needs",
            "Give the sizes of this batch, or run one domain after another, with "
            "optimizer.domain(name).",
        )
        self.has_written = False
        """Whether any row was written since `recording` was entered."""
        self._rules = self._rules_of(model)
        self._forwards = {
            module: self._forward_of(module, rule) for module, (_, rule) in self._rules.items()
        }

    def covers(self, model: nn.Module, tracked: Mapping[int, Tensor]) -> bool:
        """Whether this was made for `model` as it is now, and for these parameters."""
        return self._tracked == frozenset(tracked) and self._rules == self._rules_of(model)

    @contextmanager
    def recording(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Have forward and backward passes fill the rows of `segments`.

        Args:
            segments: as `segments_of` gives them.
        """
        self._batch = SortedBatch.of(segments)
        self._examples.begin(segments[-1].last)
        self.has_written = False
        before = {module: module.__dict__.get("forward") for module in self._forwards}
        _recording.append(self)
        try:
            for module, forward in self._forwards.items():
                module.forward = forward
            yield
        finally:
            _recording.remove(self)
            self._batch = None
            for module, original in before.items():
                if original is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.forward = original

    @property
    def batch(self) -> SortedBatch:
        """The batch under way.

        Raises:
            RuntimeError: there is none.
        """
        if self._batch is None:
            raise RuntimeError(
                "a backward pass of a stacked batch ran outside its context, where its tokens "
                "cannot be assigned to domains. Call loss.backward() inside "
                "optimizer.stacked(...)."
            )
        return self._batch

    def write(self, param: Tensor, gradient: TokenSum) -> None:
        """Fill all rows of `param`, or add to them; one that is not trained has none.

        Raises:
            RuntimeError: outside `recording`.
        """
        if id(param) in self._tracked:
            for run in self.batch.runs:
                self.fill(param, run.rows, gradient.dtype, gradient.rows(run))

    def fill(self, param: Tensor, rows: range, dtype: torch.dtype, fill: Fill) -> None:
        """Have `fill(out, adds)` write neighbouring rows of `param`, or add to them.

        Args:
            param: whose gradient it is; `out` is [len(rows), *its shape], in the rows' dtype.
            rows: of the buffer, one after another.
            dtype: in which the gradient is computed.
            fill: writes `out`, adding to what is there if `adds`.
        """
        self.has_written = True
        rows_GN, adds = self._buffer.slots(rows.start, len(rows), param, dtype)
        fill(rows_GN.view(-1, *param.shape), adds)

    def _receive(self, row: int, param: Tensor, grad: Tensor) -> None:
        self.has_written = True
        self._buffer.receive(row, param, grad)

    def _forward_of(self, module: nn.Module, rule: LayerRule | None) -> Callable[..., Any]:
        """What takes the place of the module's forward."""
        if rule is not None:
            return StackedLayer(module, rule, self._examples, self.write).forward
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            return outputs_by_slices(
                *(module, original, args, kwargs),
                segments=self.batch.segments,
                tracked=self._tracked,
                receive=self._receive,
            )

        return forward

    def _rules_of(self, model: nn.Module) -> dict[nn.Module, tuple[Any, LayerRule | None]]:
        """Modules that own trained parameters: what each of them is, and its rule."""
        return {
            module: (module.__dict__.get("forward", type(module)), self._rule_of(module))
            for module in self._owners(model, "")
        }

    def _rule_of(self, module: nn.Module) -> LayerRule | None:
        params = module.parameters(recurse=False)
        if any(param.requires_grad and id(param) not in self._tracked for param in params):
            # Another optimizer trains it, and autograd has to give it a gradient.
            return None
        return rule_of(module)

    def _owners(self, module: nn.Module, name: str) -> Iterator[nn.Module]:
        """Modules that own trained parameters and fill their rows."""
        if couples_examples(module):
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}, whose statistics mix the "
                "examples of all domains: no domain has a gradient of its own. Run one domain "
                "after another, with optimizer.domain(name), or put it in eval mode."
            )
        if any(id(param) in self._tracked for param in module.parameters(recurse=False)):
            yield module
            if self._rule_of(module) is None:
                # Its children run inside it, domain by domain; only look for what is refused.
                for child_name, child in module.named_modules():
                    if couples_examples(child) and child is not module:
                        yield from self._owners(child, f"{name}.{child_name}")
                return
        for child_name, child in module.named_children():
            yield from self._owners(child, f"{name}.{child_name}".lstrip("."))


# The passes under way, the innermost last; like autocast, they hold for what runs inside them.
_recording: list[StackedModel] = []


def pass_of(param: Tensor) -> StackedModel | None:
    """The stacked pass under way that trains `param`, the innermost of several; None outside.

    For functions that take a parameter itself, past its module, as `linear_domain_losses` does:
    they write its rows with `StackedModel.fill`, and give autograd no gradient of it.
    """
    passes = (stacked for stacked in reversed(_recording) if id(param) in stacked._tracked)
    return next(passes, None)
