"""The K x K step on a GPU, in Triton: one program for any number of rows.

Computes clipping factors, W, score, mirror step, averages, combined norm and overflow flag, and
updates the state. Reads two B x B matrices of float64 (one of them twice), writes one of R x R. The
matrices are processed in slabs of BLOCK_R rows. Vectors that later slabs need are stored in the
output and loaded from there after a barrier.
"""

# Triton's own compiler types device code.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

import torch
import triton
import triton.language as tl
from torch import Tensor

from doge_fast.kernels.triton_support import on_device
from doge_fast.weights import scores
from doge_fast.weights.reweight import StepSettings, StepTensors

# Float64 elements of a slab; 128 threads then hold 32 each, in 64 registers.
SLAB = 4096
NUM_WARPS = 4
NORM_FLOOR = tl.constexpr(scores.NORM_FLOOR)
LOW, HIGH = map(tl.constexpr, scores.PUBLISHED_BOUNDS)
# Places of the settings in `settings_F`. They are in memory, since Triton rounds float arguments to
# float32, and each is loaded where it is used, since in registers they would spill.
_ORDER = StepSettings._fields.index
LR = tl.constexpr(_ORDER("lr"))
MU = tl.constexpr(_ORDER("mu"))
GRAD_SCALE = tl.constexpr(_ORDER("grad_scale"))
DOMAIN_MAX = tl.constexpr(_ORDER("domain_max_grad_norm"))
TOTAL_MAX = tl.constexpr(_ORDER("max_grad_norm"))
SMOOTHING = tl.constexpr(_ORDER("smoothing"))


def reweight(tensors: StepTensors, score: scores.Score) -> tuple[Tensor, Tensor, Tensor]:
    """As `doge_fast.weights.reweight.in_torch`, for "paper" and "published"."""
    num_names, num_domains, num_rows = tensors.sizes
    # What `LastStep` views: [V] float64, a bool and a float32 scalar.
    size = num_names**2 + num_rows + num_names + 4 * num_domains + 1
    empty = tensors.gram_BB.new_empty
    outputs = empty(size), empty((), dtype=torch.bool), empty((), dtype=torch.float32)
    constants = constants_of(*tensors.sizes, score.name)
    with on_device(tensors.gram_BB.device):
        reweight_once[(1,)](*tensors, *outputs, **constants, num_warps=NUM_WARPS)
    return outputs


def constants_of(
    num_names: int, num_domains: int, num_rows: int, score: str = scores.PAPER.name
) -> dict[str, int | bool]:
    """Compile-time arguments."""
    padded = max(2, 1 << (num_names - 1).bit_length())
    return {
        "R": num_names,
        "K": num_domains,
        "B": num_rows,
        "IS_PUBLISHED": score == scores.PUBLISHED.name,
        "PADDED_R": padded,
        "BLOCK_R": max(1, min(padded, SLAB // padded)),
    }


@triton.jit
def clip_factor(norm, max_norm):
    """min(1, max_norm / (norm + 1e-6)); NaN for a norm of NaN."""
    factor = max_norm / (norm + NORM_FLOOR)
    return tl.where(factor > 1, 1.0, factor)


@triton.jit
def is_finite(x):
    """Neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def reweight_once(
    gram,
    full,
    state,
    tau,
    row,
    settings,
    values,
    skipped,
    found_inf,
    R: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    IS_PUBLISHED: tl.constexpr,
    PADDED_R: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Update `state`; write `values`, `skipped` and `found_inf`."""
    coefficients = values + R * R
    norms = coefficients + B
    gains = norms + R
    influences = gains + K
    difficulties = influences + K
    alphas = difficulties + K
    NUM_DRAWN: tl.constexpr = B - (R - K)

    scale = tl.load(settings + GRAD_SCALE)
    unit = 1 / (scale * scale)
    # [PADDED_R]; elements past R or K are masked where they would count
    r = tl.arange(0, PADDED_R)
    is_row = r < R
    is_domain = r < K
    row_R = tl.load(row + r, mask=is_row, other=-1)
    present_R = row_R >= 0
    squares_R = tl.load(full + row_R * (B + 1), mask=present_R, other=0.0) * unit
    norms_R = tl.sqrt(squares_R)
    clip_R = clip_factor(norms_R, tl.load(settings + DOMAIN_MAX))
    tau_R = tl.load(tau + r, mask=is_row, other=0.0)
    tl.store(norms + r, norms_R, mask=is_row)

    for first in range(0, R, BLOCK_R):
        i = first + tl.arange(0, BLOCK_R)
        is_slab = i < R
        entries = i[:, None] * R + r[None, :]
        # [BLOCK_R, PADDED_R]
        is_entry = is_slab[:, None] & is_row[None, :]
        row_i = tl.load(row + i, mask=is_slab, other=-1)
        is_there = (row_i[:, None] >= 0) & present_R[None, :]
        places = row_i[:, None] * B + row_R[None, :]
        norm_i = tl.sqrt(tl.load(full + row_i * (B + 1), mask=row_i >= 0, other=0.0) * unit)
        clip_i = clip_factor(norm_i, tl.load(settings + DOMAIN_MAX))
        square = tl.load(gram + places, mask=is_there, other=0.0) * unit
        square = clip_i[:, None] * square * clip_R[None, :]
        tl.store(values + entries, square, mask=is_entry)
        # The pairs of training domains in the step stand for all pairs.
        if NUM_DRAWN > 1:
            is_pair = (i[:, None] < K) & is_domain[None, :] & (i[:, None] != r[None, :])
            square = tl.where(is_pair, square * ((K - 1) / (NUM_DRAWN - 1)), square)
        w_i = tl.sum(square * tau_R[None, :], axis=1)
        tl.store(gains + i, w_i, mask=i < K)
    tl.debug_barrier()

    w_K = tl.load(gains + r, mask=is_domain, other=0.0)
    own_K = tl.load(values + r * (R + 1), mask=is_domain, other=0.0)
    difficulty_K = tau_R * own_K
    tl.store(difficulties + r, difficulty_K, mask=is_domain)
    tl.store(influences + r, w_K - difficulty_K, mask=is_domain)
    score_K = w_K
    if IS_PUBLISHED:
        counts = is_domain & present_R
        total = tl.sum(tl.where(counts, tl.sqrt(own_K), 0.0), axis=0)
        count = tl.maximum(tl.sum(counts.to(tl.int32), axis=0), 1)
        score_K = score_K / (total / count.to(tl.float64) + NORM_FLOOR)
        score_K = tl.where(score_K < LOW, LOW, score_K)
        score_K = tl.where(score_K > HIGH, HIGH, score_K)
    # Without a target's row every W lacks a term.
    is_missing = is_row & (r >= K) & (present_R == 0) & (tau_R != 0)
    is_whole = tl.max(is_missing.to(tl.int32), axis=0) == 0
    carried_K = tl.load(state + 2 * K + r, mask=is_domain, other=0.0)
    gain_K = tl.where(present_R & is_whole, score_K, carried_K)

    alpha_K = tl.load(state + r, mask=is_domain, other=0.0)
    # A weight of zero stays zero.
    rate = tl.load(settings + LR) / tl.load(settings + MU)
    logs_K = tl.log(tl.where(alpha_K == 0, 1.0, alpha_K)) + rate * gain_K
    logs_K = tl.where(is_domain & (alpha_K != 0), logs_K, -float("inf"))
    raised_K = tl.exp(logs_K - tl.max(logs_K, axis=0))
    raised_K = tl.where(is_domain, raised_K, 0.0)
    moved_K = raised_K / tl.sum(raised_K, axis=0)
    smoothing = tl.load(settings + SMOOTHING)
    moved_K = (1 - smoothing) * moved_K + smoothing * (1.0 / K)

    # All threads have loaded W from `gains`, which is overwritten now.
    tl.debug_barrier()
    tl.store(gains + r, gain_K, mask=is_domain)
    weighs = is_domain & present_R
    # K / S: the domains in the step stand for all.
    coefficients_R = tl.where(weighs, moved_K * clip_R / (NUM_DRAWN / K), 0.0)
    squared_norm = tl.sum(squares_R, axis=0) * 0.0
    # Scratch: the weights overwrite these at the end.
    tl.store(alphas + r, coefficients_R, mask=is_domain)
    tl.debug_barrier()
    for first in range(0, R, BLOCK_R):
        i = first + tl.arange(0, BLOCK_R)
        is_slab = i < R
        row_i = tl.load(row + i, mask=is_slab, other=-1)
        is_there = (row_i[:, None] >= 0) & present_R[None, :]
        places = row_i[:, None] * B + row_R[None, :]
        # [BLOCK_R, PADDED_R]
        square = tl.load(full + places, mask=is_there, other=0.0) * unit
        c_i = tl.load(alphas + i, mask=i < K, other=0.0)
        squared_norm += tl.sum(c_i * tl.sum(square * coefficients_R[None, :], axis=1), axis=0)
    squared_norm = tl.where(squared_norm < 0, 0.0, squared_norm)
    combined_norm = tl.sqrt(squared_norm)
    tl.store(alphas + K, combined_norm)

    is_bad = (is_row & (is_finite(norms_R) == 0)) | (is_domain & (is_finite(moved_K) == 0))
    is_skipped = tl.max(is_bad.to(tl.int32), axis=0)
    is_taken = is_skipped == 0
    factor = clip_factor(combined_norm, tl.load(settings + TOTAL_MAX))
    # NaN, so that a scaler or a clipping loop sees the overflow too.
    factor = tl.where(is_taken, factor, float("nan"))
    # A row of the buffer whose domain is absent gets coefficient zero.
    tl.store(coefficients + r, 0.0 * factor, mask=r < B)
    tl.debug_barrier()
    tl.store(coefficients + row_R, coefficients_R * factor, mask=present_R)

    num_steps = tl.load(state + 3 * K)
    num_skipped = tl.load(state + 3 * K + 1)
    mean_K = tl.load(state + K + r, mask=is_domain, other=0.0)
    steps = num_steps + 1
    next_K = tl.where(is_taken, moved_K, alpha_K)
    next_mean_K = tl.where(is_taken, mean_K + (moved_K - mean_K) / steps, mean_K)
    next_gain_K = tl.where(is_taken, gain_K, carried_K)
    tl.debug_barrier()
    tl.store(alphas + r, next_K, mask=is_domain)
    tl.store(state + r, next_K, mask=is_domain)
    tl.store(state + K + r, next_mean_K, mask=is_domain)
    tl.store(state + 2 * K + r, next_gain_K, mask=is_domain)
    tl.store(state + 3 * K, tl.where(is_taken, steps, num_steps))
    tl.store(state + 3 * K + 1, tl.where(is_taken, num_skipped, num_skipped + 1))
    tl.store(skipped, is_skipped != 0)
    tl.store(found_inf, is_skipped.to(tl.float32))
