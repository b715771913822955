"""Several optimizers on one model: what is refused, what is warned of, and what is neither."""

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


def step(model: nn.Module, optimizer: DoGEOptimizer, *, is_stacked: bool = False) -> None:
    if is_stacked:
        with optimizer.stacked(model, dict.fromkeys(DOMAINS, 3)):
            outputs = model(torch.randn(6, 4))
            (outputs[:3].square().mean() + outputs[3:].square().mean()).backward()
    else:
        fill(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def test_two_domains_at_once_are_refused():
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


def test_threads_have_domains_of_their_own():
    model, other = small_model(), small_model()
    optimizer, others = wrapped(*model.parameters()), wrapped(*other.parameters())
    with optimizer.domain("a"):
        thread = threading.Thread(target=step, args=(other, others))
        thread.start()
        thread.join()
        model(torch.randn(3, 4)).mean().backward()
    assert others.num_steps == 1


@pytest.mark.parametrize("is_whole_first", [False, True])
@pytest.mark.parametrize("is_stacked", [False, True], ids=["sequential", "stacked"])
def test_a_half_of_the_model_is_warned_of_once(is_stacked, is_whole_first):
    whole, model = nn.ModuleDict(), small_model()
    if not is_whole_first:
        whole = nn.ModuleDict()
    whole.update({"model": model, "unused": nn.Linear(2, 2)})
    optimizer = wrapped(*model[2].parameters())
    with pytest.warns(UserWarning, match=r"0\.weight, (model\.)?0\.bias ") as caught:
        step(model, optimizer, is_stacked=is_stacked)
    assert len(caught) == 1
    assert "/tests/" in caught[0].filename
    assert ("model.0.weight" in str(caught[0].message)) is not is_stacked
    # Said once; and what it says is so.
    assert model[0].weight.grad is not None
    step(model, optimizer, is_stacked=is_stacked)
    # Of many some are named.
    many = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with pytest.warns(UserWarning, match=r"0\.weight, (\S*)0\.bias, (\S*)1\.weight .6 in all"):
        step(many, wrapped(*many[3].parameters()), is_stacked=is_stacked)


class Discriminated(nn.Module):
    """A model beside another one, which has an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.other = small_model(), small_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda both: None,
        lambda both: both.other(torch.randn(3, 4)).mean().backward(),
        lambda both: both.model[0].requires_grad_(False),
    ],
    ids=["as it is", "after a backward pass of the other", "half frozen"],
)
@pytest.mark.parametrize("is_stacked", [False, True], ids=["sequential", "stacked"])
def test_what_is_done_on_purpose_is_left_alone(change, is_stacked):
    both = Discriminated()
    change(both)
    optimizer = wrapped(*(p for p in both.model.parameters() if p.requires_grad))
    # A warning would be an error.
    step(both, optimizer, is_stacked=is_stacked)


class HalfMade(nn.Linear):
    def __init__(self) -> None:
        """Without that of its base class."""


def test_a_module_whose_init_has_failed_owns_nothing():
    model, half_made = small_model(), HalfMade()
    optimizer = wrapped(*model.parameters())
    step(model, optimizer)
    assert optimizer.num_steps == 1
    assert isinstance(half_made, nn.Module)


def test_a_parameter_of_a_group_is_owned_while_it_is_frozen():
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = wrapped(*model.parameters())
    with optimizer.domain("a"):
        model[0].requires_grad_(True)
        model(torch.randn(3, 4)).mean().backward()
