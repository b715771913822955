"""From a Gram matrix to the generalization estimation: everything that is K x K.

Once all inner products of the gradients are known, nothing here touches memory of the size of
the model again. Rows are the K training domains, then M domains that are measured and never
trained on; R = K + M. All tensors are float64 and stay on the device they came on.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# torch.nn.utils.clip_grad_norm_ adds the same to the norm it divides by.
NORM_FLOOR = 1e-6


@dataclass(frozen=True)
class Score:
    """How W becomes the score that moves the domain weights.

    The default is the paper's: W itself. `PUBLISHED` is the variant of the published code.

    Args:
        scale_by_mean_norm: divide W by the mean norm of the (clipped) gradients of the training
            domains that are present. Follows the published code, not the paper: scores become
            linear, not quadratic, in the scale of the gradients.
        bounds: cut the score to [low, high]. Follows the published code, whose bounds are
            (0, 5): anti-aligned domains count as orthogonal ones. None: not cut.

    Raises:
        ValueError: bounds that are not low < high.
    """

    scale_by_mean_norm: bool = False
    bounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Refuse bounds that leave nothing between them."""
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"score bounds must be low < high; got {self.bounds}.")

    @property
    def name(self) -> str:
        """ "paper", "published", or the parts of another."""
        return next((name for name, score in NAMED_SCORES.items() if score == self), repr(self))


PAPER = Score()
PUBLISHED = Score(scale_by_mean_norm=True, bounds=(0.0, 5.0))
NAMED_SCORES = {"paper": PAPER, "published": PUBLISHED}


def score_of(score: str | Score) -> Score:
    """The score that "paper" or "published" names, or the one given.

    Raises:
        ValueError: it is none of them.
    """
    if isinstance(score, Score):
        return score
    if score not in NAMED_SCORES:
        raise ValueError(f"score must be 'paper', 'published' or a Score; got {score!r}.")
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


def clip_factors(norms_R: Tensor, max_norm: float | Tensor | None) -> Tensor:
    """s_r = min(1, c / (||g_r|| + 1e-6)), [R]; ones when `max_norm` is None or infinite.

    Cutting every row to norm c turns the Gram matrix into diag(s) G diag(s), so no gradient has
    to be touched.
    """
    if max_norm is None:
        return torch.ones_like(norms_R)
    return (max_norm / (norms_R + NORM_FLOOR)).clamp(max=1)


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
