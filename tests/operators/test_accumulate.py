"""Accumulation, in every implementation, against the reference in float64."""

import math

import pytest
import torch

from doge_fast import reference
from doge_fast.kernels import accumulate
from doge_fast.kernels.accumulate import _in_few_launches, accumulate_torch
from tests.laws import assert_torch_knows
from tests.problems import STORAGE_DTYPES

OPERATOR = "accumulate"
pytestmark = pytest.mark.usefixtures("nan_memory")


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("row_dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", STORAGE_DTYPES, ids=str)
def test_accumulate_is_the_reference(grad_dtype, row_dtype, add, implementation, device):
    grads = [torch.randn(n, device=device).to(grad_dtype) for n in (1, 64, 70_001)]
    rows = [torch.randn_like(grad, dtype=row_dtype) for grad in grads]
    expected = reference.accumulate(grads, rows, add=add)
    # What is overwritten is not read.
    if not add:
        for row in rows:
            row.fill_(math.nan)
    accumulate(grads, rows, add=add, implementation=implementation)
    for row, exact in zip(rows, expected, strict=True):
        # A second rounding, where a wider sum is narrowed to the row.
        is_rounded_twice = add and row_dtype in (torch.bfloat16, torch.float16)
        slack = torch.finfo(row_dtype).eps if is_rounded_twice else 0
        error = (row.double() - exact.double()).abs()
        assert (error <= slack * exact.double().abs()).all()


def test_half_precision_rounds_as_torch_does(implementation, device):
    """All its numbers, those between them and those beyond: not all CPUs can convert them."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    beyond = torch.randn(4096) * torch.logspace(-12, 8, 4096)
    grads = [part.to(device) for part in (every, every.float() * (1 + 2.0**-11), beyond)]
    rows = [torch.zeros_like(grad, dtype=torch.float16) for grad in grads]
    accumulate(grads, rows, add=True, implementation=implementation)
    for row, grad in zip(rows, grads, strict=True):
        torch.testing.assert_close(row, grad.half(), rtol=0, atol=0, equal_nan=True)


def test_gradients_of_any_shape_and_strides(implementation, device):
    channels_last = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    expanded = torch.randn(1, device=device).expand(7)
    transposed = torch.randn(4, 6, device=device).T
    empty = torch.empty(0, 4, device=device)
    grads = [channels_last, expanded, transposed, torch.randn((), device=device), empty]
    rows = [torch.full((grad.numel(),), math.nan, device=device) for grad in grads]
    accumulate(grads, rows, add=False, implementation=implementation)
    for grad, row in zip(grads, rows, strict=True):
        assert torch.equal(row, grad.flatten())
    accumulate([], [], add=True, implementation=implementation)


def test_rows_of_a_matrix_and_nothing_beside_them(implementation, device):
    memory_KN = torch.full((3, 128), 7.0, device=device)
    row_N = memory_KN[1, 3:70]
    accumulate([torch.ones(67, device=device)], [row_N], add=True, implementation=implementation)
    assert (row_N == 8).all()
    row_N.fill_(7)
    assert (memory_KN == 7).all()


@pytest.mark.parametrize("add", [False, True])
def test_torch_knows_it(add, implementation, device):
    grads = [torch.randn(4, 5, device=device), torch.randn(7, device=device).bfloat16()]
    rows = [torch.randn(20, device=device), torch.randn(7, device=device)]
    assert_torch_knows("accumulate", (grads, rows, add), implementation, changed=rows[1])


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("row_dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", STORAGE_DTYPES, ids=str)
def test_few_launches_give_what_tiles_give(grad_dtype, row_dtype, add):
    """Plain torch's two ways, the one for GPUs run on the CPU."""
    grads = [torch.randn(n).to(grad_dtype) for n in (1, 70_001)]
    rows = [torch.randn(n).to(row_dtype) for n in (1, 70_001)]
    others = [row.clone() for row in rows]
    accumulate_torch(grads, rows, add)
    _in_few_launches(grads, others, add)
    assert all(map(torch.equal, rows, others))
