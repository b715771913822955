"""Accumulation: gradients written into their rows, or added to what the rows hold."""

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from doge_fast.kernels import build
from doge_fast.kernels.dispatch import (
    Operator,
    by_device,
    choose_without_cuda,
    register,
    requested_backend,
    runs,
)
from doge_fast.kernels.schema import STORAGE_DTYPES, check_pairs, check_writable, dtype_names


def accumulate(
    grads: Sequence[Tensor],
    rows: Sequence[Tensor],
    *,
    add: bool,
    implementation: str | None = None,
) -> None:
    """Write gradients into their rows, all in one call.

    rows[i]  =  grads[i]     or, with `add`,     rows[i]  =  rows[i] + grads[i]

    Sums are float64 if either side is, else float32, and rounded to the row's dtype (from float64
    to 16 bits possibly through float32). Rows must not overlap each other or a gradient. Reads each
    gradient once (and its row, with `add`); writes each row once.

    Args:
        grads: dense tensors of any shape, of float32, bfloat16, float16 or float64; a tensor that
            is not contiguous is copied first.
        rows: for each gradient a contiguous tensor with the same number of elements and device, of
            any of these dtypes.
        add: whether to add to the rows or to overwrite them.
        implementation: "torch", "cpp" or "cuda"; None: the dispatcher chooses.

    Raises:
        ValueError: the lists differ in length; a row differs from its gradient in size or device;
            a gradient is sparse; a row is not contiguous.
        RuntimeError: the forced implementation cannot run.
    """
    _op(grads, rows, add, implementation=implementation)


def fill(grads: Sequence[Tensor], rows: Sequence[Tensor], *, add: bool) -> None:
    """`accumulate` for a caller that guarantees: each row has its gradient's shape and device.

    If all gradients are contiguous and on one device, this skips the check and torch's dispatcher,
    which take longer than the work for many small gradients.
    """
    # Plain tensors only: a subclass may have no memory, as in a FakeTensorMode.
    are_plain = set(map(type, grads)) == {Tensor} and all(map(Tensor.is_contiguous, grads))
    if are_plain and len(set(map(Tensor.get_device, grads))) == 1:
        runs["accumulate", grads[0].device, None, requested_backend()](grads, rows, add)
    else:
        accumulate(grads, rows, add=add)


# In plain torch: any device, always available.
#
# Reads each gradient once, and each row once when adding; writes each row once.

# 512 KiB of float64: a cast tile that stays in the second-level cache.
TILE_COLUMNS = 65_536


@torch.no_grad()
def accumulate_torch(grads: Sequence[Tensor], rows: Sequence[Tensor], add: bool) -> None:
    """rows[i] = grads[i], or rows[i] += grads[i], in the wider of the two dtypes.

    On a GPU each gradient has its row's shape.
    """
    if rows and not rows[0].is_cpu:
        _in_few_launches(list(grads), list(rows), add)
        return
    for grad, row in zip(grads, rows, strict=True):
        flat_grad, flat_row = grad.view(-1), row.view(-1)
        if not add:
            flat_row.copy_(flat_grad)
        elif grad.dtype == row.dtype:
            flat_row.add_(flat_grad)
        else:
            _add_in_tiles(flat_grad, flat_row)


def _in_few_launches(grads: list[Tensor], rows: list[Tensor], add: bool) -> None:
    # foreach kernels take addresses as arguments: no upload, and a CUDA graph can capture them.
    (torch._foreach_add_ if add else torch._foreach_copy_)(rows, grads)


def _add_in_tiles(grad_N: Tensor, row_N: Tensor) -> None:
    # In tiles: on a CPU torch would copy whole rows to the common dtype. float16 with bfloat16
    # promotes to float32, so only the store rounds.
    common = torch.promote_types(grad_N.dtype, row_N.dtype)
    for first in range(0, len(row_N), TILE_COLUMNS):
        row_T = row_N[first : first + TILE_COLUMNS]
        grad_T = grad_N[first : first + TILE_COLUMNS]
        row_T.copy_(row_T.to(common) + grad_T.to(common))


# Compiled: csrc/cpu/accumulate.cpp and csrc/cuda/accumulate.cu.


def accumulate_cpp(grads: Sequence[Tensor], rows: Sequence[Tensor], add: bool) -> None:
    """On a CPU."""
    try:
        torch.ops.doge_fast_cpp.accumulate.default(grads, rows, add)
    except RuntimeError:
        # C++ checks its arguments in a tenth of the time; this message names the gradient.
        check_accumulate(grads, rows, add)
        raise


def accumulate_cuda(grads: Sequence[Tensor], rows: Sequence[Tensor], add: bool) -> None:
    """One launch for up to 144 gradients of one dtype, whose rows have one dtype, too.

    The kernel does not take float64: then another implementation runs.
    """
    if torch.float64 in map(_dtype_of, [*grads, *rows]):
        choose_without_cuda("accumulate", grads[0].device)(grads, rows, add)
    elif grads:
        build.cuda_operators(grads[0].device.type).accumulate(grads, rows, add)


def on_gpu() -> tuple[str, ...]:
    """Best first.

    Gradients have new addresses in every step. CUDA's kernel and torch's foreach operators take
    addresses as arguments; a kernel of Triton would need a table on the device.
    """
    # CUDA's kernel runs several times as many blocks at once as torch's. That is not worth a minute
    # of nvcc, so it comes first only if the library is built already.
    return ("cuda", "torch") if build.is_built(build.CUDA) else ("torch", "cuda")


def check_accumulate(grads: Sequence[Tensor], rows: Sequence[Tensor], add: bool) -> None:
    """Raise ValueError unless every gradient has a contiguous row of its size."""
    if _are_pairs(grads, rows):
        return
    for index, grad in enumerate(grads):
        if grad.layout != torch.strided or grad.dtype not in STORAGE_DTYPES:
            raise ValueError(
                f"accumulate() reads dense {dtype_names()} gradients; grads[{index}] is "
                f"{grad.dtype} with layout {grad.layout}. Convert it, or turn off sparse=True "
                "in the layer that made it."
            )
    check_pairs("accumulate", "grads", [grad.numel() for grad in grads], "rows", rows)
    if grads:
        device = grads[0].device
        for index, grad in enumerate(grads):
            if grad.device != device:
                raise ValueError(
                    "accumulate() works on one device at a time; grads[0] is on "
                    f"{device}, grads[{index}] on {grad.device}. Call it once per device."
                )
        check_writable("accumulate", "rows", rows, device)


def _are_pairs(grads: Sequence[Tensor], rows: Sequence[Tensor]) -> bool:
    """The conditions of `check_accumulate`, without Python loops."""
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
_shape_of = attrgetter("shape")


def _run(
    grads: Sequence[Tensor], rows: Sequence[Tensor], add: bool, *, implementation: str | None = None
) -> None:
    if not grads and not rows:
        return
    # Faster than .device, which makes an object for each tensor.
    if len(set(map(Tensor.get_device, grads))) > 1 and len(grads) == len(rows):
        for group in by_device(grads):
            these = [grads[i] for i in group], [rows[i] for i in group]
            _run(*these, add, implementation=implementation)
        return
    device = (grads or rows)[0].device
    # On a CPU the implementations flatten each pair themselves.
    are_alike = device.type == "cpu" or list(map(_shape_of, grads)) == list(map(_shape_of, rows))
    if not are_alike or not all(map(Tensor.is_contiguous, grads)):
        check_accumulate(grads, rows, add)
        grads = [grad.contiguous().view(-1) for grad in grads]
        rows = [row.view(-1) for row in rows]
    run = runs["accumulate", device, implementation, requested_backend()]
    if run is not accumulate_cpp:
        # Not in the implementations: `fill` runs them without it.
        check_accumulate(grads, rows, add)
    run(grads, rows, add)
    increment_version(rows)


def _fake(
    grads: Sequence[Tensor], rows: Sequence[Tensor], add: bool, *, implementation: str | None = None
) -> None:
    if len(grads) != len(rows):
        check_accumulate(grads, rows, add)
    for group in by_device(grads):
        check_accumulate([grads[i] for i in group], [rows[i] for i in group], add)


_op = register(
    Operator(
        "accumulate",
        {
            "cpp": accumulate_cpp,
            "cuda": accumulate_cuda,
            "torch": accumulate_torch,
        },
        on_gpu=on_gpu,
    ),
    "(Tensor[] grads, Tensor(a!)[] rows, bool add, *, str? implementation=None) -> ()",
    run=_run,
    fake=_fake,
)
