"""The weighted sum of rows: each times its coefficient, into one output."""

# Triton's own compiler types device code.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from doge_fast.kernels import build
from doge_fast.kernels.chunks import chunk_tables, spans_by_dtype
from doge_fast.kernels.dispatch import (
    Operator,
    by_device,
    choose_without_cuda,
    register,
    requested_backend,
    runs,
)
from doge_fast.kernels.schema import check_blocks, check_pairs, check_writable, sum_dtype
from doge_fast.kernels.triton_support import kernel, launching_on, tl, triton_dtype


def weighted_sum(
    grads: Tensor | Sequence[Tensor],
    coefficients_R: Tensor,
    *,
    out: Tensor | Sequence[Tensor] | None = None,
    implementation: str | None = None,
) -> Tensor | list[Tensor]:
    """The combined gradient: the sum of the rows, each times its coefficient.

    out_n  =  sum_r c_r g_rn     over the rows with c_r != 0

    A row whose coefficient is exactly zero is ignored: it may hold NaN. Sums are float32, float64
    for float64 rows, in row order. Reads each row with a nonzero coefficient once, writes each
    output once; coefficients stay on the device.

    Args:
        grads: [R, N] or a list of blocks [R, n_p], as for `gram`.
        coefficients_R: [R] floating; converted to float64, then rounded to the dtype of the sum.
        out: contiguous, n_p elements of any shape and of the dtypes of `gram`, not overlapping the
            rows; a tensor if `grads` is one, else a list. None: [n_p] in the rows' dtype.
        implementation: as for `gram`.

    Returns:
        `out`, or new tensors.

    Raises:
        ValueError: as `gram`; there is not one coefficient per row; an output is missing, not
            contiguous, or of another size or device.
        RuntimeError: the forced implementation cannot run.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), Algorithm 1: sum_j alpha'_j g_j.
    """
    blocks = [grads] if isinstance(grads, Tensor) else grads
    outs = [out] if isinstance(out, Tensor) else out
    if outs is None:
        outs = [block.new_empty(block.shape[1:]) for block in blocks]
    c_R = coefficients_R.to(blocks[0].device, torch.float64)
    _op(blocks, c_R, outs, implementation=implementation)
    return outs[0] if isinstance(grads, Tensor) else list(outs)


# In plain torch: any device, always available.
#
# Reads each row with a non-zero coefficient once; writes each output once.

# 1 MiB of float32: the running sum stays in cache, and a call has work for every thread.
TILE_COLUMNS = 1 << 18


@torch.no_grad()
def weighted_sum_torch(
    blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]
) -> None:
    """outs[p] = sum_r c_r blocks[p][r], float32 or better inside; c_r = 0 ignores the row."""
    check_weighted_sum(blocks, coefficients_R, outs)
    if coefficients_R.device.type == "cpu":
        _sum_used_rows(blocks, coefficients_R, outs)
    else:
        _sum_masked_rows(blocks, coefficients_R, outs)


def _sum_used_rows(
    blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]
) -> None:
    exact_R = coefficients_R.tolist()
    # Rounded by torch: beyond float32's range they become infinite instead of raising.
    rounded_R = coefficients_R.float().tolist()
    for block, out in zip(blocks, outs, strict=True):
        out_N = out.view(-1)
        values_R = exact_R if block.dtype == torch.float64 else rounded_R
        terms = [(row, values_R[row]) for row, c in enumerate(exact_R) if c != 0]
        for first in range(0, block.shape[1], TILE_COLUMNS):
            tile_RT = block[:, first : first + TILE_COLUMNS]
            out_T = out_N[first : first + TILE_COLUMNS]
            dtype = sum_dtype(block.dtype)
            # Sum in the output itself if it has the sum's dtype.
            sum_T = out_T if out.dtype == dtype else torch.empty_like(out_T, dtype=dtype)
            sum_T.zero_()
            for row, c in terms:
                sum_T.add_(tile_RT[row].to(dtype), alpha=c)
            if sum_T is not out_T:
                out_T.copy_(sum_T)


def _sum_masked_rows(
    blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]
) -> None:
    # Reading the coefficients would make the host wait. So all rows are read, and ignored ones
    # replaced by zeros, because 0 * NaN is NaN.
    used_R1 = (coefficients_R != 0)[:, None]
    for block, out in zip(blocks, outs, strict=True):
        out_N, dtype = out.view(-1), sum_dtype(block.dtype)
        c_R1 = coefficients_R.to(dtype)[:, None]
        for first in range(0, block.shape[1], TILE_COLUMNS):
            tile_RT = block[:, first : first + TILE_COLUMNS].to(dtype)
            # Not a matrix product, which might run in tf32.
            sum_T = (c_R1 * torch.where(used_R1, tile_RT, 0)).sum(0)
            out_N[first : first + TILE_COLUMNS].copy_(sum_T)


# Compiled: csrc/cpu/weighted_sum.cpp and csrc/cuda/weighted_sum.cu.

FIELDS = ("source", "row_stride", "length", "vector")
# A block of threads takes a chunk, 16 columns per thread; the kernel checks this limit.
CUDA_CHUNK_COLUMNS = 4096


def weighted_sum_cpp(
    blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]
) -> None:
    """On a CPU."""
    try:
        torch.ops.doge_fast_cpp.weighted_sum.default(blocks, coefficients_R, outs)
    except RuntimeError:
        # C++ checks its arguments in a tenth of the time; this message names the block.
        check_weighted_sum(blocks, coefficients_R, outs)
        raise


def weighted_sum_cuda(
    blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]
) -> None:
    """One launch for each pair of dtypes and alignment.

    The kernel does not take float64: then another implementation runs.
    """
    groups = spans_by_dtype(partial(check_weighted_sum, blocks, coefficients_R, outs), blocks, outs)
    check_coefficients(blocks, coefficients_R)
    if any(torch.float64 in dtypes for dtypes, _ in groups):
        choose_without_cuda("weighted_sum", coefficients_R.device)(blocks, coefficients_R, outs)
        return
    run = build.cuda_operators(coefficients_R.device.type).weighted_sum
    coefficients_R = coefficients_R.contiguous()
    for (dtype, out_dtype), spans in groups:
        for table in chunk_tables(spans, FIELDS, CUDA_CHUNK_COLUMNS, coefficients_R.device):
            run(
                *(table.table, CUDA_CHUNK_COLUMNS, table.is_aligned),
                *(dtype, out_dtype, coefficients_R),
            )


# Through Triton.
#
# One program per chunk of columns; a chunk is (address in row 0, row stride, length, address in the
# output) in a [num_chunks, 4] int64 table. One program computes an output element, in row order:
# there is no reduction, and results are bitwise reproducible. The kernel reads the coefficients on
# the device, where the K x K step wrote them with clipping and unscaling: the host does not wait. A
# row with coefficient zero is not read; a skipped step's NaN makes every output NaN.


@dataclass(frozen=True)
class Tuning:
    """Columns of a program, 16-byte loads of a thread per row, rows loaded at once.

    A thread needs few registers (32 to 40 on sm_80 and sm_90), so a multiprocessor holds its
    maximum of warps: 32 KB of loads in flight with one row, 64 KB with more.
    """

    group: int
    chunk_columns: int = 4096
    num_warps: int = 4


FEW_ROWS = 8
MANY_ROWS = Tuning(group=4)
# Threads of an NVIDIA warp; bytes of a thread's widest load.
WARP, LOAD_BYTES = 32, 16


def pick(num_rows: int) -> Tuning:
    """All rows at once while they are few."""
    return Tuning(group=num_rows) if num_rows <= FEW_ROWS else MANY_ROWS


def constants_of(num_rows: int, dtype: torch.dtype, out_dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments except the alignment."""
    tuning = pick(num_rows)
    return {
        "R": num_rows,
        "GROUP": tuning.group,
        "CHUNK": tuning.chunk_columns,
        "BLOCK": tuning.num_warps * WARP * LOAD_BYTES // dtype.itemsize,
        "STORAGE": triton_dtype(dtype),
        "OUTPUT": triton_dtype(out_dtype),
        "SUM": triton_dtype(sum_dtype(dtype)),
    }


def weighted_sum_triton(
    blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]
) -> None:
    """One launch for each pair of dtypes and alignment."""
    groups = spans_by_dtype(partial(check_weighted_sum, blocks, coefficients_R, outs), blocks, outs)
    check_coefficients(blocks, coefficients_R)
    device = coefficients_R.device
    coefficients_R = coefficients_R.contiguous()
    for (dtype, out_dtype), spans in groups:
        tuning = pick(len(coefficients_R))
        constants = constants_of(len(coefficients_R), dtype, out_dtype)
        for table in chunk_tables(spans, FIELDS, tuning.chunk_columns, device):
            with launching_on(device):
                sum_chunk[(table.num_chunks,)](
                    table.table,
                    coefficients_R,
                    **constants,
                    ALIGNED=table.is_aligned,
                    num_warps=tuning.num_warps,
                    enable_fp_fusion=True,
                )


@kernel
def sum_chunk(
    table,
    coefficients_R,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STORAGE: tl.constexpr,
    OUTPUT: tl.constexpr,
    SUM: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """out = sum_r c_r row_r over one chunk of columns; GROUP rows are loaded at once."""
    entry = table + tl.program_id(0).to(tl.int64) * 4
    pointer = tl.load(entry).to(tl.pointer_type(STORAGE))
    row_stride = tl.load(entry + 1)
    length = tl.load(entry + 2)
    output = tl.load(entry + 3).to(tl.pointer_type(OUTPUT))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        row_stride = tl.multiple_of(row_stride, 16)
        length = tl.multiple_of(length, 16)
        output = tl.multiple_of(output, 16)
    for start in range(0, CHUNK, BLOCK):
        columns_B = start + tl.arange(0, BLOCK)
        sum_B = tl.zeros([BLOCK], SUM)
        for first in range(0, R, GROUP):
            coefficients = ()
            rows = ()
            for g in tl.static_range(GROUP):
                r = first + g
                c = tl.load(coefficients_R + r, mask=r < R, other=0.0)
                # [BLOCK]; a row with coefficient zero is not read
                end = tl.where(c != 0, length, 0)
                # row_stride is int64: rows may be further apart than 2**31
                row_B = tl.load(pointer + r * row_stride + columns_B, mask=columns_B < end, other=0)
                coefficients = coefficients + (c,)  # noqa: RUF005
                rows = rows + (row_B,)  # noqa: RUF005
            for g in tl.static_range(GROUP):
                c_B = tl.zeros([BLOCK], SUM) + coefficients[g].to(SUM)
                sum_B = tl.fma(rows[g].to(SUM), c_B, sum_B)
        if OUTPUT == tl.bfloat16:  # noqa: SIM300
            # Not every Triton narrows float64 to bfloat16 in one step.
            sum_B = sum_B.to(tl.float32)
        tl.store(output + columns_B, sum_B.to(OUTPUT), mask=columns_B < length)


def check_weighted_sum(
    blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]
) -> None:
    """Raise ValueError unless there is an output per block and a coefficient per row."""
    check_blocks("weighted_sum", blocks)
    check_coefficients(blocks, coefficients_R)
    check_pairs("weighted_sum", "blocks", [block.shape[1] for block in blocks], "outs", outs)
    check_writable("weighted_sum", "outs", outs, blocks[0].device)


def check_coefficients(blocks: Sequence[Tensor], coefficients_R: Tensor) -> None:
    """Raise ValueError unless there is a float64 coefficient per row, on the blocks' device."""
    num_rows, device = blocks[0].shape[0], blocks[0].device
    is_right = coefficients_R.shape == (num_rows,) and coefficients_R.dtype == torch.float64
    if not is_right or coefficients_R.device != device:
        raise ValueError(
            f"weighted_sum() needs one float64 coefficient per row, shape [{num_rows}] on "
            f"{device}; coefficients_R has shape {list(coefficients_R.shape)} and "
            f"{coefficients_R.dtype} on {coefficients_R.device}."
        )


def _run(
    blocks: Sequence[Tensor],
    coefficients_R: Tensor,
    outs: Sequence[Tensor],
    *,
    implementation: str | None = None,
) -> None:
    # Faster than .device, which makes an object for each tensor.
    if len(set(map(Tensor.get_device, blocks))) > 1 and len(blocks) == len(outs):
        for group in by_device(blocks):
            _run(
                [blocks[i] for i in group],
                coefficients_R.to(blocks[group[0]].device),
                [outs[i] for i in group],
                implementation=implementation,
            )
        return
    run = runs["weighted_sum", blocks[0].device, implementation, requested_backend()]
    run(blocks, coefficients_R, outs)
    increment_version(outs)


def _fake(
    blocks: Sequence[Tensor],
    coefficients_R: Tensor,
    outs: Sequence[Tensor],
    *,
    implementation: str | None = None,
) -> None:
    if len(blocks) != len(outs):
        check_weighted_sum(blocks, coefficients_R, outs)
    for group in by_device(blocks):
        c_R = coefficients_R.to(blocks[group[0]].device)
        check_weighted_sum([blocks[i] for i in group], c_R, [outs[i] for i in group])


_op = register(
    Operator(
        "weighted_sum",
        {
            "cpp": weighted_sum_cpp,
            "cuda": weighted_sum_cuda,
            "triton": weighted_sum_triton,
            "torch": weighted_sum_torch,
        },
    ),
    "(Tensor[] blocks, Tensor coefficients_R, Tensor(a!)[] outs, *, "
    "str? implementation=None) -> ()",
    run=_run,
    fake=_fake,
)
