"""From a Gram matrix to W, to scores, and to the domain weights that they move: an equation each.

Nothing here reads memory of the size of the model. R = K + M stands for the names of the
objective: the K training domains, then the M held-out targets. All tensors are float64; results
are on the device of the inputs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

# Added to norms before dividing, as in torch.nn.utils.clip_grad_norm_.
NORM_FLOOR = 1e-6
# To which the published code clips its score.
PUBLISHED_BOUNDS = (0.0, 5.0)


@dataclass(frozen=True)
class Score(ABC):
    """A score: one method from a Gram matrix to a number for each domain.

    `PAPER` and `PUBLISHED` run in one launch on a GPU. A subclass of yours runs in plain torch on
    the device. If it has parameters make it a frozen dataclass, so that ranks can compare them.
    """

    @property
    def name(self) -> str:
        """The score's name in weights.json."""
        return repr(self)

    @abstractmethod
    def gain(self, gram_RR: Tensor, tau_R: Tensor, present_K: Tensor) -> Tensor:
        """[K] the scores, larger for domains that should get more weight.

        Nothing may be read on the host.

        Args:
            gram_RR: [R, R] inner products of the gradients, after per-domain clipping; zeros for
                absent rows. If a step has a few of many domains, products of two training domains
                are scaled up for the missing pairs (p in `reweight`).
            tau_R: [R] >= 0; the objective is sum_r tau_r l_r.
            present_K: [K] bool; training domains with a gradient. The others keep their last
                score, whatever is returned for them.
        """


@dataclass(frozen=True)
class Paper(Score):
    """W itself.

    Source: DoGE, eq. (ge-decompose).
    """

    name = "paper"

    def gain(self, gram_RR: Tensor, tau_R: Tensor, present_K: Tensor) -> Tensor:
        """[K] W."""
        return gain(gram_RR, tau_R, len(present_K))


@dataclass(frozen=True)
class Published(Score):
    """W over the mean norm of the training domains' gradients, within [0, 5].

    Follows the published code, not the paper. Scores are linear in the scale of the gradients, not
    quadratic, and negative scores become zero.
    """

    name = "published"

    def gain(self, gram_RR: Tensor, tau_R: Tensor, present_K: Tensor) -> Tensor:
        """[K] the scaled W, clipped."""
        norms_K = gram_RR.diagonal()[: len(present_K)].sqrt()
        mean_norm = (norms_K * present_K).sum() / present_K.sum().clamp(min=1)
        scaled_K = gain(gram_RR, tau_R, len(present_K)) / (mean_norm + NORM_FLOOR)
        return scaled_K.clamp(*PUBLISHED_BOUNDS)


PAPER, PUBLISHED = Paper(), Published()
NAMED_SCORES: dict[str, Score] = {score.name: score for score in (PAPER, PUBLISHED)}


def score_of(score: str | Score) -> Score:
    """The score named "paper" or "published", or a `Score` itself."""
    return score if isinstance(score, Score) else NAMED_SCORES[score]


def gain(gram_RR: Tensor, tau_R: Tensor, num_domains: int) -> Tensor:
    """W_j = < g_j , sum_r tau_r g_r >, [K]: how much a step on domain j lowers the objective.

    `gram_RR` has the training domains first; `tau_R` is [R] >= 0. All ones on the training rows is
    Algorithm 1 (universal); one on a measured row is Algorithm 2 (out-of-domain).

    Source: DoGE, eq. (ge-decompose) and the text around W_ood.
    """
    return gram_RR[:num_domains] @ tau_R


def difficulty(gram_RR: Tensor, tau_R: Tensor, num_domains: int) -> Tensor:
    """tau_j ||g_j||^2, [K]: the term of W_j with domain j's own gradient, eq. (ge-decompose)."""
    return (tau_R * gram_RR.diagonal())[:num_domains]


def clip_factors(norms_R: Tensor, max_norm: float | Tensor) -> Tensor:
    """s_r = min(1, c / (||g_r|| + 1e-6)), [R]; ones if `max_norm` is infinite.

    The Gram matrix of clipped rows is diag(s) G diag(s), so no gradient is read or written.
    """
    return (max_norm / (norms_R + NORM_FLOOR)).clamp(max=1)


def combined_norm(gram_RR: Tensor, coefficients_R: Tensor) -> Tensor:
    """|| sum_r c_r g_r || = sqrt(c^T G c), scalar, without forming the sum."""
    return (coefficients_R @ gram_RR @ coefficients_R).clamp(min=0).sqrt()


def cosine(gram_RR: Tensor) -> Tensor:
    """G_ij / (||g_i|| ||g_j||), [R, R]: the affinity of domains (fig. dw_ood); 0 for zero rows."""
    norms_R = gram_RR.diagonal().clamp(min=0).sqrt()
    inverse_R = torch.where(norms_R > 0, 1 / norms_R, 0.0)
    return gram_RR * inverse_R[:, None] * inverse_R


def mirror_step(
    alpha_K: Tensor, gain_K: Tensor, *, lr: float | Tensor, mu: float | Tensor
) -> Tensor:
    """Move the domain weights one step of exponentiated gradient.

    alpha'_j  =  alpha_j exp(lr * W_j / mu) / sum_i alpha_i exp(lr * W_i / mu)

    Computed as a softmax of logarithms, so a large gain cannot overflow and a weight of zero
    stays zero. W is `gain_K`.

    Args:
        alpha_K: [K] floating, on the simplex.
        gain_K: [K], same dtype; loss decrease per unit of `lr`.
        lr: >= 0; this step's learning rate (a warm-up may start at 0).
        mu: > 0; Bregman coefficient. The limit of large `mu` is "do not move".
            Neither is checked: that would wait for a tensor's device. `UpdateRule` and
            `DomainWeights` check the numbers of a run.

    Returns:
        [K], same dtype; sums to 1 within K ulp.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), eq. (update_dw), Algorithm 1.
    """
    return torch.softmax(alpha_K.log() + (lr / mu) * gain_K, dim=-1)


def smooth(alpha_K: Tensor, smoothing: float | Tensor) -> Tensor:
    """(1 - eps) alpha + eps / K, [K]: mixture with uniform, which keeps every weight above eps / K.

    `smoothing`, eps, is in [0, 1).
    """
    return (1 - smoothing) * alpha_K + smoothing / len(alpha_K)


def running_mean(mean_K: Tensor, alpha_K: Tensor, count: float | Tensor) -> Tensor:
    """Mean of `count` points: `alpha_K` and `count` - 1 points of mean `mean_K`.

    Source: DoGE, Algorithm 1, last line: alpha_bar = (1/T) sum_t alpha^(t).
    """
    return mean_K + (alpha_K - mean_K) / count
