"""What a rule is that moves the domain weights: what it needs of a step, its state, its record.

There are two: `MirrorStep` of `doge_fast.weights.reweight`, the paper's, and `Aligned` of
`doge_fast.weights.aligned`. A rule checks the ranges of its settings; below it `scores` and
`reweight` take numbers as they come.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class Matrices(NamedTuple):
    """The Gram matrices of a step with B rows, float64; in AdamW's metric if the rule asks for it.

    [B, B], symmetric to the bit. With a rule that has halves [B + 1, B]: of their sums, and in the
    last row the product of the two halves of each.
    """

    gram: Tensor
    """Over the columns that enter W."""
    full: Tensor
    """Over all columns; may be `gram`."""


class Names(NamedTuple):
    """What a step knows of the R names of the objective; all [R], on the device."""

    tau_R: Tensor
    """float64 >= 0, the target weights."""
    row_R: Tensor
    """int32: the row b of each name; -1: not drawn, or absent."""
    first_R: Tensor
    """float64: the share of a name's first half in its gradient; with a rule without halves 1."""


class WeightsState(NamedTuple):
    """The state that a step updates: `state_S`, [3 K + 2] float64."""

    alpha: Tensor
    """[K] domain weights."""
    alpha_mean: Tensor
    """[K] the result: their mean over the steps taken; for "aligned" the weights themselves."""
    gain: Tensor
    """[K] the last score of each domain; for "aligned" the last slope."""
    num_steps: Tensor
    """Scalar; steps that moved the weights."""
    num_skipped: Tensor
    """Scalar; steps skipped because a norm or a weight was not finite."""


VECTORS, COUNTS = WeightsState._fields[:3], WeightsState._fields[3:]


class LastStep(NamedTuple):
    """The record of a step; tensors on the device.

    Values are those of unscaled gradients, after per-domain clipping (`grad_norms`: before). `gram`
    and `grad_norms` have the rows of `optimizer.names`: training domains, then held-out targets;
    absent rows are zero.
    """

    gram: Tensor
    """[R, R] inner products over the columns that enter W; for "aligned" in its metric, with the
    products of halves on the diagonal, which may be negative."""
    coefficients: Tensor
    """[C] coefficients of the buffer's rows in the weighted sum; NaN if skipped."""
    grad_norms: Tensor
    """[R] norms of the rows before any clipping, over all columns; for "aligned" in its metric."""
    gain: Tensor
    """[K] the scores that moved the weights; W for "paper" and, of this step, for "aligned"."""
    influence: Tensor
    """[K] W less the difficulty: what domain j does for the others, eq. (ge-decompose)."""
    difficulty: Tensor
    """[K] tau_j ||g_j||^2, eq. (ge-decompose)."""
    alpha: Tensor
    """[K] domain weights after the step."""
    combined_norm: Tensor
    """Scalar: norm of the combined gradient before the global clip."""
    skipped: Tensor
    """Bool scalar: a norm or a weight was not finite, so the state did not change."""
    found_inf: Tensor
    """`skipped` as a float32 scalar, for fused optimizers."""
    lr: float | Tensor | None = None
    """eta of this step, as in the parameter group; None: not known."""


class Outputs(NamedTuple):
    """What a kernel writes of `LastStep`; uninitialised memory before."""

    values: Tensor
    """[V] float64: the first fields in their order, one after another."""
    skipped: Tensor
    """Bool scalar."""
    found_inf: Tensor
    """Float32 scalar."""


def new_outputs(
    num_names: int, num_domains: int, num_rows: int, device: torch.device | str
) -> Outputs:
    """Memory for the record of a step with R names, K domains and C rows."""
    size = num_names**2 + num_rows + num_names + 4 * num_domains + 1
    return Outputs(
        torch.empty(size, dtype=torch.float64, device=device),
        torch.empty((), dtype=torch.bool, device=device),
        torch.empty((), dtype=torch.float32, device=device),
    )


def last_step_of(outputs: Outputs, num_names: int, num_domains: int, num_rows: int) -> LastStep:
    """The record whose parts `outputs` has, as views of it."""
    sizes = [num_names**2, num_rows, num_names, *4 * [num_domains], 1]
    parts = torch.split(outputs.values, sizes)
    gram, coefficients, norms, gain, influence, difficulty, alpha, combined_norm = parts
    return LastStep(
        gram=gram.view(num_names, num_names),
        coefficients=coefficients,
        grad_norms=norms,
        gain=gain,
        influence=influence,
        difficulty=difficulty,
        alpha=alpha,
        combined_norm=combined_norm.view(()),
        skipped=outputs.skipped,
        found_inf=outputs.found_inf,
    )


@dataclass(frozen=True, kw_only=True)
class UpdateRule(ABC):
    """How domain weights move; constant over a run.

    Raises:
        ValueError: a setting is outside its range.
    """

    has_halves: ClassVar[bool] = False
    """Whether the rule needs two independent parts of each gradient, in rows 2 b and 2 b + 1."""
    is_preconditioned: ClassVar[bool] = False
    """Whether the Gram matrices are in AdamW's metric. They do not know the norm of the combined
    gradient then, which is read once more."""
    has_mixture: ClassVar[bool] = False
    """Whether the coefficients of a step are known before its gradients (`mixture`): then rows are
    read once, for the Gram matrix and the weighted sum."""
    mu: float | None = None
    """Bregman coefficient, of the rule that has one."""
    max_grad_norm: float | None = None
    """> 0, norm to which the combined gradient is clipped; None: not clipped."""
    smoothing: float = 0.0
    """In [0, 1), mixture with uniform."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        self._check_positive("max_grad_norm")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing must be in [0, 1); got {self.smoothing!r}.")

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, or None for no clip; got {value!r}.")

    @property
    @abstractmethod
    def name(self) -> str:
        """In weights.json."""

    def new_memory(self, alpha_K: Tensor, num_names: int) -> Tensor:
        """What the rule keeps from step to step beside `WeightsState`, before the first step."""
        return alpha_K.new_empty(0)

    def mixture(self, memory_S: Tensor, num_names: int) -> Tensor:
        """[R] the coefficients of this step's gradients, a view; of a rule that has a mixture."""
        raise NotImplementedError(f"{type(self).__name__} has no mixture().")

    @abstractmethod
    def settings(self, lr: float | Tensor, grad_scale: float | Tensor) -> Sequence[float | Tensor]:
        """The numbers of a step, as `step` takes them on the device; ValueError out of range."""

    @abstractmethod
    def step(
        self, matrices: Matrices, state_S: Tensor, memory_S: Tensor, names: Names, settings: Tensor
    ) -> LastStep:
        """Move the weights in `state_S`, of `WeightsState`, and the rule's own memory, in place.

        Nothing is read on the host. A step whose gradients are not finite is skipped: it counts as
        such, moves nothing else, and the coefficients in its record are NaN.
        """
