"""Chunk tables: the arguments of one GPU launch over a list of blocks.

A table has one int64 row per chunk of at most `chunk_columns` columns: addresses, a row stride if
there is one, and the length. Tables are uploaded once and cached: the blocks of a flat buffer have
the same addresses in every step, so a launch normally copies nothing and waits for nothing. The
spans of a list of blocks are cached after its check, by the addresses, shapes, strides, dtypes and
devices of the blocks. A CUDA graph capture cannot upload. It must follow an ordinary call with the
same blocks; the tables that it used are never evicted, because the graph reads them.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import NamedTuple

import torch
from torch import Tensor

# The largest cost of an operator's cached tables, some 16 MB. A table costs 64 plus its number of
# rows. Operators have separate caches, so that the tables of gradients, whose addresses change from
# step to step, do not evict those of the buffer's rows.
MAX_COST, COST_OF_A_TABLE = 1 << 19, 64
# At least this many tables stay cached: a step has that many lists per operator.
# Beyond 500 million columns two tables would otherwise evict each other in every step.
MIN_TABLES = 4
# Lists of blocks whose spans are cached; an optimizer has two to four.
MAX_LISTS = 32
# The alignment that a launch promises the compiler, in elements. Blocks of a flat buffer start at
# multiples of 64 elements.
ALIGNED_ELEMENTS = 16


class Span(NamedTuple):
    """Addresses and sizes of a block [R, n], and of vectors [n] that go with it, if any."""

    source: int
    source_itemsize: int
    row_stride: int
    length: int
    vector: int = 0
    vector_itemsize: int = 1
    out: int = 0
    out_itemsize: int = 1

    @classmethod
    def of(cls, block: Tensor, *vectors: Tensor) -> "Span":
        """The span of a block and its vectors: an output, or second moments and then an output."""
        of_block = (block.data_ptr(), block.itemsize, block.stride(0), block.shape[1])
        return cls(*of_block, *(part for v in vectors for part in (v.data_ptr(), v.itemsize)))


class Spans(tuple[Span, ...]):
    """Spans as a key, whose hash is computed once."""

    _hash: int | None = None

    def __hash__(self) -> int:
        """The hash of the tuple."""
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


class ChunkTable(NamedTuple):
    """A table on the device, with the arguments of a launch."""

    table: Tensor
    num_chunks: int
    is_aligned: bool
    # The upload reads this, so it must live until the upload is done.
    host_table: Tensor


class _Uploaded(NamedTuple):
    """The tables of one list of blocks; on a GPU with the stream and the event of their upload."""

    tables: tuple[ChunkTable, ...]
    stream: torch.cuda.Stream | None
    uploaded: torch.cuda.Event | None

    def cost(self) -> int:
        return COST_OF_A_TABLE + sum(table.num_chunks for table in self.tables)

    def wait(self) -> None:
        """Let the current stream wait for the upload, if that ran on another stream."""
        if self.stream is None or self.uploaded is None:
            return
        stream = torch.cuda.current_stream(self.stream.device)
        if stream != self.stream:
            stream.wait_event(self.uploaded)
            for table in self.tables:
                table.table.record_stream(stream)


_Key = tuple[object, ...]
# By the fields of a table, least recently used first.
_uploaded: defaultdict[tuple[str, ...], OrderedDict[_Key, _Uploaded]] = defaultdict(OrderedDict)
_costs: defaultdict[tuple[str, ...], int] = defaultdict(int)
# Tables that a CUDA graph reads.
_captured: dict[_Key, _Uploaded] = {}
SpansByDtype = tuple[tuple[tuple[torch.dtype, ...], Spans], ...]
# By the layout of the lists, least recently used first.
_spans: OrderedDict[_Key, SpansByDtype] = OrderedDict()
_shape_of, _dtype_of = attrgetter("shape"), attrgetter("dtype")
_is_none = partial(is_, None)


def spans_by_dtype(
    check: Callable[[], None], blocks: Sequence[Tensor], *vectors: Sequence[Tensor | None]
) -> SpansByDtype:
    """The spans of blocks, or of blocks and vectors, for each tuple of dtypes: one launch each.

    Args:
        check: raises ValueError about these lists; called once for each new layout, so it may read
            only sizes, strides, dtypes and devices.
        blocks: [R, n] each.
        vectors: none, or one list with a vector [n] for each block; None for a block without one,
            whose tuple has one dtype. Or two lists, without None.
    """
    # Not the tensors' identities: a tensor may be moved, resized or cast in place.
    layout = tuple(
        tuple(map(of, tensors))
        for tensors in (blocks, *map(_without_none, vectors))
        for of in (Tensor.data_ptr, Tensor.stride, _shape_of, _dtype_of, Tensor.get_device)
    )
    layout += tuple(tuple(map(_is_none, each)) for each in vectors)
    groups = _spans.get(layout)
    if groups is None:
        check()
        groups = _spans[layout] = tuple(
            (dtypes, Spans(Span.of(*tensors) for tensors in group))
            for dtypes, group in by_dtype(map(_without_none, zip(blocks, *vectors, strict=True)))
        )
        if len(_spans) > MAX_LISTS:
            _spans.popitem(last=False)
    else:
        _spans.move_to_end(layout)
    return groups


def _without_none(tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def chunk_tables(
    spans: Sequence[Span], fields: tuple[str, ...], chunk_columns: int, device: torch.device
) -> tuple[ChunkTable, ...]:
    """The tables of `spans`: one of aligned chunks and one of the others, without empty tables.

    The columns of a table are `fields`: of "source", "row_stride", "length", "vector" and "out".
    There are two tables so that a bias of ten elements does not cost all others their wide loads.

    Raises:
        RuntimeError: a CUDA graph is being captured and there is no table of these blocks yet.
    """
    # With all sizes: the allocator may hand out an address again for another size.
    key = (device, chunk_columns, fields, spans if isinstance(spans, Spans) else Spans(spans))
    cached = _uploaded[fields]
    entry = cached.get(key) or _captured.get(key)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if entry is None:
            raise RuntimeError(
                "A CUDA graph is being captured, and the addresses of these blocks are not on the "
                "device yet. Run the same call on the same tensors once before the capture; for "
                "gradients whose addresses change pass implementation='torch'."
            )
        # The upload is done: torch.cuda.graph synchronizes the device before a capture.
        _captured[key] = entry
        return entry.tables
    if entry is None:
        entry = _remember(key, _upload(spans, fields, chunk_columns, device))
    elif key in cached:
        cached.move_to_end(key)
    entry.wait()
    return entry.tables


def _remember(key: _Key, new: _Uploaded) -> _Uploaded:
    fields = key[2]
    assert isinstance(fields, tuple)
    cached = _uploaded[fields]
    cached[key] = new
    _costs[fields] += new.cost()
    while _costs[fields] > MAX_COST and len(cached) > MIN_TABLES:
        _, oldest = cached.popitem(last=False)
        _costs[fields] -= oldest.cost()
    return new


def _upload(
    spans: Sequence[Span], fields: tuple[str, ...], chunk_columns: int, device: torch.device
) -> _Uploaded:
    column_of, is_aligned_C = _columns_of_chunks(spans, chunk_columns)
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
        return _Uploaded(tuple(tables), None, None)
    stream = torch.cuda.current_stream(device)
    return _Uploaded(tuple(tables), stream, stream.record_event())


def _columns_of_chunks(
    spans: Sequence[Span], chunk_columns: int
) -> tuple[dict[str, Tensor], Tensor]:
    spans_SF = torch.tensor(spans, dtype=torch.int64).view(-1, len(Span._fields))
    of_span = dict(zip(Span._fields, spans_SF.unbind(1), strict=True))
    counts_S = -(-of_span["length"] // chunk_columns)
    span_C = torch.repeat_interleave(counts_S)
    of = {name: values_S[span_C] for name, values_S in of_span.items()}
    first_S = counts_S.cumsum(0) - counts_S
    start_C = (torch.arange(len(span_C)) - first_S[span_C]) * chunk_columns
    of["source"] = of["source"] + start_C * of["source_itemsize"]
    of["vector"] = of["vector"] + start_C * of["vector_itemsize"]
    of["out"] = of["out"] + start_C * of["out_itemsize"]
    of["length"] = (of["length"] - start_C).clamp(max=chunk_columns)
    is_aligned_C = (
        (of["source"] % (ALIGNED_ELEMENTS * of["source_itemsize"]) == 0)
        & (of["vector"] % (ALIGNED_ELEMENTS * of["vector_itemsize"]) == 0)
        & (of["out"] % (ALIGNED_ELEMENTS * of["out_itemsize"]) == 0)
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
