"""Points on the probability simplex: how domain weights start, move, mix and average."""

import math
import operator
from typing import SupportsFloat

import torch
from torch import Tensor


def uniform(num_domains: int, *, device: torch.device | str | None = None) -> Tensor:
    """1/K everywhere, [K] float64: where Algorithm 1 starts; ValueError for no domain."""
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
            If `lr` or `mu` is a tensor it is not checked: that would wait for its device.

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

    ValueError if `smoothing`, eps, is a number outside [0, 1). A tensor is not checked: that would
    wait for its device.
    """
    if not isinstance(smoothing, Tensor):
        check_smoothing(smoothing)
        if smoothing == 0:
            return alpha_K
    return (1 - smoothing) * alpha_K + smoothing / len(alpha_K)


def running_mean(mean_K: Tensor, alpha_K: Tensor, count: float | Tensor) -> Tensor:
    """Mean of `count` points: `alpha_K` and `count` - 1 points of mean `mean_K`.

    Source: DoGE, Algorithm 1, last line: alpha_bar = (1/T) sum_t alpha^(t).
    """
    return mean_K + (alpha_K - mean_K) / count


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
    """Whether `value` is a number or a tensor of one element; a bool is not."""
    is_one = isinstance(value, SupportsFloat) and not isinstance(value, bool)
    return is_one and math.prod(getattr(value, "shape", ())) == 1


def is_integer(value: object) -> bool:
    """Whether `value` is an integer; a bool is not."""
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)
