"""What the mirror step and its helpers refuse; test_properties.py has their laws."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from doge_fast.weights import simplex
from doge_fast.weights.projection import effective_domains


def on_simplex(seed: int = 0, num_domains: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_domains, generator=generator, dtype=torch.float64).softmax(0)


def gains(seed: int = 1, num_domains: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_domains, generator=generator, dtype=torch.float64)


def moved(gain_K: Tensor, **rates: Any) -> Tensor:
    return simplex.mirror_step(on_simplex(), gain_K, **{"lr": 0.1, "mu": 0.5} | rates)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"lr": -0.1}, "learning rate .* >= 0; got -0.1"),
        ({"lr": math.nan}, ">= 0; got nan"),
        ({"mu": 0.0}, "positive and finite; got 0.0"),
        ({"mu": math.inf}, "positive and finite; got inf"),
        ({"mu": True}, "positive and finite; got True"),
    ],
)
def test_a_mirror_step_refuses(rates, message):
    with pytest.raises(ValueError, match=message):
        moved(gains(), **rates)
    simplex.check_mu(math.ulp(0.0))


@pytest.mark.parametrize("shapes", [((1, 7), (1, 7)), ((7,), (3,))])
def test_weights_and_gains_are_vectors_of_one_length(shapes):
    alpha_K, gain_K = map(torch.ones, shapes)
    with pytest.raises(ValueError, match="vectors of one length"):
        simplex.mirror_step(alpha_K, gain_K, lr=0.1, mu=1.0)


def test_what_lives_on_a_device_is_not_looked_at():
    """A refusal would wait for it."""
    minus_one = torch.tensor(-1.0, dtype=torch.float64)
    back_K = moved(-gains(), lr=1.0, mu=1.0)
    for rates in ({"lr": minus_one, "mu": 1.0}, {"lr": 1.0, "mu": minus_one}):
        torch.testing.assert_close(moved(gains(), **rates), back_K, rtol=1e-14, atol=0)
    wide_K = simplex.smooth(on_simplex(), torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(wide_K, 2 / 7 - on_simplex(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("smoothing", [1.0, -1e-9, math.nan, False, "0"])
def test_smoothing_is_at_least_zero_and_less_than_one(smoothing):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\); got "):
        simplex.smooth(on_simplex(), smoothing)
    simplex.check_smoothing(0)
    simplex.check_smoothing(math.nextafter(1.0, 0.0))


@pytest.mark.parametrize(
    ("value", "is_number", "is_integer"),
    [
        *((2, True, True), (2.0, True, False), (np.float32(2), True, False)),
        *((np.int64(2), True, True), (torch.tensor(2.0), True, False)),
        *((torch.tensor(2), True, True), (torch.ones(1), True, False)),
        *((torch.ones(2), False, False), (True, False, False), ("2", False, False)),
        (None, False, False),
    ],
    ids=repr,
)
def test_numbers_are_told_from_bools_and_words(value, is_number, is_integer):
    assert simplex.is_number(value) == is_number
    assert simplex.is_integer(value) == is_integer


def test_uniform_smoothing_and_means():
    assert simplex.uniform(4).tolist() == [0.25] * 4
    with pytest.raises(ValueError, match="at least one domain; got 0"):
        simplex.uniform(0)
    alpha_K = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert simplex.smooth(alpha_K, 0.2).min() == 0.05
    assert simplex.smooth(alpha_K, 0.0) is alpha_K
    points = torch.stack([on_simplex(seed) for seed in range(10)])
    mean_K = torch.full((7,), 0.3, dtype=torch.float64)
    for count, point_K in enumerate(points, start=1):
        mean_K = simplex.running_mean(mean_K, point_K, count)
    torch.testing.assert_close(mean_K, points.mean(0), rtol=1e-14, atol=0)
    assert effective_domains([0.2] * 5) == pytest.approx(5)
    assert effective_domains([1.0, 0.0]) == 1.0
