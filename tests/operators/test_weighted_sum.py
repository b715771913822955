"""The weighted sum, in every implementation, against the reference in float64."""

import math

import pytest
import torch
from torch import Tensor

from doge_fast import reference
from doge_fast.kernels import weighted_sum
from doge_fast.kernels.triton_support import is_interpreted
from doge_fast.kernels.weighted_sum import _sum_masked_rows
from tests.laws import assert_torch_knows
from tests.problems import GRADIENT_PROBLEMS, STORAGE_DTYPES

pytestmark = pytest.mark.usefixtures("nan_memory")


def coefficients_for(grads_RN: Tensor) -> Tensor:
    return torch.randn(len(grads_RN), dtype=torch.float64, device=grads_RN.device)


def assert_close(
    sum_N: Tensor, grads_RN: Tensor, coefficients_R: Tensor, implementation: str
) -> None:
    """Within R + 1 roundings of what was added up, and one of the result.

    |error_n| <= (R + 1) u sum_r |c_r g_rn| + u_out |sum_n|; Triton's interpreter cuts bits
    off where it narrows, which is two roundings.
    """
    exact_N = reference.weighted_sum(grads_RN.double(), coefficients_R)
    size_N = reference.weighted_sum(grads_RN.double().abs(), coefficients_R.abs())
    is_double = grads_RN.dtype == torch.float64
    unit = torch.finfo(torch.float64 if is_double else torch.float32).eps / 2
    cuts = implementation == "triton" and is_interpreted()
    out_unit = torch.finfo(sum_N.dtype).eps / (1 if cuts else 2)
    bound_N = (len(grads_RN) + 1) * unit * size_N + out_unit * exact_N.abs()
    # Below the normal numbers of the result's dtype spacing is absolute.
    bound_N += torch.finfo(sum_N.dtype).smallest_normal * torch.finfo(sum_N.dtype).eps
    assert ((sum_N.double() - exact_N).abs() <= bound_N * (1 + 1e-6)).all()


@pytest.mark.parametrize("problem", GRADIENT_PROBLEMS, ids=str)
def test_weighted_sum_is_the_reference(problem, implementation, device):
    grads_RN = problem.sample(device)
    coefficients_R = coefficients_for(grads_RN)
    sum_N = weighted_sum(grads_RN, coefficients_R, implementation=implementation)
    assert isinstance(sum_N, Tensor)
    assert (sum_N.shape, sum_N.dtype) == (grads_RN.shape[1:], grads_RN.dtype)
    assert_close(sum_N, grads_RN, coefficients_R, implementation)


@pytest.mark.parametrize("problem", GRADIENT_PROBLEMS, ids=str)
def test_plain_torch_of_a_gpu_ignores_rows_without_coefficient(problem):
    """It masks rows, since the host does not read the coefficients; here on any device."""
    grads_RN = problem.sample()
    coefficients_R = coefficients_for(grads_RN)
    out_N = torch.full_like(grads_RN[0], math.nan)
    if len(grads_RN) > 1 and problem.name != "overlapping rows":
        grads_RN[0], coefficients_R[0] = math.nan, 0
    _sum_masked_rows([grads_RN], coefficients_R, [out_N])
    used = coefficients_R != 0
    assert_close(out_N, grads_RN[used], coefficients_R[used], "torch")


@pytest.mark.parametrize("out_dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_every_pair_of_dtypes(dtype, out_dtype, implementation, device):
    grads_RN = torch.randn(5, 333, device=device).to(dtype)
    coefficients_R = coefficients_for(grads_RN)
    out_N = torch.full((333,), math.nan, dtype=out_dtype, device=device)
    result = weighted_sum(grads_RN, coefficients_R, out=out_N, implementation=implementation)
    assert result is out_N
    assert_close(out_N, grads_RN, coefficients_R, implementation)


def test_blocks_go_to_outputs_of_any_shape(implementation, device):
    shapes = [(3, 5), (70_000,), (), (0,), (2, 3, 4)]
    blocks = [torch.randn(4, math.prod(shape), device=device) for shape in shapes]
    outs = [torch.full(shape, math.nan, device=device) for shape in shapes]
    coefficients_R = coefficients_for(blocks[0])
    result = weighted_sum(blocks, coefficients_R, out=outs, implementation=implementation)
    assert all(given is returned for given, returned in zip(outs, result, strict=True))
    for block, out in zip(blocks, outs, strict=True):
        assert_close(out.flatten(), block, coefficients_R, implementation)
    # Coefficients may be a view; the neighbours of an output stay.
    memory = torch.full((64 * 3,), 7.0, device=device)
    every_second_R = torch.tensor([1.0, 9, 2, 9], dtype=torch.float64, device=device)[::2]
    repeated_R = torch.tensor(1.5, dtype=torch.float64, device=device).expand(2)
    for coefficients_R in (every_second_R, repeated_R):
        rows_RN = torch.ones(2, 61, device=device)
        weighted_sum(rows_RN, coefficients_R, out=memory[65:126], implementation=implementation)
        assert (memory[65:126] == 3).all()
        assert (memory[:65] == 7).all()
        assert (memory[126:] == 7).all()


def test_a_row_of_coefficient_zero_is_not_read(implementation, device):
    grads_RN = torch.randn(4, 1000, device=device)
    grads_RN[0], grads_RN[2] = math.nan, math.inf
    coefficients_R = torch.tensor([0.0, 0.25, -0.0, 0.75], dtype=torch.float64, device=device)
    sum_N = weighted_sum(grads_RN, coefficients_R, implementation=implementation)
    expected_N = weighted_sum(
        grads_RN[[1, 3]], coefficients_R[[1, 3]], implementation=implementation
    )
    assert torch.equal(sum_N, expected_N)
    # One-hot coefficients copy the row, and zeros write zeros.
    *_, one_hot_R = torch.eye(4, device=device)
    sum_N = weighted_sum(grads_RN, one_hot_R, implementation=implementation)
    assert torch.equal(sum_N, grads_RN[3])
    sum_N = weighted_sum(grads_RN, torch.zeros(4, device=device), implementation=implementation)
    assert torch.equal(sum_N, torch.zeros(1000, device=device))


def test_torch_knows_it(implementation, device):
    blocks = [torch.randn(3, 20, device=device), torch.randn(3, 7, device=device).bfloat16()]
    outs = [torch.zeros(20, device=device), torch.zeros(7, device=device)]
    # Parameters, as a caller may hand over.
    blocks[0].requires_grad_()
    arguments = ([blocks[0].detach(), blocks[1]], coefficients_for(blocks[1]), outs)
    assert_torch_knows("weighted_sum", arguments, implementation, changed=outs[0])
    weighted_sum(blocks, torch.ones(3, device=device), out=outs, implementation=implementation)
    assert not outs[0].requires_grad


# Numpy's, of Triton's interpreter; the second of triton 3.7.
@pytest.mark.filterwarnings(
    "ignore:overflow encountered in cast", "ignore:invalid value encountered:RuntimeWarning"
)
def test_a_coefficient_beyond_float32_is_infinite(implementation, device):
    rows_RN = torch.ones(2, 37, device=device)
    coefficients_R = torch.tensor([1e39, 0.0], dtype=torch.float64, device=device)
    sum_N = weighted_sum(rows_RN, coefficients_R, implementation=implementation)
    assert (sum_N == math.inf).all()
    exact_N = weighted_sum(rows_RN.double(), coefficients_R, implementation=implementation)
    assert (exact_N == 1e39).all()
