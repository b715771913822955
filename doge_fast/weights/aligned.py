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
decides alone. The model's steps follow the weights: what a model at uniform weights has learned
already looks useless to it. docs/evidence.md has what was measured.

Axis letters: K training domains, R names of the objective, B rows of the step, C = 2 B halves.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from doge_fast.weights import scores
from doge_fast.weights.defaults import DOMAIN_MAX_GRAD_NORM
from doge_fast.weights.rule import LastStep, Matrices, Names, UpdateRule, state_views

WAITING_STEPS = 20
"""Steps before the first move: of fewer, the mean matrix is mostly noise."""
RATE = 0.1
"""Of the mirror step on log(W.a / sqrt(a'Ga)) that each training step takes."""
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
    name: ClassVar[str] = "aligned"

    def memory(self, num_names: int) -> int:
        """The mean matrix, [R, R]."""
        return num_names * num_names

    def settings(self, lr: float | Tensor, grad_scale: float | Tensor) -> AlignedSettings:
        """Those of `align`; the learning rate moves no weights here."""
        return AlignedSettings(grad_scale, self.smoothing)

    def step(
        self, matrices: Matrices, state_S: Tensor, memory_S: Tensor, names: Names, settings: Tensor
    ) -> LastStep:
        """As `align`."""
        num_names = len(names.tau_R)
        return align(
            matrices,
            state_S,
            memory_S.view(num_names, num_names),
            names,
            AlignedSettings(*settings.unbind()),
        )


def refuse_settings(
    mu: float | None,
    domain_max_grad_norm: float | None,
    domains_per_step: int | None,
    absent: str,
) -> None:
    """ValueError if a setting was passed that has no meaning for this rule."""
    passed = {
        "mu": mu is not None,
        "domain_max_grad_norm": domain_max_grad_norm != DOMAIN_MAX_GRAD_NORM,
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
    names: Names,
    settings: AlignedSettings,
) -> LastStep:
    """Move the domain weights one step of the aligned rule; every name has a gradient.

    c        =  1 / mean_r <g_r, g_r>
    G_ij     =  c <g_i, g_j>,    G_jj  =  c <a_j, b_j> / (w_j (1 - w_j)),   g_j = a_j + b_j
    mean     =  mean over steps of G;  W = mean tau
    slope_j  =  W_j / W.a  -  (mean a)_j / a' mean a
    alpha'_j ∝  max(alpha_j exp(RATE slope_j) / sum_i alpha_i exp(RATE slope_i), 0.01 / K)

    w_j is the share of the first half. A weight of zero stays zero.
    """
    num_domains = (state_S.numel() - 2) // 3
    state = state_views(state_S)
    scale_square = settings.grad_scale**2
    halves_RR = _halves(matrices.gram_CC, names.row_R) / scale_square
    whole_RR = halves_RR.sum((0, 1))
    full_RR = whole_RR
    if matrices.full_CC is not matrices.gram_CC:
        full_RR = _halves(matrices.full_CC, names.row_R).sum((0, 1)) / scale_square
    # Of halves that cancel, a square may come out below zero.
    norms_R = full_RR.diagonal().clamp(min=0).sqrt()
    products_R = halves_RR[0, 1].diagonal() / (names.first_R * (1 - names.first_R))
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

    coefficients_R = torch.zeros_like(names.tau_R)
    coefficients_R[:num_domains] = alpha_K
    coefficients_B = torch.empty_like(coefficients_R)
    coefficients_B[names.row_R.long()] = torch.where(finite, coefficients_R, torch.nan)

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
        combined_norm=scores.combined_norm(full_RR, coefficients_R),
        skipped=~finite,
        found_inf=(~finite).to(torch.float32),
    )


def _halves(matrix_CC: Tensor, row_R: Tensor) -> Tensor:
    """[2, 2, R, R]: products of halves of the names."""
    num_rows, index_R = len(matrix_CC) // 2, row_R.long()
    halves_22BB = matrix_CC.view(num_rows, 2, num_rows, 2).permute(1, 3, 0, 2)
    return halves_22BB[:, :, index_R][:, :, :, index_R]


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
