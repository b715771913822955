"""The K x K step: from the Gram matrices of a step to new domain weights.

Axis letters: K training domains, R rows of the objective (the K domains, then M held-out targets),
B rows of the buffer. B = R, or S + M if a step has S of the K training domains.

One launch for each small operation would cost more than their arithmetic. So on a GPU `reweight` is
one launch of `reweight_triton`; otherwise, and for a score that the kernel does not know, it is the
plain torch below. Settings, state and results are packed into one vector each, for few kernel
arguments; named tuples view their parts.
"""

import importlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doge_fast.kernels.dispatch import OPERATORS, Operator, choose
from doge_fast.weights import scores, simplex
from doge_fast.weights.scores import NAMED_SCORES, PAPER, Score


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


class WeightsState(NamedTuple):
    """The state that a step updates: `state_S`, [3 K + 2] float64."""

    alpha: Tensor
    """[K] domain weights."""
    alpha_mean: Tensor
    """[K] their mean over the steps taken."""
    gain: Tensor
    """[K] the last score of each domain."""
    num_steps: Tensor
    """Scalar; steps that moved the weights."""
    num_skipped: Tensor
    """Scalar; steps skipped because a norm or a weight was not finite."""


VECTORS, COUNTS = WeightsState._fields[:3], WeightsState._fields[3:]


class LastStep(NamedTuple):
    """The record of a step; tensors on the device.

    Values are those of unscaled gradients, after per-domain clipping (`grad_norms`: before). `gram`
    and `grad_norms` have the rows of `optimizer.names`: training domains, then held-out targets;
    absent rows are zero.
    """

    gram: Tensor
    """[R, R] inner products over the columns that enter W."""
    coefficients: Tensor
    """[B] coefficients of the buffer's rows in the weighted sum; NaN if skipped."""
    grad_norms: Tensor
    """[R] norms of the rows before any clipping, over all columns."""
    gain: Tensor
    """[K] the scores that moved the weights; W for the score "paper"."""
    influence: Tensor
    """[K] W less the difficulty: what domain j does for the others, eq. (ge-decompose)."""
    difficulty: Tensor
    """[K] tau_j ||g_j||^2, eq. (ge-decompose)."""
    alpha: Tensor
    """[K] domain weights after the step."""
    combined_norm: Tensor
    """Scalar: norm of the combined gradient before the global clip."""
    skipped: Tensor
    """Bool scalar: a norm or a weight was not finite, so the state did not change."""
    found_inf: Tensor
    """`skipped` as a float32 scalar, for fused optimizers."""
    lr: float | Tensor | None = None
    """eta of this step, as in the parameter group; None: not known."""


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
        num_domains = (self.state_S.numel() - len(COUNTS)) // len(VECTORS)
        return len(self.tau_R), num_domains, len(self.gram_BB)


def new_state(alpha_K: Tensor) -> Tensor:
    """[3 K + 2]: `alpha_K` as weights and as their mean; zero scores and counts."""
    rest = torch.zeros(len(alpha_K) + len(COUNTS), dtype=alpha_K.dtype, device=alpha_K.device)
    return torch.cat([alpha_K, alpha_K, rest])


def state_views(state_S: Tensor) -> WeightsState:
    """The parts of a state, by name."""
    vectors = state_S[: -len(COUNTS)].view(len(VECTORS), -1).unbind()
    return WeightsState(*vectors, *state_S[-len(COUNTS) :].unbind())


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
    it is 1. It makes up for the pairs that the step does not have. (1e-6 is added to the last norm
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
        row_R: [R] int32: index of each row in the buffer; -1: not drawn, or absent.
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
    outputs = choose("reweight", gram_BB.device, implementation)(tensors, score)
    return _step_views(tensors, *outputs)


def in_torch(tensors: StepTensors, score: Score) -> tuple[Tensor, Tensor, Tensor]:
    """The step in plain torch: some fifty small operations, on any device.

    Returns:
        The [V] values that `LastStep` views, and `skipped` and `found_inf`.
    """
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
    moved_K = simplex.mirror_step(state.alpha, gain_K, lr=settings.lr, mu=settings.mu)
    alpha_K = simplex.smooth(moved_K, settings.smoothing)

    coefficients_R = torch.zeros_like(tau_R)
    share = num_drawn / num_domains
    coefficients_R[:num_domains] = alpha_K * clip_R[:num_domains] * present_K / share
    combined_norm = scores.combined_norm(full_RR, coefficients_R)
    # Check the weights too: a learning rate of NaN spoils them although all norms are finite.
    finite = norms_R.isfinite().all() & alpha_K.isfinite().all()
    # NaN, so that a scaler or a clipping loop sees the overflow too.
    factor = torch.where(finite, 1.0, torch.nan).to(coefficients_R)
    factor = factor * scores.clip_factors(combined_norm, settings.max_grad_norm)
    # A row of the buffer whose domain is absent gets coefficient zero.
    is_at_BR = row_R == torch.arange(num_rows, device=row_R.device)[:, None]
    coefficients_B = is_at_BR.to(coefficients_R) @ coefficients_R

    num_steps = state.num_steps + finite
    mean_K = simplex.running_mean(state.alpha_mean, alpha_K, num_steps.clamp(min=1))
    moved_S = torch.cat([alpha_K, mean_K, gain_K, num_steps[None], state.num_skipped[None]])
    state_S.copy_(torch.where(finite, moved_S, state_S))
    state.num_skipped.add_(~finite)
    values_V = torch.cat(
        [
            clipped_RR.flatten(),
            coefficients_B * factor,
            norms_R,
            gain_K,
            raw_K - difficulty_K,
            difficulty_K,
            state.alpha,
            combined_norm[None],
        ]
    )
    return values_V, ~finite, (~finite).to(torch.float32)


def _scatter(matrix_BB: Tensor, row_R: Tensor, present_R: Tensor) -> Tensor:
    """[R, R] from the buffer's [B, B]; zeros for absent rows."""
    index_R = row_R.clamp(min=0).long()
    return torch.where(present_R[:, None] & present_R, matrix_BB[index_R][:, index_R], 0.0)


def _with_all_pairs(gram_RR: Tensor, num_domains: int, num_drawn: int) -> Tensor:
    """The Gram matrix times p (see `reweight`): the pairs in the step stand for all pairs."""
    factor_RR = torch.ones_like(gram_RR)
    if 1 < num_drawn < num_domains:
        factor_RR[:num_domains, :num_domains] = (num_domains - 1) / (num_drawn - 1)
        factor_RR.fill_diagonal_(1)
    return gram_RR * factor_RR


def _step_views(
    tensors: StepTensors, values_V: Tensor, skipped: Tensor, found_inf: Tensor
) -> LastStep:
    num_names, _, num_rows = tensors.sizes
    sizes = [num_names**2, num_rows, num_names]
    sizes += [len(values_V) - sum(sizes) - 1, 1]
    gram, coefficients, norms, vectors, combined_norm = torch.split(values_V, sizes)
    gain, influence, difficulty, alpha = vectors.view(4, -1).unbind()
    return LastStep(
        gram=gram.view(num_names, num_names),
        coefficients=coefficients,
        grad_norms=norms,
        gain=gain,
        influence=influence,
        difficulty=difficulty,
        alpha=alpha,
        combined_norm=combined_norm.view(()),
        skipped=skipped,
        found_inf=found_inf,
    )


def check_arguments(tensors: StepTensors, score: Score) -> None:
    """Raise ValueError unless the shapes, dtypes and devices belong together."""
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


def _in_triton(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    # Imported at first use, since Triton is large and may be missing.
    module = importlib.import_module("doge_fast.weights.reweight_triton")
    outputs: tuple[Tensor, Tensor, Tensor] = module.reweight(*arguments)
    return outputs


# Not an operator of torch: nothing compiles or differentiates the end of a step.
OPERATORS["reweight"] = Operator(
    "reweight",
    implementations={"triton": _in_triton, "torch": in_torch},
    check=check_arguments,
)
