"""From a Gram matrix to the generalization estimation: everything that is K x K.

Once all inner products of the gradients are known, nothing here touches memory of the size of
the model again. Rows are the K training domains, then M domains that are measured and never
trained on; R = K + M. All tensors are float64 and stay on the device they came on.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# torch.nn.utils.clip_grad_norm_ adds the same to the norm it divides by.
NORM_FLOOR = 1e-6

# Steps over which a running norm is a mean.
NORM_MEMORY = 20
# Rows are cut to this multiple of their running norm.
SPIKE = 2.0


@dataclass(frozen=True)
class Score:
    """How W becomes the score that moves the domain weights.

    The default is the paper's: W itself. `PUBLISHED` is the variant of the published code;
    `UNBIASED` is ours, for all training domains at once.

    Args:
        scale_by_mean_norm: divide W by the mean norm of the (clipped) gradients of the training
            domains that are present. Follows the published code, not the paper: scores become
            linear, not quadratic, in the scale of the gradients.
        bounds: cut the score to [low, high]. Follows the published code, whose bounds are
            (0, 5): anti-aligned domains count as orthogonal ones. None: not cut.
        is_unbiased: in the place of ||g_j||^2 in W_j is 4 < a_j , b_j >, with the gradients of the
            two halves of domain j's batch, which do not share their noise. Where a training domain
            is a target, all of them have two rows, and come in an even number of micro-batches or
            examples.
        has_common_scale: cut each gradient to twice its running norm, in the place of
            `domain_max_grad_norm`, and divide all by the mean running norm of the training domains.

    Raises:
        ValueError: bounds that are not low < high; or unbiased over the mean norm.
    """

    scale_by_mean_norm: bool = False
    bounds: tuple[float, float] | None = None
    is_unbiased: bool = False
    has_common_scale: bool = False

    def __post_init__(self) -> None:
        """Refuse bounds that leave nothing between them, and a scale that is all noise."""
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"score bounds must be low < high; got {self.bounds}.")
        if self.is_unbiased and self.scale_by_mean_norm:
            raise ValueError(
                "a score cannot both be is_unbiased and scale_by_mean_norm, since norms hold the "
                "noise of a batch. Pass has_common_scale=True for a scale that changes slowly."
            )

    @property
    def name(self) -> str:
        """ "paper", "published", "unbiased", or the parts of another."""
        return next((name for name, score in NAMED_SCORES.items() if score == self), repr(self))


PAPER = Score()
PUBLISHED = Score(scale_by_mean_norm=True, bounds=(0.0, 5.0))
UNBIASED = Score(is_unbiased=True, has_common_scale=True)
NAMED_SCORES = {"paper": PAPER, "published": PUBLISHED, "unbiased": UNBIASED}


def score_of(score: str | Score) -> Score:
    """The score that "paper", "published" or "unbiased" names, or the one given.

    Raises:
        ValueError: it is none of them.
    """
    if isinstance(score, Score):
        return score
    if score not in NAMED_SCORES:
        raise ValueError(
            f"score must be 'paper', 'published', 'unbiased' or a Score; got {score!r}."
        )
    return NAMED_SCORES[score]


def gain(gram_RR: Tensor, tau_R: Tensor, num_domains: int) -> Tensor:
    """W_j = < g_j , sum_r tau_r g_r >, [K]: how much a step on domain j lowers the objective.

    Args:
        gram_RR: [R, R] inner products of the gradients, training domains first.
        tau_R: [R] >= 0; the objective is sum_r tau_r l_r. All ones on the training rows is
            Algorithm 1 (universal); one on a measured row is Algorithm 2 (out-of-domain).
        num_domains: K.

    Source: DoGE, eq. (ge-decompose) and the text around W_ood.
    """
    return gram_RR[:num_domains] @ tau_R


def difficulty(gram_RR: Tensor, tau_R: Tensor, num_domains: int) -> Tensor:
    """tau_j ||g_j||^2, [K]: the part of W_j that domain j owes to itself, eq. (ge-decompose)."""
    return (tau_R * gram_RR.diagonal())[:num_domains]


def improvement(gram_RR: Tensor, alpha_K: Tensor) -> Tensor:
    """< g_r , sum_j alpha_j g_j >, [R]: how much a step with the combined gradient helps row r."""
    return gram_RR[:, : len(alpha_K)] @ alpha_K


def target_step(
    tau_R: Tensor,
    improvement_R: Tensor,
    present_R: Tensor,
    *,
    lr: float | Tensor,
    mu: float,
) -> Tensor:
    """Move the weights of the targets to those that the step helps least; their sum stays.

    tau'_r  ~  tau_r exp(-lr d_r / mu),    d_r = < g_r , sum_j alpha_j g_j >

    A target that this step has no gradient of counts as improving as the mean of the others.

    Args:
        tau_R: [R] >= 0; a weight of zero stays zero.
        improvement_R: [R] d.
        present_R: [R] bool; rows with a gradient.
        lr: >= 0; eta of this step.
        mu: > 0; Bregman coefficient of the targets.

    Source: GRAPE (Fan, Glarou, Jaggi, 2025), without its division by the targets' losses; the
    mirror step of group DRO.
    """
    counted_R = tau_R * present_R
    mean = (counted_R @ improvement_R) / counted_R.sum().clamp(min=torch.finfo(tau_R.dtype).tiny)
    helped_R = torch.where(present_R, improvement_R, mean)
    return tau_R.sum() * torch.softmax(tau_R.log() - lr / mu * helped_R, dim=0)


def clip_factors(norms_R: Tensor, max_norm: float | Tensor | None) -> Tensor:
    """s_r = min(1, c / (||g_r|| + 1e-6)), [R]; ones when `max_norm` is None or infinite.

    Cutting every row to norm c turns the Gram matrix into diag(s) G diag(s), so no gradient has
    to be touched.
    """
    if max_norm is None:
        return torch.ones_like(norms_R)
    return (max_norm / (norms_R + NORM_FLOOR)).clamp(max=1)


class CommonScale(NamedTuple):
    """What the rows of a step are cut by, and the scale that they are divided by."""

    norms_R: Tensor
    """[R] ||g_r||."""
    factors_R: Tensor
    """[R] what each row is cut by, at most 1."""
    scale: Tensor
    """Scalar: the mean running norm of the training domains; 1 where none has one."""
    running_R: Tensor
    """[R] the running norms after the step; 0: no gradient yet."""

    def cut(self, gram_RR: Tensor) -> Tensor:
        """The inner products of the rows that are cut: diag(s) G diag(s)."""
        return self.factors_R[:, None] * gram_RR * self.factors_R


def common_scale(
    norms_R: Tensor, running_R: Tensor, present_R: Tensor, num_domains: int, num_steps: Tensor
) -> CommonScale:
    """One scale for all rows of a step: it keeps the ratios of their norms.

    s_r  = min(1, 2 m_r / (||g_r|| + 1e-6))
    m'_r = m_r + (s_r ||g_r|| - m_r) / min(t, 20)
    c    = mean of m' over the training domains that have had a gradient

    The norm of a row's first gradient is its first running norm. An absent row keeps its own.

    Args:
        norms_R: [R] ||g_r||.
        running_R: [R] m, before the step.
        present_R: [R] bool; rows with a gradient.
        num_domains: K.
        num_steps: scalar; t - 1, the steps before this one.
    """
    known_R = torch.where(running_R > 0, running_R, norms_R)
    factors_R = (SPIKE * known_R / (norms_R + NORM_FLOOR)).clamp(max=1)
    share = 1 / (num_steps + 1).clamp(max=NORM_MEMORY)
    moved_R = known_R + share * (factors_R * norms_R - known_R)
    running_R = torch.where(present_R, moved_R, running_R)
    of_domains_K = running_R[:num_domains]
    mean = of_domains_K.sum() / (of_domains_K > 0).sum().clamp(min=1)
    return CommonScale(norms_R, factors_R, torch.where(mean > 0, mean, 1.0), running_R)


def scored(
    gain_K: Tensor,
    norms_K: Tensor,
    present_K: Tensor,
    *,
    scale_by_mean_norm: Tensor,
    low: Tensor,
    high: Tensor,
) -> Tensor:
    """The gains as a `Score` wants them, [K].

    The score's parts are scalars on the device of the gains, and nothing reads them on the host.

    Args:
        gain_K: [K] W.
        norms_K: [K] norms of the training rows over the same columns as W.
        present_K: [K] bool; rows that count in the mean norm.
        scale_by_mean_norm: 1: divide W by the mean norm; 0: do not.
        low: what the score is cut to at least; -inf: not cut.
        high: at most; inf: not cut.
    """
    mean_norm = (norms_K * present_K).sum() / present_K.sum().clamp(min=1)
    divisor = torch.where(scale_by_mean_norm != 0, mean_norm + NORM_FLOOR, 1.0)
    return (gain_K / divisor).clamp(low, high)


def combined_norm(gram_RR: Tensor, coefficients_R: Tensor) -> Tensor:
    """|| sum_r c_r g_r || = sqrt(c^T G c), scalar: known before the sum is formed."""
    return (coefficients_R @ gram_RR @ coefficients_R).clamp(min=0).sqrt()


def cosine(gram_RR: Tensor) -> Tensor:
    """G_ij / (||g_i|| ||g_j||), [R, R]: the affinity of domains (fig. dw_ood); 0 in zero rows."""
    norms_R = gram_RR.diagonal().clamp(min=0).sqrt()
    inverse_R = torch.where(norms_R > 0, 1 / norms_R, 0.0)
    return gram_RR * inverse_R[:, None] * inverse_R
