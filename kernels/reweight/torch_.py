"""The K x K step in plain torch: some forty small operations, on any device.

Nothing reads a value on the host, so that a device never waits.
"""

import torch
from torch import Tensor

from doge_fast.kernels.reweight.packing import Settings, num_domains_of, state_views
from doge_fast.weights import scores as generalization
from doge_fast.weights import simplex


def reweight(
    gram_RR: Tensor,
    full_RR: Tensor,
    state_S: Tensor,
    tau_R: Tensor,
    present_R: Tensor,
    settings_C: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Clip, estimate, score, move, commit: lines 7 and 8 of Algorithm 1, and the average."""
    num_domains = num_domains_of(state_S)
    state = state_views(state_S)
    settings = Settings(*settings_C.unbind())
    square = settings.grad_scale**2
    full_RR = full_RR / square
    norms_R = full_RR.diagonal().sqrt()
    clip_R = generalization.clip_factors(norms_R, settings.domain_max_grad_norm)
    clipped_RR = clip_R[:, None] * (gram_RR / square) * clip_R

    raw_K = generalization.gain(clipped_RR, tau_R, num_domains)
    difficulty_K = generalization.difficulty(clipped_RR, tau_R, num_domains)
    present_K = present_R[:num_domains]
    score_K = generalization.scored(
        raw_K,
        clipped_RR.diagonal()[:num_domains].sqrt(),
        present_K,
        scale_by_mean_norm=settings.scale_by_mean_norm,
        low=settings.low,
        high=settings.high,
    )
    # Where a target row is absent, every W lacks a term.
    has_targets = (present_R | (tau_R == 0))[num_domains:].all()
    gain_K = torch.where(present_K & has_targets, score_K, state.gain)
    moved_K = simplex.mirror_step(state.alpha, gain_K, lr=settings.lr, mu=settings.mu)
    alpha_K = simplex.smooth(moved_K, settings.smoothing)

    coefficients_R = torch.zeros_like(tau_R)
    coefficients_R[:num_domains] = alpha_K * clip_R[:num_domains] * present_K
    combined_norm = generalization.combined_norm(full_RR, coefficients_R)
    # The weights too: a learning rate of NaN spoils them though every gradient is finite.
    finite = norms_R.isfinite().all() & alpha_K.isfinite().all()
    # NaN, so that a scaler or a clipping loop sees the overflow too.
    factor = torch.where(finite, 1.0, torch.nan).to(coefficients_R)
    factor = factor * generalization.clip_factors(combined_norm, settings.max_grad_norm)

    num_steps = state.num_steps + finite
    mean_K = simplex.running_mean(state.alpha_mean, alpha_K, num_steps.clamp(min=1))
    moved_S = torch.cat(
        [alpha_K, mean_K, gain_K, num_steps[None], state.num_skipped[None]],
    )
    state_S.copy_(torch.where(finite, moved_S, state_S))
    state.num_skipped.add_(~finite)
    values_V = torch.cat(
        [
            clipped_RR.flatten(),
            coefficients_R * factor,
            norms_R,
            gain_K,
            raw_K - difficulty_K,
            difficulty_K,
            state.alpha,
            combined_norm[None],
        ]
    )
    return values_V, ~finite, (~finite).to(torch.float32)
