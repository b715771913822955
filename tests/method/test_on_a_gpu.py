"""What only a GPU can show of a step: it waits for nothing, and a CUDA graph can hold it.

Watched is the whole step: from the first domain to the end of `step()`.
"""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from doge_fast import DoGEOptimizer
from tests.models import take_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of NVIDIA")

DOMAINS = ["a", "b", "c"]
# The second is not the one in use, which a missing device guard takes instead.
on_each_gpu = pytest.mark.parametrize(
    "device",
    [
        "cuda:0",
        pytest.param(
            "cuda:1",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU"),
        ),
    ],
)


def model_and_optimizer(device: str) -> tuple[nn.Module, DoGEOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(device)
    # A rate on the device, which a graph reads when it is replayed.
    inner = torch.optim.AdamW(
        model.named_parameters(), lr=torch.tensor(1e-3, device=device), fused=True, capturable=True
    )
    return model, DoGEOptimizer(inner, domains=DOMAINS, mu=0.1, max_grad_norm=1.0)


def batches(step: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(16, 32, generator=generator).to(device) for name in DOMAINS}


def train(model: nn.Module, optimizer: DoGEOptimizer, data: Mapping[str, Tensor]) -> None:
    take_step(optimizer, data, lambda name: model(data[name]).square().mean())


@on_each_gpu
def test_a_step_waits_for_nothing(device):
    model, optimizer = model_and_optimizer(device)
    for step in range(4):
        data = batches(step, device)
        # Tables are uploaded and kernels compiled in the first steps.
        torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
        try:
            train(model, optimizer, data)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.num_steps == 4


@on_each_gpu
def test_a_captured_step_is_the_step(device):
    eager_model, eager = model_and_optimizer(device)
    model, optimizer = model_and_optimizer(device)
    data = batches(0, device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    # Autograd remembers the stream where a parameter was first used.
    with torch.cuda.stream(stream):
        for step in range(3):
            for name, batch in batches(step, device).items():
                data[name].copy_(batch)
            train(model, optimizer, data)
    with torch.cuda.graph(graph, stream=stream):
        train(model, optimizer, data)
    for step in range(8):
        if step >= 3:
            for name, batch in batches(step, device).items():
                data[name].copy_(batch)
            graph.replay()
        train(eager_model, eager, batches(step, device))
    torch.testing.assert_close(optimizer.alpha, eager.alpha, rtol=1e-12, atol=0)
    assert optimizer.num_steps == eager.num_steps == 8
    for param, expected in zip(model.parameters(), eager_model.parameters(), strict=True):
        torch.testing.assert_close(param, expected)


@on_each_gpu
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_first_step_that_the_device_skips_leaves_no_momentum(device, dampening):
    ends = []
    for place in (device, "cpu"):
        torch.manual_seed(0)
        model = nn.Linear(32, 8).to(place)
        options = {"lr": 0.1, "momentum": 0.9, "dampening": dampening, "fused": True}
        inner = torch.optim.SGD(model.parameters(), **options)
        optimizer = DoGEOptimizer(inner, domains=DOMAINS)
        for step in range(3):
            factor = math.inf if step == 0 else 1.0
            data = {name: factor * batch for name, batch in batches(step, place).items()}
            train(model, optimizer, data)
        assert optimizer.num_skipped == 1
        ends.append([param.detach().cpu() for param in model.parameters()])
    for mine, expected in zip(*ends, strict=True):
        torch.testing.assert_close(mine, expected)


@on_each_gpu
def test_a_new_learning_rate_cannot_be_captured(device):
    model = nn.Linear(32, 8, device=device)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    optimizer = DoGEOptimizer(inner, domains=DOMAINS)
    data = batches(0, device)
    train(model, optimizer, data)
    optimizer.param_groups[0]["lr"] = 0.2
    with (
        pytest.raises(RuntimeError, match="one more step before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        train(model, optimizer, data)


@on_each_gpu
def test_a_step_that_the_host_would_skip_cannot_be_captured(device):
    model = nn.Linear(32, 8, device=device)
    optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=DOMAINS)
    data = batches(0, device)
    train(model, optimizer, data)
    with (
        pytest.raises(RuntimeError, match="SGD needs fused=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        train(model, optimizer, data)
