"""The K x K step: from a Gram matrix to new domain weights and the coefficients of the rows.

Everything between the two passes over the gradients, as one function of small tensors. Nothing
here reads a value on the host, so that a device never waits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from doge_fast import generalization, simplex
from doge_fast.generalization import Score


@dataclass(frozen=True)
class Rule:
    """How domain weights move: the parts of Algorithms 1 and 2 that do not change over a run.

    Args:
        mu: > 0, Bregman coefficient.
        score: the paper's W or the published variant.
        domain_max_grad_norm: > 0, norm to which every row is cut first; None: not cut.
        max_grad_norm: > 0, norm to which the combined gradient is cut; None: not cut.
        smoothing: in [0, 1), mixture with uniform.

    Raises:
        ValueError: an argument outside its range.
    """

    mu: float
    score: Score
    domain_max_grad_norm: float | None
    max_grad_norm: float | None
    smoothing: float

    def __post_init__(self) -> None:
        """Check the ranges."""
        simplex.check_mu(self.mu)
        simplex.check_smoothing(self.smoothing)
        for name in ("max_grad_norm", "domain_max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, or None for no clipping; got {value}.")


class Reweighted(NamedTuple):
    """What a K x K step yields; float64, on the device of the Gram matrix."""

    alpha: Tensor
    """[K] new domain weights."""
    gain: Tensor
    """[K] the scores that moved them."""
    influence: Tensor
    """[K] W less the difficulty, eq. (ge-decompose)."""
    difficulty: Tensor
    """[K] tau_j ||g_j||^2, eq. (ge-decompose)."""
    gram: Tensor
    """[R, R] of the clipped rows."""
    coefficients: Tensor
    """[R] of the rows in the combined gradient; per-domain clipping is in them."""


def reweight(
    gram_RR: Tensor,
    norms_R: Tensor,
    alpha_K: Tensor,
    tau_R: Tensor,
    present_R: Tensor,
    *,
    lr: float | Tensor,
    rule: Rule,
    carried_K: Tensor | None = None,
) -> Reweighted:
    """Clip, estimate, score and move: lines 7 and 8 of Algorithm 1.

    Args:
        gram_RR: [R, R] inner products over the columns that enter W.
        norms_R: [R] norms of the rows over all columns; read only when rows are cut.
        alpha_K: [K] domain weights so far.
        tau_R: [R] the objective.
        present_R: [R] bool; the others have zero rows.
        lr: eta of this step.
        rule: what does not change over a run.
        carried_K: [K] scores that stand in for those of absent domains; None: nobody is absent.
    """
    num_domains = len(alpha_K)
    clip_R = generalization.clip_factors(norms_R, rule.domain_max_grad_norm)
    clipped_RR = clip_R[:, None] * gram_RR * clip_R
    raw_K = generalization.gain(clipped_RR, tau_R, num_domains)
    difficulty_K = generalization.difficulty(clipped_RR, tau_R, num_domains)
    present_K = present_R[:num_domains]
    norms_K = clipped_RR.diagonal()[:num_domains].sqrt()
    gain_K = generalization.scored(raw_K, norms_K, present_K, rule.score)
    if carried_K is not None:
        # Without a measured row that the objective needs, nobody's W is whole.
        has_targets = (present_R | (tau_R == 0))[num_domains:].all()
        gain_K = torch.where(present_K & has_targets, gain_K, carried_K)
    new_alpha_K = simplex.mirror_step(alpha_K, gain_K, lr=lr, mu=rule.mu)
    new_alpha_K = simplex.smooth(new_alpha_K, rule.smoothing)
    coefficients_R = torch.zeros_like(tau_R)
    coefficients_R[:num_domains] = new_alpha_K * clip_R[:num_domains] * present_K
    return Reweighted(
        alpha=new_alpha_K,
        gain=gain_K,
        influence=raw_K - difficulty_K,
        difficulty=difficulty_K,
        gram=clipped_RR,
        coefficients=coefficients_R,
    )
