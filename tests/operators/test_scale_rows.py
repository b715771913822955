"""Rows times factors, in every implementation."""

import math

import pytest
import torch

from doge_fast.kernels import scale_rows
from doge_fast.kernels.triton_support import is_interpreted
from tests.laws import assert_torch_knows

OPERATOR = "scale_rows"
pytestmark = pytest.mark.usefixtures("nan_memory")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (2, 5000), (1, 70_001), (4, 1), (0, 3), (3, 0)])
def test_each_row_is_multiplied_by_its_factor(shape, dtype, implementation, device):
    """In rows that are no neighbours, and nothing beside them."""
    memory = torch.randn(shape[0], shape[1] + 7, device=device).to(dtype)
    values_RN = memory[:, : shape[1]]
    factors_R = torch.tensor([-2.5, 1.0, 0.0, 1 / 3], device=device)[: shape[0]]
    exact_RN = values_RN.double() * factors_R.double()[:, None]
    before = memory.clone()
    scale_rows(values_RN, factors_R, implementation=implementation)
    # The interpreter cuts bits off where it narrows.
    is_cut = implementation == "triton" and is_interpreted()
    eps = torch.finfo(dtype).eps * (1 if is_cut or dtype.itemsize > 2 else 0.5)
    slack = torch.finfo(torch.float16).tiny if dtype == torch.float16 else 0
    error_RN = (values_RN.double() - exact_RN).abs()
    # Factors may be of fewer bits than products.
    assert (error_RN <= (eps + 2**-24) * exact_RN.abs() + slack).all()
    assert torch.equal(values_RN[1:2], before[1:2, : shape[1]])
    assert torch.equal(memory[:, shape[1] :], before[:, shape[1] :])


def test_the_factor_may_be_one_number_for_all(implementation, device):
    """As the gradient of a sum is."""
    values_RN = torch.ones(3, 4, device=device)
    for factor in (1.0, 8.0):
        factors_R = torch.tensor(factor, device=device).expand(3)
        scale_rows(values_RN, factors_R, implementation=implementation)
        assert (values_RN == factor).all()


def test_what_is_not_a_number_reaches_its_row(implementation, device):
    values_RN = torch.zeros(2, 3, device=device)
    scale_rows(
        values_RN, torch.tensor([1.0, math.nan], device=device), implementation=implementation
    )
    assert values_RN.isnan().tolist() == [[False] * 3, [True] * 3]


def test_torch_knows_it(implementation, device):
    values_RN = torch.randn(3, 9, device=device)[:, :4]
    arguments = values_RN, torch.randn(3, device=device)
    assert_torch_knows("scale_rows", arguments, implementation, changed=values_RN)
