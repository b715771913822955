"""Rows in, blocks out: layout, padding, first writes, what waits."""

import copy

import pytest
import torch
from torch import Tensor

from doge_fast import flat_buffer
from doge_fast.flat_buffer import FlatBuffer, weighted_gradients


def param(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)


def grad(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def test_rows_hold_what_was_received() -> None:
    params = [param(3, 5), param(7), param(())]
    buffer = FlatBuffer(3)
    for row in range(3):
        for i, p in enumerate(params):
            buffer.receive(row, p, grad(p, 10 * row + i))
    for i, (p, block) in enumerate(zip(params, buffer.touched(params), strict=True)):
        assert block.param is p
        for row in range(3):
            assert torch.equal(block.rows_BN[row], grad(p, 10 * row + i).flatten())


def test_rows_are_aligned_and_padded_with_zeros() -> None:
    p = param(5, 13)
    buffer = FlatBuffer(2)
    buffer.receive(0, p, grad(p, 0))
    (block,) = buffer.touched([p])
    assert block.rows_BN.stride() == (128, 1)
    memory = block.rows_BN.as_strided((2, 128), (128, 1))
    assert (memory[:, 65:] == 0).all()
    assert buffer.num_bytes == 2 * 128 * 4


def test_rows_do_not_lie_pages_apart() -> None:
    p = param(1024)
    buffer = FlatBuffer(2)
    buffer.receive(0, p, grad(p, 0))
    (block,) = buffer.touched([p])
    assert block.rows_BN.stride() == (1024 + 64, 1)


def test_first_write_replaces_and_the_next_adds() -> None:
    p = param(4)
    buffer = FlatBuffer(1)
    for _ in range(2):
        for seed in (1, 2, 3):
            buffer.receive(0, p, grad(p, seed))
        (block,) = buffer.touched([p])
        expected = grad(p, 1) + grad(p, 2) + grad(p, 3)
        torch.testing.assert_close(block.rows_BN[0], expected)
        buffer.clear()


def test_rows_of_domains_that_stayed_away_are_zero() -> None:
    p, other = param(4), param(3)
    buffer = FlatBuffer(2)
    buffer.receive(0, p, grad(p, 0))
    buffer.receive(1, p, grad(p, 1))
    buffer.receive(0, other, grad(other, 0))
    buffer.touched([p, other])
    buffer.clear()
    buffer.receive(1, p, grad(p, 2))
    (block,) = buffer.touched([p, other])
    assert block.param is p
    assert (block.rows_BN[0] == 0).all()
    assert torch.equal(block.rows_BN[1], grad(p, 2))


def test_what_waits_is_written_once_a_megabyte_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(grads: list[Tensor], rows: list[Tensor], *, add: bool) -> None:
        calls.append(len(grads))
        for g, r in zip(grads, rows, strict=True):
            r.add_(g) if add else r.copy_(g)

    monkeypatch.setattr(flat_buffer, "accumulate", counted)
    small = [param(1000) for _ in range(300)]
    buffer = FlatBuffer(1)
    for p in small:
        buffer.receive(0, p, grad(p, 0))
    assert len(calls) == 1
    assert calls[0] == -(-flat_buffer.PENDING_BYTES["cpu"] // 4000)
    buffer.flush()
    assert sum(calls) == 300
    # The same row twice among what waits: the first must be written before the second is added.
    buffer.receive(0, small[0], grad(small[0], 1))
    buffer.receive(0, small[0], grad(small[0], 2))
    buffer.flush()
    expected = grad(small[0], 0) + grad(small[0], 1) + grad(small[0], 2)
    torch.testing.assert_close(buffer.touched(small[:1])[0].rows_BN[0], expected)


def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of what is written at once, from now on."""
    calls: list[int] = []
    real = flat_buffer.accumulate

    def counted(grads: list[Tensor], rows: list[Tensor], *, add: bool) -> None:
        calls.append(len(grads))
        real(grads, rows, add=add)

    monkeypatch.setattr(flat_buffer, "accumulate", counted)
    return calls


def test_exactly_as_many_bytes_as_may_wait_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = writes(monkeypatch)
    half = param(flat_buffer.PENDING_BYTES["cpu"] // 8)
    other = param(flat_buffer.PENDING_BYTES["cpu"] // 8)
    buffer = FlatBuffer(1)
    buffer.receive(0, half, grad(half, 0))
    assert calls == []
    buffer.receive(0, other, grad(other, 1))
    assert calls == [2]
    # What was written no longer counts.
    buffer.clear()
    buffer.receive(0, half, grad(half, 0))
    assert calls == [2]


def test_first_gradients_and_later_ones_are_not_written_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = writes(monkeypatch)
    one, other, third = param(3), param(4), param(5)
    buffer = FlatBuffer(2)
    buffer.receive(0, one, grad(one, 0))
    buffer.flush()
    buffer.receive(0, other, grad(other, 1))
    # Adds, where what waits replaces.
    buffer.receive(0, one, grad(one, 2))
    assert calls == [1, 1]
    # Replaces, where what waits adds.
    buffer.receive(0, third, grad(third, 3))
    assert calls == [1, 1, 1]
    # Neither does another row of what waits.
    buffer.receive(1, third, grad(third, 4))
    assert calls == [1, 1, 1, 1]
    blocks = buffer.touched([one, other, third])
    torch.testing.assert_close(blocks[0].rows_BN[0], grad(one, 0) + grad(one, 2))
    assert torch.equal(blocks[1].rows_BN[0], grad(other, 1))
    assert torch.equal(blocks[2].rows_BN, torch.stack([grad(third, 3), grad(third, 4)]))


def test_what_was_written_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose gradients were written, or forgotten, is not flushed for once more."""
    calls = writes(monkeypatch)
    one, other = param(3), param(4)
    buffer = FlatBuffer(2)
    for forget in (buffer.flush, buffer.clear):
        buffer.receive(0, one, grad(one, 0))
        forget()
        calls.clear()
        buffer.receive(0, other, grad(other, 0))
        if forget == buffer.clear:
            buffer.receive(0, one, grad(one, 1))
        else:
            buffer.receive(1, one, grad(one, 1))
        assert calls == []
        buffer.clear()


def test_rows_are_lent_after_what_waits_is_written() -> None:
    p = param(4)
    buffer = FlatBuffer(3)
    buffer.receive(0, p, grad(p, 1))
    rows_RN, adds = buffer.slots(0, 2, p, torch.float32)
    assert adds
    assert torch.equal(rows_RN, torch.stack([grad(p, 1), torch.zeros(4)]))
    rows_RN += 1
    (block,) = buffer.touched([p])
    assert torch.equal(block.rows_BN, torch.stack([grad(p, 1) + 1, torch.ones(4), torch.zeros(4)]))
    # Others are lent as they are.
    buffer.clear()
    assert not buffer.slots(1, 2, p, torch.float32)[1]
    assert block.written == 0b110
    assert not buffer.slots(0, 1, p, torch.float32)[1]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_rows_of_16_bits_that_are_lent_twice_become_wide(dtype: torch.dtype | None) -> None:
    """Unless the loop has asked for them."""
    p = param(4, dtype=torch.bfloat16)
    buffer = FlatBuffer(2, dtype)
    for times in range(2):
        rows_RN, adds = buffer.slots(0, 1, p, torch.bfloat16)
        assert adds == (times == 1)
        assert rows_RN.dtype == (torch.float32 if adds and dtype is None else torch.bfloat16)
        rows_RN.fill_(2.0)
    assert buffer.touched([p])[0].rows_BN.tolist() == [[2.0] * 4, [0.0] * 4]
    # Single precision is wide enough.
    wide = param(4)
    first, _ = buffer.slots(0, 1, wide, torch.float32)
    again, _ = buffer.slots(0, 1, wide, torch.float32)
    assert again.data_ptr() == first.data_ptr()


def test_wider_gradients_widen_what_is_there_after_it_was_written() -> None:
    p = param(4, dtype=torch.bfloat16)
    buffer = FlatBuffer(2)
    buffer.receive(0, p, grad(p, 1))
    third = torch.full((4,), 1 / 3)
    buffer.receive(1, p, third)
    (block,) = buffer.touched([p])
    assert block.rows_BN.dtype == torch.float32
    assert torch.equal(block.rows_BN, torch.stack([grad(p, 1).float(), third]))
    assert block.grad_dtype == torch.float32
    # Narrower ones afterwards find the wide rows.
    buffer.receive(0, p, grad(p, 2))
    assert block.rows_BN.dtype == torch.float32
    assert block.grad_dtype == torch.bfloat16
    torch.testing.assert_close(
        buffer.touched([p])[0].rows_BN[0], grad(p, 1).float() + grad(p, 2).float(), rtol=0, atol=0
    )


def test_a_dtype_that_was_asked_for_stays() -> None:
    p = param(4, dtype=torch.bfloat16)
    buffer = FlatBuffer(1, torch.bfloat16)
    buffer.receive(0, p, grad(p, 1))
    buffer.receive(0, p, torch.ones(4))
    assert buffer.touched([p])[0].rows_BN.dtype == torch.bfloat16


def test_more_rows_keep_what_is_written() -> None:
    p, other = param(3), param(2)
    buffer = FlatBuffer(1)
    buffer.receive(0, p, grad(p, 1))
    buffer.receive(0, other, grad(other, 2))
    buffer.num_rows = 3
    buffer.receive(2, p, grad(p, 3))
    blocks = buffer.touched([p, other])
    assert torch.equal(blocks[0].rows_BN, torch.stack([grad(p, 1), torch.zeros(3), grad(p, 3)]))
    assert torch.equal(blocks[1].rows_BN, torch.stack([grad(other, 2), *torch.zeros(2, 2)]))
    assert [len(block.rows) for block in blocks] == [3, 3]


def test_all_at_once_is_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, bool]] = []
    real = flat_buffer.fill

    def counted(grads: list[Tensor], rows: list[Tensor], *, add: bool) -> None:
        calls.append((len(grads), add))
        real(grads, rows, add=add)

    monkeypatch.setattr(flat_buffer, "fill", counted)
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
    blocks = buffer.touched([one, other])
    assert torch.equal(blocks[0].rows_BN, torch.stack([grad(one, 5) + grad(one, 6), grad(one, 1)]))
    both = grad(other, 2) + grad(other, 4)
    assert torch.equal(blocks[1].rows_BN, torch.stack([torch.zeros(4), both]))


def test_dtypes_are_those_of_rows_with_a_gradient() -> None:
    p, without, later = param(3), param(3), param(3)
    buffer = FlatBuffer(1, torch.float64)
    buffer.receive(0, later, grad(later, 0))
    buffer.clear()
    buffer.receive(0, p, grad(p, 0))
    assert buffer.dtypes_of([p, without, later]) == [torch.float64, None, None]
    (block,) = buffer.touched([p, without], [torch.float64, None])
    assert block.param is p
    with pytest.raises(ValueError, match="zip"):
        buffer.touched([p], [])


def test_where_another_rank_alone_has_a_gradient_the_rows_are_zeros() -> None:
    here, there = param(3), param(2)
    buffer = FlatBuffer(2)
    buffer.receive(0, here, grad(here, 0))
    blocks = buffer.touched([here, there], [torch.float64, torch.float32])
    assert [block.rows_BN.dtype for block in blocks] == [torch.float64, torch.float32]
    assert torch.equal(blocks[0].rows_BN[0], grad(here, 0).double())
    assert (blocks[1].rows_BN == 0).all()


def test_a_parameter_that_has_moved_is_refused_by_everything() -> None:
    p = param(3)
    buffer = FlatBuffer(1)
    buffer.receive(0, p, grad(p, 0))
    buffer.clear()
    p.data = torch.zeros(3, dtype=torch.float64)
    said = r"had rows of 3 elements on cpu for torch.float32 and is now torch.float64, \[3\] on cpu"
    for use in (
        lambda: buffer.receive(0, p, torch.zeros(3, dtype=torch.float64)),
        lambda: buffer.slots(0, 1, p, torch.float64),
        lambda: buffer.receive_all(0, [p], [torch.zeros(3, dtype=torch.float64)]),
    ):
        with pytest.raises(RuntimeError, match=said):
            use()


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool])
def test_rows_are_floating(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"a floating type or None; got {dtype}"):
        FlatBuffer(1, dtype)


def test_a_combined_gradient_is_told_from_another() -> None:
    p, other = param(3), param(3)
    buffer = FlatBuffer(1)
    assert not buffer.is_combined(p)
    buffer.receive(0, p, grad(p, 0))
    (combined,) = weighted_gradients(buffer.touched([p]), torch.ones(1, dtype=torch.float64))
    p.grad = combined
    assert buffer.is_combined(p)
    p.grad = combined.clone()
    assert not buffer.is_combined(p)
    other.grad = combined
    assert not buffer.is_combined(other)


def test_gradients_in_the_memory_order_of_their_parameters() -> None:
    p = torch.zeros(4, 3).t().requires_grad_()
    buffer = FlatBuffer(2)
    for row in range(2):
        buffer.receive(row, p, grad(p, row))
    weights_R = torch.tensor([0.5, 0.25], dtype=torch.float64)
    (combined,) = weighted_gradients(buffer.touched([p]), weights_R)
    assert combined.stride() == p.stride() == (1, 3)
    torch.testing.assert_close(combined, 0.5 * grad(p, 0) + 0.25 * grad(p, 1))
    (block,) = buffer.blocks
    values_N = torch.arange(12.0)
    assert torch.equal(block.combined_as(values_N), values_N.view(3, 4))
    assert block.combined_as(values_N).stride() == (1, 3)
    plain = param(2, 3)
    buffer.receive(0, plain, grad(plain, 0))
    six_N = torch.arange(6.0)
    given = buffer.blocks[1].combined_as(six_N)
    assert given.shape == (2, 3)
    assert given.data_ptr() == six_N.data_ptr()
    assert buffer.blocks[1].combined is given


def test_sizes_are_counted_with_their_padding() -> None:
    one, other = param(65), param(64, dtype=torch.float64)
    buffer = FlatBuffer(3)
    for p in (one, other):
        buffer.receive(0, p, grad(p, 0))
    assert buffer.num_bytes == 3 * 128 * 4 + 3 * 64 * 8
    assert [block.num_columns for block in buffer.blocks] == [65, 64]


def test_a_copy_is_an_empty_buffer_of_the_same_kind() -> None:
    p = param(3)
    buffer = FlatBuffer(4, torch.float64)
    buffer.receive(0, p, grad(p, 0))
    other = copy.deepcopy(buffer)
    assert (other.num_rows, other.dtype, other.blocks) == (4, torch.float64, [])


def test_sparse_gradients_are_refused_one_by_one_and_all_at_once() -> None:
    p = param(2, 3)
    sparse = torch.ones(2, 3).to_sparse()
    said = r"a parameter of shape \[2, 3\] got one of layout torch.sparse_coo"
    for use in (
        lambda buffer: buffer.receive(0, p, sparse),
        lambda buffer: buffer.receive_all(0, [p], [sparse]),
    ):
        buffer = FlatBuffer(1)
        with pytest.raises(RuntimeError, match=said):
            use(buffer)
        assert buffer.blocks == []


def test_transposed_gradients_land_in_the_parameters_order() -> None:
    p = param(3, 5)
    buffer = FlatBuffer(1)
    transposed = torch.randn(5, 3).T
    buffer.receive(0, p, transposed)
    (block,) = buffer.touched([p])
    assert torch.equal(block.rows_BN[0].view(3, 5), transposed)


def test_combined_gradient_keeps_its_memory_and_dtype() -> None:
    p = param(9, dtype=torch.bfloat16)
    buffer = FlatBuffer(2, dtype=torch.float32)
    coefficients_R = torch.tensor([0.25, 0.5], dtype=torch.float64)
    addresses = set()
    for step in range(2):
        buffer.receive(0, p, grad(p, step))
        buffer.receive(1, p, grad(p, step + 5))
        blocks = buffer.touched([p])
        (combined,) = weighted_gradients(blocks, coefficients_R)
        expected = 0.25 * grad(p, step).float() + 0.5 * grad(p, step + 5).float()
        assert torch.equal(combined, expected.to(torch.bfloat16))
        p.grad = combined
        assert buffer.is_combined(p)
        addresses.add(combined.data_ptr())
        buffer.clear()
    assert len(addresses) == 1


def test_release_gives_memory_back() -> None:
    p = param(100)
    buffer = FlatBuffer(2)
    buffer.receive(0, p, grad(p, 0))
    buffer.release()
    assert buffer.num_bytes == 0
    assert buffer.touched([p]) == []


def test_an_allocation_that_fails_says_what_would_need_less() -> None:
    num_rows = 2**60
    with pytest.raises(RuntimeError) as error:
        flat_buffer._new_rows(torch.nn.Parameter(torch.zeros(8)), num_rows, torch.float32)
    assert error.value.__notes__ == [flat_buffer.OUT_OF_MEMORY.format(num_rows=num_rows)]
