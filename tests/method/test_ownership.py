"""Several optimizers on one model: what is refused, and what is not."""

import threading

import pytest
import torch
from torch import nn

from doge_fast import DoGEOptimizer
from tests.models import enter

DOMAINS = ["a", "b"]


def small_model(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def wrapped(*params: nn.Parameter) -> DoGEOptimizer:
    return DoGEOptimizer(torch.optim.SGD(params, lr=0.1), domains=DOMAINS)


def fill(model: nn.Module, optimizer: DoGEOptimizer) -> None:
    enter(optimizer, DOMAINS, lambda _: model(torch.randn(3, 4)).square().mean())


def step(model: nn.Module, optimizer: DoGEOptimizer) -> None:
    fill(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def test_domains_of_two_wrappers_at_once_are_refused():
    model = small_model()
    first, second = wrapped(*model[0].parameters()), wrapped(*model[2].parameters())
    refused = pytest.raises(RuntimeError, match="both optimizers to one")
    with refused, first.domain("a"), second.domain("a"):
        raise AssertionError("entered")
    with refused, first.domain("a"), second.stacked(model, dict.fromkeys(DOMAINS, 3)):
        raise AssertionError("entered")
    # Neither is left open.
    both = wrapped(*model.parameters())
    step(model, both)
    step(model, both)
    assert both.num_steps == 2


class StepsOfItsParents(torch.optim.SGD):
    """Whose step is made of two of the class above it."""

    def step(self, closure: None = None) -> None:
        for _ in range(2):
            super().step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, StepsOfItsParents])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_loop_that_steps_the_wrapped_optimizer_too_is_refused(kind, is_first):
    model = small_model()
    inner = [kind(model[0].parameters(), lr=0.1), kind(model[2].parameters(), lr=0.1)]
    optimizer = DoGEOptimizer(inner, domains=DOMAINS)
    steps = [optimizer.step, inner[1].step][:: 1 if is_first else -1]
    for is_alone in (True, True, False):
        fill(model, optimizer)
        if is_alone:
            # One of the two, whichever it is, and as often as there are gradients.
            for step_of in (inner[0].step, inner[1].step) if is_first else (optimizer.step,):
                step_of()
            optimizer.zero_grad()
            inner[0].step()
            continue
        steps[0]()
        with pytest.raises(RuntimeError, match="move the parameters twice"):
            steps[1]()
    # Without domains it is a plain optimizer.
    optimizer.zero_grad()
    optimizer.release()
    for _ in range(2):
        model(torch.randn(3, 4)).square().mean().backward()
        inner[0].step()


def test_two_threads_may_train_two_models():
    model, other = small_model(), small_model()
    optimizer, others = wrapped(*model.parameters()), wrapped(*other.parameters())
    with optimizer.domain("a"):
        thread = threading.Thread(target=step, args=(other, others))
        thread.start()
        thread.join()
        model(torch.randn(3, 4)).mean().backward()
    assert others.num_steps == 1
