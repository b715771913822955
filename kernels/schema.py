"""Each operator's signature, output shape and argument rules, written once.

An implementation takes the positional arguments of its operator's schema; only the registered
operators take `implementation` too. The dispatcher runs the checks below before torch, Triton and
CUDA; those that keep tables of their blocks run them where a list of blocks is new. C++ checks its
arguments itself, which is faster; when it refuses them the dispatcher runs the check, so that the
error reads the same.
"""

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

NAMESPACE = "doge_fast"

SIGNATURES: dict[str, str] = {
    "gram": "(Tensor[] blocks, *, str? implementation=None) -> Tensor",
    "weighted_sum": (
        "(Tensor[] blocks, Tensor coefficients_R, Tensor(a!)[] outs, *, "
        "str? implementation=None) -> ()"
    ),
    "accumulate": (
        "(Tensor[] grads, Tensor(a!)[] rows, bool add, *, str? implementation=None) -> ()"
    ),
    "segment_sum": (
        "(Tensor values_TD, Tensor(a!) out_GRD, bool add, Tensor? borders, Tensor? order, "
        "Tensor? factor_TD, Tensor? mean_T, Tensor? rstd_T, *, str? implementation=None) -> ()"
    ),
}

STORAGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def gram_shape(blocks: Sequence[Tensor]) -> Tensor:
    """An empty result of `gram`: [R, R] float64 on the blocks' device."""
    num_rows = blocks[0].shape[0]
    return blocks[0].new_empty((num_rows, num_rows), dtype=torch.float64)


def check_gram(blocks: Sequence[Tensor]) -> None:
    """Raise ValueError unless `blocks` are [R, n_p] floating rows on one device."""
    _check_blocks("gram", blocks)


def check_weighted_sum(
    blocks: Sequence[Tensor], coefficients_R: Tensor, outs: Sequence[Tensor]
) -> None:
    """Raise ValueError unless every block has its coefficient per row and its output."""
    _check_blocks("weighted_sum", blocks)
    check_coefficients(blocks, coefficients_R)
    _check_pairs("weighted_sum", "blocks", [block.shape[1] for block in blocks], "outs", outs)
    _check_writable("weighted_sum", "outs", outs, blocks[0].device)


def check_coefficients(blocks: Sequence[Tensor], coefficients_R: Tensor) -> None:
    """Raise ValueError unless there is a float64 coefficient for each row, where the rows are."""
    num_rows, device = blocks[0].shape[0], blocks[0].device
    if coefficients_R.shape != (num_rows,) or coefficients_R.dtype != torch.float64:
        raise ValueError(
            f"weighted_sum() needs one float64 coefficient per row, shape [{num_rows}]; "
            f"coefficients_R has shape {list(coefficients_R.shape)} and "
            f"{coefficients_R.dtype}. Pass coefficients for the {num_rows} rows of the blocks."
        )
    if coefficients_R.device != device:
        raise ValueError(
            "weighted_sum() reads the coefficients where the blocks are; coefficients_R is on "
            f"{coefficients_R.device}, the blocks on {device}. Move them with .to({str(device)!r})."
        )


def check_accumulate(grads: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Raise ValueError unless every gradient has a contiguous row of its size."""
    if _are_pairs(grads, rows):
        return
    for index, grad in enumerate(grads):
        if grad.layout != torch.strided or grad.dtype not in STORAGE_DTYPES:
            raise ValueError(
                f"accumulate() reads dense {_dtype_names()} gradients; grads[{index}] is "
                f"{grad.dtype} with layout {grad.layout}. Convert it, or turn off sparse=True "
                "in the layer that made it."
            )
    _check_pairs("accumulate", "grads", [grad.numel() for grad in grads], "rows", rows)
    if grads:
        device = grads[0].device
        for index, grad in enumerate(grads):
            if grad.device != device:
                raise ValueError(
                    "accumulate() works on one device at a time; grads[0] is on "
                    f"{device}, grads[{index}] on {grad.device}. Call it once per device."
                )
        _check_writable("accumulate", "rows", rows, device)


def _are_pairs(grads: Sequence[Tensor], rows: Sequence[Tensor]) -> bool:
    """Whether nothing is to be refused: what the loops of `check_accumulate` see, in C."""
    both = [*grads, *rows]
    return (
        list(map(Tensor.numel, grads)) == list(map(Tensor.numel, rows))
        and set(map(_layout_of, grads)) <= _STRIDED
        and set(map(_dtype_of, both)) <= _STORAGE
        and len(set(map(_device_of, both))) <= 1
        and all(map(Tensor.is_contiguous, rows))
    )


_layout_of, _dtype_of, _device_of = map(attrgetter, ("layout", "dtype", "device"))
_STRIDED = {torch.strided}
_STORAGE = set(STORAGE_DTYPES)


def check_segment_sum(
    values_TD: Tensor,
    out_GRD: Tensor,
    add: bool,
    borders: Tensor | None,
    order: Tensor | None,
    factor_TD: Tensor | None,
    mean_T: Tensor | None,
    rstd_T: Tensor | None,
) -> None:
    """Raise ValueError unless all are of T tokens, D columns and G R segments, on one device."""
    if values_TD.dim() != 2 or out_GRD.dim() != 3 or values_TD.shape[1] != out_GRD.shape[2]:
        raise ValueError(
            "segment_sum() sums rows of values_TD [T, D] into out_GRD [G, R, D]; got shapes "
            f"{list(values_TD.shape)} and {list(out_GRD.shape)}."
        )
    num_segments, num_tokens = out_GRD.shape[0] * out_GRD.shape[1], len(values_TD)
    if borders is None and num_tokens % max(1, num_segments):
        raise ValueError(
            f"segment_sum() without borders cuts the tokens into segments of one length; "
            f"{num_tokens} tokens are no multiple of {num_segments} segments. Pass borders."
        )
    if len({mean_T is None, rstd_T is None, mean_T is None or factor_TD is None}) > 1:
        raise ValueError(
            "segment_sum() takes mean_T and rstd_T together, and with factor_TD. Pass all three, "
            "or factor_TD alone."
        )
    expected = {
        "values_TD": (values_TD, values_TD.shape, STORAGE_DTYPES),
        "out_GRD[0]": (out_GRD[0] if len(out_GRD) else out_GRD, out_GRD.shape[-2:], STORAGE_DTYPES),
        "borders": (borders, (num_segments + 1,), (torch.int64,)),
        "order": (order, (num_tokens,), (torch.int64,)),
        "factor_TD": (factor_TD, values_TD.shape, STORAGE_DTYPES),
        "mean_T": (mean_T, (num_tokens,), STORAGE_DTYPES),
        "rstd_T": (rstd_T, (num_tokens,), STORAGE_DTYPES),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        is_right = tensor.shape == shape and tensor.dtype in dtypes and tensor.is_contiguous()
        if not is_right or tensor.device != out_GRD.device:
            raise ValueError(
                f"segment_sum() needs {name} contiguous, of shape {list(shape)} and "
                f"{' or '.join(map(str, dtypes))} on {out_GRD.device}; it has shape "
                f"{list(tensor.shape)}, strides {list(tensor.stride())} and {tensor.dtype} on "
                f"{tensor.device}."
            )


def _check_blocks(operator: str, blocks: Sequence[Tensor]) -> None:
    if not blocks:
        raise ValueError(
            f"{operator}() needs at least one block to know the number of rows; got an empty "
            "list. Pass [K, n] tensors, or one [K, N] tensor."
        )
    first = blocks[0]
    for index, block in enumerate(blocks):
        if block.dim() != 2 or block.shape[0] == 0:
            raise ValueError(
                f"{operator}() needs blocks of shape [K, n] with K >= 1; blocks[{index}] has "
                f"shape {list(block.shape)}. View it as [K, numel]."
            )
        if block.dtype not in STORAGE_DTYPES:
            raise ValueError(
                f"{operator}() reads {_dtype_names()}; blocks[{index}] is {block.dtype}. "
                "Convert it with .to(torch.float32)."
            )
        if block.shape[0] != first.shape[0]:
            raise ValueError(
                f"{operator}() needs the same number of rows in every block; blocks[0] has "
                f"{first.shape[0]}, blocks[{index}] has {block.shape[0]}. "
                "A domain that did not touch a parameter is a row of zeros."
            )
        if block.device != first.device:
            raise ValueError(
                f"the operator {operator} works on one device at a time; blocks[0] is on "
                f"{first.device}, blocks[{index}] on {block.device}. "
                f"doge_fast.kernels.{operator} groups blocks by device."
            )
        if block.shape[1] > 1 and block.stride(1) != 1:
            raise ValueError(
                f"{operator}() needs rows whose elements are neighbours, stride(1) == 1; "
                f"blocks[{index}] has strides {list(block.stride())}. Call .contiguous() on it."
            )


def _check_pairs(
    operator: str, left: str, sizes: Sequence[int], right: str, tensors: Sequence[Tensor]
) -> None:
    if len(sizes) != len(tensors):
        raise ValueError(
            f"{operator}() pairs {left} with {right}; got {len(sizes)} {left} and "
            f"{len(tensors)} {right}. Pass one of {right} for each of {left}."
        )
    for index, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        if tensor.numel() != size:
            raise ValueError(
                f"{operator}() needs {right}[i] as long as a row of {left}[i]; "
                f"{left}[{index}] has {size} elements, {right}[{index}] has {tensor.numel()}. "
                "Check that both lists are in the same order."
            )


def _check_writable(
    operator: str, name: str, tensors: Sequence[Tensor], device: torch.device
) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in STORAGE_DTYPES or tensor.device != device:
            raise ValueError(
                f"{operator}() writes {_dtype_names()} on {device}, where it reads; "
                f"{name}[{index}] is {tensor.dtype} on {tensor.device}. Allocate it there."
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{operator}() writes contiguous memory; {name}[{index}] has shape "
                f"{list(tensor.shape)} and strides {list(tensor.stride())}. Pass a contiguous "
                "tensor and copy from it."
            )


def _dtype_names() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in STORAGE_DTYPES)
