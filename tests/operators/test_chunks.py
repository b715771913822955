"""Chunk tables: every column once, aligned chunks apart, tables kept and let go."""

from collections import OrderedDict, defaultdict
from typing import Any
from unittest import mock

import pytest
import torch

from doge_fast.kernels import chunks
from doge_fast.kernels.chunks import (
    ChunkTable,
    Span,
    Spans,
    _Uploaded,
    chunk_tables,
    spans_by_dtype,
)

FIELDS = ("source", "row_stride", "length", "vector")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_uploaded", defaultdict(OrderedDict))
    monkeypatch.setattr(chunks, "_costs", defaultdict(int))
    monkeypatch.setattr(chunks, "_captured", {})
    monkeypatch.setattr(chunks, "_spans", OrderedDict())


def test_chunks_cover_every_column_once():
    spans = [
        Span(0, 4, 128, 100, 10_000, 8),
        Span(4096, 4, 64, 0, 20_000, 8),
        Span(8192, 4, 64, 7, 30_000, 8),
    ]
    covered = set()
    for table in chunk_tables(spans, FIELDS, 32, CPU):
        for source, row_stride, length, vector in table.table.tolist():
            span = next(s for s in spans if s.source <= source < s.source + 4 * max(s.length, 1))
            first = (source - span.source) // 4
            assert row_stride == span.row_stride
            assert vector == span.vector + 8 * first
            assert 0 < length <= 32
            new = {(span.source, first + i) for i in range(length)}
            assert not new & covered
            covered |= new
    assert covered == {(s.source, i) for s in spans for i in range(s.length)}
    # Nothing to do makes no table.
    assert chunk_tables([spans[1]], FIELDS, 64, CPU) == ()


def test_a_ragged_block_does_not_take_wide_loads_from_the_others():
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
        pytest.param(Span(0, 4, 64, 64, 12, 4), id="vector"),
    ],
)
def test_alignment_needs_all_four(span):
    [table] = chunk_tables([span], FIELDS, 64, CPU)
    assert not table.is_aligned


def tables_at(
    address: int, length: int = 64, fields: tuple[str, ...] = FIELDS
) -> tuple[ChunkTable, ...]:
    return chunk_tables([Span(address, 4, 64, length)], fields, 64, CPU)


def test_a_table_is_made_once_and_old_ones_are_let_go(monkeypatch):
    monkeypatch.setattr(chunks, "MAX_COST", 10 * (chunks.COST_OF_A_TABLE + 1))
    first = tables_at(0)
    assert tables_at(0) is first
    for address in range(9):
        tables_at(64 * (address + 1))
    assert tables_at(0) is first
    assert len(chunks._uploaded[FIELDS]) == 10
    # The one that was used least recently goes first.
    second = tables_at(128)
    tables_at(64 * 10)
    assert tables_at(0) is first
    assert tables_at(128) is second
    assert len(chunks._uploaded[FIELDS]) == 10
    for address in range(100, 110):
        tables_at(64 * address)
    assert tables_at(0) is not first
    # An address that comes back with another size is another table.
    [short], [long] = tables_at(0, 64), tables_at(0, 128)
    assert short.table[:, 2].tolist() == [64]
    assert long.table[:, 2].tolist() == [64, 64]


def test_the_tables_of_a_step_are_kept_whatever_they_cost(monkeypatch):
    monkeypatch.setattr(chunks, "MAX_COST", 100)
    large = [tables_at(4096 * n, length=64 * 200) for n in range(chunks.MIN_TABLES)]
    for n, tables in enumerate(large):
        assert tables_at(4096 * n, length=64 * 200) is tables
    tables_at(64)
    assert tables_at(0, length=64 * 200) is not large[0]
    assert len(chunks._uploaded[FIELDS]) == chunks.MIN_TABLES


def test_one_operator_does_not_push_out_the_tables_of_another(monkeypatch):
    monkeypatch.setattr(chunks, "MAX_COST", 3 * (chunks.COST_OF_A_TABLE + 1))
    first = tables_at(0)
    for address in range(10):
        tables_at(64 * address, fields=("source", "length"))
    assert tables_at(0) is first


class TestSpansByDtype:
    """What is known of a list of blocks, and when it is found out anew."""

    @pytest.fixture
    def seen(self) -> list[int]:
        return []

    def look(self, seen: list[int], *lists: list[torch.Tensor]) -> Any:
        return spans_by_dtype(lambda: seen.append(1), *lists)

    def test_a_list_is_looked_at_once(self, seen):
        blocks = [torch.zeros(3, 8), torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(3, 2)]
        groups = self.look(seen, blocks)
        assert [dtypes for dtypes, _ in groups] == [(torch.float32,), (torch.bfloat16,)]
        assert list(groups[0][1]) == [Span.of(blocks[0]), Span.of(blocks[2])]
        # Other objects for the same memory, as torch's operators may hand over.
        assert self.look(seen, [block.view(block.shape) for block in blocks]) is groups
        assert len(seen) == 1

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda block: block.set_(torch.zeros(3, 8)), id="memory"),
            pytest.param(lambda block: block.resize_(3, 7), id="size"),
            pytest.param(lambda block: block.resize_(2, 8), id="rows"),
            pytest.param(lambda block: block.as_strided_((3, 8), (1, 3)), id="strides"),
            pytest.param(lambda block: setattr(block, "data", block.int()), id="dtype"),
        ],
    )
    def test_a_tensor_that_changes_is_looked_at_again(self, seen, change):
        block = torch.zeros(3, 8)
        self.look(seen, [block])
        change(block)
        [(_, [span])] = self.look(seen, [block])
        assert span == Span.of(block)
        assert len(seen) == 2

    def test_other_outputs_are_another_list(self, seen):
        blocks, first, second = [torch.zeros(3, 8)], [torch.zeros(8)], [torch.zeros(8)]
        assert self.look(seen, blocks, first) != self.look(seen, blocks, second)
        assert self.look(seen, blocks, first)[0][1][0].vector == first[0].data_ptr()
        assert len(seen) == 2

    def test_a_block_without_a_vector_is_a_launch_of_its_own(self, seen):
        blocks, vector = [torch.zeros(3, 8), torch.zeros(3, 8)], torch.zeros(8)
        groups = self.look(seen, blocks, [None, vector])
        assert groups == (
            ((torch.float32,), Spans([Span.of(blocks[0])])),
            ((torch.float32, torch.float32), Spans([Span.of(blocks[1], vector)])),
        )
        assert self.look(seen, blocks, [vector, None]) != groups
        assert self.look(seen, blocks, [None, vector]) is groups
        assert len(seen) == 2

    def test_what_was_refused_is_not_kept(self):
        def refuse() -> None:
            raise ValueError("no")

        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                spans_by_dtype(refuse, [torch.zeros(3, 8)])

    def test_the_oldest_are_let_go(self, seen, monkeypatch):
        monkeypatch.setattr(chunks, "MAX_LISTS", 2)
        lists = [[torch.zeros(1, 4)] for _ in range(3)]
        for index in (0, 1, 0, 2, 0):
            self.look(seen, lists[index])
        assert len(seen) == 3
        self.look(seen, lists[1])
        assert len(seen) == 4


class TestCapture:
    """No GPU is needed to see what a capture is refused and what it keeps."""

    CUDA = torch.device("cuda", 0)

    @pytest.fixture(autouse=True)
    def capture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def test_addresses_that_are_not_on_the_device_are_refused(self):
        with pytest.raises(RuntimeError, match="once before the capture"):
            chunk_tables([Span(0, 4, 64, 64)], FIELDS, 64, self.CUDA)
        assert not chunks._uploaded[FIELDS]

    def test_tables_that_a_graph_reads_are_kept_for_good(self, monkeypatch):
        span = Span(0, 4, 64, 64)
        uploaded = chunks._upload([span], FIELDS, 64, CPU)
        chunks._remember((self.CUDA, 64, FIELDS, Spans([span])), uploaded)
        assert chunk_tables([span], FIELDS, 64, self.CUDA) is uploaded.tables
        chunks._uploaded.clear()
        assert chunk_tables([span], FIELDS, 64, self.CUDA) is uploaded.tables
        # Nor is it made anew afterwards.
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert chunk_tables([span], FIELDS, 64, self.CUDA) is uploaded.tables


def test_another_stream_waits_for_the_upload_and_keeps_the_table(monkeypatch):
    now, uploaded, table = mock.Mock(), mock.Mock(), mock.Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    for stream in (now, mock.Mock()):
        now.wait_event.assert_not_called()
        _Uploaded((ChunkTable(table, 1, True, torch.empty(0)),), stream, uploaded).wait()
    now.wait_event.assert_called_once_with(uploaded)
    table.record_stream.assert_called_once_with(now)
