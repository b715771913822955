"""The mathematics of DoReMi: group DRO on the loss in excess of a reference model's.

Follows DoReMi (Xie et al., NeurIPS 2023, Algorithm 1). Where the paper and its authors' code
differ, it follows the code:

- Batches are drawn at the reference's weights, and the domain weights start there; in the loss they
  are divided by the sampling weights. The paper draws uniformly and starts at uniform.
- A domain without tokens in a batch keeps its last excess. The paper has every domain in every
  batch.
- Smoothing is 1e-4; the paper's is 1e-3.

One thing follows the paper: the mean is over the weights of steps 1 to T, without the initial ones.
One follows neither paper nor code: a domain that no batch has had yet has the mean excess of the
others. In DoReMi's code it is log V, which in each such step multiplies the domain's weight by up
to V; in DoGE's it is zero.

The variant "doge" is the baseline in DoGE's published code, with two differences. That code runs
the reference in training mode, with dropout. And it clips the gradient to `max_grad_norm` again
after adding each domain, so that its step depends on the order of the domains.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from doge_fast.weights import scores

Variant = Literal["doremi", "doge"]

STEP_SIZE: dict[Variant, float] = {"doremi": 1.0, "doge": 0.1}
"""eta of the weights' step: DoReMi's of paper and code; DoGE's code has a fixed one, independent of
the learning rate and mu."""
SMOOTHING: dict[Variant, float] = {"doremi": 1e-4, "doge": 0.0}
"""Mixture with uniform. DoReMi: its code; its paper has 1e-3. DoGE's code: none."""


UNSEEN = -1.0
"""The excess of a domain that no batch has had yet."""


class ExcessWeights(NamedTuple):
    """The state of group DRO after a step; all float64."""

    alpha: Tensor
    """[K], on the simplex: the weights of the step's loss."""
    alpha_mean: Tensor
    """[K]: their mean over the steps."""
    excess: Tensor
    """[K], >= 0 or UNSEEN; lambda of the step, in nats per token."""
    num_steps: Tensor
    """Scalar."""

    def moved(self, excess_K: Tensor, *, step_size: float, smoothing: float) -> "ExcessWeights":
        """The weights after one step of exponentiated gradient ascent.

        alpha'_k     =  alpha_k exp(eta lambda_k) / sum_i alpha_i exp(eta lambda_i)
        alpha_k      =  (1 - c) alpha'_k + c / K

        lambda is `excess_K`, [K] float64 in nats per token, and the mean of the others where that
        is UNSEEN; eta is `step_size`, c is `smoothing`.

        Source: DoReMi (Xie et al., NeurIPS 2023), Algorithm 1.
        """
        is_seen_K = excess_K != UNSEEN
        mean = excess_K.where(is_seen_K, 0).sum() / is_seen_K.sum()
        lambda_K = excess_K.where(is_seen_K, mean)
        alpha_K = scores.mirror_step(self.alpha, lambda_K, lr=step_size, mu=1.0)
        alpha_K = scores.smooth(alpha_K, smoothing)
        count = self.num_steps + 1
        mean_K = scores.running_mean(self.alpha_mean, alpha_K, count)
        return ExcessWeights(alpha_K, mean_K, excess_K, count)


def domain_means(values_ET: Tensor, domain_ids_E: Tensor, num_domains: int) -> Tensor:
    """[K] float64: mean over the tokens of each domain; NaN for a domain without any.

    `domain_ids_E` is int64 in [0, K): the domain of each example of `values_ET`.
    """
    ids_K1 = torch.arange(num_domains, device=domain_ids_E.device).unsqueeze(1)
    # Not index_add, which adds in any order on a GPU.
    is_of_KE = (domain_ids_E == ids_K1).double()
    return is_of_KE @ values_ET.double().mean(1) / is_of_KE.sum(1)


def excess_losses(
    losses_ET: Tensor,
    reference_ET: Tensor,
    domain_ids_E: Tensor,
    last_K: Tensor,
    *,
    variant: Variant = "doremi",
) -> Tensor:
    """The proxy's loss on each domain in excess of the reference's, [K] float64, >= 0.

    doremi:  lambda_k  =  mean over the tokens t of k of  max(0, l_t - l_ref,t)
    doge:    lambda_k  =  max(0, mean_t l_t - mean_t l_ref,t)

    The losses are [E, T] in nats, `domain_ids_E` int64 in [0, K), and `last_K` the values of the
    step before, which a domain without tokens in the batch keeps.

    Source: DoReMi (Xie et al., NeurIPS 2023), Algorithm 1, lambda_t[i].
    """
    difference_ET = losses_ET - reference_ET
    if variant == "doremi":
        difference_ET = difference_ET.clamp(min=0)
    excess_K = domain_means(difference_ET, domain_ids_E, len(last_K)).clamp(min=0)
    ids_K = torch.arange(len(last_K), device=domain_ids_E.device)
    return torch.where(torch.isin(ids_K, domain_ids_E), excess_K, last_K)


def example_shares(
    alpha_K: Tensor, sampling_K: Tensor, domain_ids_E: Tensor, *, variant: Variant = "doremi"
) -> Tensor:
    """The share of each example's mean loss in the loss of the proxy, [E].

    doremi:  r_b  =  w_k(b) / sum_b' w_k(b'),   w_k = alpha_k / s_k
    doge:    r_b  =  alpha_k(b) / B_k(b)

    s are the weights > 0 at which the batch was drawn, `sampling_K`; k(b) is the domain of example
    b, B_k the number of examples of domain k. The first is DoReMi's normalisation: the shares sum
    to one, and a domain with more than s_k E examples counts more. The second makes the loss sum_k
    alpha_k l_k over the domains in the batch, where l_k is the domain's mean loss.

    Source: DoReMi (Xie et al., NeurIPS 2023), eq. (1).
    """
    if variant == "doremi":
        ratios_E = (alpha_K / sampling_K)[domain_ids_E]
        return ratios_E / ratios_E.sum()
    is_same_EE = domain_ids_E.unsqueeze(0) == domain_ids_E.unsqueeze(1)
    return alpha_K[domain_ids_E] / is_same_EE.sum(1)
