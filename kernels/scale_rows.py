"""Rows times factors on the device, where most factors are 1 and their rows are left alone.

Reads the factors; reads and writes each row whose factor is not 1.
"""

# Triton's own compiler types device code.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from doge_fast.kernels.dispatch import Operator, register, requested_backend, runs
from doge_fast.kernels.schema import STORAGE_DTYPES, sum_dtype
from doge_fast.kernels.triton_support import kernel, launching_on, tl, triton_dtype


def scale_rows(values_RN: Tensor, factors_R: Tensor, *, implementation: str | None = None) -> None:
    """Multiply each row by its factor, in place.

    x_rn <-  f_r x_rn

    A row whose factor is 1 is neither read nor written by Triton; the host reads no factor of a
    GPU. Products are float32 (float64 for float64 rows), rounded once.

    Args:
        values_RN: [R, N] of float32, bfloat16, float16 or float64; stride(1) == 1, stride(0)
            arbitrary, rows do not overlap.
        factors_R: [R] floating, of any stride.
        implementation: "torch" or "triton"; None leaves it to the dispatcher.

    Raises:
        ValueError: a tensor has another shape, dtype, layout or device.
        RuntimeError: the forced implementation cannot run.
    """
    _op(values_RN, factors_R, implementation=implementation)


# In plain torch: any device, always available.


@torch.no_grad()
def scale_rows_torch(values_RN: Tensor, factors_R: Tensor) -> None:
    """values[r] *= factors[r]"""
    # On a CPU the host reads numbers without waiting.
    if factors_R.is_cpu and bool((factors_R == 1).all()):
        return
    values_RN.mul_(factors_R.to(sum_dtype(values_RN.dtype))[:, None])


# Through Triton: a program for each row and piece of it.

# Columns of a program: so many that programs with nothing to do are few.
PIECE = 1 << 16
NUM_WARPS = 4
# Of a thread of a warp, in 16-byte loads.
WARP, LOAD_BYTES = 32, 16


def scale_rows_triton(values_RN: Tensor, factors_R: Tensor) -> None:
    """values[r] *= factors[r]"""
    num_rows, num_columns = values_RN.shape
    if not values_RN.numel():
        return
    with launching_on(values_RN.device):
        scale_piece[(num_rows, -(-num_columns // PIECE))](
            values=values_RN,
            factors=factors_R,
            num_columns=num_columns,
            stride=values_RN.stride(0),
            # 0 for the gradient of a sum.
            factor_stride=factors_R.stride(0),
            **constants_of(values_RN.dtype),
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


def constants_of(dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments."""
    return {
        "PIECE": PIECE,
        "BLOCK": NUM_WARPS * WARP * LOAD_BYTES // dtype.itemsize,
        "SUM": triton_dtype(sum_dtype(dtype)),
    }


@kernel
def scale_piece(
    values,
    factors,
    num_columns,
    stride,
    factor_stride,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
):
    """A piece of a row times the row's factor."""
    # int64: rows are further apart than 2**31 in real models.
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * PIECE
    factor = tl.load(factors + row * factor_stride).to(SUM)
    values += row * stride
    # Of a factor of 1 nothing is read.
    last = tl.where(factor == 1, first, tl.minimum(first + PIECE, num_columns))
    for start in range(first, last, BLOCK):
        column_B = start + tl.arange(0, BLOCK)
        # [BLOCK]
        value_B = tl.load(values + column_B, mask=column_B < last, other=0).to(SUM) * factor
        if values.dtype.element_ty == tl.bfloat16:
            # Not every Triton narrows float64 to bfloat16 in one step.
            value_B = value_B.to(tl.float32)
        tl.store(values + column_B, value_B.to(values.dtype.element_ty), mask=column_B < last)


def check_scale_rows(values_RN: Tensor, factors_R: Tensor) -> None:
    """Raise ValueError unless there is a factor for each row, on one device."""
    is_right = values_RN.dim() == 2 and values_RN.dtype in STORAGE_DTYPES
    if not is_right or (values_RN.shape[1] > 1 and values_RN.stride(1) != 1):
        raise ValueError(
            "scale_rows() takes floating values_RN [R, N] with stride(1) == 1; got shape "
            f"{list(values_RN.shape)}, strides {list(values_RN.stride())} and {values_RN.dtype}."
        )
    is_right = factors_R.shape == values_RN.shape[:1] and factors_R.dtype in STORAGE_DTYPES
    if not is_right or factors_R.device != values_RN.device:
        raise ValueError(
            f"scale_rows() needs one floating factor for each of {len(values_RN)} rows, on "
            f"{values_RN.device}; factors_R has shape {list(factors_R.shape)} and "
            f"{factors_R.dtype} on {factors_R.device}."
        )


def _run(values_RN: Tensor, factors_R: Tensor, *, implementation: str | None = None) -> None:
    check_scale_rows(values_RN, factors_R)
    runs["scale_rows", values_RN.device, implementation, requested_backend()](values_RN, factors_R)
    increment_version([values_RN])


def _fake(values_RN: Tensor, factors_R: Tensor, *, implementation: str | None = None) -> None:
    check_scale_rows(values_RN, factors_R)


_op = register(
    Operator("scale_rows", {"triton": scale_rows_triton, "torch": scale_rows_torch}),
    "(Tensor(a!) values_RN, Tensor factors_R, *, str? implementation=None) -> ()",
    run=_run,
    fake=_fake,
)
