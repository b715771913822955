"""Chunk tables: how a list of blocks reaches one GPU launch.

A table has one row of int64 per chunk of at most `chunk_columns` columns: addresses, the row
stride where there is one, the length. It is uploaded once and kept: blocks of a flat buffer
live at the same address step after step, so the usual launch copies nothing and waits for
nothing. A capture into a CUDA graph must follow one ordinary call with the same blocks.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Tables that are kept: some per dtype and operator for one model, and room for a few models.
MAX_TABLES = 64
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


class ChunkTable(NamedTuple):
    """A table on the device, and what the launch must know about it."""

    table: Tensor
    num_chunks: int
    is_aligned: bool
    # The upload reads this; it must live until then.
    host_table: Tensor


_kept: OrderedDict[tuple[object, ...], tuple[ChunkTable, ...]] = OrderedDict()


def chunk_tables(
    spans: Sequence[Span], fields: tuple[str, ...], chunk_columns: int, device: torch.device
) -> tuple[ChunkTable, ...]:
    """The tables of `spans`: the aligned chunks, then the others; none where there are none.

    A row has the `fields`, of "source", "row_stride", "length" and "target", in this order.
    Apart, because one bias of ten elements would otherwise take the wide loads from all.
    """
    key = (device, chunk_columns, fields, tuple(spans))
    found = _kept.get(key)
    if found is None:
        found = _kept[key] = _upload(spans, fields, chunk_columns, device)
        if len(_kept) > MAX_TABLES:
            _kept.popitem(last=False)
    else:
        _kept.move_to_end(key)
    return found


def _upload(
    spans: Sequence[Span], fields: tuple[str, ...], chunk_columns: int, device: torch.device
) -> tuple[ChunkTable, ...]:
    column_of, is_aligned_C = _cut(spans, chunk_columns)
    rows_CF = np.stack([column_of[name] for name in fields], axis=1)
    tables = []
    for is_aligned in (True, False):
        host_table = torch.from_numpy(rows_CF[is_aligned_C == is_aligned])
        if len(host_table):
            if device.type != "cpu":
                # Pinned, or the copy would make the host wait for the device.
                host_table = host_table.pin_memory()
            table = host_table.to(device, non_blocking=True)
            tables.append(ChunkTable(table, len(host_table), is_aligned, host_table))
    return tuple(tables)


def _cut(spans: Sequence[Span], chunk_columns: int) -> tuple[dict[str, IntArray], BoolArray]:
    spans_SF = np.array(spans, dtype=np.int64).reshape(-1, len(Span._fields))
    of_span = dict(zip(Span._fields, spans_SF.T, strict=True))
    counts_S = -(-of_span["length"] // chunk_columns)
    span_C = np.repeat(np.arange(len(spans)), counts_S)
    of: dict[str, IntArray] = {name: values_S[span_C] for name, values_S in of_span.items()}
    first_S: IntArray = np.cumsum(counts_S) - counts_S
    start_C = (np.arange(len(span_C), dtype=np.int64) - first_S[span_C]) * chunk_columns
    of["source"] = of["source"] + start_C * of["source_itemsize"]
    of["target"] = of["target"] + start_C * of["target_itemsize"]
    of["length"] = np.minimum(of["length"] - start_C, chunk_columns)
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
