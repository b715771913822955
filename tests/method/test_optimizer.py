"""What the wrapper refuses, the gradients it gives, and how it behaves as a torch optimizer."""

import contextlib
import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from doge_fast import DoGEOptimizer
from tests.integrations.small import assert_same, everything
from tests.models import KeepsGradient, domain_tokens, enter, tied_transformer

DOMAINS = ("a", "b", "c")
# The paper's text to the letter.
AS_IN_THE_PAPER: dict[str, Any] = {"mu": 0.01, "domain_max_grad_norm": None}


def build(model: nn.Module | None = None, **kwargs: Any) -> tuple[nn.Module, DoGEOptimizer]:
    model = tied_transformer() if model is None else model
    inner = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    return model, DoGEOptimizer(inner, domains=DOMAINS, **(AS_IN_THE_PAPER | kwargs))


def fill(model: nn.Module, optimizer: DoGEOptimizer, step: int = 0) -> None:
    rows = {name: row for row, name in enumerate(optimizer.names)}
    enter(optimizer, rows, lambda name: model(domain_tokens(rows[name], step)))


# Ranges have their tests beside the code that knows them; here each is reached.
@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"domains": []}, "domains .* list of distinct"),
        ({"domains": ["a", "a", "b"]}, "distinct"),
        ({"domains": ["a", ""]}, "non-empty names"),
        ({"domains": {"a"}}, "list of distinct"),
        ({"domains": "abc"}, "list of distinct"),
        ({"domains": ["universal", "a"]}, "domains .*'universal' stands alone"),
        ({"target": {"a"}}, "target must be a list of distinct"),
        ({"target": {"x": 0.0}}, "one of them positive"),
        ({"target": {"x": -1.0}}, "finite and >= 0.*'x': -1.0"),
        ({"target": {"x": math.inf}}, "finite and >= 0"),
        ({"mu": -1.0}, "mu must be positive and finite"),
        ({"smoothing": 1.0}, r"\[0, 1\)"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive, or None"),
        ({"domain_max_grad_norm": -1.0}, "domain_max_grad_norm must be positive, or None"),
        ({"initial": {"a": 2, "b": -1, "c": 0}}, "weights >= 0 .*'b': -1"),
        ({"selection": "embedding"}, "non-empty collection"),
        ({"selection": []}, "non-empty collection"),
        ({"selection": ["nope"]}, "named_parameters"),
        ({"absent": "zero"}, "'error' or 'keep'"),
        ({"domains": {"a": 0.7, "b": 0.3}}, "as initial"),
        ({"buffer_dtype": torch.int32}, "floating type"),
    ],
    ids=str,
)
def test_an_argument_is_refused(kwargs, word):
    inner = torch.optim.SGD(tied_transformer().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=word):
        DoGEOptimizer(inner, **{"domains": DOMAINS, **kwargs})


def test_the_default_mu_needs_a_learning_rate():
    model = tied_transformer()
    # mu follows a learning rate that is there.
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(ValueError, match="mu=None"):
        DoGEOptimizer(inner, domains=DOMAINS)


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, "rate"])
@pytest.mark.parametrize("selection", [None, ["norm.weight"]], ids=["all", "selected"])
def test_a_step_that_is_not_finite_is_counted_and_moves_nothing(value, selection):
    """Of one element of one domain, outside the selection; or because the rate is NaN."""
    model, optimizer = build(max_grad_norm=1.0, selection=selection)
    fill(model, optimizer, 0)
    optimizer.step()
    optimizer.zero_grad()
    before, mean_K = everything(model, optimizer), optimizer.alpha_mean
    factor = 1.0 if value == "rate" else value
    handle = model.layers[0]["up"].weight.register_hook(
        lambda grad: grad.index_fill(0, torch.tensor([1]), factor)
    )
    if value == "rate":
        optimizer.param_groups[0]["lr"] = torch.tensor(math.nan)
    fill(model, optimizer, 1)
    optimizer.step()
    optimizer.zero_grad()
    # The last but one counts the steps that were skipped.
    assert_same(everything(model, optimizer)[:-2], before[:-2])
    assert (optimizer.num_steps, optimizer.num_skipped) == (1, 1)
    assert bool(optimizer.last.skipped)
    assert optimizer.last.found_inf == 1
    handle.remove()
    optimizer.param_groups[0]["lr"] = 1e-2
    fill(model, optimizer, 2)
    optimizer.step()
    assert (optimizer.num_steps, optimizer.num_skipped) == (2, 1)
    assert not torch.equal(optimizer.alpha_mean, mean_K)


@pytest.mark.usefixtures("taken")
def test_a_parameter_some_domains_do_not_touch_counts_as_zero():
    """Over two steps, so that a row left from the first would show in the second."""
    layers = {name: nn.Linear(2, 1) for name in ("all", "some", "unused", "frozen")}
    layers["frozen"].requires_grad_(False)
    model, optimizer = build(nn.ModuleDict(layers).double())
    before = copy.deepcopy(model)
    x = torch.ones(1, 2).double()
    for step in range(2):
        for i, name in enumerate(DOMAINS):
            with optimizer.domain(name):
                loss = (model["all"](x) + model["frozen"](x)).sum()
                if (i + step) % 2 == 0:
                    loss = loss + model["some"](x).sum() * (i + 1)
                loss.backward()
        optimizer.combine()
        alpha = optimizer.alpha
        expected = sum(alpha[i] * (i + 1) for i in range(len(DOMAINS)) if (i + step) % 2 == 0)
        torch.testing.assert_close(model["some"].bias.grad, expected[None])
        torch.testing.assert_close(model["all"].bias.grad, alpha.sum()[None])
        optimizer.step()
        for name in ("unused", "frozen"):
            assert model[name].weight.grad is None
            assert torch.equal(model[name].weight, before[name].weight)
        optimizer.zero_grad()


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters(dtype):
    """As is that of a model which is cast after its optimizer was built."""
    model, optimizer = build()
    model.to(dtype)
    params = list(model.parameters())
    grads = [torch.autograd.grad(model(domain_tokens(row, 0)), params) for row in range(3)]
    rows = torch.stack([torch.cat([g.double().flatten() for g in gs]) for gs in grads])
    fill(model, optimizer)
    optimizer.combine()
    torch.testing.assert_close(optimizer.last.gram, rows @ rows.T, rtol=1e-6, atol=0)
    flat = torch.cat([p.grad.double().flatten() for p in params])
    expected = optimizer.alpha @ rows
    assert all(p.grad.dtype == dtype for p in params)
    # One rounding to storage: half an ulp of each element.
    assert ((flat - expected).abs() <= torch.finfo(dtype).eps * expected.abs() + 1e-7).all()


@pytest.mark.parametrize("num_skipped", [0, 20])
def test_an_optimizer_may_keep_the_gradient_that_it_was_given(num_skipped):
    found = []
    for is_wrapped in (False, True):
        model = tied_transformer()
        inner = KeepsGradient(model.parameters())
        optimizer = DoGEOptimizer(inner, domains=["a"], domain_max_grad_norm=None, mu=1.0)
        if not is_wrapped:
            optimizer.release()
        for step in range(-num_skipped if is_wrapped else 0, 4):
            with optimizer.domain("a") if is_wrapped else contextlib.nullcontext():
                (model(domain_tokens(0, step)) * (1 if step >= 0 else math.nan)).backward()
            (optimizer if is_wrapped else inner).step()
            (optimizer if is_wrapped else inner).zero_grad()
        found.append([param.detach().clone() for param in model.parameters()])
    for alone, wrapped in zip(*found, strict=True):
        assert torch.equal(wrapped, alone)


def test_the_optimizer_is_freed_with_its_last_reference():
    model, optimizer = build()
    ref = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ref() is None
    assert all(not param._post_accumulate_grad_hooks for param in model.parameters())
    model(domain_tokens(0, 0)).backward()
