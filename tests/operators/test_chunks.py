"""Chunk tables: every column once, aligned chunks apart, tables kept and let go."""

import pytest
import torch

from doge_fast.kernels import chunks
from doge_fast.kernels.chunks import Span, chunk_tables

FIELDS = ("source", "row_stride", "length", "target")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_kept", type(chunks._kept)())


def test_chunks_cover_every_column_once() -> None:
    spans = [
        Span(0, 4, 128, 100, 10_000, 8),
        Span(4096, 4, 64, 0, 20_000, 8),
        Span(8192, 4, 64, 7, 30_000, 8),
    ]
    covered = set()
    for table in chunk_tables(spans, FIELDS, 32, CPU):
        for source, row_stride, length, target in table.table.tolist():
            span = next(s for s in spans if s.source <= source < s.source + 4 * max(s.length, 1))
            first = (source - span.source) // 4
            assert row_stride == span.row_stride
            assert target == span.target + 8 * first
            assert 0 < length <= 32
            new = {(span.source, first + i) for i in range(length)}
            assert not new & covered
            covered |= new
    assert covered == {(s.source, i) for s in spans for i in range(s.length)}


def test_a_ragged_block_does_not_take_wide_loads_from_the_others() -> None:
    spans = [Span(0, 4, 64, 96), Span(1024, 4, 64, 10), Span(4096 + 4, 4, 64, 64)]
    aligned, ragged = chunk_tables(spans, ("length",), 32, CPU)
    assert (aligned.is_aligned, aligned.table.tolist()) == (True, [[32], [32], [32]])
    assert (ragged.is_aligned, ragged.table.tolist()) == (False, [[10], [32], [32]])


@pytest.mark.parametrize(
    "span",
    [
        pytest.param(Span(8, 4, 64, 64), id="address"),
        pytest.param(Span(0, 4, 63, 64), id="row stride"),
        pytest.param(Span(0, 4, 64, 60), id="length"),
        pytest.param(Span(0, 4, 64, 64, 12, 4), id="target"),
    ],
)
def test_alignment_needs_all_four(span: Span) -> None:
    [table] = chunk_tables([span], FIELDS, 64, CPU)
    assert not table.is_aligned


def test_nothing_to_do_makes_no_table() -> None:
    assert chunk_tables([Span(0, 4, 64, 0)], FIELDS, 64, CPU) == ()


def test_a_table_is_made_once_and_old_ones_are_let_go() -> None:
    def tables(address: int) -> object:
        return chunk_tables([Span(address, 4, 64, 64)], FIELDS, 64, CPU)

    first = tables(0)
    assert tables(0) is first
    for address in range(chunks.MAX_TABLES):
        tables(64 * (address + 1))
    assert len(chunks._kept) == chunks.MAX_TABLES
    assert tables(0) is not first
