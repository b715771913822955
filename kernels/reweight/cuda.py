"""The K x K step through the CUDA extension: one launch of one block."""

from torch import Tensor

from doge_fast.kernels.build_cuda import operators
from doge_fast.kernels.reweight.torch_kernel import reweight as reweight_in_torch

# The vectors of a step stand in shared memory.
MAX_ROWS = 1024


def reweight(
    gram_RR: Tensor,
    full_RR: Tensor,
    state_S: Tensor,
    tau_R: Tensor,
    present_R: Tensor,
    lr: Tensor,
    grad_scale: Tensor,
    mu: float,
    scale_by_mean_norm: bool,
    low: float,
    high: float,
    domain_max_grad_norm: float,
    max_grad_norm: float,
    smoothing: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Clip, estimate, score, move, commit; more rows than a block can hold go to plain torch."""
    is_small = len(tau_R) <= MAX_ROWS
    run = operators(gram_RR.device.type).reweight if is_small else reweight_in_torch
    values_V, skipped, found_inf = run(
        gram_RR,
        full_RR,
        state_S,
        tau_R,
        present_R,
        lr,
        grad_scale,
        mu,
        scale_by_mean_norm,
        low,
        high,
        domain_max_grad_norm,
        max_grad_norm,
        smoothing,
    )
    return values_V, skipped, found_inf
