"""Laws of the projection: within bounds, nearest, and nothing moves that need not."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from doge_fast.weights import projection
from tests.laws import assert_simplex
from tests.packages import installed


def project(alpha_K: Tensor, *, floor_K: Tensor, cap_K: Tensor) -> Tensor:
    """`projection.project` of vectors, in float64."""
    found = projection.project(
        alpha_K.double().tolist(), floors=floor_K.double().tolist(), caps=cap_K.double().tolist()
    )
    return torch.tensor(found, dtype=torch.float64)


def on_simplex(seed: int = 0, num_domains: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_domains, generator=generator, dtype=torch.float64).softmax(0)


def test_kl_is_the_sum_and_infinite_off_the_support() -> None:
    alpha_K, other_K = on_simplex(0), on_simplex(1)
    expected = float((alpha_K * (alpha_K / other_K).log()).sum())
    assert projection.kl(alpha_K.tolist(), other_K.tolist()) == pytest.approx(expected, rel=1e-13)
    assert projection.kl(alpha_K.tolist(), alpha_K.tolist()) == 0
    assert projection.kl([1.0, 0.0], [0.5, 0.5]) == pytest.approx(math.log(2))
    assert projection.kl([0.5, 0.5], [1.0, 0.0]) == math.inf


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
def test_projection_satisfies_the_optimality_conditions(num_domains: int) -> None:
    """Free domains share one ratio; those at a floor would have less, those at a cap more."""
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


@pytest.mark.parametrize("is_reversed", [False, True], ids=["q-from-p", "p-from-q"])
@pytest.mark.parametrize("seed", range(6))
def test_projection_is_what_a_solver_finds_in_either_direction(
    seed: int, is_reversed: bool
) -> None:
    optimize = installed("scipy.optimize")
    alpha_K, floor_K, cap_K = bounded_problem(seed, 6)
    # Where a weight is zero one direction is infinite, so the solver sees none.
    alpha_K = (alpha_K + 0.02) / (alpha_K + 0.02).sum()
    moved_K = project(alpha_K, floor_K=floor_K, cap_K=cap_K)

    def divergence(point_K: np.ndarray) -> float:
        pair = (torch.from_numpy(point_K).clamp(min=1e-12), alpha_K)
        first_K, second_K = pair[::-1] if is_reversed else pair
        return projection.kl(first_K.tolist(), second_K.tolist())

    room = optimize.LinearConstraint(np.ones((1, 6)), 1, 1)
    start = project(torch.ones(6), floor_K=floor_K, cap_K=cap_K)
    found = optimize.minimize(
        divergence,
        start.numpy(),
        method="SLSQP",
        bounds=list(zip(floor_K.tolist(), cap_K.tolist(), strict=True)),
        constraints=[room],
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert found.success
    # SLSQP differentiates by differences of 1.5e-8; it may not beat us by more than that is worth.
    assert divergence(moved_K.numpy()) <= found.fun + 1e-10
    np.testing.assert_allclose(found.x, moved_K.numpy(), atol=1e-5)


def test_projection_moves_nothing_that_is_within_bounds_and_repeats_itself() -> None:
    alpha_K = on_simplex()
    none_K, all_K = torch.zeros(7), torch.ones(7)
    kept_K = project(alpha_K, floor_K=none_K, cap_K=all_K)
    torch.testing.assert_close(kept_K, alpha_K, rtol=1e-15, atol=0)
    for seed in range(20):
        alpha_K, floor_K, cap_K = bounded_problem(seed, 7)
        once_K = project(alpha_K, floor_K=floor_K, cap_K=cap_K)
        twice_K = project(once_K, floor_K=floor_K, cap_K=cap_K)
        torch.testing.assert_close(twice_K, once_K, rtol=1e-14, atol=0)
        scaled_K = project(7 * alpha_K, floor_K=floor_K, cap_K=cap_K)
        torch.testing.assert_close(scaled_K, once_K, rtol=1e-13, atol=0)


def test_projection_takes_domains_in_any_order() -> None:
    alpha_K, floor_K, cap_K = bounded_problem(3, 7)
    order = torch.tensor([3, 1, 0, 2, 6, 5, 4])
    moved_K = project(alpha_K, floor_K=floor_K, cap_K=cap_K)
    permuted_K = project(alpha_K[order], floor_K=floor_K[order], cap_K=cap_K[order])
    torch.testing.assert_close(permuted_K, moved_K[order], rtol=1e-14, atol=0)


def test_bounds_that_leave_no_room_are_the_answer() -> None:
    alpha_K = on_simplex(num_domains=10)
    for dtype in (torch.float64, torch.float32):
        # Ten of them sum to a little less than one, or in float32 to a little more.
        tenths_K = torch.full((10,), 0.1, dtype=dtype)
        for floor_K, cap_K in ((tenths_K, torch.ones(10)), (torch.zeros(10), tenths_K)):
            moved_K = project(alpha_K, floor_K=floor_K, cap_K=cap_K)
            torch.testing.assert_close(
                moved_K, tenths_K.double(), rtol=10 * torch.finfo(dtype).eps, atol=0
            )


def test_a_zero_is_lifted_to_its_floor_and_no_higher() -> None:
    alpha_K = torch.tensor([0.0, 0.0, 0.25, 0.75])
    floor_K = torch.tensor([0.2, 0.0, 0.0, 0.0])
    moved_K = project(alpha_K, floor_K=floor_K, cap_K=torch.ones(4))
    torch.testing.assert_close(moved_K, torch.tensor([0.2, 0.0, 0.2, 0.6]).double())
    # The limit of ever smaller weights.
    tiny_K = torch.tensor([1e-300, 5e-324, 0.25, 0.75], dtype=torch.float64)
    near_K = project(tiny_K, floor_K=floor_K, cap_K=torch.ones(4))
    torch.testing.assert_close(near_K, moved_K, atol=1e-15, rtol=1e-15)
