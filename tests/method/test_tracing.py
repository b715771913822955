"""The phases of a step carry names in a profile, and cost nothing without one."""

import torch
from torch.profiler import ProfilerActivity, profile

from doge_fast import DoGEOptimizer
from doge_fast.tracing import phase

PHASES = ("accumulate", "gram", "reweight", "weighted_sum", "inner_step")


def test_a_profile_names_the_phases() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=["a", "b"])
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for name in "ab":
            with optimizer.domain(name):
                model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    counts = {event.key: event.count for event in seen.key_averages()}
    for name in PHASES:
        assert counts[f"doge_fast.{name}"] == (2 if name == "accumulate" else 1)


def test_nobody_looking_is_the_same_nothing() -> None:
    assert phase("gram") is phase("reweight")
