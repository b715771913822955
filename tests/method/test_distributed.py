"""Ranks that each have some domains: their pieces, one Gram matrix and sum for all, and errors."""

import pytest
import torch
from torch import distributed as dist

from doge_fast.distributed.columns import ColumnExchange, _checksum
from doge_fast.distributed.exchange import Exchange
from doge_fast.distributed.process_group import Communicator, Report
from doge_fast.sampling import pieces


def seen_where_one_was_begun() -> frozenset[str]:
    has_ranks = dist.is_initialized()
    exchange = ColumnExchange(Communicator(dist.group.WORLD)) if has_ranks else Exchange()
    counts = {"b": 0.0, "a": 2.0}
    return exchange.agree(["a", "b"], Report(counts, list(counts), [], [], {}, True)).seen


def test_a_row_that_was_begun_and_not_finished_has_no_gradient(ranks):
    """In one process, nor on any rank."""
    assert seen_where_one_was_begun() == {"a"}
    assert ranks.run(2, seen_where_one_was_begun) == [{"a"}, {"a"}]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_ranks_compare_every_bit_of_their_parameters_in_any_order(dtype):
    values = torch.randn(6, 5).to(dtype)
    checksum = _checksum(values)
    assert _checksum(values.T) == checksum
    values[2, 3] = torch.nextafter(values[2, 3], torch.tensor(9.0, dtype=dtype))
    assert _checksum(values) != checksum


def test_pieces_of_few_examples_leave_ranks_without_any():
    found = [pieces({"a": 1, "b": 0, "c": 2}, rank, 4) for rank in range(4)]
    assert found == [{}, {"a": (0, 1)}, {"c": (0, 1)}, {"c": (1, 2)}]


@pytest.mark.parametrize(("sizes", "rank"), [({"a": -1}, 0), ({"a": 1}, 2), ({"a": 1}, -1)])
def test_pieces_refuse_what_is_no_rank_or_size(sizes, rank):
    with pytest.raises(ValueError, match=r"(rank|sizes) must be"):
        pieces(sizes, rank, 2)
