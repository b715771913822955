"""The K x K step as an operator."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from doge_fast.kernels.dispatch import Operator, choose, register
from doge_fast.kernels.reweight.packing import (
    LastStep,
    Settings,
    num_domains_of,
    reweight_outputs,
    step_views,
)


def reweight(
    gram_RR: Tensor,
    state_S: Tensor,
    *,
    tau_R: Tensor,
    present_R: Tensor,
    settings_C: Tensor,
    full_RR: Tensor | None = None,
    implementation: str | None = None,
) -> LastStep:
    """The K x K step: from the Gram matrix to new domain weights, in one launch.

    s_r       =  min(1, domain_max_grad_norm / (||g_r|| + 1e-6))
    W_j       =  sum_r s_j G_jr s_r tau_r
    alpha'_j  =  alpha_j exp(lr W_j / mu) / sum_i alpha_i exp(lr W_i / mu)
    c_j       =  alpha'_j s_j min(1, max_grad_norm / (||sum_i alpha'_i s_i g_i|| + 1e-6))

    Weights, their mean, the scores and the counts in `state_S` move in place, unless a norm or a
    weight is not finite: then only the count of skipped steps does and the coefficients are NaN.
    Arithmetic is float64. Nothing is read on the host. Rows that are absent have zeros in the
    Gram matrix; their domains keep the score in the state, and all domains do where a
    target's row is absent.

    Args:
        gram_RR: [R, R] float64, inner products of the scaled gradients over the columns that
            enter W; training domains are the first K rows.
        state_S: [3 K + 2] float64, as `packing.new_state` makes it; K <= 512 on a GPU.
        tau_R: [R] float64 >= 0, the objective.
        present_R: [R] bool.
        settings_C: [9] float64, lr, mu and what else `packing.Settings` names, as
            `packing.new_settings` makes it. Their ranges are not checked here.
        full_RR: as `gram_RR`, over all columns: for norms and clipping; None: the same.
        implementation: "torch", "triton" or "cuda"; None leaves it to the dispatcher.

    Raises:
        ValueError: a tensor of another shape, dtype or device.
        RuntimeError: the forced implementation cannot run.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), eq. (update_dw), Algorithm 1.
    """
    full_RR = gram_RR if full_RR is None else full_RR
    outputs = _op(
        gram_RR, full_RR, state_S, tau_R, present_R, settings_C, implementation=implementation
    )
    return step_views(*outputs, len(tau_R), num_domains_of(state_S))


def check_reweight(
    gram_RR: Tensor,
    full_RR: Tensor,
    state_S: Tensor,
    tau_R: Tensor,
    present_R: Tensor,
    settings_C: Tensor,
) -> None:
    """Raise ValueError unless all are of R rows and K <= R domains, on one device."""
    num_rows, num_domains = len(tau_R), num_domains_of(state_S)
    if state_S.shape != (3 * num_domains + 2,) or not 1 <= num_domains <= num_rows:
        raise ValueError(
            "reweight() keeps 3 K + 2 numbers for K domains, K at least 1 and at most the "
            f"{num_rows} rows of tau_R; state_S has shape {list(state_S.shape)}. "
            "Make it with packing.new_state(alpha_K)."
        )
    expected = {
        "gram_RR": (gram_RR, (num_rows, num_rows), torch.float64),
        "full_RR": (full_RR, (num_rows, num_rows), torch.float64),
        "state_S": (state_S, tuple(state_S.shape), torch.float64),
        "tau_R": (tau_R, (num_rows,), torch.float64),
        "present_R": (present_R, (num_rows,), torch.bool),
        "settings_C": (settings_C, (len(Settings._fields),), torch.float64),
    }
    for name, (tensor, shape, dtype) in expected.items():
        is_right = tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        if not is_right or tensor.device != gram_RR.device:
            raise ValueError(
                f"reweight() needs {name} contiguous, of shape {list(shape)} and {dtype} on "
                f"{gram_RR.device}; it has shape {list(tensor.shape)}, strides "
                f"{list(tensor.stride())} and {tensor.dtype} on {tensor.device}."
            )


def _run(
    gram_RR: Tensor,
    full_RR: Tensor,
    state_S: Tensor,
    *rest: Any,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    run = choose("reweight", gram_RR.device, implementation)
    values_V, skipped, found_inf = run(gram_RR, full_RR, state_S, *rest)
    increment_version(state_S)
    return values_V, skipped, found_inf


def _fake(
    gram_RR: Tensor,
    full_RR: Tensor,
    state_S: Tensor,
    *rest: Any,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    check_reweight(gram_RR, full_RR, state_S, *rest)
    values_V, skipped, found_inf = reweight_outputs(gram_RR, state_S)
    return values_V, skipped, found_inf


def _of(name: str) -> Callable[..., Any]:
    """An implementation whose file is read when it first runs."""

    def run(*args: Tensor) -> Any:
        module = importlib.import_module(f"doge_fast.kernels.reweight.{name}_")
        return module.reweight(*args)

    return run


_op = register(
    # It is not written in C++: no step of a tiny model shows the fraction of a millisecond.
    Operator("reweight", {name: _of(name) for name in ("cuda", "triton", "torch")}, check_reweight),
    "(Tensor gram_RR, Tensor full_RR, Tensor(a!) state_S, Tensor tau_R, Tensor present_R, "
    "Tensor settings_C, *, str? implementation=None) "
    "-> (Tensor values_V, Tensor skipped, Tensor found_inf)",
    run=_run,
    fake=_fake,
)
