"""Parameters <-> columns, domains <-> rows: the memory behind `grads_BN`.

The buffer is parameter-major: for each parameter one contiguous block of B rows, each as long
as the parameter, padded to a multiple of 64 elements. A block is allocated when the first gradient
of its parameter appears. Beside its block a parameter has the combined gradient that becomes
`p.grad`. Its memory is kept from step to step: fresh pages cost more than the arithmetic.
If rows need not stay until the end of a step (`FlatBuffer.lend`), many blocks share a memory.

Gradients that arrive one at a time, as on a CPU (`step.parameters`), are pending until there are
`PENDING_BYTES` of them. Then one call writes all of them into their rows. So there are few calls,
and the gradients of a whole domain never exist twice.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from doge_fast import tracing
from doge_fast.kernels import accumulate, fill
from doge_fast.kernels.dispatch import by_device
from doge_fast.kernels.schema import STORAGE_DTYPES

# Elements: 256 bytes of float32, so that every row starts on a cache line and a 16-byte vector.
ALIGNMENT = 64
# Rows a multiple of a page apart share their cache sets; the Gram matrix reads them side by side.
PAGE_BYTES = 4096
# On a CPU pending gradients should still be in the cache; on a GPU fewer launches matter more.
PENDING_BYTES = {"cpu": 1 << 20}
PENDING_BYTES_ELSEWHERE = 1 << 26
# Of rows that share a memory, before they are read; a layer that needs more has more. Less would be
# more calls and, on a GPU, launches.
SHARED_BYTES = {"cpu": 1 << 26}
SHARED_BYTES_ELSEWHERE = 1 << 30

# Subclasses of Tensor may have no memory of their own.
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)

_dtype_of, _kind_of = attrgetter("dtype"), attrgetter("device", "dtype", "shape")


class Block:
    """One parameter's rows: `rows_BN` is a [B, numel] view, `rows[r]` the r-th, in its shape."""

    def __init__(
        self, param: Tensor, num_rows: int, dtype: torch.dtype, shared_N: Tensor | None = None
    ) -> None:
        self.param = param
        # Device, dtype and shape of the parameter that the rows were allocated for.
        self.kind = _kind_of(param)
        # The dtype of the last gradient. The rows have this dtype or a wider one.
        self.grad_dtype = dtype
        self.allocate(num_rows, dtype, shared_N)
        # Bit r: row r holds a gradient of this step.
        self.written = 0
        # {row: the view of its memory that `reserve` returned last}, until `claim` takes the row.
        self.reserved: dict[int, Tensor] = {}
        self.combined: Tensor | None = None
        # Those of the parameter when `combined` was allocated.
        self.strides: tuple[int, ...] = ()

    def allocate(self, num_rows: int, dtype: torch.dtype, shared_N: Tensor | None = None) -> None:
        """Give the rows memory of their own, or the beginning of a shared one of uint8."""
        shape = num_rows, _stride_of(self.num_columns, dtype)
        if shared_N is None:
            memory = torch.empty(shape, dtype=dtype, device=self.param.device)
            memory[:, self.num_columns :] = 0
        else:
            memory = shared_N[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        self.rows_BN = memory[:, : self.num_columns]
        # In the shape of the parameter, so that no gradient is reshaped when it is received.
        self.rows = self.rows_BN.view(num_rows, *local_of(self.param).shape).unbind(0)

    @property
    def is_read(self) -> bool:
        """Whether the rows of this step have been read, and their memory been taken back."""
        return bool(self.written) and not self.rows

    def take_back(self) -> None:
        """Leave the shared memory; the next gradient needs other rows."""
        # Not a view, which would keep a memory that has become too small.
        self.rows_BN, self.rows = self.rows_BN.new_empty(0, self.num_columns), ()

    def remake(self, num_rows: int, dtype: torch.dtype) -> None:
        """Replace the rows by more, or wider, ones with the same values."""
        before = self.rows
        self.reserved.clear()
        self.allocate(num_rows, dtype)
        for r, row in enumerate(before):
            if self.written >> r & 1:
                self.rows[r].copy_(row)

    @property
    def num_columns(self) -> int:
        """Elements of the parameter; of a sharded one, those of this rank."""
        return local_of(self.param).numel()

    def gradient(self) -> Tensor:
        """Memory of the combined gradient, in the shape of the parameter."""
        param, dtype = local_of(self.param), grad_dtype_of(self.param)
        combined = self.combined
        if combined is None or self.strides != param.stride() or combined.dtype != dtype:
            # The strides matter: fused optimizers walk parameter and gradient in memory order.
            combined = self.combined = torch.empty_like(param, dtype=dtype, requires_grad=False)
            self.strides = param.stride()
        return combined

    def give(self) -> None:
        """Set `param.grad` to the combined gradient, of which a shard has this rank's part."""
        param: Any = self.param
        gradient: Any = self.gradient()
        if local_of(param) is not param:
            gradient = type(param.data).from_local(
                gradient,
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
        param.grad = gradient

    def combined_as(self, values_N: Tensor) -> Tensor:
        """The combined gradient, viewed in or copied from [numel] of its dtype."""
        if self.param.is_contiguous():
            self.combined, self.strides = values_N.view(self.param.shape), self.param.stride()
            return self.combined
        return self.gradient().copy_(values_N.view(self.param.shape))


def _stride_of(num_columns: int, dtype: torch.dtype) -> int:
    """Elements from row to row."""
    stride = -(-num_columns // ALIGNMENT) * ALIGNMENT
    return stride + ALIGNMENT * (stride * dtype.itemsize % PAGE_BYTES == 0)


def grad_dtype_of(param: Tensor) -> torch.dtype:
    """The dtype of a parameter's `p.grad`; where it may have any, that of the parameter."""
    demanded: torch.dtype | None = param.grad_dtype
    return demanded or param.dtype


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    # By attribute: importing DTensor takes as long as importing doge_fast.
    return getattr(tensor, "_local_tensor", tensor)


def local_gradient(param: Any, grad: Any) -> Tensor:
    """This rank's part of a gradient, sharded as the parameter is."""
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_of(grad)


def on_device(
    numbers: Sequence[Any] | Tensor, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """The numbers as a tensor on `device`; the host does not wait for the copy."""
    values = torch.as_tensor(numbers, dtype=dtype)
    if device.type == "cuda" and values.device.type == "cpu":
        # Pinned, or the copy would make the host wait for the device.
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class FlatBuffer:
    """Rows of domain gradients, filled during backward passes and read by the operators.

    Each block has at least `num_rows` rows; in one process that is B. A dtype of None is that of
    each gradient. Sums over micro-batches round to the dtype.
    """

    def __init__(self, num_rows: int, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and dtype not in STORAGE_DTYPES:
            raise ValueError(
                f"buffer_dtype must be a floating type or None; got {dtype}. "
                "Pass torch.float32, torch.bfloat16, torch.float16 or torch.float64."
            )
        self.num_rows = num_rows
        self.dtype = dtype
        # By id: tensors compare elementwise. A block holds its parameter, so ids stay unique.
        self._blocks: dict[int, Block] = {}
        # (whether they are added to their rows, their device), the same for all pending gradients.
        self._pending_kind = False, torch.device("cpu")
        self._forget_pending()
        # Parameters, (dtypes, number of rows) and blocks of the domain before.
        self._last_blocks: tuple[Sequence[Tensor], object, list[Block]] = [], None, []
        # Whether the wrapped optimizer's state holds a `p.grad`; None: not known before its step.
        self._state_holds_grad: bool | None = None
        # By device and stream: rows are read on the stream that has written them.
        self._shared: dict[object, _SharedMemory] = {}
        # autograd has a thread for each device.
        self._lock = threading.RLock()

    @property
    def blocks(self) -> list[Block]:
        """The rows of every parameter that has had a gradient."""
        return list(self._blocks.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, padding included; the combined gradients are not counted."""
        memories = [block.rows_BN for block in self._blocks.values()]
        memories += [shared.memory_N for shared in self._shared.values()]
        storages = (memory.untyped_storage() for memory in memories)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def receive_all(self, row: int, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """`receive` all parameters and their gradients in one call."""
        with self._lock:
            self.flush()
            blocks = self._blocks_for(params, grads)
            bit = 1 << row
            rows = [block.rows[row] for block in blocks]
            adds = [block.written & bit > 0 for block in blocks]
            for block in blocks:
                block.written |= bit
            with tracing.phase("doge_fast.accumulate"):
                for add in set(adds):
                    these = [each == add for each in adds]
                    fill(list(compress(grads, these)), list(compress(rows, these)), add=add)

    def _blocks_for(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Block]:
        # Most domains of a step touch the same parameters.
        last_params, last_kind, blocks = self._last_blocks
        kind = dtypes, _ = list(map(_dtype_of, grads)), self.num_rows
        is_same = params is last_params or list(map(id, params)) == list(map(id, last_params))
        if not is_same or kind != last_kind:
            blocks = list(map(self._block, params, dtypes))
            self._last_blocks = params, kind, blocks
        return blocks

    def receive(self, row: int, param: Tensor, grad: Tensor) -> None:
        """Add `grad` to a row of `param`; the first gradient in a step replaces what is there."""
        # Runs for every parameter and domain of a step, so it makes few calls.
        with self._lock:
            block = self._blocks.get(id(param))
            if (
                block is None
                or not block.written
                or block.grad_dtype != grad.dtype
                or row >= len(block.rows)
            ):
                block = self._block(param, grad.dtype)
            adds = bool(block.written >> row & 1)
            kind = adds, grad.device
            if self._pending and (kind != self._pending_kind or id(param) in self._pending):
                self.flush()
            block.written |= 1 << row
            self._pending[id(param)] = grad, block.rows[row]
            self._pending_kind = kind
            self._pending_bytes += grad.nbytes
            if self._pending_bytes >= PENDING_BYTES.get(grad.device.type, PENDING_BYTES_ELSEWHERE):
                self.flush()

    def claim(
        self, first_row: int, num_rows: int, param: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, bool]:
        """Mark neighbouring rows as written, for the caller to write or add to.

        With a buffer dtype of None, rows of 16 bits become float32 when a second gradient is added
        or a float32 gradient comes.

        Returns:
            [num_rows, numel], a view of the rows of `param`'s block; and whether the caller must
            add to them, since one of them holds a gradient of this step. The others hold zeros
            then.
        """
        with self._lock:
            block = self._block(param, dtype)
            if id(param) in self._pending:
                self.flush()
            these = ((1 << num_rows) - 1) << first_row
            adds = bool(block.written & these)
            if adds:
                if self.dtype is None and block.rows_BN.dtype.itemsize < 4:
                    block.remake(self.num_rows, torch.float32)
                for row in range(first_row, first_row + num_rows):
                    if not block.written >> row & 1:
                        block.rows[row].zero_()
            block.written |= these
            return block.rows_BN[first_row : first_row + num_rows], adds

    def reserve(self, row: int, param: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The memory of a row, for a gradient that may still be changed; `claim` makes it count.

        Until then `is_reserved` says whether the memory still holds what the caller has written.
        None if the row holds a gradient of this step, or is narrower than `dtype`.
        """
        with self._lock:
            block = self._block(param, dtype)
            if block.written >> row & 1 or block.rows_BN.dtype.itemsize < dtype.itemsize:
                return None
            # A new view for each caller, so that `is_reserved` can tell them apart.
            memory = block.reserved[row] = block.rows[row].view_as(block.rows[row])
            return memory

    def is_reserved(self, row: int, param: Tensor, memory: Tensor) -> bool:
        """Whether no other gradient and no other `reserve` has taken the memory of a row."""
        block = self._blocks.get(id(param))
        return (
            block is not None and block.reserved.get(row) is memory and not block.written >> row & 1
        )

    def lend(
        self,
        kinds: Sequence[tuple[Tensor, torch.dtype]],
        most_bytes: int,
        read: Callable[[list[Block]], None],
    ) -> None:
        """Have the rows of parameters, each with its dtype, in memory that others use after them.

        Call it before the first of them is written, and after all that were lent it before have got
        their gradients. Where the memory is full, `read` is called with the blocks that have it;
        then their rows are lost, and a further gradient of one in this step is refused. A parameter
        that has a gradient in this step, or whose row is reserved, keeps its memory. `most_bytes`:
        of all rows that may be lent.
        """
        with self._lock:
            wanted: dict[torch.device, dict[int, tuple[Tensor, torch.dtype]]] = defaultdict(dict)
            for param, dtype in kinds:
                block = self._blocks.get(id(param))
                if block is None or not (block.written or block.reserved):
                    wanted[param.device][id(param)] = param, dtype
            for device, of_device in wanted.items():
                most = SHARED_BYTES.get(device.type, SHARED_BYTES_ELSEWHERE)
                stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
                if (device, stream) not in self._shared:
                    self._shared[device, stream] = _SharedMemory(device)
                shared = self._shared[device, stream]
                self._lend([*of_device.values()], shared, min(most, most_bytes), read)

    def _lend(
        self,
        kinds: Sequence[tuple[Tensor, torch.dtype]],
        shared: "_SharedMemory",
        num_bytes: int,
        read: Callable[[list[Block]], None],
    ) -> None:
        sizes = [self.bytes_of(param, dtype) for param, dtype in kinds]
        # Not the size of the memory, which has grown since the first step: sums must be the same to
        # the bit in a process that goes on from a checkpoint.
        if shared.blocks and shared.num_used + sum(sizes) > num_bytes:
            self.flush()
            self._clear_absent(shared.blocks)
            read(shared.blocks)
            shared.take_back()
        if len(shared.memory_N) < (needed := max(num_bytes, sum(sizes))):
            # The old one first, which nothing uses: there may be no room for both.
            shared.memory_N = shared.memory_N.new_empty(0)
            shared.memory_N = shared.memory_N.new_empty(needed)
        for (param, dtype), size in zip(kinds, sizes, strict=True):
            shared_N = shared.memory_N[shared.num_used : shared.num_used + size]
            shared.blocks.append(self._block(param, dtype, shared_N))
            shared.num_used += size

    def bytes_of(self, param: Tensor, dtype: torch.dtype) -> int:
        """Of the rows of a parameter with gradients of this dtype, padding included."""
        dtype = self.dtype or dtype
        size = self.num_rows * _stride_of(param.numel(), dtype) * dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT

    def flush(self) -> None:
        """Write the pending gradients into their rows."""
        if self._pending:
            grads, rows = zip(*self._pending.values(), strict=True)
            with tracing.phase("doge_fast.accumulate"):
                accumulate(grads, rows, add=self._pending_kind[0])
        self._forget_pending()

    def _forget_pending(self) -> None:
        # {id of a parameter: its gradient, and the row}
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}
        self._pending_bytes = 0

    def clear(self) -> None:
        """Forget this step's rows; the memory stays."""
        self._forget_pending()
        for block in self._blocks.values():
            block.written = 0
            block.reserved.clear()
        for shared in self._shared.values():
            shared.take_back()
        # The model may be moved or cast before the next step.
        self._last_blocks = [], None, []

    def release(self) -> None:
        """Free the memory."""
        self.clear()
        self._blocks.clear()
        self._shared.clear()

    def is_combined(self, param: Tensor) -> bool:
        """Whether `param.grad` is the combined gradient that this buffer holds."""
        grad, block = param.grad, self._blocks.get(id(param))
        if grad is None or block is None or block.combined is None:
            return False
        own = local_of(grad)
        # The local part of a DTensor is a view of the tensor that the DTensor was made from.
        is_view = own is not grad and own.data_ptr() == block.combined.data_ptr()
        return own is block.combined or is_view

    def forget_combined(self, optimizer: Any) -> bool:
        """Drop the combined gradients if the optimizer's state holds one, as that of MARS does.

        The next step then allocates new ones, and does not write into the optimizer's state. True
        if they were dropped.
        """
        if self._state_holds_grad is None and (state := optimizer.state):
            values = map(local_of, tree_leaves([*state.values()]))
            plain = (x for x in values if type(x) in PLAIN_TENSORS and x.layout == torch.strided)
            addresses = {tensor.untyped_storage().data_ptr() for tensor in plain}
            ours = (block.combined for block in self._blocks.values() if block.combined is not None)
            self._state_holds_grad = any(
                each.untyped_storage().data_ptr() in addresses for each in ours
            )
        if self._state_holds_grad:
            for block in self._blocks.values():
                block.combined = None
        return bool(self._state_holds_grad)

    def dtypes_of(self, params: Iterable[Tensor]) -> list[torch.dtype | None]:
        """The dtype of each parameter's rows; None without a gradient in this step."""
        blocks = [self._blocks.get(id(param)) for param in params]
        return [b.rows_BN.dtype if b is not None and b.written else None for b in blocks]

    def touched(
        self, params: Sequence[Tensor], dtypes: Sequence[torch.dtype | None] | None = None
    ) -> list[Block]:
        """Blocks of the `params` with a gradient in this step; rows without one hold zeros.

        Those whose rows have been read are left out.

        `dtypes` are those of the rows over all ranks, None without a gradient on any rank; by
        default `dtypes_of(params)`.
        """
        self.flush()
        if dtypes is None:
            dtypes = self.dtypes_of(params)
        read = {id(block.param) for block in self.read_blocks()}
        blocks = [
            self._block(param, dtype)
            for param, dtype in zip(params, dtypes, strict=True)
            if dtype is not None and id(param) not in read
        ]
        self._clear_absent(blocks)
        return blocks

    def read_blocks(self) -> list[Block]:
        """Those whose rows have been read in this step, in the order of their first gradient."""
        return [block for block in self._blocks.values() if block.is_read]

    def _clear_absent(self, blocks: Sequence[Block]) -> None:
        every = (1 << self.num_rows) - 1
        absent = [
            row
            for block in blocks
            if block.written != every
            for r, row in enumerate(block.rows)
            if not block.written >> r & 1
        ]
        if absent:
            torch._foreach_zero_(absent)

    def _block(self, param: Tensor, dtype: torch.dtype, shared_N: Tensor | None = None) -> Block:
        block = self._blocks.get(id(param))
        has_moved = block is not None and not block.written and _kind_of(param) != block.kind
        if block is None or has_moved:
            # The parameter may have been cast or moved since the last step.
            block = Block(param, self.num_rows, self.dtype or dtype, shared_N)
            self._blocks[id(param)] = block
        elif block.is_read:
            raise RuntimeError(
                f"a parameter of shape {list(param.shape)} has a second gradient in a step whose "
                "rows are not kept, after its first one was read. Pass keep_rows=True, or run one "
                "domain after another, with optimizer.domain(name)."
            )
        elif shared_N is not None:
            block.allocate(self.num_rows, self.dtype or dtype, shared_N)
        else:
            both = self.dtype or torch.promote_types(block.rows_BN.dtype, dtype)
            if both != block.rows_BN.dtype or len(block.rows) < self.num_rows:
                self.flush()
                block.remake(self.num_rows, both)
        block.grad_dtype = dtype
        return block


class _SharedMemory:
    """Memory of one device, and the blocks that have a part of it."""

    def __init__(self, device: torch.device) -> None:
        self.memory_N = torch.empty(0, dtype=torch.uint8, device=device)
        self.blocks: list[Block] = []
        self.num_used = 0

    def take_back(self) -> None:
        """All parts."""
        for block in self.blocks:
            block.take_back()
        self.blocks, self.num_used = [], 0


@contextmanager
def combined_gradients(blocks: Sequence[Block]) -> Iterator[list[Tensor]]:
    """Memory for the weighted sum of every block, which is its `combined` afterwards."""
    gradients = [block.gradient() for block in blocks]
    # Rows have logical order: a gradient with other strides is copied from a contiguous sum.
    outs = [g if g.is_contiguous() else g.new_empty(g.shape) for g in gradients]
    yield outs
    for gradient, values in zip(gradients, outs, strict=True):
        if values is not gradient:
            gradient.copy_(values)


def combined_norm(blocks: Sequence[Block]) -> Tensor:
    """Float64 scalar: the norm of the combined gradients in `p.grad`; of shards, of this rank's."""
    gradients = _gradients_of(blocks)
    # Not in 16 bits, which would round the norms.
    wide = torch.float64 if torch.float64 in map(_dtype_of, gradients) else torch.float32
    norms = torch._foreach_norm(gradients, 2, wide)
    norm: Tensor = torch.stack([each.to(norms[0].device) for each in norms]).double().norm()
    return norm


def scale_combined(blocks: Sequence[Block], factor: Tensor) -> None:
    """Multiply the combined gradients in `p.grad`, in place."""
    gradients = _gradients_of(blocks)
    for group in by_device(gradients):
        there = [gradients[index] for index in group]
        torch._foreach_mul_(there, factor.to(there[0]))


def _gradients_of(blocks: Sequence[Block]) -> list[Tensor]:
    """`p.grad` of every block; of a sharded one, this rank's part."""
    return [local_of(block.param.grad) for block in blocks if block.param.grad is not None]
