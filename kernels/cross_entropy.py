"""Cross-entropy of logits, which turn into their gradients in the same memory.

Triton reads the logits twice and writes them once: three passes over the memory of a chunk, the
second of which mostly hits the cache. In plain torch the same takes about 28 bytes for each 16-bit
logit in float32 passes (the copy, maximum, subtraction, exponential, sum, product and rounding)
instead of six. With losses alone the logits are read once. What there is for each row (target,
share, loss) does not count.
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

# The label of a token that is not predicted, as in torch's cross_entropy.
IGNORED = -100


def cross_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    shares_T: Tensor | None = None,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Cross-entropy of each row; with shares the logits turn into the gradient of a weighted sum.

    l_t   =  log sum_v exp(z_tv) - z_t,y(t)             0 where the target y(t) is -100
    z_tv <-  s_t (exp(z_tv) / sum_u exp(z_tu) - [v = y(t)])         0 where the target is -100

    The new z is d(sum_t s_t l_t) / d(z), in the memory of the logits. Inside all is float32
    (float64 for float64 logits), whatever the logits are; the gradients are rounded once, to the
    dtype of the logits. Bitwise reproducible. The host reads nothing.

    Args:
        logits_TV: [T, V] of float32, bfloat16, float16 or float64; stride(1) == 1, stride(0)
            arbitrary. Rows that start at multiples of 16 bytes are read fastest.
        targets_T: [T] int64 contiguous; from 0 to V - 1, or -100.
        shares_T: [T] contiguous, of the dtype of the losses. None: the logits stay as they are.
        implementation: "torch" or "triton"; None leaves it to the dispatcher.

    Returns:
        [T] float32, or float64; in nats.

    Raises:
        ValueError: a tensor has another shape, dtype, layout or device.
        RuntimeError: the forced implementation cannot run.
    """
    losses_T: Tensor = _op(logits_TV, targets_T, shares_T, implementation=implementation)
    return losses_T


# In plain torch: any device, always available.


@torch.no_grad()
def cross_entropy_torch(logits_TV: Tensor, targets_T: Tensor, shares_T: Tensor | None) -> Tensor:
    """[T] losses; the logits turn into gradients if there are shares."""
    counted_T = targets_T != IGNORED
    # Ignored positions get a valid index; their loss and their share are zero.
    targets_T1 = torch.where(counted_T, targets_T, 0)[:, None]
    dtype = sum_dtype(logits_TV.dtype)
    # From logits to softmax to their gradient in the same memory: the logits' own, if it is as wide
    # and may be written.
    is_own = logits_TV.dtype == dtype and shares_T is not None
    values_TV = logits_TV if is_own else logits_TV.to(dtype, copy=True)
    values_TV.sub_(values_TV.amax(1, keepdim=True))
    picked_T1 = values_TV.gather(1, targets_T1)
    totals_T1 = values_TV.exp_().sum(1, keepdim=True)
    losses_T = torch.where(counted_T, (totals_T1.log() - picked_T1)[:, 0], 0)
    if shares_T is not None:
        shares_T1 = (counted_T * shares_T)[:, None]
        values_TV.mul_(shares_T1 / totals_T1).scatter_add_(1, targets_T1, -shares_T1)
        if not is_own:
            logits_TV.copy_(values_TV)
    return losses_T


# Through Triton. There is no C++ or CUDA version: on a CPU the products beside it take the time.
#
# A program takes a row. It goes over it twice: for the largest logit and the sum of exponentials at
# once, and for the gradients. Many threads on few rows, so that the second pass finds the row in
# the second-level cache: two programs of 16 warps on each of 132 multiprocessors hold 26 MB of rows
# of 50,304 16-bit logits. Whole blocks are loaded without a mask, and therefore 16 bytes at a time
# also where the vocabulary is odd.

# A 16-byte load of 16-bit logits by every thread.
BLOCK, NUM_WARPS = 4096, 16


def cross_entropy_triton(logits_TV: Tensor, targets_T: Tensor, shares_T: Tensor | None) -> Tensor:
    """[T] losses; the logits turn into gradients if there are shares."""
    num_tokens, width = logits_TV.shape
    losses_T = logits_TV.new_empty(num_tokens, dtype=sum_dtype(logits_TV.dtype))
    if num_tokens:
        with launching_on(logits_TV.device):
            cross_entropy_of_row[(num_tokens,)](
                logits=logits_TV,
                targets=targets_T,
                # None is a constant for Triton's compiler.
                shares=shares_T,
                losses=losses_T,
                width=width,
                stride=logits_TV.stride(0),
                **constants_of(logits_TV.dtype),
                num_warps=NUM_WARPS,
                enable_fp_fusion=True,
            )
    return losses_T


def constants_of(dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments."""
    return {"BLOCK": BLOCK, "SUM": triton_dtype(sum_dtype(dtype)), "IGNORED": IGNORED}


@kernel
def cross_entropy_of_row(
    logits,
    targets,
    shares,
    losses,
    width,
    stride,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    IGNORED: tl.constexpr,
):
    """The loss of one row; with shares its logits turn into gradients."""
    # int64: tokens times columns pass 2**31 in large batches.
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    is_ignored = target == IGNORED
    # Before the sums, for which all threads wait: some may write there soon after. NaN for a target
    # outside of the vocabulary.
    is_inside = (target >= 0) & (target < width)
    picked = tl.load(logits + target, mask=is_inside, other=float("nan")).to(SUM)
    # Of an ignored row nothing is read.
    end = tl.where(is_ignored, 0, width)
    whole = end // BLOCK * BLOCK
    column_B = tl.arange(0, BLOCK)
    # Each lane has a largest logit of its own, so that no thread waits for others in the loop. Not
    # minus infinity, whose difference to itself is not a number: logits may be that, too.
    largest_B = tl.full([BLOCK], -3.0e38, SUM)
    total_B = tl.zeros([BLOCK], SUM)
    for start in range(0, whole, BLOCK):
        # [BLOCK]
        value_B = tl.load(logits + start + column_B).to(SUM)
        largest_B, total_B = _add_exponentials(value_B, largest_B, total_B)
    is_rest_B = whole + column_B < end
    rest_B = tl.load(logits + whole + column_B, mask=is_rest_B, other=-float("inf")).to(SUM)
    largest_B, total_B = _add_exponentials(rest_B, largest_B, total_B)
    largest = tl.max(largest_B, 0)
    total = tl.where(is_ignored, 1.0, tl.sum(total_B * tl.exp(largest_B - largest), 0))
    # The difference first: logits far from zero would cost digits.
    loss = tl.log(total) + (largest - picked)
    tl.store(losses + row, tl.where(is_ignored, 0.0, loss))
    if shares is not None:
        share = tl.where(is_ignored, 0.0, tl.load(shares + row))
        scale = share / total
        for start in range(0, whole, BLOCK):
            # [BLOCK]
            value_B = tl.load(logits + start + column_B).to(SUM)
            slope_B = tl.exp(value_B - largest) * scale
            slope_B = tl.where(start + column_B == target, slope_B - share, slope_B)
            tl.store(logits + start + column_B, _narrow(slope_B, logits.dtype.element_ty))
        # Loaded again, which costs less than registers.
        rest_B = tl.load(logits + whole + column_B, mask=is_rest_B, other=-float("inf")).to(SUM)
        slope_B = tl.exp(rest_B - largest) * scale
        slope_B = tl.where(whole + column_B == target, slope_B - share, slope_B)
        slope_B = _narrow(slope_B, logits.dtype.element_ty)
        tl.store(logits + whole + column_B, slope_B, mask=is_rest_B)
        # The zeros of an ignored row.
        for start in range(end, width, BLOCK):
            zero_B = tl.zeros([BLOCK], logits.dtype.element_ty)
            tl.store(logits + start + column_B, zero_B, mask=start + column_B < width)


@kernel
def _add_exponentials(value_B, before_B, total_B):
    """The largest value so far, and sums of exp(value - largest)."""
    largest_B = tl.maximum(before_B, value_B)
    return largest_B, total_B * tl.exp(before_B - largest_B) + tl.exp(value_B - largest_B)


@kernel
def _narrow(value_B, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        # Not every Triton narrows float64 to bfloat16 in one step.
        value_B = value_B.to(tl.float32)
    return value_B.to(dtype)


def check_cross_entropy(logits_TV: Tensor, targets_T: Tensor, shares_T: Tensor | None) -> None:
    """Raise ValueError unless there are a target and a share for each row, on one device."""
    if logits_TV.dim() != 2 or logits_TV.dtype not in STORAGE_DTYPES or not logits_TV.shape[1]:
        raise ValueError(
            "cross_entropy() takes floating logits_TV [T, V] with V >= 1; got shape "
            f"{list(logits_TV.shape)} of {logits_TV.dtype}."
        )
    if logits_TV.stride(1) != 1 and logits_TV.shape[1] > 1:
        raise ValueError(
            "cross_entropy() needs rows whose elements are neighbours, stride(1) == 1; logits_TV "
            f"has strides {list(logits_TV.stride())}. Call .contiguous() on it."
        )
    expected = {"targets_T": (targets_T, torch.int64)}
    if shares_T is not None:
        expected["shares_T"] = (shares_T, sum_dtype(logits_TV.dtype))
    for name, (tensor, dtype) in expected.items():
        is_right = tensor.shape == logits_TV.shape[:1] and tensor.is_contiguous()
        if not is_right or tensor.dtype != dtype or tensor.device != logits_TV.device:
            raise ValueError(
                f"cross_entropy() needs {name} contiguous, of shape [{len(logits_TV)}] and {dtype} "
                f"on {logits_TV.device}; it has shape {list(tensor.shape)}, strides "
                f"{list(tensor.stride())} and {tensor.dtype} on {tensor.device}."
            )


def _run(
    logits_TV: Tensor,
    targets_T: Tensor,
    shares_T: Tensor | None,
    *,
    implementation: str | None = None,
) -> Tensor:
    check_cross_entropy(logits_TV, targets_T, shares_T)
    run = runs["cross_entropy", logits_TV.device, implementation, requested_backend()]
    losses_T: Tensor = run(logits_TV, targets_T, shares_T)
    if shares_T is not None:
        increment_version([logits_TV])
    return losses_T


def _fake(
    logits_TV: Tensor,
    targets_T: Tensor,
    shares_T: Tensor | None,
    *,
    implementation: str | None = None,
) -> Tensor:
    check_cross_entropy(logits_TV, targets_T, shares_T)
    return logits_TV.new_empty(len(logits_TV), dtype=sum_dtype(logits_TV.dtype))


_op = register(
    Operator(
        "cross_entropy",
        {"triton": cross_entropy_triton, "torch": cross_entropy_torch},
    ),
    "(Tensor(a!) logits_TV, Tensor targets_T, Tensor? shares_T, "
    "*, str? implementation=None) -> Tensor",
    run=_run,
    fake=_fake,
)
