"""The vectors of the K x K step: its settings, what it keeps and what it yields, and their order.

Each is one float64 vector, so one allocation and one address for a kernel; the names are views.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Vectors of K that the state and the values begin with, and scalars that they end with.
STATE_VECTORS, STATE_SCALARS = 3, 2
VALUE_VECTORS, VALUE_SCALARS = 4, 1


class Settings(NamedTuple):
    """The entries of `settings_C`, [9], in their order; as numbers, or as 0-dim views of it.

    csrc/cuda/reweight.cu has a struct of the same order.
    """

    lr: float | Tensor
    """>= 0, eta of this step."""
    mu: float | Tensor
    """> 0, Bregman coefficient."""
    grad_scale: float | Tensor = 1.0
    """The factor that gradients carry."""
    scale_by_mean_norm: float | Tensor = 0.0
    """1: divide W by the mean norm of the present training rows (published code); 0: do not."""
    low: float | Tensor = -math.inf
    """The score is cut to [low, high] (published code)."""
    high: float | Tensor = math.inf
    domain_max_grad_norm: float | Tensor = math.inf
    """Norm to which each row is cut; infinite: none is."""
    max_grad_norm: float | Tensor = math.inf
    """Norm to which the combined gradient is cut; infinite: it is not."""
    smoothing: float | Tensor = 0.0
    """In [0, 1), mixture with uniform."""


class State(NamedTuple):
    """Views of `state_S`, [3 K + 2]: what lasts from step to step."""

    alpha: Tensor
    """[K] domain weights."""
    alpha_mean: Tensor
    """[K] their mean over the steps that were taken."""
    gain: Tensor
    """[K] the scores that last moved them."""
    num_steps: Tensor
    """Scalar: steps taken."""
    num_skipped: Tensor
    """Scalar: steps skipped, because a gradient was not finite."""


class LastStep(NamedTuple):
    """What one K x K step saw and did; float64 unless said, on the device of the Gram matrix.

    Gradients are in unscaled units and, except for `grad_norms`, after per-domain clipping. As
    `optimizer.last`, `gram` has the rows of `optimizer.rows`: training domains, then measured-only
    ones. With a score that `has_common_scale`, `gram` and the scores are of gradients over that
    scale.
    """

    gram: Tensor
    """[R, R] inner products over the columns that enter W."""
    coefficients: Tensor
    """[R] of the rows in the weighted sum: alpha, per-domain and global clipping; NaN to skip."""
    grad_norms: Tensor
    """[R] norms of the rows before any clipping; over the columns of `full_RR`."""
    gain: Tensor
    """[K] the scores that moved the weights: W, or its published variant."""
    influence: Tensor
    """[K] W less the difficulty: what domain j does for the others, eq. (ge-decompose)."""
    difficulty: Tensor
    """[K] tau_j ||g_j||^2, eq. (ge-decompose); of halves where the score is unbiased, maybe < 0."""
    alpha: Tensor
    """[K] domain weights after the step."""
    combined_norm: Tensor
    """Scalar: norm of the combined gradient before the global clip."""
    skipped: Tensor
    """Bool scalar: something was not finite, the state stays."""
    found_inf: Tensor
    """Float32 scalar: one if skipped, as fused optimizers take it."""
    lr: float | Tensor | None = None
    """eta of this step, as the optimizer had it; None: not said."""


def new_settings(settings: Settings, device: torch.device | str | None = None) -> Tensor:
    """[9] float64 `settings_C` of numbers, on a device.

    Copying it there waits for a GPU: keep it, and `fill_` the entry that changes.

    Raises:
        ValueError: mu is not positive.
    """
    if not settings.mu > 0:
        raise ValueError(f"mu must be positive; got {settings.mu}.")
    return torch.tensor(settings, dtype=torch.float64, device=device)


def num_domains_of(state_S: Tensor) -> int:
    """K of a state."""
    return (state_S.numel() - STATE_SCALARS) // STATE_VECTORS


def new_state(alpha_K: Tensor) -> Tensor:
    """[3 K + 2]: weights `alpha_K`, which are their own mean; no score, no step yet."""
    rest = torch.zeros(len(alpha_K) + STATE_SCALARS, dtype=alpha_K.dtype, device=alpha_K.device)
    return torch.cat([alpha_K, alpha_K, rest])


def state_views(state_S: Tensor) -> State:
    """The parts of a state, by name."""
    num_domains = num_domains_of(state_S)
    vectors = state_S[:-STATE_SCALARS].view(STATE_VECTORS, num_domains).unbind()
    return State(*vectors, *state_S[-STATE_SCALARS:].unbind())


def num_values(num_rows: int, num_domains: int) -> int:
    """V = R^2 + 2 R + 4 K + 1."""
    return num_rows * num_rows + 2 * num_rows + VALUE_VECTORS * num_domains + VALUE_SCALARS


def reweight_outputs(gram_RR: Tensor, state_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty results of `reweight`: [V] float64, a bool and a float32 scalar."""
    size = num_values(len(gram_RR), num_domains_of(state_S))
    return (
        gram_RR.new_empty(size),
        gram_RR.new_empty((), dtype=torch.bool),
        gram_RR.new_empty((), dtype=torch.float32),
    )


def step_views(
    values_V: Tensor, skipped: Tensor, found_inf: Tensor, num_rows: int, num_domains: int
) -> LastStep:
    """The parts of a step's values, by name."""
    sizes = [num_rows**2, num_rows, num_rows, VALUE_VECTORS * num_domains, VALUE_SCALARS]
    gram, coefficients, norms, vectors, combined_norm = torch.split(values_V, sizes)
    gain, influence, difficulty, alpha = vectors.view(VALUE_VECTORS, num_domains).unbind()
    return LastStep(
        gram=gram.view(num_rows, num_rows),
        coefficients=coefficients,
        grad_norms=norms,
        gain=gain,
        influence=influence,
        difficulty=difficulty,
        alpha=alpha,
        combined_norm=combined_norm.view(()),
        skipped=skipped,
        found_inf=found_inf,
    )
