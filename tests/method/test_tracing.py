"""The phases of a step carry names for who observes them, and cost nothing otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from doge_fast import DoGEOptimizer
from doge_fast.tracing import observed
from tests.models import take_step

PHASES = ("accumulate", "gram", "reweight", "weighted_sum", "inner_step")


def step() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=["a", "b"])
    take_step(optimizer, "ab", lambda _: model(torch.randn(4, 3)).square().mean())


def test_a_profile_names_the_phases():
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    counts = {event.key: event.count for event in seen.key_averages()}
    for name in PHASES:
        assert counts[f"doge_fast.{name}"] == (2 if name == "accumulate" else 1)


def test_an_observer_sees_every_phase():
    told: list[str] = []

    @contextmanager
    def ranges(phase: str) -> Iterator[None]:
        name = phase.removeprefix("doge_fast.")
        told.append(f"{name} begins")
        yield
        told.append(f"{name} ends")

    with observed(ranges):
        step()
    expected = ["accumulate", *PHASES]
    assert told == [f"{name} {what}" for name in expected for what in ("begins", "ends")]
    with pytest.raises(KeyError), observed(ranges):
        raise KeyError
    step()
    assert len(told) == 2 * len(expected)
