"""The K x K step on a GPU: device code only.

One program does it all: clipping factors, W, score, mirror step, averages, combined norm, overflow
flag and the commit of the new state. Reads two R x R matrices of float64 (one twice), writes one.
The square passes through in slabs of BLOCK_R rows; vectors that later slabs need stand in the
values that are written anyway, behind a barrier.
"""

# Triton's own compiler types device code.
# mypy: ignore-errors

import triton
import triton.language as tl

# What torch.nn.utils.clip_grad_norm_ adds to the norm it divides by.
NORM_FLOOR = tl.constexpr(1e-6)


@triton.jit
def clip_factor(norm, MAX: tl.constexpr, IS_CUT: tl.constexpr):
    """min(1, MAX / (norm + 1e-6)); a NaN stays one."""
    factor = norm * 0 + 1
    if IS_CUT:
        factor = MAX / (norm + NORM_FLOOR)
        factor = tl.where(factor > 1, 1.0, factor)
    return factor


@triton.jit
def is_finite(x):
    """Neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def reweight(
    gram,
    full,
    state,
    tau,
    present,
    lr,
    grad_scale,
    values,
    skipped,
    found_inf,
    R: tl.constexpr,
    K: tl.constexpr,
    PADDED_R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MU: tl.constexpr,
    SCALE_BY_MEAN_NORM: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    DOMAIN_MAX: tl.constexpr,
    CUTS_DOMAINS: tl.constexpr,
    TOTAL_MAX: tl.constexpr,
    CUTS_TOTAL: tl.constexpr,
    SMOOTHING: tl.constexpr,
):
    """state moves; values, skipped and found_inf are written."""
    coefficients = values + R * R
    norms = coefficients + R
    gains = norms + R
    influences = gains + K
    difficulties = influences + K
    alphas = difficulties + K

    scale = tl.load(grad_scale)
    unit = 1 / (scale * scale)
    # [PADDED_R]; what is past R or K is masked wherever it would count
    r = tl.arange(0, PADDED_R)
    is_row = r < R
    is_domain = r < K
    squares_R = tl.load(full + r * (R + 1), mask=is_row, other=0.0) * unit
    norms_R = tl.sqrt(squares_R)
    clip_R = clip_factor(norms_R, DOMAIN_MAX, CUTS_DOMAINS)
    tau_R = tl.load(tau + r, mask=is_row, other=0.0)
    present_R = tl.load(present + r, mask=is_row, other=0) != 0
    tl.store(norms + r, norms_R, mask=is_row)

    for first in range(0, R, BLOCK_R):
        i = first + tl.arange(0, BLOCK_R)
        is_slab = i < R
        entries = i[:, None] * R + r[None, :]
        # [BLOCK_R, PADDED_R]
        is_entry = is_slab[:, None] & is_row[None, :]
        norm_i = tl.sqrt(tl.load(full + i * (R + 1), mask=is_slab, other=0.0) * unit)
        clip_i = clip_factor(norm_i, DOMAIN_MAX, CUTS_DOMAINS)
        square = tl.load(gram + entries, mask=is_entry, other=0.0) * unit
        square = clip_i[:, None] * square * clip_R[None, :]
        tl.store(values + entries, square, mask=is_entry)
        w_i = tl.sum(square * tau_R[None, :], axis=1)
        tl.store(gains + i, w_i, mask=i < K)
    tl.debug_barrier()

    w_K = tl.load(gains + r, mask=is_domain, other=0.0)
    own_K = tl.load(values + r * (R + 1), mask=is_domain, other=0.0)
    difficulty_K = tau_R * own_K
    tl.store(difficulties + r, difficulty_K, mask=is_domain)
    tl.store(influences + r, w_K - difficulty_K, mask=is_domain)
    score_K = w_K
    if SCALE_BY_MEAN_NORM:
        counts = is_domain & present_R
        total = tl.sum(tl.where(counts, tl.sqrt(own_K), 0.0), axis=0)
        count = tl.maximum(tl.sum(counts.to(tl.int32), axis=0), 1)
        score_K = score_K / (total / count.to(tl.float64) + NORM_FLOOR)
    if HAS_LOW:
        score_K = tl.where(score_K < LOW, LOW, score_K)
    if HAS_HIGH:
        score_K = tl.where(score_K > HIGH, HIGH, score_K)
    # Without a measured row that the objective needs, nobody's W is whole.
    is_missing = is_row & (r >= K) & (present_R == 0) & (tau_R != 0)
    is_whole = tl.max(is_missing.to(tl.int32), axis=0) == 0
    carried_K = tl.load(state + 2 * K + r, mask=is_domain, other=0.0)
    gain_K = tl.where(present_R & is_whole, score_K, carried_K)

    alpha_K = tl.load(state + r, mask=is_domain, other=0.0)
    # A weight of zero stays zero.
    logs_K = tl.log(tl.where(alpha_K == 0, 1.0, alpha_K)) + tl.load(lr) / MU * gain_K
    logs_K = tl.where(is_domain & (alpha_K != 0), logs_K, -float("inf"))
    raised_K = tl.exp(logs_K - tl.max(logs_K, axis=0))
    raised_K = tl.where(is_domain, raised_K, 0.0)
    moved_K = raised_K / tl.sum(raised_K, axis=0)
    if SMOOTHING > 0:
        moved_K = (1 - SMOOTHING) * moved_K + SMOOTHING / K

    # Every thread has read what stands there.
    tl.debug_barrier()
    tl.store(gains + r, gain_K, mask=is_domain)
    weighs = is_domain & present_R
    coefficients_R = tl.where(weighs, moved_K * clip_R, 0.0)
    squared_norm = tl.sum(squares_R, axis=0) * 0.0
    tl.store(coefficients + r, coefficients_R, mask=is_row)
    tl.debug_barrier()
    for first in range(0, R, BLOCK_R):
        i = first + tl.arange(0, BLOCK_R)
        is_slab = i < R
        is_entry = is_slab[:, None] & is_row[None, :]
        entries = i[:, None] * R + r[None, :]
        # [BLOCK_R, PADDED_R]
        square = tl.load(full + entries, mask=is_entry, other=0.0) * unit
        c_i = tl.load(coefficients + i, mask=is_slab, other=0.0)
        squared_norm += tl.sum(c_i * tl.sum(square * coefficients_R[None, :], axis=1), axis=0)
    squared_norm = tl.where(squared_norm < 0, 0.0, squared_norm)
    combined_norm = tl.sqrt(squared_norm)
    tl.store(alphas + K, combined_norm)

    is_bad = (is_row & (is_finite(norms_R) == 0)) | (is_domain & (is_finite(moved_K) == 0))
    is_skipped = tl.max(is_bad.to(tl.int32), axis=0)
    is_taken = is_skipped == 0
    factor = clip_factor(combined_norm, TOTAL_MAX, CUTS_TOTAL)
    # NaN, so that a scaler or a clipping loop sees the overflow too.
    factor = tl.where(is_taken, factor, float("nan"))
    tl.debug_barrier()
    tl.store(coefficients + r, coefficients_R * factor, mask=is_row)

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
