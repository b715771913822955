"""A batch that is sorted by domain: its domains, and the dimension of its examples in an input.

Most modules get an input [B, ...]. Some get a flattened one, [B * T, features]. Positions come
without a batch, as [L] or [1, L].
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from doge_fast.flat_buffer import on_device


class Segment(NamedTuple):
    """A domain of a batch, or a half of one: its row, and its examples `first` up to `last`."""

    domain: int
    """Its place among the domains of the batch."""
    row: int
    """Of the buffer."""
    first: int
    last: int


class DomainRun:
    """Neighbouring domains of a batch with neighbouring rows, which are filled together.

    Domain g has the examples `borders[g]` up to `borders[g + 1]` of the batch of `num_examples`.
    """

    def __init__(self, first_row: int, borders: Sequence[int], num_examples: int) -> None:
        self.borders = tuple(borders)
        self.num_examples = num_examples
        self.row_range = range(first_row, first_row + len(borders) - 1)
        """Rows of the G domains in the buffer."""
        self.equal_parts = self._split_where_sizes_change()
        """[(slice of the run's domains, the run of that slice)]; a slice has one size of domain."""
        self.is_equal = len(self.equal_parts) == 1
        """Whether all domains have the same number of examples: then one product fills all rows."""
        self._borders_on: dict[tuple[torch.device, int], Tensor] = {}

    def _split_where_sizes_change(self) -> list[tuple[slice, "DomainRun"]]:
        sizes = [last - first for first, last in itertools.pairwise(self.borders)]
        changes = [i for i in range(1, len(sizes)) if sizes[i] != sizes[i - 1]]
        if not changes:
            return [(slice(None), self)]
        return [
            (slice(i, j), DomainRun(self.row_range[i], self.borders[i : j + 1], self.num_examples))
            for i, j in itertools.pairwise([0, *changes, len(sizes)])
        ]

    def tokens(self, values: Tensor, *last: int) -> Tensor:
        """The run's T tokens, [T, *last] contiguous; `values` are [B, ..., *last] or flattened."""
        # A plain reshape: einops here costs the step of a tiny model 9 % of its host time.
        return self._of_run(values).reshape(-1, *last).contiguous()

    def by_domain(self, values: Tensor, *last: int) -> Tensor:
        """[G, tokens of a domain, *last]: `tokens` of a run whose G domains have equal sizes."""
        return self._of_run(values).reshape(len(self.row_range), -1, *last)

    def _of_run(self, values: Tensor) -> Tensor:
        # T if the values are flattened, [B * T, ...]; 1 if they are [B, ...].
        per_example = values.shape[0] // self.num_examples
        return values[self.borders[0] * per_example : self.borders[-1] * per_example]

    def token_borders(self, num_tokens: int, device: torch.device) -> Tensor:
        """[G + 1] int64 on `device`: where each domain begins among the run's `num_tokens`."""
        per_example = num_tokens // (self.borders[-1] - self.borders[0])
        key = (device, per_example)
        # One copy to the device for all layers of a pass.
        if key not in self._borders_on:
            starts = [(border - self.borders[0]) * per_example for border in self.borders]
            self._borders_on[key] = on_device(starts, device)
        return self._borders_on[key]


def runs_of(segments: Sequence[Segment]) -> list[DomainRun]:
    """The consecutive segments of a batch, in as few runs as possible."""
    starts = [
        index
        for index, segment in enumerate(segments)
        if index == 0 or segment.row != segments[index - 1].row + 1
    ]
    runs = []
    for start, end in itertools.pairwise([*starts, len(segments)]):
        borders = [segments[start].first, *(segment.last for segment in segments[start:end])]
        runs.append(DomainRun(segments[start].row, borders, segments[-1].last))
    return runs


class SortedBatch:
    """The B examples of one stacked pass, sorted by domain."""

    def __init__(self, segments: Sequence[Segment], *, has_halves: bool = False) -> None:
        self.segments = segments
        self.runs = runs_of(segments)
        self.has_halves = has_halves
        """Whether a domain with two examples or more has two segments."""
        self.weights_S: Tensor | None = None
        """[segments] float64: the weight of each in its domain's loss, if that was measured."""
        # {id of a parameter: calls in the forward pass that use it}, outside compiled graphs.
        self.num_uses: Counter[int] = Counter()
        # `torch.compile` takes the sizes of a tensor for variables, and an int that it reaches
        # through a module or a global for a constant.
        self._examples = torch.empty(segments[-1].last, 0, device="cpu")
        # Every T of an input [B, T, ...] in this pass; a flattened input is [B * T, features].
        self._lengths: set[int] = set()
        # Inputs whose meaning depends on these lengths: the class of the module, and the shape.
        self._unclear: list[tuple[str, list[int]]] = []

    @property
    def num_examples(self) -> int:
        """B"""
        return self._examples.shape[0]

    @property
    def parts(self) -> list[list[int]]:
        """Examples of each domain's segments."""
        by_domain = itertools.groupby(self.segments, attrgetter("domain"))
        return [[segment.last - segment.first for segment in group] for _, group in by_domain]

    def add_weights(self, weights_S: Tensor) -> None:
        """Add weights of the segments in the losses of their domains."""
        self.weights_S = weights_S if self.weights_S is None else self.weights_S + weights_S

    def expand(self, x: Tensor, module: nn.Module) -> Tensor:
        """The input of `module` with the examples in the first dimension, [B, ...].

        x is floating [..., features], or integer indices [...]. It is expanded if all examples
        share it; a flattened batch stays [B * T, features]. Raises what `note` raises, except in a
        compiled graph: there `note` is for its backward.
        """
        is_indices = not x.is_floating_point()
        if is_indices and x.dim() == 1 and len(x) != self.num_examples:
            # Positions [L].
            x = x[None]
        # What requires a gradient may be one example of the batch.
        if x.shape[0] == 1 and not x.requires_grad:
            x = x.expand(self.num_examples, *x.shape[1:])
        # It changes this object, which a graph must not do.
        if not torch.compiler.is_compiling():
            self.note(x, module)
        return x

    def note(self, x: Tensor, module: nn.Module) -> None:
        """Note what an input that `expand` has returned says about the lengths of this pass.

        Raises:
            RuntimeError: the first dimension does not hold the examples.
        """
        size, shape, kind = self.num_examples, list(x.shape), type(module).__name__
        is_indices = not x.is_floating_point()
        if shape[0] == size:
            if len(shape) > (1 if is_indices else 2):
                self._lengths.add(shape[1])
            elif is_indices:
                self._unclear.append((kind, shape))
        elif len(shape) == 2 and shape[0] % size == 0 and not is_indices:
            self._unclear.append((kind, shape))
        else:
            raise self._without_examples(kind, shape)

    def check(self) -> None:
        """Check the inputs of a whole pass, when all its lengths are known.

        Raises:
            RuntimeError: an input may not be a flattened batch, or indices [B] may be positions.
        """
        size = self.num_examples
        for kind, shape in self._unclear:
            is_flattened = shape[0] != size
            # [time, features] may be a multiple of B, too.
            if is_flattened and shape[0] // size not in self._lengths:
                raise self._without_examples(kind, shape)
            # Positions would be taken for examples: each domain's row would get a part of them.
            if not is_flattened and (not self._lengths or size in self._lengths):
                raise RuntimeError(
                    f"a {kind} got indices of shape {shape}: these may be {size} positions, or one "
                    f"index for each of the {size} examples. Give positions as [1, L], or one "
                    "index per example as [B, 1]."
                )

    def _without_examples(self, kind: str, shape: list[int]) -> RuntimeError:
        return RuntimeError(
            f"the first dimension must be the {self.num_examples} examples of the batch; a {kind} "
            f"got shape {shape}. Check the sizes of the batch, or run one domain (or one example) "
            "after another."
        )


def refuse_coupled_examples(model: nn.Module) -> None:
    """Raise ValueError where a module mixes examples, as norms without running statistics do."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}, whose statistics mix the "
                "examples of a batch, so no domain has a gradient of its own. Put it in eval mode, "
                "with running statistics, or run one domain after another: optimizer.domain(name)."
            )
