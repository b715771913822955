"""Laws of the mirror step, smoothing and the running average."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import LinearConstraint, minimize
from torch import Tensor

from doge_fast import reference, simplex
from tests.laws import assert_simplex


def on_simplex(seed: int = 0, num_domains: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_domains, generator=generator, dtype=torch.float64).softmax(0)


def gains(seed: int = 1, num_domains: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_domains, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("scale", [0.0, 1e-10, 1.0, 1e3, 1e10])
def test_mirror_step_stays_on_the_simplex(scale: float) -> None:
    alpha_K = simplex.mirror_step(on_simplex(), scale * gains(), lr=0.1, mu=0.01)
    assert (alpha_K >= 0).all()
    assert abs(alpha_K.sum().item() - 1) <= len(alpha_K) * torch.finfo(alpha_K.dtype).eps


def test_mirror_step_equals_the_equation() -> None:
    ours = simplex.mirror_step(on_simplex(), gains(), lr=0.1, mu=0.5)
    theirs = reference.mirror_step(on_simplex(), gains(), 0.1, 0.5)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)


def test_equal_gains_move_nothing() -> None:
    alpha_K = simplex.mirror_step(on_simplex(), torch.full((7,), 3.0).double(), lr=0.1, mu=0.01)
    torch.testing.assert_close(alpha_K, on_simplex(), rtol=1e-13, atol=0)


def test_zero_learning_rate_moves_nothing() -> None:
    alpha_K = simplex.mirror_step(on_simplex(), gains(), lr=0.0, mu=0.01)
    torch.testing.assert_close(alpha_K, on_simplex(), rtol=1e-15, atol=0)


def test_a_larger_gain_means_a_larger_weight() -> None:
    gain_K = gains()
    weights = []
    for extra in (0.0, 0.5, 1.0):
        gain_K[2] = extra
        weights.append(simplex.mirror_step(on_simplex(), gain_K, lr=1.0, mu=1.0)[2].item())
    assert weights == sorted(weights)
    assert weights[0] < weights[-1]


def test_large_mu_is_do_not_move() -> None:
    moves = [
        (simplex.mirror_step(on_simplex(), gains(), lr=1.0, mu=mu) - on_simplex()).abs().sum()
        for mu in (1.0, 10.0, 100.0, 1e6)
    ]
    assert moves == sorted(moves, reverse=True)
    assert moves[-1] < 1e-5


def test_zero_weight_stays_zero() -> None:
    alpha_K = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    moved_K = simplex.mirror_step(alpha_K, gains(num_domains=3).abs() * 1e3, lr=1.0, mu=0.01)
    assert moved_K[0] == 0


def test_domains_may_be_permuted() -> None:
    order = torch.tensor([3, 1, 0, 2, 6, 5, 4])
    moved_K = simplex.mirror_step(on_simplex(), gains(), lr=0.1, mu=0.5)
    permuted_K = simplex.mirror_step(on_simplex()[order], gains()[order], lr=0.1, mu=0.5)
    torch.testing.assert_close(permuted_K, moved_K[order], rtol=1e-14, atol=0)


def test_tensor_learning_rate() -> None:
    lr = torch.tensor(0.1, dtype=torch.float64)
    ours = simplex.mirror_step(on_simplex(), gains(), lr=lr, mu=0.5)
    torch.testing.assert_close(
        ours, simplex.mirror_step(on_simplex(), gains(), lr=0.1, mu=0.5), rtol=1e-14, atol=0
    )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": -0.1, "mu": 1.0}, "learning rate of a mirror step must be >= 0; got -0.1"),
        ({"lr": math.nan, "mu": 1.0}, "must be >= 0; got nan"),
        ({"lr": 0.1, "mu": 0.0}, "must be positive and finite; got 0.0"),
        ({"lr": 0.1, "mu": math.inf}, "must be positive and finite; got inf"),
    ],
)
def test_mirror_step_refuses(kwargs: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simplex.mirror_step(on_simplex(), gains(), **kwargs)


def test_mirror_step_refuses_other_lengths() -> None:
    with pytest.raises(ValueError, match=r"vectors of one length; got \[7\] and \[3\]"):
        simplex.mirror_step(on_simplex(), gains(num_domains=3), lr=0.1, mu=1.0)


def test_uniform() -> None:
    assert simplex.uniform(4).tolist() == [0.25] * 4
    with pytest.raises(ValueError, match="at least one domain; got 0"):
        simplex.uniform(0)


def test_smoothing_keeps_a_floor_and_the_simplex() -> None:
    alpha_K = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    smooth_K = simplex.smooth(alpha_K, 0.2)
    torch.testing.assert_close(smooth_K, reference.smooth(alpha_K, 0.2))
    assert smooth_K.min() == 0.05
    assert simplex.smooth(alpha_K, 0.0) is alpha_K


def test_running_mean_is_the_mean() -> None:
    points = torch.stack([on_simplex(seed) for seed in range(10)])
    mean_K = torch.full((7,), 0.3, dtype=torch.float64)
    for count, alpha_K in enumerate(points, start=1):
        mean_K = simplex.running_mean(mean_K, alpha_K, count)
    torch.testing.assert_close(mean_K, points.mean(0), rtol=1e-14, atol=0)


def test_effective_domains() -> None:
    assert simplex.effective_domains(simplex.uniform(5)).item() == pytest.approx(5)
    assert simplex.effective_domains(torch.tensor([1.0, 0.0])).item() == 1.0


def test_kl_is_the_sum_and_infinite_off_the_support() -> None:
    alpha_K, other_K = on_simplex(0), on_simplex(1)
    expected = (alpha_K * (alpha_K / other_K).log()).sum()
    torch.testing.assert_close(simplex.kl(alpha_K, other_K), expected, rtol=1e-13, atol=1e-16)
    assert simplex.kl(alpha_K, alpha_K) == 0
    corner_K = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert simplex.kl(corner_K, simplex.uniform(2)).item() == pytest.approx(math.log(2))
    assert simplex.kl(simplex.uniform(2), corner_K) == math.inf


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
        moved_K = simplex.project(alpha_K, floor_K=floor_K, cap_K=cap_K)
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
    alpha_K, floor_K, cap_K = bounded_problem(seed, 6)
    # Where a weight is zero one direction is infinite, so the solver sees none.
    alpha_K = (alpha_K + 0.02) / (alpha_K + 0.02).sum()
    moved_K = simplex.project(alpha_K, floor_K=floor_K, cap_K=cap_K)

    def divergence(point_K: np.ndarray) -> float:
        pair = (torch.from_numpy(point_K).clamp(min=1e-12), alpha_K)
        return float(simplex.kl(*(pair[::-1] if is_reversed else pair)))

    room = LinearConstraint(np.ones((1, 6)), 1, 1)
    start = simplex.project(torch.ones(6), floor_K=floor_K, cap_K=cap_K)
    found = minimize(
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
    kept_K = simplex.project(alpha_K, floor_K=none_K, cap_K=all_K)
    torch.testing.assert_close(kept_K, alpha_K, rtol=1e-15, atol=0)
    for seed in range(20):
        alpha_K, floor_K, cap_K = bounded_problem(seed, 7)
        once_K = simplex.project(alpha_K, floor_K=floor_K, cap_K=cap_K)
        twice_K = simplex.project(once_K, floor_K=floor_K, cap_K=cap_K)
        torch.testing.assert_close(twice_K, once_K, rtol=1e-14, atol=0)
        scaled_K = simplex.project(7 * alpha_K, floor_K=floor_K, cap_K=cap_K)
        torch.testing.assert_close(scaled_K, once_K, rtol=1e-13, atol=0)


def test_projection_takes_domains_in_any_order() -> None:
    alpha_K, floor_K, cap_K = bounded_problem(3, 7)
    order = torch.tensor([3, 1, 0, 2, 6, 5, 4])
    moved_K = simplex.project(alpha_K, floor_K=floor_K, cap_K=cap_K)
    permuted_K = simplex.project(alpha_K[order], floor_K=floor_K[order], cap_K=cap_K[order])
    torch.testing.assert_close(permuted_K, moved_K[order], rtol=1e-14, atol=0)


def test_bounds_that_leave_no_room_are_the_answer() -> None:
    alpha_K = on_simplex(num_domains=10)
    for dtype in (torch.float64, torch.float32):
        # Ten of them sum to a little less than one, or in float32 to a little more.
        tenths_K = torch.full((10,), 0.1, dtype=dtype)
        for floor_K, cap_K in ((tenths_K, torch.ones(10)), (torch.zeros(10), tenths_K)):
            moved_K = simplex.project(alpha_K, floor_K=floor_K, cap_K=cap_K)
            torch.testing.assert_close(
                moved_K, tenths_K.double(), rtol=10 * torch.finfo(dtype).eps, atol=0
            )


def test_a_zero_is_lifted_to_its_floor_and_no_higher() -> None:
    alpha_K = torch.tensor([0.0, 0.0, 0.25, 0.75])
    floor_K = torch.tensor([0.2, 0.0, 0.0, 0.0])
    moved_K = simplex.project(alpha_K, floor_K=floor_K, cap_K=torch.ones(4))
    torch.testing.assert_close(moved_K, torch.tensor([0.2, 0.0, 0.2, 0.6]).double())
    # The limit of ever smaller weights.
    tiny_K = torch.tensor([1e-300, 5e-324, 0.25, 0.75], dtype=torch.float64)
    near_K = simplex.project(tiny_K, floor_K=floor_K, cap_K=torch.ones(4))
    torch.testing.assert_close(near_K, moved_K, atol=1e-15, rtol=1e-15)
    with pytest.raises(ValueError, match=r"may hold 0.4 in all, 0.6 is missing.*weight zero"):
        simplex.project(alpha_K, floor_K=torch.zeros(4), cap_K=torch.full((4,), 0.2))


@pytest.mark.parametrize(
    ("alpha", "floor", "cap", "message"),
    [
        ([0.5, 0.5], [0.6, 0.6], [1.0, 1.0], "floors must leave room .* sum to 1.2, 0.2 too much"),
        ([0.5, 0.5], [0.0, 0.0], [0.3, 0.3], "caps must leave room .* 0.6 in all, 0.4 is missing"),
        ([0.5, 0.5], [0.0, 0.5], [1.0, 0.4], "got floor 0.5 and cap 0.4 at position 1"),
        ([0.5, 0.5], [-0.1, 0.0], [1.0, 1.0], "0 <= floor <= cap <= 1; got floor -0.1"),
        ([0.5, 0.5], [0.0, 0.0], [1.0, 1.5], "cap 1.5 at position 1"),
        ([0.5, 0.5], [0.0, math.nan], [1.0, 1.0], "got floor nan"),
        ([0.5, -0.5], [0.0, 0.0], [1.0, 1.0], "finite, >= 0 and not all zero"),
        ([0.5, math.inf], [0.0, 0.0], [1.0, 1.0], "finite, >= 0 and not all zero"),
        ([0.0, 0.0], [0.0, 0.0], [1.0, 1.0], "finite, >= 0 and not all zero"),
        ([0.5, 0.5], [0.0], [1.0, 1.0], r"vectors of one length; got \[2\], \[1\] and \[2\]"),
    ],
)
def test_projection_refuses(
    alpha: list[float], floor: list[float], cap: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        simplex.project(torch.tensor(alpha), floor_K=torch.tensor(floor), cap_K=torch.tensor(cap))
