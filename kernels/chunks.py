"""Chunk tables: how a list of blocks reaches one GPU launch.

A table has one row of int64 per chunk of at most `chunk_columns` columns: addresses, the row
stride where there is one, the length. It is uploaded once and kept: blocks of a flat buffer
live at the same address step after step, so the usual launch copies nothing and waits for
nothing. What depends on the list of blocks alone (checks, spans, the key of the tables) is kept
too; it is found by all that it is made of, addresses, shapes, strides, dtypes and devices, which
takes a fraction of the time. A capture into a CUDA graph cannot upload: it follows one ordinary
call with the same blocks, and the tables it used are kept for good, since the graph reads them
whenever it runs.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

# Each operator keeps tables up to this cost, some 16 MB: a table costs its number of rows, and 64
# for what surrounds it. One budget for all would let gradients, which move from step to step, push
# out the tables of rows that stay.
MAX_COST, COST_OF_A_TABLE = 1 << 19, 64
# Whatever they cost: a step has so many lists for one operator, and with models beyond 500 million
# columns two would push each other out, to be uploaded at every step.
MIN_TABLES = 4
# Lists of blocks whose spans are kept: an optimizer has two to four.
MAX_LISTS = 32
# What a launch may promise the compiler, in elements; blocks that start on 64 elements keep it.
ALIGNED_ELEMENTS = 16


class Span(NamedTuple):
    """A block as the device sees it: addresses that advance with the column, and sizes."""

    source: int
    source_itemsize: int
    row_stride: int
    length: int
    target: int = 0
    target_itemsize: int = 1

    @classmethod
    def of(cls, block: Tensor, out: Tensor | None = None) -> "Span":
        """A block [R, n], and the [n] that it is summed into, where there is one."""
        of_block = (block.data_ptr(), block.itemsize, block.stride(0), block.shape[1])
        return cls(*of_block) if out is None else cls(*of_block, out.data_ptr(), out.itemsize)


class Spans(tuple[Span, ...]):
    """Spans in a key: the hash of a thousand numbers is computed once."""

    _hash: int | None = None

    def __hash__(self) -> int:
        """As that of a tuple."""
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


class ChunkTable(NamedTuple):
    """A table on the device, and what a kernel's launch needs to know about it."""

    table: Tensor
    num_chunks: int
    is_aligned: bool
    # The upload reads this, so it must live until the upload is done.
    host_table: Tensor


class _Kept(NamedTuple):
    """The tables of one list of blocks; on a GPU the stream and the event of the upload."""

    tables: tuple[ChunkTable, ...]
    stream: torch.cuda.Stream | None
    uploaded: torch.cuda.Event | None

    def cost(self) -> int:
        return COST_OF_A_TABLE + sum(table.num_chunks for table in self.tables)

    def wait(self) -> None:
        """Let the current stream, where it is another than the upload's, wait for the upload."""
        if self.stream is None or self.uploaded is None:
            return
        stream = torch.cuda.current_stream(self.stream.device)
        if stream != self.stream:
            stream.wait_event(self.uploaded)
            for table in self.tables:
                table.table.record_stream(stream)


_Key = tuple[object, ...]
# By the fields of a table, least recently used first.
_kept: defaultdict[tuple[str, ...], OrderedDict[_Key, _Kept]] = defaultdict(OrderedDict)
_costs: defaultdict[tuple[str, ...], int] = defaultdict(int)
# Tables that a CUDA graph reads.
_captured: dict[_Key, _Kept] = {}
_Groups = tuple[tuple[tuple[torch.dtype, ...], Spans], ...]
# By the layout of the lists, least recently used first.
_groups: OrderedDict[_Key, _Groups] = OrderedDict()
_shape_of, _dtype_of = attrgetter("shape"), attrgetter("dtype")


def spans_by_dtype(check: Callable[[], None], *lists: Sequence[Tensor]) -> _Groups:
    """The spans of blocks, or of blocks and outputs, for each tuple of dtypes: one launch each.

    Args:
        check: raises what is to be raised about these lists; called where they are new. It may
            look at nothing but the sizes, strides, dtypes and devices of their tensors.
        lists: blocks [R, n], and the [n] that each is summed into, where there are any.
    """
    # A tensor that was moved, resized or cast differs in one of these, whatever its identity.
    layout = tuple(
        tuple(map(of, tensors))
        for tensors in lists
        for of in (Tensor.data_ptr, Tensor.stride, _shape_of, _dtype_of, Tensor.get_device)
    )
    groups = _groups.get(layout)
    if groups is None:
        check()
        groups = _groups[layout] = tuple(
            (dtypes, Spans(Span.of(*tensors) for tensors in group))
            for dtypes, group in by_dtype(zip(*lists, strict=True))
        )
        if len(_groups) > MAX_LISTS:
            _groups.popitem(last=False)
    else:
        _groups.move_to_end(layout)
    return groups


def chunk_tables(
    spans: Sequence[Span], fields: tuple[str, ...], chunk_columns: int, device: torch.device
) -> tuple[ChunkTable, ...]:
    """The tables of `spans`: the aligned chunks, then the others; none where there are none.

    A row has the `fields`, of "source", "row_stride", "length" and "target", in this order.
    Two tables, because one bias of ten elements would otherwise take the wide loads from all.

    Raises:
        RuntimeError: a CUDA graph is being captured and there is no table of these blocks yet.
    """
    # All that a table is made of: an address that comes back with another size is another key.
    key = (device, chunk_columns, fields, spans if isinstance(spans, Spans) else Spans(spans))
    kept = _kept[fields]
    entry = kept.get(key) or _captured.get(key)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if entry is None:
            raise RuntimeError(
                "A CUDA graph is being captured, and the addresses of these blocks are not on the "
                "device yet. Run the same call once before the capture, on the very tensors that "
                "it uses; gradients that move from step to step need implementation='torch'."
            )
        # torch.cuda.graph waits for the device before it captures: the upload is done.
        _captured[key] = entry
        return entry.tables
    if entry is None:
        entry = _keep(key, _upload(spans, fields, chunk_columns, device))
    elif key in kept:
        kept.move_to_end(key)
    entry.wait()
    return entry.tables


def _keep(key: _Key, new: _Kept) -> _Kept:
    fields = key[2]
    assert isinstance(fields, tuple)
    kept = _kept[fields]
    kept[key] = new
    _costs[fields] += new.cost()
    while _costs[fields] > MAX_COST and len(kept) > MIN_TABLES:
        _, oldest = kept.popitem(last=False)
        _costs[fields] -= oldest.cost()
    return new


def _upload(
    spans: Sequence[Span], fields: tuple[str, ...], chunk_columns: int, device: torch.device
) -> _Kept:
    column_of, is_aligned_C = _cut(spans, chunk_columns)
    rows_CF = torch.stack([column_of[name] for name in fields], dim=1)
    tables = []
    for is_aligned in (True, False):
        host_table = rows_CF[is_aligned_C == is_aligned]
        if len(host_table):
            if device.type != "cpu":
                # Pinned, or the copy would make the host wait for the device.
                host_table = host_table.pin_memory()
            table = host_table.to(device, non_blocking=True)
            tables.append(ChunkTable(table, len(host_table), is_aligned, host_table))
    if device.type != "cuda":
        return _Kept(tuple(tables), None, None)
    stream = torch.cuda.current_stream(device)
    return _Kept(tuple(tables), stream, stream.record_event())


def _cut(spans: Sequence[Span], chunk_columns: int) -> tuple[dict[str, Tensor], Tensor]:
    spans_SF = torch.tensor(spans, dtype=torch.int64).view(-1, len(Span._fields))
    of_span = dict(zip(Span._fields, spans_SF.unbind(1), strict=True))
    counts_S = -(-of_span["length"] // chunk_columns)
    span_C = torch.repeat_interleave(counts_S)
    of = {name: values_S[span_C] for name, values_S in of_span.items()}
    first_S = counts_S.cumsum(0) - counts_S
    start_C = (torch.arange(len(span_C)) - first_S[span_C]) * chunk_columns
    of["source"] = of["source"] + start_C * of["source_itemsize"]
    of["target"] = of["target"] + start_C * of["target_itemsize"]
    of["length"] = (of["length"] - start_C).clamp(max=chunk_columns)
    is_aligned_C = (
        (of["source"] % (ALIGNED_ELEMENTS * of["source_itemsize"]) == 0)
        & (of["target"] % (ALIGNED_ELEMENTS * of["target_itemsize"]) == 0)
        & (of["row_stride"] % ALIGNED_ELEMENTS == 0)
        & (of["length"] % ALIGNED_ELEMENTS == 0)
    )
    return of, is_aligned_C


def by_dtype(
    items: Iterable[Sequence[Tensor]],
) -> Iterable[tuple[tuple[torch.dtype, ...], list[Sequence[Tensor]]]]:
    """Tuples of tensors, grouped by their dtypes in order of first appearance: one launch each."""
    groups: dict[tuple[torch.dtype, ...], list[Sequence[Tensor]]] = {}
    for tensors in items:
        groups.setdefault(tuple(tensor.dtype for tensor in tensors), []).append(tensors)
    return groups.items()
