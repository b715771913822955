"""The nearest point of the simplex within bounds, and how many domains are in use."""

import pytest
import torch
from torch import Tensor

from doge_fast.weights import projection
from tests.laws import assert_simplex


def test_effective_domains():
    assert projection.effective_domains([0.2] * 5) == pytest.approx(5)
    assert projection.effective_domains([1.0, 0.0]) == 1.0


def project(alpha_K: Tensor, *, floor_K: Tensor, cap_K: Tensor) -> Tensor:
    """`projection.project` of vectors, in float64."""
    found = projection.project(
        alpha_K.double().tolist(), floors=floor_K.double().tolist(), caps=cap_K.double().tolist()
    )
    return torch.tensor(found, dtype=torch.float64)


def bounded_problem(seed: int, num_domains: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights over many orders of magnitude, some of them zero, and bounds with room in between."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.rand(num_domains, generator=generator, dtype=torch.float64)

    alpha_K = draw() ** (1 + 20 * draw())
    alpha_K[draw() < 0.2] = 0
    alpha_K[0] = 0.1
    floor_K = draw() * (draw() < 0.4)
    floor_K *= 0.6 * draw() / floor_K.sum().clamp(min=1)
    cap_K = (floor_K + 3 * draw() / num_domains).clamp(max=1)
    # Caps that leave room: of the domains that may be lifted, the first takes what there is.
    cap_K[0] = 1
    return alpha_K / alpha_K.sum(), floor_K, cap_K


@pytest.mark.parametrize("num_domains", [1, 2, 3, 7, 40, 512])
def test_projection_satisfies_the_optimality_conditions(num_domains):
    """Free domains share one ratio; those at a floor would have less, those at a cap more.

    The nearest point in either direction of KL, which no other point satisfies.
    """
    for seed in range(40):
        alpha_K, floor_K, cap_K = bounded_problem(seed, num_domains)
        moved_K = project(alpha_K, floor_K=floor_K, cap_K=cap_K)
        assert_simplex(moved_K)
        assert (moved_K >= floor_K).all()
        assert (moved_K <= cap_K).all()
        has_weight = alpha_K > 0
        assert torch.equal(moved_K[~has_weight], floor_K[~has_weight])
        ratio_K = moved_K / alpha_K
        is_free = has_weight & (moved_K > floor_K) & (moved_K < cap_K)
        at_floor = has_weight & (moved_K == floor_K) & (moved_K < cap_K)
        at_cap = has_weight & (moved_K == cap_K) & (moved_K > floor_K)
        # Ratios are quotients of rounded numbers.
        slack = 1 + 8 * num_domains * torch.finfo(torch.float64).eps
        level = ratio_K[is_free | at_cap].max() if (is_free | at_cap).any() else 0
        assert (ratio_K[at_floor] * slack >= level).all()
        if is_free.any():
            lowest = ratio_K[is_free].min()
            assert ratio_K[is_free].max() <= lowest * slack
            assert (ratio_K[at_cap] <= lowest * slack).all()


def test_bounds_that_leave_no_room_are_the_answer():
    alpha_K = torch.rand(10, dtype=torch.float64).softmax(0)
    for dtype in (torch.float64, torch.float32):
        # Ten of them sum to a little less than one, or in float32 to a little more.
        tenths_K = torch.full((10,), 0.1, dtype=dtype)
        for floor_K, cap_K in ((tenths_K, torch.ones(10)), (torch.zeros(10), tenths_K)):
            moved_K = project(alpha_K, floor_K=floor_K, cap_K=cap_K)
            torch.testing.assert_close(
                moved_K, tenths_K.double(), rtol=10 * torch.finfo(dtype).eps, atol=0
            )


def test_a_zero_is_lifted_to_its_floor_and_no_higher():
    alpha_K = torch.tensor([0.0, 0.0, 0.25, 0.75])
    floor_K = torch.tensor([0.2, 0.0, 0.0, 0.0])
    moved_K = project(alpha_K, floor_K=floor_K, cap_K=torch.ones(4))
    torch.testing.assert_close(moved_K, torch.tensor([0.2, 0.0, 0.2, 0.6]).double())
    # The limit of ever smaller weights.
    tiny_K = torch.tensor([1e-300, 5e-324, 0.25, 0.75], dtype=torch.float64)
    near_K = project(tiny_K, floor_K=floor_K, cap_K=torch.ones(4))
    torch.testing.assert_close(near_K, moved_K, atol=1e-15, rtol=1e-15)
