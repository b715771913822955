"""Where the examples of a batch are: in what a module is given, and domain by domain.

A batch of B examples is sorted by domain. Most modules get it with the examples in front, [B, ...].
Some get it flattened, [B * T, features], and positions come without a batch, as [L] or [1, L].
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Segment(NamedTuple):
    """The examples of a row of the buffer: `first` up to `last` of the batch."""

    row: int
    first: int
    last: int
    """Whether it is the second half of the domain of the segment before."""


class Run:
    """Neighbouring domains with neighbouring rows, whose rows are filled together.

    Args:
        first_row: of the first domain.
        borders: the domains' examples, of `borders[g]` up to `borders[g + 1]`.
        num_examples: of the whole batch.
    """

    def __init__(self, first_row: int, borders: Sequence[int], num_examples: int) -> None:
        self.borders = tuple(borders)
        self.num_examples = num_examples
        self.rows = range(first_row, first_row + len(borders) - 1)
        """Of the buffer."""
        self.equal_parts = self._cut_where_sizes_change()
        """(which domains of the run, the run of them) for neighbours of equal size."""
        self.is_equal = len(self.equal_parts) == 1
        """Whether all domains have as many examples, so that one product fills all rows."""
        self._borders_on: dict[tuple[torch.device, int], Tensor] = {}

    def _cut_where_sizes_change(self) -> list[tuple[slice, "Run"]]:
        sizes = [last - first for first, last in itertools.pairwise(self.borders)]
        changes = [i for i in range(1, len(sizes)) if sizes[i] != sizes[i - 1]]
        if not changes:
            return [(slice(None), self)]
        parts = itertools.pairwise([0, *changes, len(sizes)])
        first_row, borders = self.rows.start, self.borders
        return [
            (slice(i, j), Run(first_row + i, borders[i : j + 1], self.num_examples))
            for i, j in parts
        ]

    def tokens(self, values: Tensor, *last: int) -> Tensor:
        """[T, *last] for all tokens of the run, domain by domain.

        Args:
            values: [B, ..., *last] or [B * T, *last].
            last: the dimensions that are no tokens.
        """
        # A plain reshape: einops here costs the step of a tiny model 9 % of its host time.
        per_example = values.shape[0] // self.num_examples
        of_run = values[self.borders[0] * per_example : self.borders[-1] * per_example]
        return of_run.reshape(-1, *last)

    def cut(self, values: Tensor, *last: int) -> Tensor:
        """[G, tokens of a domain, *last] for the run's G domains of equal size; as `tokens`."""
        per_example = values.shape[0] // self.num_examples
        of_run = values[self.borders[0] * per_example : self.borders[-1] * per_example]
        return of_run.reshape(len(self.rows), -1, *last)

    def token_borders(self, num_tokens: int, device: torch.device) -> Tensor:
        """[G + 1] int64 on `device`: where each domain begins among the run's `num_tokens`."""
        per_example = num_tokens // (self.borders[-1] - self.borders[0])
        key = (device, per_example)
        if key not in self._borders_on:
            starts = [(border - self.borders[0]) * per_example for border in self.borders]
            self._borders_on[key] = on_device(starts, device)
        return self._borders_on[key]


def on_device(
    numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Numbers, or lists of them, as a tensor on `device`; the host does not wait for it."""
    values = torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        # Pinned, or the copy would make the host wait for the device.
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class SortedBatch(NamedTuple):
    """A batch that is sorted by domain."""

    segments: tuple[Segment, ...]
    runs: tuple[Run, ...]
    """The same domains, in as few runs as there can be."""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "SortedBatch":
        """The batch of these segments, which are one after another and at least one."""
        num_examples = segments[-1].last
        starts = [
            index
            for index, segment in enumerate(segments)
            if index == 0 or segment.row != segments[index - 1].row + 1
        ]
        runs = []
        for first, last in itertools.pairwise([*starts, len(segments)]):
            borders = [segments[first].first, *(each.last for each in segments[first:last])]
            runs.append(Run(segments[first].row, borders, num_examples))
        return cls(tuple(segments), tuple(runs))


class ExampleAxis:
    """Finds the examples in what the modules of a model are given, during one pass.

    Args:
        needs: what needs them, up to the verb; begins the sentence of a refusal.
        instead: what else can be done; ends it.
    """

    def __init__(self, needs: str, instead: str) -> None:
        self._needs = needs
        self._instead = instead
        self.num_examples = 0
        # T of every [B, T, ...] of this pass: a flattened batch has B * T of one of them.
        self._lengths: set[int] = set()

    def begin(self, num_examples: int) -> None:
        """Begin a pass over a batch of `num_examples`."""
        self.num_examples = num_examples
        self._lengths = set()

    def in_front(self, x: Tensor, module: nn.Module) -> Tensor:
        """The input of `module` with the examples in the first dimension.

        Args:
            x: floating, or indices of an integer dtype, which have no dimension of features.
            module: which is named if `x` is refused.

        Returns:
            [B, ...]; a flattened batch as it is, [B * T, features]; [1, ...] for what is the same
            for all examples.

        Raises:
            RuntimeError: the first dimension is something else, or [B] indices may be positions.
        """
        size, shape = self.num_examples, list(x.shape)
        is_indices = not x.is_floating_point()
        if is_indices and x.dim() == 1:
            if len(x) == size and (not self._lengths or size in self._lengths):
                raise RuntimeError(
                    f"a pass over examples cannot tell {size} positions from one index for each of "
                    f"the {size} examples: a {type(module).__name__} got shape {shape}. Give "
                    "positions as [1, L], or one index per example as [B, 1]."
                )
            x = x if len(x) == size else x[None]
        if x.shape[0] == size:
            if x.dim() > (1 if is_indices else 2):
                self._lengths.add(x.shape[1])
            return x
        if x.shape[0] == 1:
            return x
        is_flattened = (
            x.dim() == 2 and x.shape[0] % size == 0 and x.shape[0] // size in self._lengths
        )
        if is_flattened and not is_indices:
            return x
        raise RuntimeError(
            f"{self._needs} the {size} examples of the batch in the first dimension; a "
            f"{type(module).__name__} got shape {shape}. {self._instead}"
        )


def only_input(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The one argument of a forward, under whichever name the module has for it.

    Raises:
        RuntimeError: there are several, or it is no tensor.
    """
    values = (*args, *kwargs.values())
    if len(values) != 1 or not isinstance(values[0], Tensor):
        raise RuntimeError(
            f"a rule is for modules with one tensor argument; a {type(module).__name__} got "
            f"{len(values)} arguments. Do not register a rule for its class."
        )
    return values[0]


def couples_examples(module: nn.Module) -> bool:
    """Whether `module` mixes the examples of a batch, so that none has a gradient of its own."""
    return isinstance(module, _BatchNorm) and module.training
