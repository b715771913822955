"""Where the examples of a batch are: in what a module is given, and domain by domain.

A batch of B examples is sorted by domain. Most modules get it with the examples in front, [B, ...].
Some get it flattened, [B * T, features], and positions come without a batch, as [L] or [1, L].
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Segment(NamedTuple):
    """The examples of one domain: `first` up to `last` of the batch, and its row of the buffer."""

    row: int
    first: int
    last: int


class Run(NamedTuple):
    """Neighbouring domains of equal size with neighbouring rows, which one product fills.

    `first` up to `last` are their examples, of `num_examples` in the batch.
    """

    first_row: int
    num_rows: int
    first: int
    last: int
    num_examples: int

    def cut(self, values: Tensor, *last: int) -> Tensor:
        """[G, tokens of a domain, *last] for the run's G domains.

        Args:
            values: [B, ..., *last] or [B * T, *last].
            last: the dimensions that are no tokens.
        """
        # A plain reshape: einops here costs the step of a tiny model 9 % of its host time.
        per_example = values.shape[0] // self.num_examples
        of_run = values[self.first * per_example : self.last * per_example]
        return of_run.reshape(self.num_rows, -1, *last)


class SortedBatch(NamedTuple):
    """A batch that is sorted by domain."""

    segments: tuple[Segment, ...]
    runs: tuple[Run, ...]
    """The same domains, in as few runs as there can be."""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "SortedBatch":
        """The batch of these segments, which are one after another and at least one."""
        runs: list[Run] = []
        for row, first, last in segments:
            before = runs[-1] if runs else Run(0, 0, 0, 0, 0)
            is_equal = before.num_rows * (last - first) == before.last - before.first
            if runs and is_equal and row == before.first_row + before.num_rows:
                runs[-1] = before._replace(num_rows=before.num_rows + 1, last=last)
            else:
                runs.append(Run(row, 1, first, last, segments[-1].last))
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
            f"a rule is for modules of one tensor; a {type(module).__name__} got {len(values)} "
            "arguments. Register no rule for its class."
        )
    return values[0]


def couples_examples(module: nn.Module) -> bool:
    """Whether `module` mixes the examples of a batch, so that none has a gradient of its own."""
    return isinstance(module, _BatchNorm) and module.training
