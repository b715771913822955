"""What only a GPU can show of a step: it waits for nothing, and a CUDA graph can hold it.

The checks see the whole step, from the first domain to the end of `step()`. They run on a GPU
(tests/method/test_on_a_gpu.py) and on the fake device (tests/fake_cuda/steps.py).
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from doge_fast import DoGEOptimizer
from doge_fast.losses import domain_losses

DOMAINS = ["a", "b", "c"]


def model_and_optimizer(
    device: str, score: Literal["paper", "aligned"] = "paper"
) -> tuple[nn.Module, DoGEOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(device)
    # A rate on the device, which a graph reads when it is replayed.
    inner = torch.optim.AdamW(
        model.named_parameters(), lr=torch.tensor(1e-3, device=device), fused=True, capturable=True
    )
    rule: dict[str, Any] = {"mu": 0.1}
    if score == "aligned":
        rule = {"score": "aligned", "micro_batches": 2, "target": "a"}
    return model, DoGEOptimizer(inner, domains=DOMAINS, max_grad_norm=1.0, **rule)


def batches(step: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(16, 32, generator=generator).to(device) for name in DOMAINS}


def train(model: nn.Module, optimizer: DoGEOptimizer, data: Mapping[str, Tensor]) -> None:
    number = optimizer.micro_batches or 1
    for part in range(number):
        for name, batch in data.items():
            with optimizer.domain(name):
                model(batch.chunk(number)[part]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def step_waits_for_nothing(device: str) -> None:
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


def captured_step_is_the_step(
    device: str, score: Literal["paper", "aligned"] = "paper", steps: int = 8
) -> None:
    eager_model, eager = model_and_optimizer(device, score)
    model, optimizer = model_and_optimizer(device, score)
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
    for step in range(steps):
        if step >= 3:
            for name, batch in batches(step, device).items():
                data[name].copy_(batch)
            graph.replay()
        train(eager_model, eager, batches(step, device))
    torch.testing.assert_close(optimizer.alpha, eager.alpha, rtol=1e-12, atol=0)
    assert (optimizer.alpha - 1 / len(DOMAINS)).abs().max() > 1e-6
    assert optimizer.num_steps == eager.num_steps == steps
    for param, expected in zip(model.parameters(), eager_model.parameters(), strict=True):
        torch.testing.assert_close(param, expected)


def skipped_first_step_leaves_no_momentum(device: str, dampening: float = 0.0) -> None:
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


def new_learning_rate_cannot_be_captured(device: str) -> None:
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


def step_that_the_host_skips_cannot_be_captured(device: str) -> None:
    model = nn.Linear(32, 8, device=device)
    optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=DOMAINS)
    data = batches(0, device)
    train(model, optimizer, data)
    with (
        pytest.raises(RuntimeError, match="SGD needs fused=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        train(model, optimizer, data)


def captured_halves_weigh_as_the_loss_does(device: str) -> None:
    """As in tests/method/test_aligned.py; other tokens are targets in the replay."""
    model = nn.Linear(8, 8, device=device)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    optimizer = DoGEOptimizer(inner, domains=["a", "b"], score="aligned")
    sizes = {"a": 2, "b": 2}
    labels = torch.tensor([[0], [1]], device=device).repeat_interleave(2, 0).repeat(1, 11)
    inputs = nn.functional.one_hot(labels, 8).float()

    def step() -> None:
        with optimizer.stacked(model, sizes):
            domain_losses(model(inputs), labels, sizes).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    with torch.cuda.graph(graph, stream=stream):
        step()
    labels[0, 3:] = -100
    graph.replay()
    assert optimizer.last is not None
    products, squares = optimizer.last.gram.diagonal(), optimizer.last.grad_norms**2
    # Rows are sums of ten tokens in float32.
    torch.testing.assert_close(products, squares, rtol=10 * 2**-23, atol=0)


CHECKS = (
    step_waits_for_nothing,
    captured_step_is_the_step,
    # Its weights move after twenty steps.
    partial(captured_step_is_the_step, score="aligned", steps=24),
    captured_halves_weigh_as_the_loss_does,
    skipped_first_step_leaves_no_momentum,
    partial(skipped_first_step_leaves_no_momentum, dampening=0.5),
    new_learning_rate_cannot_be_captured,
    step_that_the_host_skips_cannot_be_captured,
)
