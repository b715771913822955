"""The aligned rule: the mixture whose gradient points most like the target's.

An adaptive optimizer's step has one length, whatever the scale of the gradient. So the mixture that
helps the target most is the one whose gradient makes the smallest angle with the target's,

    alpha  =  argmax over the simplex of  W.a / sqrt(a' G a),        W = G tau,

in the metric in which the optimizer measures its steps, D = 1 / (sqrt(v) + eps) of AdamW. The
maximum is usually inside the simplex: the distance from uniform is the rule's own, where that of
the paper's mirror step is decided by mu. If all domains are targets with one weight, uniform
weights stay where they are.

G must be without minibatch noise on its diagonal: the squared norm of a small batch's gradient is
nearly all noise, and would punish each domain for it. So a domain's gradient comes in two
independent halves, and the diagonal is their product. Noise in the other entries averages out: G is
the mean over all steps so far, each divided by the mean squared norm of its rows, so that no step
decides alone. The model's steps follow the weights half-way: what a model at uniform weights has
learned already looks useless to it, and what one at the weights alone has learned looks useless
too soon. They follow those of the step before, which are known before the step's gradients: so the
rows are read once, for the Gram matrix and the weighted sum together. docs/evidence.md has what was
measured.

Axis letters: K training domains, R names of the objective, B = R rows of the step.

As `reweight`, `align` is one launch of a Triton kernel on a GPU, and plain torch elsewhere.
"""

# Triton's own compiler types device code.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from doge_fast.kernels.dispatch import OPERATORS, Operator, requested_backend, runs
from doge_fast.kernels.triton_support import kernel, launching_on, tl
from doge_fast.weights import scores
from doge_fast.weights.defaults import DOMAIN_MAX_GRAD_NORM
from doge_fast.weights.reweight import num_domains_of, state_views
from doge_fast.weights.rule import (
    LastStep,
    Matrices,
    Names,
    UpdateRule,
    last_step_of,
    new_outputs,
)

WAITING_STEPS = 20
"""Steps before the first move: of fewer, the mean matrix is mostly noise."""
RATE = 0.1
"""Of the mirror step on log(W.a / sqrt(a'Ga)) that each training step takes."""
FOLLOWED = 0.5
"""Share of the domain weights in the mixture that the model moves by; the rest is uniform."""
_LEAST_WEIGHT = 0.01
"""The least weight of a domain, beside uniform, so that it can come back."""
_LEAST_GAIN = 0.1
"""The least W.a in the slope, beside the largest |W_j|."""
_LEAST_SQUARE = 0.01
"""With a smaller a'Ga, beside that of domains of equal norm at right angles, nothing moves: the
mean matrix is noise."""
_MOST_SLOPE = 10.0


class AlignedSettings(NamedTuple):
    """The settings of a step: `settings_F`, [2] float64."""

    grad_scale: float | Tensor
    smoothing: float | Tensor


@dataclass(frozen=True, kw_only=True)
class Aligned(UpdateRule):
    """One mirror step towards the mixture with the smallest angle to the target.

    ValueError as `UpdateRule`.
    """

    has_halves: ClassVar[bool] = True
    is_preconditioned: ClassVar[bool] = True
    has_mixture: ClassVar[bool] = True
    name: ClassVar[str] = "aligned"

    def new_memory(self, alpha_K: Tensor, num_names: int) -> Tensor:
        """The mean matrix [R, R], and then the mixture of the next step [R]."""
        mixture_R = _mixture(alpha_K, num_names)
        return torch.cat([alpha_K.new_zeros(num_names * num_names), mixture_R])

    def mixture(self, memory_S: Tensor, num_names: int) -> Tensor:
        """Half-way from uniform weights to those of the step before."""
        return memory_S[-num_names:]

    def settings(self, lr: float | Tensor, grad_scale: float | Tensor) -> AlignedSettings:
        """Those of `align`; the learning rate moves no weights here."""
        return AlignedSettings(grad_scale, self.smoothing)

    def step(
        self, matrices: Matrices, state_S: Tensor, memory_S: Tensor, names: Names, settings: Tensor
    ) -> LastStep:
        """As `align`."""
        num_names = len(names.tau_R)
        mean_RR, mixture_R = memory_S[:-num_names].view(-1, num_names), memory_S[-num_names:]
        return align(matrices, state_S, mean_RR, mixture_R, names, settings)


def refuse_settings(
    mu: float | None,
    domain_max_grad_norm: float | None,
    domains_per_step: int | None,
    absent: str,
) -> None:
    """ValueError if a setting was passed that has no meaning for this rule."""
    passed = {
        "mu": mu is not None,
        "domain_max_grad_norm": domain_max_grad_norm not in (None, DOMAIN_MAX_GRAD_NORM),
        "domains_per_step": domains_per_step is not None,
        "absent": absent == "keep",
    }
    if names := [name for name, is_passed in passed.items() if is_passed]:
        raise ValueError(
            f"{', '.join(names)} must keep the default with score='aligned', which has no mu, "
            "clips no domain, and needs all domains in each step."
        )


def align(
    matrices: Matrices,
    state_S: Tensor,
    mean_RR: Tensor,
    mixture_R: Tensor,
    names: Names,
    settings_F: Tensor,
    *,
    implementation: str | None = None,
) -> LastStep:
    """Move the domain weights one step of the aligned rule, in one launch.

    c        =  1 / mean_r <g_r, g_r>,   g_j = a_j + b_j
    G_ij     =  c <g_i, g_j>,    G_jj  =  c <a_j, b_j> / (w_j (1 - w_j))
    mean     =  mean over steps of G;  W = mean tau
    slope_j  =  W_j / W.a  -  (mean a)_j / a' mean a
    alpha'_j ∝  max(alpha_j exp(RATE slope_j) / sum_i alpha_i exp(RATE slope_i), 0.01 / K)
    c'_j     =  FOLLOWED alpha'_j + (1 - FOLLOWED) / K,    of the next step

    w_j is the share of the first half. A weight of zero stays zero unless it is smoothed, and then
    K counts the others in c'. Arithmetic is float64, and nothing is read on the host.

    Args:
        matrices: [B + 1, B] each: <g_i, g_j>, symmetric to the bit, and then <a_j, b_j>.
        state_S: [3 K + 2] float64, made by `new_state`; updated in place.
        mean_RR: [R, R] float64, the mean of all steps before; updated in place.
        mixture_R: [R] float64, the coefficients of this step, which the record has; those of the
            next one are written there.
        names: every name has a row.
        settings_F: [2] float64, the fields of `AlignedSettings`.
        implementation: "torch" or "triton"; None: the dispatcher chooses.

    Returns:
        The record. Its `combined_norm` is NaN: the matrices do not have the Euclidean norm.

    Raises:
        RuntimeError: the requested implementation cannot run.
    """
    run = runs["align", state_S.device, implementation, requested_backend()]
    last: LastStep = run(matrices, state_S, mean_RR, mixture_R, names, settings_F)
    return last


# In plain torch: some sixty small operations.


def align_torch(
    matrices: Matrices,
    state_S: Tensor,
    mean_RR: Tensor,
    mixture_R: Tensor,
    names: Names,
    settings_F: Tensor,
) -> LastStep:
    """An equation a line."""
    num_domains = num_domains_of(state_S)
    state, settings = state_views(state_S), AlignedSettings(*settings_F.unbind())
    scale_square = settings.grad_scale**2
    row_R = names.row_R.long()
    whole_RR = matrices.gram[row_R][:, row_R] / scale_square
    products_R = matrices.gram[-1, row_R] / scale_square / (names.first_R * (1 - names.first_R))
    norms_R = (matrices.full.diagonal()[row_R] / scale_square).sqrt()
    gram_RR = whole_RR - torch.diag(whole_RR.diagonal()) + torch.diag(products_R)
    mean_square = whole_RR.diagonal().mean()
    finite = norms_R.isfinite().all() & whole_RR.isfinite().all() & products_R.isfinite().all()

    num_steps = state.num_steps + finite
    # A step whose gradients are all zero says nothing.
    is_new = finite & (mean_square > 0)
    moved_RR = scores.running_mean(mean_RR, gram_RR / mean_square, num_steps.clamp(min=1))
    mean_RR.copy_(torch.where(is_new, moved_RR, mean_RR))

    slope_K = _slope(mean_RR, names.tau_R, state.alpha)
    raised_K = scores.mirror_step(state.alpha, slope_K, lr=RATE, mu=1.0)
    raised_K = raised_K.clamp(min=_LEAST_WEIGHT / num_domains) * (state.alpha > 0)
    raised_K = scores.smooth(raised_K / raised_K.sum(), settings.smoothing)
    alpha_K = torch.where(num_steps > WAITING_STEPS, raised_K, state.alpha)

    coefficients_B = torch.empty_like(mixture_R)
    coefficients_B[row_R] = torch.where(finite, mixture_R, torch.nan)
    mixture_R.copy_(torch.where(finite, _mixture(alpha_K, len(mixture_R)), mixture_R))

    gain_K = scores.gain(gram_RR, names.tau_R, num_domains)
    difficulty_K = scores.difficulty(gram_RR, names.tau_R, num_domains)
    next_S = torch.cat([alpha_K, alpha_K, slope_K, num_steps[None], state.num_skipped[None]])
    state_S.copy_(torch.where(finite, next_S, state_S))
    state.num_skipped.add_(~finite)
    return LastStep(
        gram=gram_RR,
        coefficients=coefficients_B.repeat_interleave(2),
        grad_norms=norms_R,
        gain=gain_K,
        influence=gain_K - difficulty_K,
        difficulty=difficulty_K,
        alpha=state.alpha.clone(),
        combined_norm=torch.full_like(mean_square, torch.nan),
        skipped=~finite,
        found_inf=(~finite).to(torch.float32),
    )


def _mixture(alpha_K: Tensor, num_names: int) -> Tensor:
    """[R] the mixture that the model moves by; zero for held-out targets."""
    is_trained_K = (alpha_K > 0).to(alpha_K)
    followed_K = FOLLOWED * alpha_K + (1 - FOLLOWED) * is_trained_K / is_trained_K.sum()
    return torch.cat([followed_K, followed_K.new_zeros(num_names - len(alpha_K))])


def _slope(mean_RR: Tensor, tau_R: Tensor, alpha_K: Tensor) -> Tensor:
    """[K] the gradient of log(W.a / sqrt(a'Ga)), bounded; zero where a'Ga is noise."""
    num_domains = len(alpha_K)
    gram_KK = mean_RR[:num_domains, :num_domains]
    gain_K = scores.gain(mean_RR, tau_R, num_domains)
    least_gain = _LEAST_GAIN * gain_K.abs().max()
    share_K = gain_K / torch.maximum(gain_K @ alpha_K, least_gain).clamp(min=1e-300)
    own_K = gram_KK @ alpha_K
    square = own_K @ alpha_K
    least_square = _LEAST_SQUARE / num_domains * gram_KK.diagonal().abs().mean()
    slope_K = share_K - (share_K @ alpha_K) * own_K / square
    is_known = (square > least_square) & (least_gain > 0)
    return torch.where(is_known, slope_K, 0.0).clamp(-_MOST_SLOPE, _MOST_SLOPE)


# Through Triton: one program for any number of names.
#
# Reads the B x B matrix and the mean, writes the mean and the R x R matrix, and reads that once
# more: nothing may change before all entries are known to be finite. The matrices are processed in
# slabs of BLOCK_R rows. Vectors that later slabs need are stored in the output, and loaded from
# there after a barrier.

# Float64 elements of a slab; 128 threads then load 16 each. With 8 each, 64 names spill on sm_90.
SLAB = 2048
NUM_WARPS = 4


def align_triton(
    matrices: Matrices,
    state_S: Tensor,
    mean_RR: Tensor,
    mixture_R: Tensor,
    names: Names,
    settings_F: Tensor,
) -> LastStep:
    """As `align_torch`."""
    sizes = len(names.tau_R), num_domains_of(state_S)
    num_rows = 2 * sizes[0]
    outputs = new_outputs(*sizes, num_rows, state_S.device)
    tensors = (*matrices, state_S, mean_RR, mixture_R, *names, settings_F, *outputs)
    with launching_on(state_S.device):
        align_once[(1,)](*tensors, **constants_of(*sizes), num_warps=NUM_WARPS)
    return last_step_of(outputs, *sizes, num_rows)


def constants_of(num_names: int, num_domains: int) -> dict[str, int | float]:
    """Compile-time arguments."""
    padded = max(2, 1 << (num_names - 1).bit_length())
    places = {name.upper(): place for place, name in enumerate(AlignedSettings._fields)}
    return {
        "R": num_names,
        "K": num_domains,
        "PADDED_R": padded,
        "BLOCK_R": max(1, min(padded, SLAB // padded)),
        **places,
        "WAITING_STEPS": WAITING_STEPS,
        "RATE": RATE,
        "FOLLOWED": FOLLOWED,
        "LEAST_WEIGHT": _LEAST_WEIGHT / num_domains,
        "LEAST_GAIN": _LEAST_GAIN,
        "LEAST_SQUARE": _LEAST_SQUARE / num_domains,
        "MOST_SLOPE": _MOST_SLOPE,
    }


@kernel
def is_finite(x):
    """Neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@kernel
def at_least(x, least):
    """The larger of both; NaN for an x of NaN. Of a constant `tl.maximum` keeps 24 bits."""
    return tl.where(x < least, least, x)


@kernel
def align_once(
    gram,
    full,
    state,
    mean,
    mixture,
    tau,
    row,
    first_share,
    settings,
    values,
    skipped,
    found_inf,
    R: tl.constexpr,
    K: tl.constexpr,
    PADDED_R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GRAD_SCALE: tl.constexpr,
    SMOOTHING: tl.constexpr,
    WAITING_STEPS: tl.constexpr,
    RATE: tl.constexpr,
    FOLLOWED: tl.constexpr,
    LEAST_WEIGHT: tl.constexpr,
    LEAST_GAIN: tl.constexpr,
    LEAST_SQUARE: tl.constexpr,
    MOST_SLOPE: tl.constexpr,
):
    """Update `state`, `mean` and `mixture`; write `values`, `skipped` and `found_inf`."""
    coefficients = values + R * R
    norms = coefficients + 2 * R
    gains = norms + R
    influences = gains + K
    difficulties = influences + K
    alphas = difficulties + K

    scale = tl.load(settings + GRAD_SCALE)
    unit = 1 / (scale * scale)
    # [PADDED_R]; elements past R, or past K in vectors [K], are masked
    r = tl.arange(0, PADDED_R)
    is_row = r < R
    is_domain = r < K
    row_R = tl.load(row + r, mask=is_row, other=0)
    # Of the halves of a name, the last row of the matrix.
    products_R = tl.load(gram + R * R + row_R, mask=is_row, other=0.0) * unit
    w_R = tl.load(first_share + r, mask=is_row, other=0.5)
    products_R = products_R / (w_R * (1 - w_R))
    squares_R = tl.load(gram + row_R * (R + 1), mask=is_row, other=0.0) * unit
    mean_square = tl.sum(squares_R, axis=0) / R
    norms_R = tl.sqrt(tl.load(full + row_R * (R + 1), mask=is_row, other=0.0) * unit)
    tl.store(norms + r, norms_R, mask=is_row)
    tau_R = tl.load(tau + r, mask=is_row, other=0.0)
    is_wrong_R = (is_finite(norms_R) == 0) | (is_finite(products_R) == 0)
    is_skipped = tl.max(is_wrong_R.to(tl.int32), axis=0)

    for first in range(0, R, BLOCK_R):
        i = first + tl.arange(0, BLOCK_R)
        is_slab = i < R
        # [BLOCK_R, PADDED_R]
        is_entry = is_slab[:, None] & is_row[None, :]
        row_i = tl.load(row + i, mask=is_slab, other=0)
        square = (
            tl.load(gram + row_i[:, None] * R + row_R[None, :], mask=is_entry, other=0.0) * unit
        )
        is_wrong = (is_finite(square) == 0).to(tl.int32)
        is_skipped = tl.maximum(is_skipped, tl.max(tl.max(is_wrong, axis=1), axis=0))
        square = tl.where(i[:, None] == r[None, :], products_R[None, :], square)
        tl.store(values + i[:, None] * R + r[None, :], square, mask=is_entry)
        tl.store(gains + i, tl.sum(square * tau_R[None, :], axis=1), mask=i < K)
    tl.debug_barrier()

    is_taken = is_skipped == 0
    alpha_K = tl.load(state + r, mask=is_domain, other=0.0)
    last_steps = tl.load(state + 3 * K)
    num_steps = tl.where(is_taken, last_steps + 1, last_steps)
    count = at_least(num_steps, 1.0)
    # A step whose gradients are all zero says nothing.
    is_new = is_taken & (mean_square > 0)
    divisor = tl.where(is_new, mean_square, 1.0)
    for first in range(0, R, BLOCK_R):
        i = first + tl.arange(0, BLOCK_R)
        # [BLOCK_R, PADDED_R]
        is_entry = (i < R)[:, None] & is_row[None, :]
        entries = i[:, None] * R + r[None, :]
        mean_i = tl.load(mean + entries, mask=is_entry, other=0.0)
        square = tl.load(values + entries, mask=is_entry, other=0.0)
        mean_i = tl.where(is_new, mean_i + (square / divisor - mean_i) / count, mean_i)
        tl.store(mean + entries, mean_i, mask=is_entry)
        # W and G a of the mean, until the record's parts take their places.
        tl.store(influences + i, tl.sum(mean_i * tau_R[None, :], axis=1), mask=i < K)
        tl.store(difficulties + i, tl.sum(mean_i * alpha_K[None, :], axis=1), mask=i < K)
    tl.debug_barrier()

    w_K = tl.load(influences + r, mask=is_domain, other=0.0)
    own_K = tl.load(difficulties + r, mask=is_domain, other=0.0)
    diagonal_K = tl.load(mean + r * (R + 1), mask=is_domain, other=0.0)
    least_gain = LEAST_GAIN * tl.max(tl.abs(w_K), axis=0)
    least_square = LEAST_SQUARE * (tl.sum(tl.abs(diagonal_K), axis=0) / K)
    total = at_least(tl.sum(w_K * alpha_K, axis=0), least_gain)
    share_K = w_K / at_least(total, 1e-300)
    square_of_all = tl.sum(own_K * alpha_K, axis=0)
    is_known = (square_of_all > least_square) & (least_gain > 0)
    own_K = own_K / tl.where(is_known, square_of_all, 1.0)
    slope_K = share_K - tl.sum(share_K * alpha_K, axis=0) * own_K
    slope_K = at_least(tl.where(is_known, slope_K, 0.0), -MOST_SLOPE)
    slope_K = tl.where(slope_K > MOST_SLOPE, MOST_SLOPE, slope_K)

    # A weight of zero stays zero.
    logs_K = tl.log(tl.where(alpha_K == 0, 1.0, alpha_K)) + RATE * slope_K
    logs_K = tl.where(is_domain & (alpha_K != 0), logs_K, -float("inf"))
    raised_K = tl.exp(logs_K - tl.max(logs_K, axis=0))
    raised_K = at_least(raised_K / tl.sum(raised_K, axis=0), LEAST_WEIGHT)
    raised_K = tl.where(is_domain & (alpha_K != 0), raised_K, 0.0)
    smoothing = tl.load(settings + SMOOTHING)
    raised_K = (1 - smoothing) * (raised_K / tl.sum(raised_K, axis=0)) + smoothing * (1.0 / K)
    moves = is_taken & (num_steps > WAITING_STEPS)
    next_K = tl.where(moves, raised_K, alpha_K)

    # All threads have loaded what is overwritten now.
    tl.debug_barrier()
    gain_K = tl.load(gains + r, mask=is_domain, other=0.0)
    difficulty_K = tau_R * tl.load(values + r * (R + 1), mask=is_domain, other=0.0)
    tl.store(influences + r, gain_K - difficulty_K, mask=is_domain)
    tl.store(difficulties + r, difficulty_K, mask=is_domain)
    tl.store(alphas + r, next_K, mask=is_domain)
    tl.store(alphas + K, float("nan"))
    trained_K = (is_domain & (next_K > 0)).to(tl.float64)
    share = (1 - FOLLOWED) / tl.sum(trained_K, axis=0)
    followed_K = tl.where(is_domain, FOLLOWED * next_K + share * trained_K, 0.0)
    mixture_R = tl.load(mixture + r, mask=is_row, other=0.0)
    coefficient_R = tl.where(is_taken, mixture_R, float("nan"))
    tl.store(coefficients + 2 * row_R, coefficient_R, mask=is_row)
    tl.store(coefficients + 2 * row_R + 1, coefficient_R, mask=is_row)
    tl.store(mixture + r, tl.where(is_taken, followed_K, mixture_R), mask=is_row)

    last_slope_K = tl.load(state + 2 * K + r, mask=is_domain, other=0.0)
    last_mean_K = tl.load(state + K + r, mask=is_domain, other=0.0)
    num_skipped = tl.load(state + 3 * K + 1)
    tl.store(state + r, next_K, mask=is_domain)
    tl.store(state + K + r, tl.where(is_taken, next_K, last_mean_K), mask=is_domain)
    tl.store(state + 2 * K + r, tl.where(is_taken, slope_K, last_slope_K), mask=is_domain)
    tl.store(state + 3 * K, num_steps)
    tl.store(state + 3 * K + 1, tl.where(is_taken, num_skipped, num_skipped + 1))
    tl.store(skipped, is_skipped != 0)
    tl.store(found_inf, is_skipped.to(tl.float32))


# Not an operator of torch: nothing compiles or differentiates the end of a step.
OPERATORS["align"] = Operator("align", {"triton": align_triton, "torch": align_torch})
