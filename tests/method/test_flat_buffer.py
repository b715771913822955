"""Rows in, blocks out: layout, padding, first writes, what waits."""

import pytest
import torch
from torch import Tensor

from doge_fast import flat_buffer
from doge_fast.flat_buffer import FlatBuffer, combined_gradients
from doge_fast.kernels import weighted_sum


def param(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)


def grad(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like.dtype)


# A line of 64 elements; one more where rows would lie pages apart.
@pytest.mark.parametrize(
    ("columns", "stride", "dtype"),
    [(65, 128, torch.float32), (64, 64, torch.bfloat16), (1024, 1024 + 64, torch.float32)],
)
def test_rows_are_aligned_and_padded_with_zeros(columns, stride, dtype):
    p = param(columns, dtype=dtype)
    buffer = FlatBuffer(2)
    buffer.receive(0, p, grad(p, 0))
    (block,) = buffer.touched([p])
    assert block.num_columns == columns
    assert block.rows_BN.stride() == (stride, 1)
    memory = block.rows_BN.as_strided((2, stride), (stride, 1))
    assert (memory[:, columns:] == 0).all()
    assert buffer.num_bytes == 2 * stride * dtype.itemsize


def writes(monkeypatch: pytest.MonkeyPatch, operator: str) -> list[tuple[int, bool]]:
    """How many gradients an operator writes at once, and whether it adds, from now on."""
    calls: list[tuple[int, bool]] = []
    real = getattr(flat_buffer, operator)

    def counted(grads: list[Tensor], rows: list[Tensor], *, add: bool) -> None:
        calls.append((len(grads), add))
        real(grads, rows, add=add)

    monkeypatch.setattr(flat_buffer, operator, counted)
    return calls


def test_pending_gradients_are_written_when_they_fill_a_megabyte(monkeypatch):
    calls = writes(monkeypatch, "accumulate")
    quarters = [param(flat_buffer.PENDING_BYTES["cpu"] // 16) for _ in range(4)]
    buffer = FlatBuffer(1)
    # What was written counts no longer, nor does what was forgotten.
    for forget in (buffer.flush, buffer.clear):
        for p in quarters[:3]:
            buffer.receive(0, p, grad(p, 0))
        forget()
    calls.clear()
    for p in quarters:
        assert calls == []
        buffer.receive(0, p, grad(p, 0))
    assert calls == [(4, False)]
    # The same row twice among what waits: the first must be written before the second is added.
    first = quarters[0]
    buffer.receive(0, first, grad(first, 1))
    buffer.receive(0, first, grad(first, 2))
    assert calls == [(4, False), (1, True)]
    expected = grad(first, 0) + grad(first, 1) + grad(first, 2)
    torch.testing.assert_close(buffer.touched([first])[0].rows_BN[0], expected)
    # One that was written, or forgotten, waits no more.
    calls.clear()
    for _ in range(2):
        buffer.receive(0, quarters[1], grad(first, 3))
        buffer.receive(0, first, grad(first, 3))
        buffer.clear()
    assert calls == []


def test_pending_gradients_are_written_before_their_row_is_used():
    """Before gradients of another kind, before rows become wide, and before rows are lent."""
    buffer, first, second = FlatBuffer(1), param(3), param(4)
    buffer.receive(0, first, grad(first, 0))
    buffer.flush()
    # Added to its row, and the first of its row.
    buffer.receive(0, first, grad(first, 1))
    buffer.receive(0, second, grad(second, 2))
    rows = [block.rows_BN[0] for block in buffer.touched([first, second])]
    assert torch.equal(rows[0], grad(first, 0) + grad(first, 1))
    assert torch.equal(rows[1], grad(second, 2))
    buffer, narrow = FlatBuffer(2), param(3, dtype=torch.bfloat16)
    buffer.receive(0, narrow, torch.ones(3, dtype=torch.bfloat16))
    buffer.receive(1, narrow, torch.full((3,), 2.0))
    assert buffer.touched([narrow])[0].rows_BN.tolist() == [[1.0] * 3, [2.0] * 3]
    buffer.clear()
    buffer.receive(0, narrow, torch.ones(3))
    buffer.claim(0, 1, narrow, torch.float32)[0].add_(1)
    assert buffer.touched([narrow])[0].rows_BN[0].tolist() == [2.0] * 3


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_rows_of_16_bits_become_float32_when_claimed_twice(dtype):
    """Unless the loop has asked for them."""
    p = param(4, dtype=torch.bfloat16)
    buffer = FlatBuffer(2, dtype)
    for times in range(2):
        rows_RN, adds = buffer.claim(0, 1, p, torch.bfloat16)
        assert adds == (times == 1)
        assert rows_RN.dtype == (torch.float32 if adds and dtype is None else torch.bfloat16)
        rows_RN.fill_(2.0)
    assert buffer.touched([p])[0].rows_BN.tolist() == [[2.0] * 4, [0.0] * 4]
    if dtype is not None:
        buffer.receive(0, p, torch.ones(4))
        assert buffer.touched([p])[0].rows_BN.dtype == dtype
    # Single precision is wide enough.
    wide = param(4)
    first, _ = buffer.claim(0, 1, wide, torch.float32)
    again, _ = buffer.claim(0, 1, wide, torch.float32)
    assert again.data_ptr() == first.data_ptr()


def test_receive_all_equals_receive_of_each(monkeypatch):
    calls = writes(monkeypatch, "fill")
    one, other = param(3), param(4)
    buffer = FlatBuffer(2)
    buffer.receive_all(1, [one, other], [grad(one, 1), grad(other, 2)])
    buffer.receive_all(1, [one, other], [grad(one, 3), grad(other, 4)])
    assert calls == [(2, False), (2, True)]
    buffer.clear()
    calls.clear()
    buffer.receive_all(1, [other], [grad(other, 2)])
    buffer.receive_all(1, [one, other], [grad(one, 1), grad(other, 4)])
    assert calls == [(1, False), (1, False), (1, True)]
    # What waited was there before.
    buffer.receive(0, one, grad(one, 5))
    buffer.receive_all(0, [one], [grad(one, 6)])
    (block, another) = buffer.touched([one, other])
    assert torch.equal(block.rows_BN, torch.stack([grad(one, 5) + grad(one, 6), grad(one, 1)]))
    both = grad(other, 2) + grad(other, 4)
    assert torch.equal(another.rows_BN, torch.stack([torch.zeros(4), both]))


def test_rows_take_the_dtypes_of_all_ranks_and_are_zero_without_a_gradient():
    here, there, later = param(3), param(2), param(3)
    buffer = FlatBuffer(2)
    buffer.receive(0, later, grad(later, 0))
    buffer.clear()
    buffer.receive(0, here, grad(here, 0))
    assert buffer.dtypes_of([here, there, later]) == [torch.float32, None, None]
    blocks = buffer.touched([here, there, later], [torch.float64, torch.float32, None])
    assert [block.param for block in blocks] == [here, there]
    assert [block.rows_BN.dtype for block in blocks] == [torch.float64, torch.float32]
    assert torch.equal(blocks[0].rows_BN[0], grad(here, 0).double())
    assert (blocks[1].rows_BN == 0).all()
    with pytest.raises(ValueError, match="zip"):
        buffer.touched([here], [])
    # The one that was asked for, where there is one.
    wide = FlatBuffer(1, torch.float64)
    wide.receive(0, here, grad(here, 0))
    assert wide.dtypes_of([here]) == [torch.float64]


@pytest.mark.parametrize(
    "use",
    [
        lambda buffer, p, grad_N: buffer.receive(0, p, grad_N),
        lambda buffer, p, grad_N: buffer.receive_all(0, [p], [grad_N]),
        lambda buffer, p, grad_N: buffer.claim(0, 1, p, grad_N.dtype)[0].copy_(grad_N[None]),
    ],
    ids=["receive", "receive_all", "claim"],
)
def test_a_parameter_that_was_cast_between_steps_gets_new_rows(use):
    p = param(3)
    buffer = FlatBuffer(1)
    buffer.receive(0, p, grad(p, 0))
    buffer.clear()
    p.data = torch.zeros(3, dtype=torch.float64)
    grad_N = torch.tensor([1, 2, 3 + 1e-12], dtype=torch.float64)
    use(buffer, p, grad_N)
    (block,) = buffer.touched([p])
    assert torch.equal(block.rows_BN, grad_N[None])


def combine(blocks, weights_R):
    with combined_gradients(blocks) as outs:
        weighted_sum([block.rows_BN for block in blocks], weights_R, out=outs)
    for block in blocks:
        block.give()


def test_gradients_in_the_memory_order_of_their_parameters():
    p = torch.zeros(4, 3).t().requires_grad_()
    buffer = FlatBuffer(2)
    for row in range(2):
        buffer.receive(row, p, grad(p, row))
    weights_R = torch.tensor([0.5, 0.25], dtype=torch.float64)
    combine(buffer.touched([p]), weights_R)
    assert p.grad.stride() == p.stride() == (1, 3)
    torch.testing.assert_close(p.grad, 0.5 * grad(p, 0) + 0.25 * grad(p, 1))
    (block,) = buffer.blocks
    values_N = torch.arange(12.0)
    assert torch.equal(block.combined_as(values_N), values_N.view(3, 4))
    assert block.combined_as(values_N).stride() == (1, 3)
    # The model may be laid out anew.
    with torch.no_grad():
        p.set_(p.contiguous())
    combine(buffer.touched([p]), weights_R)
    assert p.grad.stride() == (4, 1)
    plain = param(2, 3)
    buffer.receive(0, plain, grad(plain, 0))
    six_N = torch.arange(6.0)
    given = buffer.blocks[1].combined_as(six_N)
    assert given.shape == (2, 3)
    assert given.data_ptr() == six_N.data_ptr()
    assert buffer.blocks[1].combined is given


def test_lent_rows_are_read_whole_before_others_take_their_memory(monkeypatch):
    monkeypatch.setattr(flat_buffer, "SHARED_BYTES", {"cpu": 2 * 64 * 4})
    buffer, first, second, seen = FlatBuffer(2), param(3), param(64), []

    def read(blocks: list[flat_buffer.Block]) -> None:
        seen.extend((block.param, block.rows_BN.clone()) for block in blocks)

    for each in (first, second):
        buffer.lend([(each, torch.float32)], 1 << 20, read)
        rows_GN, adds = buffer.claim(1, 1, each, torch.float32)
        assert not adds
        rows_GN.fill_(each.numel())
    ((found, rows_BN),) = seen
    assert found is first
    # A domain without a gradient has zeros, whatever was there before.
    assert torch.equal(rows_BN, torch.tensor([[0.0] * 3, [3.0] * 3]))
    assert [block.param for block in buffer.read_blocks()] == [first]
    assert [block.param for block in buffer.touched([first, second])] == [second]
    with pytest.raises(RuntimeError, match="second gradient"):
        buffer.receive(0, first, torch.zeros(3))
    buffer.clear()
    buffer.receive(0, first, torch.ones(3))
    (block,) = buffer.touched([first])
    assert torch.equal(block.rows_BN, torch.tensor([[1.0] * 3, [0.0] * 3]))
    assert buffer.num_bytes == 2 * 64 * 4 + 2 * 64 * 4
