"""Runs whose weights mean nothing, though they train: each warns once."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

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


def test_steps_that_were_skipped_are_counted(tmp_path):
    (message,) = messages(run(sgd(0.1), 30, value=math.nan))
    assert "30 of 30 steps" in message
    optimizer = run(sgd(0.1), 3, value=math.nan)
    with pytest.warns(UserWarning, match="3 of 3 steps") as caught:
        optimizer.save_weights(tmp_path / "weights.json")
    assert caught[0].filename == __file__


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
def test_a_first_group_without_a_learning_rate_warns(lr):
    (message,) = messages(run(sgd(lr), 12, mu=1.0))
    assert "not moved in 12 steps" in message
    assert "learning rate of the first parameter group is 0" in message
    # A rate that warms up is no such group, nor is one domain alone.
    assert not messages(run(sgd(lr), 9, mu=1.0))
    warm_up = run(sgd(0.01), 12, lambda inner: LambdaLR(inner, lambda step: step / 1e4))
    assert not messages(warm_up)


@pytest.mark.parametrize(("norm", "does_warn"), [(1.0, True), (3.0, False)])
def test_two_domains_clipped_to_one_norm_have_equal_scores(norm, does_warn):
    # Of norms 4 and 2: a norm of 3 clips the first alone, and its scores are 9 + 6 and 4 + 6.
    optimizer = run(sgd(0.01), 20, domain_max_grad_norm=norm, mu=1e-2)
    found = [message for message in messages(optimizer) if "domain_max_grad_norm=None" in message]
    assert len(found) == does_warn
    weight = optimizer.weights["a"]
    assert (abs(weight - 0.5) < 1e-4) == does_warn


def moments(optimizer: DoGEOptimizer) -> torch.Tensor:
    (weight,) = optimizer.param_groups[0]["params"]
    return optimizer.state[weight]["exp_avg"]


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.ones(4, requires_grad=True)], lr=0.1)


def test_a_state_that_was_loaded_in_its_place_warns():
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
def test_a_state_that_came_another_way_does_not(way):
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
