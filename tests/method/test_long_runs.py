"""Memory and descriptors after many steps are those after few."""

import gc

import pytest
import torch

from doge_fast import DoGEOptimizer
from tests.models import enter

psutil = pytest.importorskip("psutil")

DOMAINS = ("web", "code", "books")
STEPS, WARM_UP = 20_000, 2_000
# What the allocator may take on the way.
SLACK_BYTES = 4 << 20


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mode", ["sequential", "stacked"])
def test_20_000_steps_take_no_more_memory_than_2_000(mode):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = DoGEOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), domains=DOMAINS, domains_per_step=2
    )
    process = psutil.Process()

    def step() -> None:
        names = optimizer.domains_of_step
        if mode == "stacked":
            with optimizer.stacked(model, dict.fromkeys(names, 4)):
                (model(torch.randn(4 * len(names), 16)).square().sum() / 4).backward()
        else:
            enter(optimizer, names, lambda _: model(torch.randn(4, 16)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def sizes() -> tuple[int, int, int]:
        gc.collect()
        return process.memory_info().rss, process.num_fds(), len(gc.get_objects())

    for _ in range(WARM_UP):
        step()
    memory, descriptors, objects = sizes()
    for _ in range(STEPS - WARM_UP):
        step()
    after = sizes()
    assert after[0] <= memory + SLACK_BYTES
    assert after[1] == descriptors
    assert after[2] <= objects + 100
