"""Rows in, blocks out: layout, padding, first writes, what waits."""

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
            assert torch.equal(block.rows_RN[row], grad(p, 10 * row + i).flatten())


def test_rows_are_aligned_and_padded_with_zeros() -> None:
    p = param(5, 13)
    buffer = FlatBuffer(2)
    buffer.receive(0, p, grad(p, 0))
    (block,) = buffer.touched([p])
    assert block.rows_RN.stride() == (128, 1)
    memory = block.rows_RN.as_strided((2, 128), (128, 1))
    assert (memory[:, 65:] == 0).all()
    assert buffer.num_bytes == 2 * 128 * 4


def test_rows_do_not_lie_pages_apart() -> None:
    p = param(1024)
    buffer = FlatBuffer(2)
    buffer.receive(0, p, grad(p, 0))
    (block,) = buffer.touched([p])
    assert block.rows_RN.stride() == (1024 + 64, 1)


def test_first_write_replaces_and_the_next_adds() -> None:
    p = param(4)
    buffer = FlatBuffer(1)
    for _ in range(2):
        for seed in (1, 2, 3):
            buffer.receive(0, p, grad(p, seed))
        (block,) = buffer.touched([p])
        expected = grad(p, 1) + grad(p, 2) + grad(p, 3)
        torch.testing.assert_close(block.rows_RN[0], expected)
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
    assert (block.rows_RN[0] == 0).all()
    assert torch.equal(block.rows_RN[1], grad(p, 2))


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
    torch.testing.assert_close(buffer.touched(small[:1])[0].rows_RN[0], expected)


def test_transposed_gradients_land_in_the_parameters_order() -> None:
    p = param(3, 5)
    buffer = FlatBuffer(1)
    transposed = torch.randn(5, 3).T
    buffer.receive(0, p, transposed)
    (block,) = buffer.touched([p])
    assert torch.equal(block.rows_RN[0].view(3, 5), transposed)


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
