"""Points on the probability simplex: how domain weights start, move, mix and average."""

import math
import operator
from typing import SupportsFloat

import torch
from torch import Tensor


def uniform(num_domains: int, *, device: torch.device | str | None = None) -> Tensor:
    """1/K everywhere, [K] float64: where Algorithm 1 starts."""
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
