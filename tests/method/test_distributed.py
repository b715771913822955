"""Ranks that each have some domains: their pieces, one Gram matrix and sum for all, and errors."""

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from doge_fast.distributed.columns import ColumnExchange
from doge_fast.distributed.exchange import Exchange
from doge_fast.distributed.process_group import Communicator, Report
from doge_fast.flat_buffer import FlatBuffer
from doge_fast.sampling import pieces
from tests.ranks import Ranks

SHAPES = [(7, 5), (64,), (3,), (33, 11), (1,)]


def parameters() -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES]


def gradients(num_domains: int) -> list[list[Tensor]]:
    """By domain and parameter."""
    generator = torch.Generator().manual_seed(num_domains)
    return [
        [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in SHAPES]
        for _ in range(num_domains)
    ]


def exchanged(entered_nD: list[dict[int, float]], num_domains: int) -> tuple[Tensor, list[Tensor]]:
    """The Gram matrix and the sum with weights 1, 2, ... as this rank sees them.

    Args:
        entered_nD: of each rank, {domain: count}; the gradient of a domain there is that of the
            domain times one more than the rank. With a count of 0 it was begun and not finished.
        num_domains: K.
    """
    rank = dist.get_rank()
    exchange = ColumnExchange(Communicator(dist.group.WORLD))
    entered = entered_nD[rank]
    params, grads = parameters(), gradients(num_domains)
    buffer = FlatBuffer(max(1, len(entered)))
    for row, (domain, count) in enumerate(entered.items()):
        if count:
            for param, grad in zip(params, grads[domain], strict=True):
                buffer.receive(row, param, grad * (rank + 1))
    names = [str(domain) for domain in range(num_domains)]
    counts = {str(domain): count for domain, count in entered.items()}
    dtypes = [torch.float64 if any(entered.values()) else None for _ in params]
    agreement = exchange.agree(
        names, Report(counts, list(counts), params, dtypes, {"the seed": 3}, True)
    )
    assert agreement.seen == {
        str(domain) for each in entered_nD for domain, count in each.items() if count
    }
    assert agreement.dtypes == [torch.float64] * len(params)
    blocks = buffer.touched(params, agreement.dtypes)
    columns = exchange.complete(blocks, ())
    gram_RR = exchange.gram(columns.rows)
    state_S = torch.full((3,), float(rank), dtype=torch.float64)
    weights_R = torch.arange(1.0, num_domains + 1, dtype=torch.float64)
    exchange.deliver(columns, weights_R, state_S)
    assert state_S.tolist() == [0, 0, 0]
    return gram_RR, [param.grad.clone() for param in params]


@pytest.mark.parametrize(
    "entered_nD",
    [
        pytest.param([{0: 1.0}, {1: 1.0}], id="a domain each"),
        pytest.param([{0: 1.0, 1: 1.0}, {1: 3.0, 2: 1.0}], id="a domain in two pieces"),
        pytest.param([{2: 5.0, 0: 1.0}, {}, {1: 2.0, 2: 1.0}], id="a rank without any"),
        pytest.param([{0: 1.0}, {0: 1.0}, {0: 2.0}, {1: 4.0}], id="a domain on three ranks"),
        pytest.param([{1: 0.0, 0: 1.0}, {1: 1.0}], id="a domain begun on another rank"),
    ],
)
def test_ranks_are_one_process(ranks: Ranks, entered_nD: list[dict[int, float]]) -> None:
    num_domains = 1 + max(domain for each in entered_nD for domain in each)
    grads = gradients(num_domains)
    rows = []
    for domain in range(num_domains):
        total = sum(each.get(domain, 0.0) for each in entered_nD)
        factor = sum(
            each.get(domain, 0.0) / total * (rank + 1) for rank, each in enumerate(entered_nD)
        )
        rows.append(factor * torch.cat([grad.flatten() for grad in grads[domain]]))
    rows_RN = torch.stack(rows)
    sum_N = torch.arange(1.0, num_domains + 1, dtype=torch.float64) @ rows_RN
    answers = ranks.run(len(entered_nD), exchanged, entered_nD, num_domains)
    for gram_RR, sums in answers:
        torch.testing.assert_close(gram_RR, rows_RN @ rows_RN.T, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(
            torch.cat([each.flatten() for each in sums]), sum_N, rtol=1e-13, atol=1e-13
        )
        assert torch.equal(gram_RR, answers[0][0])
        assert torch.equal(gram_RR, gram_RR.T)


def test_a_row_that_was_begun_and_not_finished_has_no_gradient() -> None:
    agreement = Exchange().agree(
        ["a", "b"], Report({"b": 0.0, "a": 2.0}, ["b", "a"], [], [], {}, True)
    )
    assert agreement.seen == {"a"}


def begun_by_none() -> frozenset[str]:
    exchange = ColumnExchange(Communicator(dist.group.WORLD))
    counts = {"b": 0.0, "a": 2.0}
    return exchange.agree(["a", "b"], Report(counts, list(counts), [], [], {}, True)).seen


def test_nor_on_any_rank(ranks: Ranks) -> None:
    assert ranks.run(2, begun_by_none) == [{"a"}, {"a"}]


def test_pieces_of_few_examples_leave_ranks_without_any() -> None:
    found = [pieces({"a": 1, "b": 0, "c": 2}, rank, 4) for rank in range(4)]
    assert found == [{}, {"a": (0, 1)}, {"c": (0, 1)}, {"c": (1, 2)}]


@pytest.mark.parametrize(("sizes", "rank"), [({"a": -1}, 0), ({"a": 1}, 2), ({"a": 1}, -1)])
def test_pieces_refuse_what_is_no_rank_or_size(sizes: dict[str, int], rank: int) -> None:
    with pytest.raises(ValueError, match=r"(rank|sizes) must be"):
        pieces(sizes, rank, 2)
