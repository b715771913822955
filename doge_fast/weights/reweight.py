"""The paper's rule, a mirror step: from the Gram matrices of a step to new domain weights.

Axis letters: K training domains, R names of the objective (the K domains, then M held-out targets),
B rows of the buffer. B = R, or S + M if a step has S of the K training domains.

Fifty small launches would take longer than their arithmetic. So on a GPU `reweight` is one launch
of a Triton kernel. Elsewhere, and for a score that the kernel does not compute, it is plain torch.
Settings, state and results are packed into one vector each, for few kernel arguments; named tuples
view their parts (`doge_fast.weights.rule`).
"""

# Triton's own compiler types device code.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from doge_fast.kernels.dispatch import OPERATORS, Operator, requested_backend, runs
from doge_fast.kernels.triton_support import kernel, launching_on, tl
from doge_fast.weights import scores
from doge_fast.weights.defaults import DOMAIN_MAX_GRAD_NORM
from doge_fast.weights.rule import (
    COUNTS,
    VECTORS,
    LastStep,
    Matrices,
    Names,
    UpdateRule,
    WeightsState,
    last_step_of,
    new_outputs,
)
from doge_fast.weights.scores import NAMED_SCORES, PAPER, PUBLISHED, PUBLISHED_BOUNDS, Score


class StepSettings(NamedTuple):
    """The settings of a step: `settings_F`, [6] float64."""

    lr: float | Tensor
    """eta of this step."""
    mu: float | Tensor
    """> 0, Bregman coefficient."""
    grad_scale: float | Tensor = 1.0
    """The factor that multiplied the losses."""
    domain_max_grad_norm: float | Tensor = math.inf
    """Norm to which each row is clipped."""
    max_grad_norm: float | Tensor = math.inf
    """Norm to which the combined gradient is clipped."""
    smoothing: float | Tensor = 0.0
    """Share of uniform in the weights."""


@dataclass(frozen=True, kw_only=True)
class MirrorStep(UpdateRule):
    """One step of exponentiated gradient: Algorithms 1 and 2.

    ValueError as `UpdateRule`.
    """

    mu: float
    """> 0, Bregman coefficient."""
    score: Score = PAPER
    """What moves the weights; `PAPER` is W."""
    domain_max_grad_norm: float | None = DOMAIN_MAX_GRAD_NORM
    """> 0, norm to which every row is clipped first; None: not clipped."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        # A number of numpy in a checkpoint is refused by torch.load(weights_only=True).
        object.__setattr__(self, "mu", float(self.mu))
        if not 0 < self.mu < math.inf:
            raise ValueError(
                f"mu must be positive and finite; got {self.mu!r}. With mu=None it is a multiple "
                "of the learning rate that the optimizer has when it is wrapped."
            )
        self._check_positive("domain_max_grad_norm")
        super().__post_init__()

    @property
    def name(self) -> str:
        """That of the score."""
        return self.score.name

    def settings(self, lr: float | Tensor, grad_scale: float | Tensor) -> StepSettings:
        """Those of `reweight`; ValueError if `lr` < 0 or NaN."""
        # A tensor is not checked: that would wait for its device.
        if not isinstance(lr, Tensor) and not lr >= 0:
            raise ValueError(f"the learning rate must be >= 0 to move the weights; got {lr}.")
        return StepSettings(
            lr=lr,
            mu=self.mu,
            grad_scale=grad_scale,
            domain_max_grad_norm=self.domain_max_grad_norm or math.inf,
            max_grad_norm=self.max_grad_norm or math.inf,
            smoothing=self.smoothing,
        )

    def step(
        self, matrices: Matrices, state_S: Tensor, memory_S: Tensor, names: Names, settings: Tensor
    ) -> LastStep:
        """As `reweight`."""
        return reweight(
            *matrices,
            state_S,
            tau_R=names.tau_R,
            row_R=names.row_R,
            settings_F=settings,
            score=self.score,
        )


class StepTensors(NamedTuple):
    """The tensors of a step, as `reweight` takes them."""

    gram_BB: Tensor
    full_BB: Tensor
    state_S: Tensor
    tau_R: Tensor
    row_R: Tensor
    settings_F: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """R, K and B."""
        return len(self.tau_R), num_domains_of(self.state_S), len(self.gram_BB)


def new_state(alpha_K: Tensor) -> Tensor:
    """[3 K + 2]: `alpha_K` as weights and as their mean; zero scores and counts."""
    rest = torch.zeros(len(alpha_K) + len(COUNTS), dtype=alpha_K.dtype, device=alpha_K.device)
    return torch.cat([alpha_K, alpha_K, rest])


def state_views(state_S: Tensor) -> WeightsState:
    """The parts of a state, by name."""
    vectors = state_S[: -len(COUNTS)].view(len(VECTORS), -1).unbind()
    return WeightsState(*vectors, *state_S[-len(COUNTS) :].unbind())


def num_domains_of(state_S: Tensor) -> int:
    """K."""
    return (len(state_S) - len(COUNTS)) // len(VECTORS)


def reweight(
    gram_BB: Tensor,
    full_BB: Tensor,
    state_S: Tensor,
    *,
    tau_R: Tensor,
    row_R: Tensor,
    settings_F: Tensor,
    score: Score = PAPER,
    implementation: str | None = None,
) -> LastStep:
    """Move the domain weights one step, in one launch for `PAPER` and `PUBLISHED`.

    s_r       =  min(1, domain_max_grad_norm / (||g_r|| + 1e-6))
    W_j       =  sum_r p_jr s_j G_jr s_r tau_r,   then the score of W
    alpha'_j  =  alpha_j exp(lr W_j / mu) / sum_i alpha_i exp(lr W_i / mu)
    c_j       =  K / S alpha'_j s_j min(1, max_grad_norm / ||sum_i K / S alpha'_i s_i g_i||)

    p_jr = (K - 1) / (S - 1) for two different training domains if a step has S of the K; otherwise
    it is 1. It makes up for the pairs that the step does not have. (The last denominator has + 1e-6
    too.)

    Weights, their mean, scores and counts in `state_S` are updated in place. If a norm or a weight
    is not finite, only the count of skipped steps is, and the coefficients are NaN. Arithmetic is
    float64. Nothing is read on the host. An absent domain keeps its last score; if a held-out
    target with tau > 0 is absent, all domains do.

    Args:
        gram_BB: [B, B] float64, inner products of the scaled gradients over the columns that enter
            W; the drawn training domains are the first S rows.
        full_BB: [B, B] float64, over all columns, for norms and clipping; may be `gram_BB`.
        state_S: [3 K + 2] float64, made by `new_state`.
        tau_R: [R] float64 >= 0, the target weights.
        row_R: [R] int32: the buffer's row of each name; -1: not drawn, or absent.
        settings_F: [6] float64, the fields of `StepSettings`. Their ranges are not checked.
        score: any other than `PAPER` and `PUBLISHED` runs in plain torch on any device.
        implementation: "torch" or "triton"; None: the dispatcher chooses.

    Raises:
        ValueError: a tensor has another shape, dtype or device.
        RuntimeError: the requested implementation cannot run.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), eq. (update_dw), Algorithm 1.
    """
    tensors = StepTensors(gram_BB, full_BB, state_S, tau_R, row_R, settings_F)
    if score not in NAMED_SCORES.values():
        implementation = "torch"
    check_arguments(tensors)
    run = runs["reweight", gram_BB.device, implementation, requested_backend()]
    last: LastStep = run(tensors, score)
    return last


# In plain torch: some fifty small operations, on any device, always available.


def reweight_torch(tensors: StepTensors, score: Score) -> LastStep:
    """An equation a line."""
    gram_BB, full_BB, state_S, tau_R, row_R, settings_F = tensors
    num_names, num_domains, num_rows = tensors.sizes
    num_drawn = num_rows - (num_names - num_domains)
    state, settings = state_views(state_S), StepSettings(*settings_F.unbind())
    present_R = row_R >= 0
    square = settings.grad_scale**2
    full_RR = _scatter(full_BB, row_R, present_R) / square
    norms_R = full_RR.diagonal().sqrt()
    clip_R = scores.clip_factors(norms_R, settings.domain_max_grad_norm)
    clipped_RR = clip_R[:, None] * (_scatter(gram_BB, row_R, present_R) / square) * clip_R

    present_K = present_R[:num_domains]
    estimate_RR = _with_all_pairs(clipped_RR, num_domains, num_drawn)
    raw_K = scores.gain(estimate_RR, tau_R, num_domains)
    difficulty_K = scores.difficulty(estimate_RR, tau_R, num_domains)
    # Without a target's row every W lacks a term.
    has_targets = (present_R | (tau_R == 0))[num_domains:].all()
    score_K = score.gain(estimate_RR, tau_R, present_K)
    gain_K = torch.where(present_K & has_targets, score_K, state.gain)
    moved_K = scores.mirror_step(state.alpha, gain_K, lr=settings.lr, mu=settings.mu)
    alpha_K = scores.smooth(moved_K, settings.smoothing)

    coefficients_R = torch.zeros_like(tau_R)
    share = num_drawn / num_domains
    coefficients_R[:num_domains] = alpha_K * clip_R[:num_domains] * present_K / share
    combined_norm = scores.combined_norm(full_RR, coefficients_R)
    # Check the weights too: a learning rate of NaN spoils them although all norms are finite.
    finite = norms_R.isfinite().all() & alpha_K.isfinite().all()
    # NaN, so that a scaler or a clipping loop sees the overflow too.
    factor = torch.where(finite, 1.0, torch.nan).to(coefficients_R)
    factor = factor * scores.clip_factors(combined_norm, settings.max_grad_norm)
    # A row of the buffer whose domain is absent has coefficient zero.
    is_at_BR = row_R == torch.arange(num_rows, device=row_R.device)[:, None]
    coefficients_B = is_at_BR.to(coefficients_R) @ coefficients_R

    num_steps = state.num_steps + finite
    mean_K = scores.running_mean(state.alpha_mean, alpha_K, num_steps.clamp(min=1))
    moved_S = torch.cat([alpha_K, mean_K, gain_K, num_steps[None], state.num_skipped[None]])
    state_S.copy_(torch.where(finite, moved_S, state_S))
    state.num_skipped.add_(~finite)
    return LastStep(
        gram=clipped_RR,
        coefficients=coefficients_B * factor,
        grad_norms=norms_R,
        gain=gain_K,
        influence=raw_K - difficulty_K,
        difficulty=difficulty_K,
        alpha=state.alpha.clone(),
        combined_norm=combined_norm,
        skipped=~finite,
        found_inf=(~finite).to(torch.float32),
    )


def _scatter(matrix_BB: Tensor, row_R: Tensor, present_R: Tensor) -> Tensor:
    """[R, R] from the buffer's [B, B]; zeros for absent rows."""
    index_R = row_R.clamp(min=0).long()
    return torch.where(present_R[:, None] & present_R, matrix_BB[index_R][:, index_R], 0.0)


def _with_all_pairs(gram_RR: Tensor, num_domains: int, num_drawn: int) -> Tensor:
    """The Gram matrix times p of `reweight`: the pairs in the step count for all pairs."""
    factor_RR = torch.ones_like(gram_RR)
    if 1 < num_drawn < num_domains:
        factor_RR[:num_domains, :num_domains] = (num_domains - 1) / (num_drawn - 1)
        factor_RR.fill_diagonal_(1)
    return gram_RR * factor_RR


# Through Triton: one program for any number of rows.
#
# Computes clipping factors, W, score, mirror step, averages, combined norm and overflow flag, and
# updates the state. Reads two B x B matrices of float64 (one of them twice), writes one of R x R.
# The matrices are processed in slabs of BLOCK_R rows. Vectors that later slabs need are stored in
# the output and loaded from there after a barrier.

# Float64 elements of a slab; 128 threads then hold 32 each, in 64 registers.
SLAB = 4096
NUM_WARPS = 4


def reweight_triton(tensors: StepTensors, score: Score) -> LastStep:
    """As `reweight_torch`, for `PAPER` and `PUBLISHED`."""
    device, sizes = tensors.gram_BB.device, tensors.sizes
    outputs = new_outputs(*sizes, device)
    constants = constants_of(*sizes, score)
    with launching_on(device):
        reweight_once[(1,)](*tensors, *outputs, **constants, num_warps=NUM_WARPS)
    return last_step_of(outputs, *sizes)


def constants_of(
    num_names: int, num_domains: int, num_rows: int, score: Score = PAPER
) -> dict[str, int | float | bool]:
    """Compile-time arguments."""
    padded = max(2, 1 << (num_names - 1).bit_length())
    # LR, MU ...: places in `settings_F`. The settings are in memory, because Triton rounds float
    # arguments to float32.
    places = {name.upper(): place for place, name in enumerate(StepSettings._fields)}
    return {
        "R": num_names,
        "K": num_domains,
        "B": num_rows,
        "PADDED_R": padded,
        "BLOCK_R": max(1, min(padded, SLAB // padded)),
        **places,
        "NORM_FLOOR": scores.NORM_FLOOR,
        "IS_PUBLISHED": score == PUBLISHED,
        "LOW": PUBLISHED_BOUNDS[0],
        "HIGH": PUBLISHED_BOUNDS[1],
    }


@kernel
def clip_factor(norm, max_norm, NORM_FLOOR: tl.constexpr):
    """min(1, max_norm / (norm + 1e-6)); NaN for a norm of NaN."""
    factor = max_norm / (norm + NORM_FLOOR)
    return tl.where(factor > 1, 1.0, factor)


@kernel
def is_finite(x):
    """Neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@kernel
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
    PADDED_R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LR: tl.constexpr,
    MU: tl.constexpr,
    GRAD_SCALE: tl.constexpr,
    DOMAIN_MAX_GRAD_NORM: tl.constexpr,
    MAX_GRAD_NORM: tl.constexpr,
    SMOOTHING: tl.constexpr,
    NORM_FLOOR: tl.constexpr,
    IS_PUBLISHED: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Update `state`; write `values`, `skipped` and `found_inf`. All are float64 but these two."""
    coefficients = values + R * R
    norms = coefficients + B
    gains = norms + R
    influences = gains + K
    difficulties = influences + K
    alphas = difficulties + K
    NUM_DRAWN: tl.constexpr = B - (R - K)

    # Each setting is loaded where it is used: held in registers, they would spill.
    scale = tl.load(settings + GRAD_SCALE)
    unit = 1 / (scale * scale)
    # [PADDED_R]; elements past R, or past K in vectors [K], are masked
    r = tl.arange(0, PADDED_R)
    is_row = r < R
    is_domain = r < K
    row_R = tl.load(row + r, mask=is_row, other=-1)
    present_R = row_R >= 0
    squares_R = tl.load(full + row_R * (B + 1), mask=present_R, other=0.0) * unit
    norms_R = tl.sqrt(squares_R)
    clip_R = clip_factor(norms_R, tl.load(settings + DOMAIN_MAX_GRAD_NORM), NORM_FLOOR)
    tau_R = tl.load(tau + r, mask=is_row, other=0.0)
    tl.store(norms + r, norms_R, mask=is_row)

    for first in range(0, R, BLOCK_R):
        i = first + tl.arange(0, BLOCK_R)
        is_slab = i < R
        entries = i[:, None] * R + r[None, :]
        # [BLOCK_R, PADDED_R]
        is_entry = is_slab[:, None] & is_row[None, :]
        row_i = tl.load(row + i, mask=is_slab, other=-1)
        is_present = (row_i[:, None] >= 0) & present_R[None, :]
        offsets = row_i[:, None] * B + row_R[None, :]
        norm_i = tl.sqrt(tl.load(full + row_i * (B + 1), mask=row_i >= 0, other=0.0) * unit)
        clip_i = clip_factor(norm_i, tl.load(settings + DOMAIN_MAX_GRAD_NORM), NORM_FLOOR)
        square = tl.load(gram + offsets, mask=is_present, other=0.0) * unit
        square = clip_i[:, None] * square * clip_R[None, :]
        tl.store(values + entries, square, mask=is_entry)
        # p of `reweight`: the pairs of training domains in the step count for all pairs.
        if NUM_DRAWN > 1:
            is_pair = (i[:, None] < K) & is_domain[None, :] & (i[:, None] != r[None, :])
            square = tl.where(is_pair, square * ((K - 1) / (NUM_DRAWN - 1)), square)
        w_i = tl.sum(square * tau_R[None, :], axis=1)
        tl.store(gains + i, w_i, mask=i < K)
    tl.debug_barrier()

    w_K = tl.load(gains + r, mask=is_domain, other=0.0)
    diagonal_K = tl.load(values + r * (R + 1), mask=is_domain, other=0.0)
    difficulty_K = tau_R * diagonal_K
    tl.store(difficulties + r, difficulty_K, mask=is_domain)
    tl.store(influences + r, w_K - difficulty_K, mask=is_domain)
    score_K = w_K
    if IS_PUBLISHED:
        counts = is_domain & present_R
        total = tl.sum(tl.where(counts, tl.sqrt(diagonal_K), 0.0), axis=0)
        count = tl.maximum(tl.sum(counts.to(tl.int32), axis=0), 1)
        score_K = score_K / (total / count.to(tl.float64) + NORM_FLOOR)
        score_K = tl.where(score_K < LOW, LOW, score_K)
        score_K = tl.where(score_K > HIGH, HIGH, score_K)
    # Without a target's row every W lacks a term.
    is_missing = is_row & (r >= K) & (present_R == 0) & (tau_R != 0)
    is_whole = tl.max(is_missing.to(tl.int32), axis=0) == 0
    last_gain_K = tl.load(state + 2 * K + r, mask=is_domain, other=0.0)
    gain_K = tl.where(present_R & is_whole, score_K, last_gain_K)

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
    is_weighted = is_domain & present_R
    # K / S: the domains in the step count for all.
    coefficients_R = tl.where(is_weighted, moved_K * clip_R / (NUM_DRAWN / K), 0.0)
    squared_norm = tl.sum(squares_R, axis=0) * 0.0
    # Coefficients for the loop below; the weights overwrite them at the end.
    tl.store(alphas + r, coefficients_R, mask=is_domain)
    tl.debug_barrier()
    for first in range(0, R, BLOCK_R):
        i = first + tl.arange(0, BLOCK_R)
        is_slab = i < R
        row_i = tl.load(row + i, mask=is_slab, other=-1)
        is_present = (row_i[:, None] >= 0) & present_R[None, :]
        offsets = row_i[:, None] * B + row_R[None, :]
        # [BLOCK_R, PADDED_R]
        square = tl.load(full + offsets, mask=is_present, other=0.0) * unit
        c_i = tl.load(alphas + i, mask=i < K, other=0.0)
        squared_norm += tl.sum(c_i * tl.sum(square * coefficients_R[None, :], axis=1), axis=0)
    squared_norm = tl.where(squared_norm < 0, 0.0, squared_norm)
    combined_norm = tl.sqrt(squared_norm)
    tl.store(alphas + K, combined_norm)

    is_not_finite = (is_row & (is_finite(norms_R) == 0)) | (is_domain & (is_finite(moved_K) == 0))
    is_skipped = tl.max(is_not_finite.to(tl.int32), axis=0)
    is_taken = is_skipped == 0
    factor = clip_factor(combined_norm, tl.load(settings + MAX_GRAD_NORM), NORM_FLOOR)
    # NaN, so that a scaler or a clipping loop sees the overflow too.
    factor = tl.where(is_taken, factor, float("nan"))
    # A row of the buffer whose domain is absent has coefficient zero.
    tl.store(coefficients + r, 0.0 * factor, mask=r < B)
    tl.debug_barrier()
    tl.store(coefficients + row_R, coefficients_R * factor, mask=present_R)

    num_steps = tl.load(state + 3 * K)
    num_skipped = tl.load(state + 3 * K + 1)
    mean_K = tl.load(state + K + r, mask=is_domain, other=0.0)
    steps = num_steps + 1
    next_K = tl.where(is_taken, moved_K, alpha_K)
    next_mean_K = tl.where(is_taken, mean_K + (moved_K - mean_K) / steps, mean_K)
    next_gain_K = tl.where(is_taken, gain_K, last_gain_K)
    tl.debug_barrier()
    tl.store(alphas + r, next_K, mask=is_domain)
    tl.store(state + r, next_K, mask=is_domain)
    tl.store(state + K + r, next_mean_K, mask=is_domain)
    tl.store(state + 2 * K + r, next_gain_K, mask=is_domain)
    tl.store(state + 3 * K, tl.where(is_taken, steps, num_steps))
    tl.store(state + 3 * K + 1, tl.where(is_taken, num_skipped, num_skipped + 1))
    tl.store(skipped, is_skipped != 0)
    tl.store(found_inf, is_skipped.to(tl.float32))


def check_arguments(tensors: StepTensors) -> None:
    """Raise ValueError unless the shapes, dtypes and devices fit each other."""
    num_names, num_domains, num_rows = tensors.sizes
    are_sizes_right = (
        1 <= num_domains <= num_names and num_names - num_domains < num_rows <= num_names
    )
    square, row = (num_rows, num_rows), (num_names,)
    shapes = square, square, (3 * num_domains + 2,), row, row, (len(StepSettings._fields),)
    device = tensors.gram_BB.device
    for (name, tensor), shape in zip(tensors._asdict().items(), shapes, strict=True):
        dtype = torch.int32 if name == "row_R" else torch.float64
        is_right = tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        if not are_sizes_right or not is_right or tensor.device != device:
            raise ValueError(
                f"reweight() needs {name} contiguous, of shape {list(shape)} and {dtype} on "
                f"{device}, where 1 <= K <= R and R - K < B <= R; it has shape "
                f"{list(tensor.shape)}, strides {tensor.stride()} and {tensor.dtype} on "
                f"{tensor.device}."
            )


# Not an operator of torch: nothing compiles or differentiates the end of a step.
OPERATORS["reweight"] = Operator(
    "reweight",
    implementations={"triton": reweight_triton, "torch": reweight_torch},
)
