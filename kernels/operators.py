"""The public operators, and their registration as `torch.ops.doge_fast.*`.

They are opaque to `torch.compile`: each has a schema and a fake kernel, so that a model traces
with `fullgraph=True`, and `torch.library.opcheck` passes. They are not differentiable, since
gradients are their data.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from doge_fast.kernels.dispatch import choose, library
from doge_fast.kernels.schema import (
    NAMESPACE,
    SIGNATURES,
    check_accumulate,
    check_gram,
    check_segment_sum,
    check_weighted_sum,
    gram_shape,
)

_shape_of = attrgetter("shape")


def gram(grads: Tensor | Sequence[Tensor], *, implementation: str | None = None) -> Tensor:
    """All inner products of the rows, in one pass over them.

    G_ij  =  sum_n g_in g_jn

    Products are exact or float32, sums float32 over at most 16384 columns and float64 beyond
    (float64 throughout for float64 rows). Symmetric to the bit. The same call gives the same
    bits, whatever the number of multiprocessors or, for `cpp`, of threads; implementations differ
    in the last float32 bits, and so does `cpp` between CPUs of other instruction sets. Reads each
    row once (GPU: up to 128 rows).

    Args:
        grads: [K, N], rows of float32, bfloat16, float16 or float64 at any distance from each
            other (`cpp`: at most 2048 rows); or a list of such blocks [K, n_p], whose dtypes and
            devices may differ.
        implementation: "torch", "cpp", "triton" or "cuda"; None leaves it to the dispatcher.

    Returns:
        [K, K] float64, on the device of the first block.

    Raises:
        ValueError: there is no block, a block is not [K, n] of these dtypes with neighbouring
            columns, or the number of rows differs.
        RuntimeError: the forced implementation cannot run.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), eq. (ge-decompose): W = G tau.
    """
    blocks = _as_blocks(grads)
    if _is_one_device(blocks):
        gram_KK: Tensor = _gram_op(blocks, implementation=implementation)
        return gram_KK
    grams = [
        _gram_op([blocks[i] for i in group], implementation=implementation)
        for group in _by_device(blocks)
    ]
    return torch.stack([gram_KK.to(grams[0].device) for gram_KK in grams]).sum(0)


def weighted_sum(
    grads: Tensor | Sequence[Tensor],
    coefficients_R: Tensor,
    *,
    out: Tensor | Sequence[Tensor] | None = None,
    implementation: str | None = None,
) -> Tensor | list[Tensor]:
    """The combined gradient: the sum of the rows, each times its coefficient.

    out_n  =  sum_r c_r g_rn     over the rows with c_r != 0

    A row whose coefficient is exactly zero does not enter: it may hold NaN. Sums are float32,
    float64 for float64 rows; every element is added in row order. Reads each row that counts
    once, writes each output once; coefficients stay on the device.

    Args:
        grads: [R, N] or a list of blocks [R, n_p], as for `gram`.
        coefficients_R: [R] floating; used in float64, rounded to the dtype of the sum.
        out: contiguous, of n_p elements in any shape and any of the four dtypes, in other memory
            than the rows; one tensor where `grads` is one, else a list. None: [n_p] in the
            rows' dtype.
        implementation: as for `gram`.

    Returns:
        `out`, or what was allocated for it.

    Raises:
        ValueError: `grads` are refused as by `gram`; there is not one coefficient per row;
            an output is missing, of another size, elsewhere or not contiguous.
        RuntimeError: the forced implementation cannot run.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), Algorithm 1: sum_j alpha'_j g_j.
    """
    blocks = _as_blocks(grads)
    outs = (
        [block.new_empty(block.shape[1:]) for block in blocks] if out is None else _as_blocks(out)
    )
    if _is_one_device(blocks) or len(blocks) != len(outs):
        c_R = coefficients_R.to(blocks[0].device if blocks else None, torch.float64)
        _weighted_sum_op(blocks, c_R, outs, implementation=implementation)
    else:
        for group in _by_device(blocks):
            _weighted_sum_op(
                [blocks[i] for i in group],
                coefficients_R.to(blocks[group[0]].device, torch.float64),
                [outs[i] for i in group],
                implementation=implementation,
            )
    return outs[0] if isinstance(grads, Tensor) else list(outs)


def accumulate(
    grads: Sequence[Tensor],
    rows: Sequence[Tensor],
    *,
    add: bool,
    implementation: str | None = None,
) -> None:
    """Write gradients into their rows, all in one call.

    rows[i]  =  grads[i]     or, with `add`,     rows[i]  =  rows[i] + grads[i]

    Added in float32, in float64 if either side is, and rounded to the row's dtype (from float64
    to 16 bits perhaps by way of float32). Rows must not overlap each other or a gradient. Reads
    each gradient once (and its row, with `add`); writes each row once.

    Args:
        grads: dense tensors of any shape and of float32, bfloat16, float16 or float64; one
            that is not contiguous is copied first.
        rows: for each gradient a contiguous tensor of as many elements, of any of the dtypes,
            on the same device.
        add: whether what the rows hold counts.
        implementation: as for `gram`.

    Raises:
        ValueError: the lists differ in length, or a row in size or device from its gradient;
            a gradient is sparse; a row is not contiguous.
        RuntimeError: the forced implementation cannot run.
    """
    if _is_one_device(grads) or len(grads) != len(rows):
        _accumulate_op(grads, rows, add, implementation=implementation)
        return
    for group in _by_device(grads):
        _accumulate_op(
            [grads[i] for i in group],
            [rows[i] for i in group],
            add,
            implementation=implementation,
        )


def fill(grads: Sequence[Tensor], rows: Sequence[Tensor], *, add: bool) -> None:
    """`accumulate`, for who knows that each gradient has its row's shape and device.

    For many small ones the check, or an operator that torch dispatches, would take longer than the
    work. Both are left out where all are contiguous and on one device.
    """
    # A subclass may have no memory of its own, as in a FakeTensorMode.
    are_plain = set(map(type, grads)) == {Tensor} and all(map(Tensor.is_contiguous, grads))
    if not are_plain or not _is_one_device(grads):
        accumulate(grads, rows, add=add)
    else:
        choose("accumulate", grads[0].device, None, is_checked=False)(grads, rows, add)


def segment_sum(
    values_TD: Tensor,
    out_GRD: Tensor,
    *,
    add: bool = False,
    borders: Tensor | None = None,
    order: Tensor | None = None,
    factor_TD: Tensor | None = None,
    mean_T: Tensor | None = None,
    rstd_T: Tensor | None = None,
    implementation: str | None = None,
) -> None:
    """Sums of neighbouring tokens: gradients of gains, biases and embeddings of many domains.

    out_s  =  sum_{i = b_s}^{b_{s+1} - 1}  v_t     with t = order_i; or, with `add`, out_s + it

    v_t is a row of `values_TD`, times that of `factor_TD` if there is one, or times
    (factor_t - mean_t) rstd_t, which is the normal of a LayerNorm. Segment s = g R + r is
    `out_GRD[g, r]`; an empty one is zero. Sums are float32 whatever the storage, float64 where
    values or output are, in an order that depends on the sizes and borders alone. Nothing is
    read on the host.

    Args:
        values_TD: [T, D] contiguous, of float32, bfloat16, float16 or float64.
        out_GRD: [G, R, D] of any of them; contiguous but for the distance of its G matrices.
        add: whether what `out_GRD` holds counts.
        borders: [G R + 1] int64, not falling, from 0 to T. None: all segments are T / (G R) long.
        order: [T] int64, positions in `values_TD`. None: as they come.
        factor_TD: [T, D] contiguous, as `values_TD`.
        mean_T: [T] contiguous and floating, with `factor_TD` and `rstd_T` alone.
        rstd_T: likewise.
        implementation: "torch" or "triton"; None leaves it to the dispatcher.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; segments cannot be as long.
        RuntimeError: the forced implementation cannot run.
    """
    _segment_sum_op(
        *(values_TD, out_GRD, add, borders, order, factor_TD, mean_T, rstd_T),
        implementation=implementation,
    )


def _as_blocks(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _is_one_device(tensors: Sequence[Tensor]) -> bool:
    if torch.compiler.is_compiling():
        return all(tensor.device == tensors[0].device for tensor in tensors)
    # Half the price of .device, which makes an object for each tensor; -1 is the CPU.
    return len(set(map(Tensor.get_device, tensors))) <= 1


def _by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the tensors of each device, in order of first appearance."""
    groups: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(index)
    return list(groups.values())


def _run_gram(blocks: Sequence[Tensor], *, implementation: str | None = None) -> Tensor:
    if not blocks:
        check_gram(blocks)
    run: Callable[..., Tensor] = choose("gram", blocks[0].device, implementation)
    return run(blocks)


def _run_weighted_sum(
    blocks: Sequence[Tensor],
    coefficients_R: Tensor,
    outs: Sequence[Tensor],
    *,
    implementation: str | None = None,
) -> None:
    if not blocks:
        check_weighted_sum(blocks, coefficients_R, outs)
    choose("weighted_sum", blocks[0].device, implementation)(blocks, coefficients_R, outs)
    increment_version(outs)


def _run_accumulate(
    grads: Sequence[Tensor], rows: Sequence[Tensor], add: bool, *, implementation: str | None = None
) -> None:
    if not grads and not rows:
        return
    device = (grads or rows)[0].device
    # On a CPU each pair is viewed by itself.
    are_alike = device.type == "cpu" or list(map(_shape_of, grads)) == list(map(_shape_of, rows))
    if not are_alike or not all(map(Tensor.is_contiguous, grads)):
        check_accumulate(grads, rows)
        grads = [grad.contiguous().view(-1) for grad in grads]
        rows = [row.view(-1) for row in rows]
    choose("accumulate", device, implementation)(grads, rows, add)
    increment_version(rows)


def _run_segment_sum(
    values_TD: Tensor, out_GRD: Tensor, *rest: Any, implementation: str | None = None
) -> None:
    choose("segment_sum", out_GRD.device, implementation)(values_TD, out_GRD, *rest)
    increment_version(out_GRD)


def _fake_gram(blocks: Sequence[Tensor], *, implementation: str | None = None) -> Tensor:
    check_gram(blocks)
    gram_RR: Tensor = gram_shape(blocks)
    return gram_RR


def _fake_weighted_sum(
    blocks: Sequence[Tensor],
    coefficients_R: Tensor,
    outs: Sequence[Tensor],
    *,
    implementation: str | None = None,
) -> None:
    check_weighted_sum(blocks, coefficients_R, outs)


def _fake_accumulate(
    grads: Sequence[Tensor], rows: Sequence[Tensor], add: bool, *, implementation: str | None = None
) -> None:
    check_accumulate(grads, rows)


def _fake_segment_sum(
    values_TD: Tensor, out_GRD: Tensor, *rest: Any, implementation: str | None = None
) -> None:
    check_segment_sum(values_TD, out_GRD, *rest)


def _register(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    library.define(
        name + SIGNATURES[name],
        # Strides are part of the contract; a compiler must not choose others.
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
    )
    # For every device: our dispatcher, not torch's, settles which implementation runs.
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


_gram_op = _register("gram", _run_gram, _fake_gram)
_weighted_sum_op = _register("weighted_sum", _run_weighted_sum, _fake_weighted_sum)
_accumulate_op = _register("accumulate", _run_accumulate, _fake_accumulate)
_segment_sum_op = _register("segment_sum", _run_segment_sum, _fake_segment_sum)
