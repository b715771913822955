"""The launch of the K x K step: one program, whatever the number of rows."""

import math

from torch import Tensor

from doge_fast.kernels.reweight.packing import num_domains_of
from doge_fast.kernels.schema import reweight_outputs
from doge_fast.kernels.triton_support import on_device

# Float64 elements of a slab of rows; 128 threads then hold 32 each, 64 registers.
SLAB = 4096
NUM_WARPS = 4


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
    """The K x K step through Triton; constants of the run are compiled in, in full precision."""
    from doge_fast.kernels.reweight import triton_kernel

    values_V, skipped, found_inf = reweight_outputs(gram_RR, state_S)
    constants = constants_of(
        len(tau_R),
        num_domains_of(state_S),
        mu,
        scale_by_mean_norm,
        low,
        high,
        domain_max_grad_norm,
        max_grad_norm,
        smoothing,
    )
    with on_device(gram_RR.device):
        triton_kernel.reweight[(1,)](
            gram_RR,
            full_RR,
            state_S,
            tau_R,
            present_R,
            lr,
            grad_scale,
            values_V,
            skipped,
            found_inf,
            **constants,
            num_warps=NUM_WARPS,
        )
    return values_V, skipped, found_inf


def constants_of(
    num_rows: int,
    num_domains: int,
    mu: float,
    scale_by_mean_norm: bool,
    low: float,
    high: float,
    domain_max_grad_norm: float,
    max_grad_norm: float,
    smoothing: float,
) -> dict[str, float]:
    """Compile-time arguments: an argument of a launch would be rounded to float32."""
    padded = max(2, 1 << (num_rows - 1).bit_length())
    return {
        "R": num_rows,
        "K": num_domains,
        "PADDED_R": padded,
        "BLOCK_R": max(1, min(padded, SLAB // padded)),
        "MU": mu,
        "SCALE_BY_MEAN_NORM": scale_by_mean_norm,
        "LOW": _finite(low),
        "HIGH": _finite(high),
        "HAS_LOW": not math.isinf(low),
        "HAS_HIGH": not math.isinf(high),
        "DOMAIN_MAX": _finite(domain_max_grad_norm),
        "CUTS_DOMAINS": not math.isinf(domain_max_grad_norm),
        "TOTAL_MAX": _finite(max_grad_norm),
        "CUTS_TOTAL": not math.isinf(max_grad_norm),
        "SMOOTHING": smoothing,
    }


def _finite(bound: float) -> float:
    return 0.0 if math.isinf(bound) else bound
