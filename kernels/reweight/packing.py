"""What the K x K step keeps and what it yields, each as one float64 vector with named views.

One vector is one allocation and one write of one kernel; the names are views of it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Vectors of K that the state and the values begin with, and scalars that they end with.
STATE_VECTORS, STATE_SCALARS = 3, 2
VALUE_VECTORS, VALUE_SCALARS = 4, 1


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


class Step(NamedTuple):
    """What one K x K step yields; float64 unless said, on the device of the Gram matrix.

    Gradients are in unscaled units and, except for `norms`, after per-domain clipping.
    """

    gram: Tensor
    """[R, R] inner products over the columns that enter W."""
    coefficients: Tensor
    """[R] of the rows in the weighted sum: alpha, per-domain and global clipping; NaN to skip."""
    norms: Tensor
    """[R] of the rows, before any clipping."""
    gain: Tensor
    """[K] the scores that moved the weights."""
    influence: Tensor
    """[K] W less the difficulty, eq. (ge-decompose)."""
    difficulty: Tensor
    """[K] tau_j ||g_j||^2, eq. (ge-decompose)."""
    alpha: Tensor
    """[K] domain weights after the step."""
    combined_norm: Tensor
    """Scalar: norm of the combined gradient before the global clip."""
    skipped: Tensor
    """Bool scalar: something was not finite, the state stays."""
    found_inf: Tensor
    """Float32 scalar: one if skipped, as fused optimizers take it."""


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


def step_views(
    values_V: Tensor, skipped: Tensor, found_inf: Tensor, num_rows: int, num_domains: int
) -> Step:
    """The parts of a step's values, by name."""
    sizes = [num_rows**2, num_rows, num_rows, VALUE_VECTORS * num_domains, VALUE_SCALARS]
    gram, coefficients, norms, vectors, combined_norm = torch.split(values_V, sizes)
    gain, influence, difficulty, alpha = vectors.view(VALUE_VECTORS, num_domains).unbind()
    return Step(
        gram=gram.view(num_rows, num_rows),
        coefficients=coefficients,
        norms=norms,
        gain=gain,
        influence=influence,
        difficulty=difficulty,
        alpha=alpha,
        combined_norm=combined_norm.view(()),
        skipped=skipped,
        found_inf=found_inf,
    )
