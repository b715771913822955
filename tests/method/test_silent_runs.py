"""Runs that train and learn nothing, or something else than they seem to: each says so once."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler

from doge_fast import DoGEOptimizer
from tests.models import take_step

Schedule = Callable[[torch.optim.Optimizer], LRScheduler | None]


def run(
    inner: torch.optim.Optimizer,
    steps: int,
    schedule: Schedule = lambda inner: None,
    value: float = 1.0,
    **options: Any,
) -> DoGEOptimizer:
    """Steps of two domains on one matrix, the first with a gradient twice as long."""
    (weight,) = inner.param_groups[0]["params"]
    scheduler = schedule(inner)
    options = {"domain_max_grad_norm": None, **options}
    optimizer = DoGEOptimizer(inner, domains=["a", "b"], **options)
    factors = {"a": 2.0 * value, "b": value}
    for _ in range(steps):
        take_step(optimizer, factors, lambda name: factors[name] * weight.sum())
        if scheduler is not None:
            scheduler.step()
    return optimizer


def sgd(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.ones(4, requires_grad=True)], lr=lr)


def messages(optimizer: DoGEOptimizer) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert sum(optimizer.weights.values()) == pytest.approx(1)
        # Once each.
        assert sum(optimizer.weights.values()) == pytest.approx(1)
    # The line that reads them.
    assert {each.filename for each in caught} <= {__file__}
    return [str(each.message) for each in caught]


def test_steps_that_were_all_skipped_are_counted(tmp_path):
    (message,) = messages(run(sgd(0.1), 30, value=math.nan))
    assert "30 of 30 steps" in message
    optimizer = run(sgd(0.1), 3, value=math.nan)
    with pytest.warns(UserWarning, match="3 of 3 steps") as caught:
        optimizer.save_weights(tmp_path / "weights.json")
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("lr", "schedule", "mu", "word"),
    [
        # The largest rate stands in the scheduler alone.
        (1e-6, lambda inner: CyclicLR(inner, 1e-6, 1e-2, step_size_up=20), None, "too fast"),
        # A rate of one times the function's.
        (1.0, lambda inner: LambdaLR(inner, lambda step: 1e-4), None, "hardly move"),
        (1.0, lambda inner: LambdaLR(inner, lambda step: 1e-4), 20.0, None),
        (torch.tensor(1.0), lambda inner: LambdaLR(inner, lambda step: 1e-4), None, "hardly move"),
        # At its height for one step of many.
        (0.1, lambda inner: LambdaLR(inner, lambda step: 0.3**step), None, "hardly move"),
        (0.01, lambda inner: None, None, None),
        (torch.tensor(0.01), lambda inner: None, None, None),
        (0.01, lambda inner: LambdaLR(inner, lambda step: min(1, step / 30)), None, None),
        # Warming up still: 0.4 % of its height, and half as much in the mean.
        (0.01, lambda inner: LambdaLR(inner, lambda step: step / 40_000), None, None),
        (torch.tensor(0.01), lambda inner: LambdaLR(inner, lambda step: step / 40_000), None, None),
        (0.01, lambda inner: LambdaLR(inner, lambda step: (step / 4e6) ** 0.5), None, None),
        # Long at a height that is far below.
        (1.0, lambda inner: LambdaLR(inner, lambda step: min(step, 30) / 1e5), None, "hardly move"),
    ],
)
def test_a_default_mu_of_another_rate_is_told(lr, schedule, mu, word):
    inner = torch.optim.SGD([torch.ones(4, requires_grad=True)], lr=lr, momentum=0.9)
    said = messages(run(inner, 150, schedule, mu=mu))
    found = [message for message in said if "mu=" in message or "was 0" in message]
    assert len(found) == (word is not None)
    assert word is None or word in found[0]


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
@pytest.mark.parametrize("steps", [12, 60])
def test_a_first_group_without_a_rate_is_told(rate, steps):
    optimizer = run(sgd(rate), steps, mu=1.0)
    assert any(f"was 0 in all {steps} steps" in message for message in messages(optimizer))


@pytest.mark.parametrize(("norm", "is_told"), [(1.0, True), (3.0, False)])
def test_two_domains_clipped_to_one_norm_are_told_why_they_stay(norm, is_told):
    # Of norms 4 and 2: a norm of 3 clips the first alone, and its scores are 9 + 6 and 4 + 6.
    optimizer = run(sgd(0.01), 20, domain_max_grad_norm=norm, mu=1e-2)
    found = [message for message in messages(optimizer) if "domain_max_grad_norm=None" in message]
    assert len(found) == is_told
    weight = optimizer.weights["a"]
    assert (abs(weight - 0.5) < 1e-4) == is_told


def moments(optimizer: DoGEOptimizer) -> torch.Tensor:
    (weight,) = optimizer.param_groups[0]["params"]
    return optimizer.state[weight]["exp_avg"]


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.ones(4, requires_grad=True)], lr=0.1)


def test_a_state_that_was_loaded_in_its_place_is_told():
    optimizer = DoGEOptimizer(adamw(), domains=["a", "b"])
    (weight,) = optimizer.param_groups[0]["params"]
    # As torch.distributed.checkpoint does: a step without a rate makes the state, then numbers are
    # written into it.
    optimizer.param_groups[0]["lr"] = 0.0
    weight.grad = torch.zeros(4)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.1
    moments(optimizer).fill_(1.0)
    with pytest.warns(UserWarning, match="in its place") as caught, optimizer.domain("a"):
        weight.sum().backward()
    # The line that enters the domain.
    assert caught[0].filename == __file__


@pytest.mark.parametrize("way", ["before wrapping", "whole", "apart", "trained without domains"])
def test_a_state_that_came_another_way_is_not(way):
    saved = run(adamw(), 2)
    inner = adamw()
    if way == "before wrapping":
        inner.load_state_dict(saved.inner.state_dict())
    optimizer = DoGEOptimizer(inner, domains=["a", "b"], domain_max_grad_norm=None)
    (weight,) = optimizer.param_groups[0]["params"]
    if way == "whole":
        optimizer.load_state_dict(saved.state_dict())
    elif way == "apart":
        optimizer.inner.load_state_dict(saved.inner.state_dict())
        optimizer.doge.load_state_dict(saved.doge.state_dict())
    elif way == "trained without domains":
        weight.grad = torch.ones(4)
        optimizer.step()
        optimizer.zero_grad()
    assert way == "before wrapping" or moments(optimizer).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.domain("a"):
            weight.sum().backward()
