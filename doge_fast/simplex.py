"""Points on the probability simplex: how domain weights start, move, mix, average and are bound."""

from bisect import bisect_left
from typing import SupportsFloat, SupportsIndex

import torch
from torch import Tensor

# Floors meant to fill the simplex do so within the rounding of float32 or of printed decimals.
BOUNDS_TOLERANCE = 1e-6


def uniform(num_domains: int, *, device: torch.device | str | None = None) -> Tensor:
    """1/K everywhere, [K] float64: where Algorithm 1 starts.

    Raises:
        ValueError: `num_domains` < 1.
    """
    if num_domains < 1:
        raise ValueError(f"a simplex needs at least one domain; got {num_domains}.")
    return torch.full((num_domains,), 1 / num_domains, dtype=torch.float64, device=device)


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
            A tensor, for either, is not checked, so that it may live on a device.

    Returns:
        [K], same dtype; sums to 1 within K ulp.

    Raises:
        ValueError: `lr` < 0 or NaN, `mu` <= 0 or NaN, or the shapes differ.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), eq. (update_dw), Algorithm 1.
    """
    if not isinstance(mu, Tensor):
        check_mu(mu)
    if not isinstance(lr, Tensor) and not lr >= 0:
        raise ValueError(f"the learning rate of a mirror step must be >= 0; got {lr}.")
    if alpha_K.shape != gain_K.shape or alpha_K.ndim != 1:
        raise ValueError(
            "domain weights and gains must be vectors of one length; got "
            f"{list(alpha_K.shape)} and {list(gain_K.shape)}."
        )
    return torch.softmax(alpha_K.log() + (lr / mu) * gain_K, dim=-1)


def smooth(alpha_K: Tensor, smoothing: float | Tensor) -> Tensor:
    """(1 - eps) alpha + eps / K, [K]: mixture with uniform, which keeps every weight above eps / K.

    Args:
        alpha_K: [K] floating, on the simplex.
        smoothing: eps. A tensor is not checked, so that it may live on a device.

    Raises:
        ValueError: `smoothing` outside [0, 1) or NaN.
    """
    if not isinstance(smoothing, Tensor):
        check_smoothing(smoothing)
        if smoothing == 0:
            return alpha_K
    return (1 - smoothing) * alpha_K + smoothing / len(alpha_K)


def running_mean(mean_K: Tensor, alpha_K: Tensor, count: float | Tensor) -> Tensor:
    """Mean of `count` points, the last of which is `alpha_K` and the others have mean `mean_K`.

    Source: DoGE, Algorithm 1, last line: alpha_bar = (1/T) sum_t alpha^(t).
    """
    return mean_K + (alpha_K - mean_K) / count


def effective_domains(alpha_K: Tensor) -> Tensor:
    """exp(H(alpha)), scalar between 1 (one domain takes all) and K (uniform)."""
    entropy: Tensor = torch.special.entr(alpha_K).sum()
    return entropy.exp()


def kl(alpha_K: Tensor, other_K: Tensor) -> Tensor:
    """KL(alpha || other) = sum_j alpha_j log(alpha_j / other_j), a scalar in nats; 0 log 0 = 0.

    Infinite where `alpha_K` has weight on a domain of which `other_K` has none.
    """
    divergence: Tensor = torch.special.xlogy(alpha_K, alpha_K) - torch.special.xlogy(
        alpha_K, other_K
    )
    # Rounding makes the divergence of neighbours a negative number of some 1e-17.
    return divergence.sum().clamp(min=0)


def project(alpha_K: Tensor, *, floor_K: Tensor, cap_K: Tensor) -> Tensor:
    """The point of the simplex between floors and caps that is nearest to `alpha_K` in KL.

    q  =  argmin KL(q || alpha)    over    floor_j <= q_j <= cap_j,  sum_j q_j = 1
       =  clip(c alpha_j, floor_j, cap_j)    with the one c > 0 for which they sum to 1

    Domains that no bound holds keep their ratios to each other. For there the Lagrangian is
    stationary in q_j: log(q_j / alpha_j) + 1 = lambda, so q_j = c alpha_j with one c for all; where
    that leaves the interval, the objective being convex in q_j alone, its nearer end is best. Which
    way round the divergence is taken does not matter: KL(alpha || q) asks for alpha_j / q_j =
    lambda, which is the same. (KL(q || alpha) is the one that the mirror step moves by.)

    A weight of zero stays zero, as in the mirror step, unless a floor lifts it: to the floor and no
    higher, the limit of ever smaller weights.

    c is exact: the sum of the clipped weights is piecewise linear in c and does not fall, with
    kinks at floor_j / alpha_j and cap_j / alpha_j; between the kinks where it passes 1 it is
    solved.

    Args:
        alpha_K: [K] floating, >= 0, with a positive sum, which need not be 1.
        floor_K: [K], in [0, cap_j].
        cap_K: [K], in [floor_j, 1]; 1 where there is none.

    Returns:
        [K] float64; within its bounds to the last bit, sums to 1 within K ulp (within 1e-6 where
        the bounds themselves do so and leave no room).

    Raises:
        ValueError: the shapes differ; a number is negative, not finite or out of its range; floors
            sum to more than 1; or caps of the domains that may have weight to less than 1.
    """
    alpha_K, floor_K, cap_K = alpha_K.double(), floor_K.double(), cap_K.double()
    _check_bounds(alpha_K, floor_K, cap_K)
    is_held_K = alpha_K == 0
    # A domain without weight gets its floor for any c.
    low_K = torch.where(is_held_K, torch.inf, floor_K / alpha_K)
    high_K = torch.where(is_held_K, torch.inf, cap_K / alpha_K)
    kinks = torch.cat([low_K[~is_held_K], high_K[~is_held_K]]).sort().values.tolist()

    def clipped(scale: float) -> Tensor:
        return torch.where(low_K >= scale, floor_K, torch.minimum(scale * alpha_K, cap_K))

    first = bisect_left(kinks, 1.0, key=lambda scale: float(clipped(scale).sum()))
    if first in (0, len(kinks)):
        # Floors leave nothing to share out, or caps hold just enough.
        return floor_K if first == 0 else torch.where(is_held_K, floor_K, cap_K)
    is_low_K, is_high_K = low_K >= kinks[first], high_K <= kinks[first - 1]
    bound_K = torch.where(is_low_K, floor_K, cap_K)
    is_free_K = ~(is_low_K | is_high_K)
    rest = 1 - bound_K[~is_free_K].sum()
    scaled_K = alpha_K * (rest / alpha_K[is_free_K].sum())
    return torch.where(is_free_K, scaled_K.clamp(floor_K, cap_K), bound_K)


def _check_bounds(alpha_K: Tensor, floor_K: Tensor, cap_K: Tensor) -> None:
    if alpha_K.ndim != 1 or not alpha_K.shape == floor_K.shape == cap_K.shape:
        raise ValueError(
            "weights, floors and caps must be vectors of one length; got "
            f"{list(alpha_K.shape)}, {list(floor_K.shape)} and {list(cap_K.shape)}."
        )
    if not (alpha_K.isfinite() & (alpha_K >= 0)).all() or not alpha_K.sum() > 0:
        raise ValueError(
            f"weights to project must be finite, >= 0 and not all zero; got {alpha_K.tolist()}."
        )
    is_wrong_K = ~((floor_K >= 0) & (floor_K <= cap_K) & (cap_K <= 1))
    if is_wrong_K.any():
        j = int(is_wrong_K.nonzero()[0])
        raise ValueError(
            "bounds of a weight must satisfy 0 <= floor <= cap <= 1; got floor "
            f"{float(floor_K[j]):g} and cap {float(cap_K[j]):g} at position {j}."
        )
    least = float(floor_K.sum())
    if least > 1 + BOUNDS_TOLERANCE:
        raise ValueError(
            f"floors must leave room on the simplex; they sum to {least:.6g}, {least - 1:.3g} too "
            "much. Lower them."
        )
    most = float(torch.where(alpha_K > 0, cap_K, floor_K).sum())
    if most < 1 - BOUNDS_TOLERANCE:
        raise ValueError(
            f"caps must leave room for all of the simplex; domains that have weight or a floor may "
            f"hold {most:.6g} in all, {1 - most:.3g} is missing. Raise caps, or give a floor to a "
            "domain of weight zero."
        )


def check_mu(mu: float) -> None:
    """Raise ValueError unless `mu` is a number > 0."""
    if not is_number(mu) or not 0 < mu < float("inf"):
        raise ValueError(
            f"mu, the Bregman coefficient, must be positive and finite; got {mu!r}. "
            "Larger values move the domain weights more slowly."
        )


def check_smoothing(smoothing: float) -> None:
    """Raise ValueError unless `smoothing` is a number in [0, 1)."""
    if not is_number(smoothing) or not 0 <= smoothing < 1:
        raise ValueError(
            f"smoothing, the share of uniform in the domain weights, must be in [0, 1); "
            f"got {smoothing!r}."
        )


def is_number(value: object) -> bool:
    """Whether an argument is a number, or a tensor of one; True and False are none."""
    return isinstance(value, int | float | SupportsFloat) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Whether an argument is an integer; True and False are none."""
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)
