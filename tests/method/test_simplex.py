"""Laws of the mirror step, smoothing and the running average."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from doge_fast import reference
from doge_fast.weights import simplex


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
        ({"lr": 0.1, "mu": True}, "must be positive and finite; got True"),
    ],
)
def test_mirror_step_refuses(kwargs: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simplex.mirror_step(on_simplex(), gains(), **kwargs)


def test_what_lives_on_a_device_is_not_looked_at() -> None:
    """A refusal would wait for it."""
    minus_one = torch.tensor(-1.0, dtype=torch.float64)
    for rates in ({"lr": minus_one, "mu": 1.0}, {"lr": 1.0, "mu": minus_one}):
        moved_K = simplex.mirror_step(on_simplex(), gains(), **rates)
        back_K = simplex.mirror_step(on_simplex(), -gains(), lr=1.0, mu=1.0)
        torch.testing.assert_close(moved_K, back_K, rtol=1e-14, atol=0)
    wide_K = simplex.smooth(on_simplex(), torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(wide_K, 2 / 7 - on_simplex(), rtol=1e-14, atol=0)


def test_matrices_are_no_weights() -> None:
    with pytest.raises(ValueError, match=r"vectors of one length; got \[1, 7\] and \[1, 7\]"):
        simplex.mirror_step(on_simplex()[None], gains()[None], lr=0.1, mu=1.0)


@pytest.mark.parametrize("smoothing", [1.0, 1.5, -1e-9, math.nan, True, False, "0", None])
def test_smoothing_is_at_least_zero_and_less_than_one(smoothing: Any) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 1\); got "):
        simplex.check_smoothing(smoothing)


def test_ends_of_ranges_are_allowed() -> None:
    simplex.check_smoothing(0)
    simplex.check_smoothing(math.nextafter(1.0, 0.0))
    simplex.check_mu(math.ulp(0.0))


@pytest.mark.parametrize(
    ("value", "is_number", "is_integer"),
    [
        (2, True, True),
        (2.0, True, False),
        (np.float32(2), True, False),
        (np.int64(2), True, True),
        (torch.tensor(2.0), True, False),
        (torch.tensor(2), True, True),
        (torch.ones(1), True, False),
        (torch.ones(2), False, False),
        (True, False, False),
        ("2", False, False),
        (None, False, False),
    ],
    ids=repr,
)
def test_numbers_are_told_from_bools_and_words(
    value: object, is_number: bool, is_integer: bool
) -> None:
    assert simplex.is_number(value) == is_number
    assert simplex.is_integer(value) == is_integer


def test_mirror_step_refuses_other_lengths() -> None:
    with pytest.raises(ValueError, match=r"vectors of one length; got \[7\] and \[3\]"):
        simplex.mirror_step(on_simplex(), gains(num_domains=3), lr=0.1, mu=1.0)


def test_uniform() -> None:
    assert simplex.uniform(4).tolist() == [0.25] * 4
    assert simplex.uniform(1).tolist() == [1.0]
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
