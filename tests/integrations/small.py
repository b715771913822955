"""A model of a few numbers and its training, for checks of what stands around a step."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from doge_fast import DoGEOptimizer

DOMAINS = ("a", "b", "c")
# Weights stay well inside the simplex over ten steps.
AS_IN_THE_PAPER = {"domains": DOMAINS, "mu": 30.0, "domain_max_grad_norm": None}


def small_model(*, bias: bool = True, width: int = 4) -> nn.Module:
    """Two layers, the same at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width, bias=bias), nn.Tanh(), nn.Linear(width, 2, bias=bias))


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **({"lr": 0.05} | options))


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def two_sgds(model: nn.Module) -> list[Optimizer]:
    """One for matrices, one for the rest."""
    return [torch.optim.SGD(params, lr=0.05, momentum=0.9) for params in divided(model)]


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and everything else."""
    params = list(model.parameters())
    return [p for p in params if p.ndim == 2], [p for p in params if p.ndim < 2]


def pair(model: nn.Module) -> list[Optimizer]:
    """SGD for matrices, AdamW for the rest."""
    matrices, others = divided(model)
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(others, lr=0.02)]


def wrapped(
    inner: Callable[[nn.Module], Optimizer | Sequence[Optimizer]] = adamw,
    model: nn.Module | None = None,
    **options: Any,
) -> tuple[nn.Module, DoGEOptimizer]:
    """A small model and the wrapper around its optimizer."""
    model = small_model() if model is None else model
    return model, DoGEOptimizer(inner(model), **(AS_IN_THE_PAPER | options))


def loss_of(model: nn.Module, step: int, row: int = 0) -> Tensor:
    """The loss of domain `row` at `step`; domains differ in where their inputs lie."""
    generator = torch.Generator().manual_seed(1000 * step + row)
    inputs = torch.randn(5, 3, generator=generator) + row
    loss: Tensor = (model(inputs) - row).square().mean()
    return loss


def collect(
    model: nn.Module,
    optimizer: DoGEOptimizer,
    step: int,
    *,
    absent: str = "",
    spoilt: Collection[str] = (),
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> None:
    """One backward pass for each domain of the step; losses of `spoilt` ones are infinite."""
    for row, name in enumerate(optimizer.names):
        is_measured = name not in optimizer.domains
        if name not in absent and (is_measured or name in optimizer.domains_of_step):
            factor = float("inf") if name in spoilt else 1.0
            with optimizer.domain(name):
                backward(factor * loss_of(model, step, row))


def train(model: nn.Module, optimizer: DoGEOptimizer, steps: Iterable[int]) -> None:
    """Whole steps of all domains."""
    for step in steps:
        collect(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()


def train_plainly(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """The same of the first domain, without DoGE."""
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: DoGEOptimizer) -> list[Tensor]:
    """Copies of parameters, the wrapped optimizer's state and all of the domain weights'."""
    inner = [
        # A quantised one is a type of its own, which may not know clone().
        (value.clone() if type(value) is Tensor else value.dequantize())
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    ours = optimizer.doge.state_dict()
    weights = [value for value in ours.values() if isinstance(value, Tensor)]
    draws = torch.tensor(ours["draws"])
    return [p.detach().clone() for p in model.parameters()] + inner + [*weights, draws]


def assert_same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """Bit for bit."""
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
