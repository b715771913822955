"""The whole method, slow and plain: one equation per line, float64 when given float64.

Tests and benchmarks compare with this file. It imports only torch: code shared with what it checks
would share the mistakes.

Rows of `grads_RN` are domain gradients: the K training domains first, then the M held-out targets,
which are measured and never trained on (R = K + M).
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def gram(grads_RN: Tensor) -> Tensor:
    """All inner products of the rows, G_ij = < g_i , g_j >, [R, R], in the dtype of the rows."""
    return grads_RN @ grads_RN.T


def weighted_sum(grads_RN: Tensor, coefficients_R: Tensor) -> Tensor:
    """sum_r c_r g_r, [N]; a row with coefficient zero is not read."""
    used = coefficients_R != 0
    return coefficients_R[used].to(grads_RN.dtype) @ grads_RN[used]


def accumulate(grads: Sequence[Tensor], rows: Sequence[Tensor], *, add: bool) -> list[Tensor]:
    """New values of the rows: the gradient, or the row plus the gradient."""
    return [
        (row.double() + grad.double() if add else grad.double()).to(row.dtype)
        for grad, row in zip(grads, rows, strict=True)
    ]


def segment_sum(terms_TD: Tensor, borders: Sequence[int]) -> Tensor:
    """s_i = sum_t v_t over the tokens from b_i up to b_{i+1}, [S, D], in the dtype of the terms."""
    ends = itertools.pairwise(borders)
    return torch.stack([terms_TD[first:last].sum(0) for first, last in ends])


def clip_factors(norms_R: Tensor, max_norm: float | None) -> Tensor:
    """s_i = min(1, c / (||g_i|| + 1e-6)), [R]: clips each domain's gradient to norm c."""
    if max_norm is None:
        return torch.ones_like(norms_R)
    return (max_norm / (norms_R + 1e-6)).clamp(max=1)


def gain(gram_RR: Tensor, tau_R: Tensor, num_domains: int) -> Tensor:
    """W_j = < g_j , sum_r tau_r g_r > for the K training domains, [K].

    Source: DoGE, eq. (ge-decompose); tau = 1 on the training rows is Algorithm 1, tau = 1 on
    a measured row and 0 elsewhere is Algorithm 2.
    """
    return (gram_RR @ tau_R)[:num_domains]


def mirror_step(alpha_K: Tensor, gain_K: Tensor, lr: float, mu: float) -> Tensor:
    """alpha'_j = alpha_j exp(lr W_j / mu) / sum_i alpha_i exp(lr W_i / mu), eq. (update_dw)."""
    alpha_hat_K = alpha_K * torch.exp(lr * (gain_K - gain_K.max()) / mu)
    return alpha_hat_K / alpha_hat_K.sum()


def smooth(alpha_K: Tensor, smoothing: float) -> Tensor:
    """(1 - eps) alpha + eps / K."""
    return (1 - smoothing) * alpha_K + smoothing / len(alpha_K)


def step(
    grads_RN: Tensor,
    alpha_K: Tensor,
    *,
    tau_R: Tensor,
    lr: float,
    mu: float,
    selected_N: Tensor | None = None,
    scale_by_mean_norm: bool = False,
    bounds: tuple[float, float] | None = None,
    domain_max_grad_norm: float | None = None,
    smoothing: float = 0.0,
    max_grad_norm: float | None = None,
    present_R: Tensor | None = None,
    last_gain_K: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Algorithm 1 or 2: new domain weights, the gradient that moves the model, W.

    Args:
        grads_RN: [R, N]; training domains first.
        alpha_K: [K], on the simplex.
        tau_R: [R] >= 0; the objective is sum_r tau_r l_r.
        lr: eta, this step's learning rate.
        mu: > 0, Bregman coefficient.
        selected_N: [N] bool; columns that enter W. None: all. Norms always see all columns.
        scale_by_mean_norm: W over the mean norm of the training rows, as in the published code.
        bounds: to which the scores are clipped, as in the published code; None: not clipped.
        domain_max_grad_norm: norm to which each row is clipped first.
        smoothing: mixture with uniform.
        max_grad_norm: norm to which the combined gradient is clipped.
        present_R: [R] bool; absent domains have rows of zeros and keep `last_gain_K`.
        last_gain_K: [K]; the last scores.

    Returns:
        alpha'_K [K], gradient_N [N], gain_K [K].
    """
    num_domains = len(alpha_K)
    present_R = torch.ones_like(tau_R, dtype=torch.bool) if present_R is None else present_R
    norms_R = grads_RN.square().sum(1).sqrt()
    rows_RN = grads_RN * clip_factors(norms_R, domain_max_grad_norm)[:, None]
    rows_RN = torch.where(present_R[:, None], rows_RN, torch.zeros_like(rows_RN))
    columns_RN = rows_RN if selected_N is None else rows_RN[:, selected_N]
    gain_K = gain(gram(columns_RN), tau_R, num_domains)
    if scale_by_mean_norm:
        present_K = present_R[:num_domains]
        norms_K = columns_RN[:num_domains][present_K].square().sum(1).sqrt()
        gain_K = gain_K / (norms_K.mean() + 1e-6)
    if bounds is not None:
        gain_K = gain_K.clamp(*bounds)
    if last_gain_K is not None:
        targets_seen = bool(present_R[num_domains:][tau_R[num_domains:] > 0].all())
        gain_K = torch.where(present_R[:num_domains] & targets_seen, gain_K, last_gain_K)
    alpha_K = smooth(mirror_step(alpha_K, gain_K, lr, mu), smoothing)
    gradient_N = alpha_K @ rows_RN[:num_domains]
    norm = gradient_N.square().sum().sqrt()
    if max_grad_norm is not None:
        gradient_N = gradient_N * (max_grad_norm / (norm + 1e-6)).clamp(max=1)
    return alpha_K, gradient_N, gain_K


def aligned_step(
    halves_2RN: Tensor,
    alpha_K: Tensor,
    mean_RR: Tensor,
    num_steps: int,
    *,
    tau_R: Tensor,
    first_R: Tensor,
    metric_N: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of the aligned rule: new domain weights, the model's gradient, the mean matrix.

    Args:
        halves_2RN: [2, R, N]; the halves of each gradient, which add up to it.
        alpha_K: [K], on the simplex.
        mean_RR: [R, R]; the mean matrix of the steps before.
        num_steps: how many these were.
        tau_R: [R] >= 0; the objective is sum_r tau_r l_r.
        first_R: [R] in (0, 1); the share of the first half in its gradient.
        metric_N: [N]; D = 1 / (sqrt(v) + eps), and 0 where v is 0.

    Returns:
        alpha'_K [K], gradient_N [N], mean_RR [R, R].
    """
    num_domains = len(alpha_K)
    rows_RN = halves_2RN.sum(0)
    # The model follows the weights of the step before half-way.
    gradient_N = (alpha_K + 1 / num_domains) / 2 @ rows_RN[:num_domains]
    gram_RR = (rows_RN * metric_N) @ rows_RN.T
    scale = 1 / gram_RR.diagonal().mean()
    # <a, b> of independent halves is w (1 - w) |g|^2 without their noise.
    products_R = (halves_2RN[0] * metric_N * halves_2RN[1]).sum(1) / (first_R * (1 - first_R))
    gram_RR = gram_RR - torch.diag(gram_RR.diagonal()) + torch.diag(products_R)
    mean_RR = mean_RR + (scale * gram_RR - mean_RR) / (num_steps + 1)
    if num_steps >= 20:
        gain_K = gain(mean_RR, tau_R, num_domains)
        share_K = gain_K / torch.maximum(gain_K @ alpha_K, 0.1 * gain_K.abs().max())
        own_K = mean_RR[:num_domains, :num_domains] @ alpha_K
        slope_K = share_K - (share_K @ alpha_K) * own_K / (own_K @ alpha_K)
        # Where a'Ga is far below that of domains at right angles it is noise, and nothing moves.
        at_right_angles = mean_RR.diagonal()[:num_domains].abs().mean() / num_domains
        slope_K = slope_K.clamp(-10, 10) * (own_K @ alpha_K > 0.01 * at_right_angles)
        alpha_K = mirror_step(alpha_K, slope_K, 0.1, 1.0).clamp(min=0.01 / num_domains)
        alpha_K = alpha_K / alpha_K.sum()
    return alpha_K, gradient_N, mean_RR
