"""What only a GPU can show of a step: it waits for nothing, and a CUDA graph can hold it."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from doge_fast import DoGEOptimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of NVIDIA")

DOMAINS = ["a", "b", "c"]


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("default")
    yield
    torch.cuda.set_sync_debug_mode("default")


def model_and_optimizer(**options: object) -> tuple[nn.Module, DoGEOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to("cuda")
    # A rate on the device, which a graph reads when it is replayed.
    inner = torch.optim.AdamW(
        model.named_parameters(), lr=torch.tensor(1e-3, device="cuda"), fused=True, capturable=True
    )
    return model, DoGEOptimizer(inner, domains=DOMAINS, mu=0.1, max_grad_norm=1.0, **options)


def collect(model: nn.Module, optimizer: DoGEOptimizer, step: int) -> None:
    for number, name in enumerate(DOMAINS):
        generator = torch.Generator("cuda").manual_seed(100 * step + number)
        batch = torch.randn(16, 32, device="cuda", generator=generator)
        with optimizer.domain(name):
            model(batch).square().mean().backward()


def test_a_step_waits_for_nothing(no_synchronisation: None) -> None:
    model, optimizer = model_and_optimizer()
    for step in range(4):
        collect(model, optimizer, step)
        # Tables are uploaded and kernels compiled in the first steps.
        if step >= 2:
            torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()
    assert optimizer.num_steps == 4


def test_a_captured_step_is_the_step() -> None:
    eager_model, eager = model_and_optimizer()
    model, optimizer = model_and_optimizer()
    for step in range(3):
        collect(eager_model, eager, step)
        eager.step()
        eager.zero_grad()
        collect(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    collect(model, optimizer, 3)
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(3, 8):
        if step > 3:
            optimizer.zero_grad()
            collect(model, optimizer, step)
        graph.replay()
        collect(eager_model, eager, step)
        eager.step()
        eager.zero_grad()
    torch.testing.assert_close(optimizer.alpha, eager.alpha, rtol=1e-12, atol=0)
    assert optimizer.num_steps == eager.num_steps == 8
    for param, expected in zip(model.parameters(), eager_model.parameters(), strict=True):
        torch.testing.assert_close(param, expected)


def test_a_step_that_the_host_would_skip_cannot_be_captured() -> None:
    model = nn.Linear(32, 8, device="cuda")
    optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=DOMAINS)
    collect(model, optimizer, 0)
    optimizer.step()
    optimizer.zero_grad()
    collect(model, optimizer, 1)
    with (
        pytest.raises(RuntimeError, match="SGD needs fused=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
