"""The Gram matrix and the weighted sum of the same rows, for weights that are known before both.

A rule that moves by the weights of the step before needs both of each row: read once, not twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from doge_fast.kernels.dispatch import Operator, Run, register, requested_backend, runs
from doge_fast.kernels.gram import (
    MAX_CPP_ROWS,
    Moments,
    can_sum,
    check_gram,
    check_options,
    gram,
    gram_and_sum_by_triton,
    gram_cpp,
    gram_cuda,
    gram_torch,
    gram_triton,
)
from doge_fast.kernels.weighted_sum import (
    check_weighted_sum,
    weighted_sum,
    weighted_sum_cpp,
    weighted_sum_cuda,
    weighted_sum_torch,
    weighted_sum_triton,
)


def gram_and_sum(
    grads: Tensor | Sequence[Tensor],
    coefficients_R: Tensor,
    *,
    out: Tensor | Sequence[Tensor],
    second_moments: Tensor | Sequence[Tensor | None] | None = None,
    eps: float = 0.0,
    halves: bool = False,
    implementation: str | None = None,
) -> Tensor:
    """`gram` and `weighted_sum` of the same rows; the sum does not wait for the matrix.

    G as `gram` returns it, and
    out_n  =  sum_r c_r g_rn     or, with `halves`, sum_k c_k (a_kn + b_kn)

    With halves, `cpp` reads each row once for both, and so does `triton` with second moments of all
    blocks, up to 64 sums of two rows. Otherwise one operator runs after the other.

    A row whose coefficient is exactly zero adds nothing if it is finite. If it is not, the sum may
    be NaN, unlike that of `weighted_sum`; then G is not finite either. The metric has no part in
    the sum.

    Args:
        grads: [R, N] or a list of blocks [R, n_p], as for `gram`; R = 2 K with halves.
        coefficients_R: [R] floating; with halves [K], one for each sum of two rows.
        out: as for `weighted_sum`, not overlapping the second moments either.
        second_moments: as for `gram`.
        eps: as for `gram`.
        halves: as for `gram`.
        implementation: as for `gram`.

    Returns:
        [R, R] float64, on the device of the first block; [K + 1, K] with halves.

    Raises:
        ValueError: as `gram` and `weighted_sum`.
        RuntimeError: the forced implementation cannot run.
    """
    blocks = [grads] if isinstance(grads, Tensor) else grads
    outs = [out] if isinstance(out, Tensor) else out
    moments = [second_moments] if isinstance(second_moments, Tensor) else second_moments
    check_options(blocks, moments, eps, halves)
    if halves and coefficients_R.shape != (len(blocks[0]) // 2,):
        raise ValueError(
            f"gram_and_sum(halves=True) needs one coefficient for each of {len(blocks[0]) // 2} "
            f"sums of two rows; coefficients_R has shape {list(coefficients_R.shape)}."
        )
    c_R = coefficients_R.to(blocks[0].device, torch.float64)
    gram_RR: Tensor = _op(blocks, c_R, outs, moments, eps, halves, implementation=implementation)
    return gram_RR


def _of_rows(coefficients_R: Tensor, halves: bool) -> Tensor:
    return coefficients_R.repeat_interleave(2) if halves else coefficients_R


# One operator after the other: plain torch and CUDA, and the others where they cannot do both.
#
# Reads each row twice.


def _in_turn(gram_of: Run, sum_of: Run) -> Run:
    def run(
        blocks: Sequence[Tensor],
        coefficients_R: Tensor,
        outs: Sequence[Tensor],
        moments: Moments | None = None,
        eps: float = 0.0,
        halves: bool = False,
    ) -> Tensor:
        gram_RR: Tensor = gram_of(blocks, moments, eps, halves)
        sum_of(blocks, _of_rows(coefficients_R, halves), outs)
        return gram_RR

    return run


# Compiled: csrc/cpu/gram.cpp.

_cpp_in_turn = _in_turn(gram_cpp, weighted_sum_cpp)


def gram_and_sum_cpp(
    blocks: Sequence[Tensor],
    coefficients_R: Tensor,
    outs: Sequence[Tensor],
    moments: Moments | None = None,
    eps: float = 0.0,
    halves: bool = False,
) -> Tensor:
    """On a CPU; rows in halves, up to MAX_CPP_ROWS, are read once."""
    if not halves or len(blocks[0]) > MAX_CPP_ROWS:
        gram_RR: Tensor = _cpp_in_turn(blocks, coefficients_R, outs, moments, eps, halves)
        return gram_RR
    try:
        gram_RR = torch.ops.doge_fast_cpp.gram_and_sum.default(
            blocks, coefficients_R, outs, moments, eps
        )
    except RuntimeError:
        # C++ checks its arguments in a tenth of the time; these messages name the block.
        check_gram(blocks, moments)
        check_weighted_sum(blocks, _of_rows(coefficients_R, halves), outs)
        raise
    return gram_RR


# Through Triton: the kernels of gram.py.

_triton_in_turn = _in_turn(gram_triton, weighted_sum_triton)


def gram_and_sum_triton(
    blocks: Sequence[Tensor],
    coefficients_R: Tensor,
    outs: Sequence[Tensor],
    moments: Moments | None = None,
    eps: float = 0.0,
    halves: bool = False,
) -> Tensor:
    """Rows in halves that all have second moments are read once, where a program has all rows."""
    vectors = [] if moments is None else [v for v in moments if v is not None]
    can_fuse = halves and len(vectors) == len(blocks) and can_sum(len(blocks[0]) // 2)
    if not can_fuse:
        gram_RR: Tensor = _triton_in_turn(blocks, coefficients_R, outs, moments, eps, halves)
        return gram_RR

    def check() -> None:
        check_gram(blocks, vectors)
        check_weighted_sum(blocks, _of_rows(coefficients_R, halves), outs)

    return gram_and_sum_by_triton(blocks, coefficients_R, outs, vectors, eps, check)


def _run(
    blocks: Sequence[Tensor],
    coefficients_R: Tensor,
    outs: Sequence[Tensor],
    moments: Moments | None = None,
    eps: float = 0.0,
    halves: bool = False,
    *,
    implementation: str | None = None,
) -> Tensor:
    # Faster than .device, which makes an object for each tensor.
    if len(set(map(Tensor.get_device, blocks))) > 1:
        gram_RR: Tensor = gram(
            blocks,
            second_moments=moments,
            eps=eps,
            halves=halves,
            implementation=implementation,
        )
        c_R = _of_rows(coefficients_R, halves)
        weighted_sum(blocks, c_R, out=outs, implementation=implementation)
        return gram_RR
    run = runs["gram_and_sum", blocks[0].device, implementation, requested_backend()]
    gram_RR = run(blocks, coefficients_R, outs, moments, eps, halves)
    increment_version(outs)
    return gram_RR


def _fake(
    blocks: Sequence[Tensor],
    coefficients_R: Tensor,
    outs: Sequence[Tensor],
    moments: Moments | None = None,
    eps: float = 0.0,
    halves: bool = False,
    *,
    implementation: str | None = None,
) -> Tensor:
    weighted_sum(blocks, _of_rows(coefficients_R, halves), out=outs)
    return gram(blocks, second_moments=moments, eps=eps, halves=halves)


_op = register(
    Operator(
        "gram_and_sum",
        {
            "cpp": gram_and_sum_cpp,
            "cuda": _in_turn(gram_cuda, weighted_sum_cuda),
            "triton": gram_and_sum_triton,
            "torch": _in_turn(gram_torch, weighted_sum_torch),
        },
    ),
    "(Tensor[] blocks, Tensor coefficients_R, Tensor(a!)[] outs, Tensor?[]? second_moments=None, "
    "float eps=0., bool halves=False, *, str? implementation=None) -> Tensor",
    run=_run,
    fake=_fake,
)
