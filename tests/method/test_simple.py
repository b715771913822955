"""The readable optimizer of doge_fast/simple.py and the fast one take the same hundred steps.

Tolerance: that of test_optimizer_twins, 1e-12 relative to the largest element.
"""

from typing import Any

import pytest
import torch
from torch import nn

from doge_fast import DoGEOptimizer
from doge_fast.simple import SimpleAligned, SimpleDoGE
from tests.models import domain_tokens, enter, tied_transformer

STEPS = 100
TOLERANCE = 1e-12
DOMAINS = ["a", "b", "c"]

SEVERAL = {"x": 0.7, "y": 0.3, "b": 2.0}
INNER: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3, weight_decay=0.1),
}
PAPER = {"mu": 0.02, "domain_max_grad_norm": None}


def run(model: nn.Module, inner: torch.optim.Optimizer, ours: Any, rows: list[str]) -> None:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, T_max=STEPS)
    for step in range(STEPS):
        enter(ours, rows, lambda name, step=step: model(domain_tokens(rows.index(name), step)))
        ours.step()
        inner.zero_grad()
        scheduler.step()


def model_with_a_spare_layer() -> nn.Module:
    model = tied_transformer(num_layers=1)
    # Without a gradient: neither optimizer may decay it.
    model.spare = nn.Linear(2, 2).double()
    return model


@pytest.mark.parametrize(
    ("target", "inner", "options"),
    [
        pytest.param(None, "adamw", {}, id="defaults"),
        pytest.param({"x": 1.0}, "sgd", PAPER, id="out of domain, as in the paper"),
        pytest.param(SEVERAL, "sgd", {}, id="several targets"),
        pytest.param(SEVERAL, "adamw", PAPER, id="several targets, as in the paper"),
    ],
)
def test_both_take_the_same_steps(target, inner, options):
    plain, fast = model_with_a_spare_layer(), model_with_a_spare_layer()
    plain_inner, fast_inner = (INNER[inner](model.parameters()) for model in (plain, fast))
    readable = SimpleDoGE(plain_inner, DOMAINS, target=target, **options)
    optimizer = DoGEOptimizer(fast_inner, domains=DOMAINS, target=target or "universal", **options)
    assert readable.mu == optimizer.mu
    assert readable.names == list(optimizer.names)
    run(plain, plain_inner, readable, readable.names)
    run(fast, fast_inner, optimizer, readable.names)
    # The weights have left uniform, else the comparison would say nothing.
    assert (optimizer.alpha - 1 / len(DOMAINS)).abs().max() > 1e-3
    torch.testing.assert_close(readable.alpha_K, optimizer.alpha, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(readable.alpha_mean_K, optimizer.alpha_mean, rtol=0, atol=TOLERANCE)
    for param, twin in zip(plain.parameters(), fast.parameters(), strict=True):
        assert (param - twin).abs().max() <= TOLERANCE * twin.abs().max()


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_both_align_by_the_same_steps(inner):
    plain, fast = model_with_a_spare_layer(), model_with_a_spare_layer()
    plain_inner, fast_inner = (INNER[inner](model.parameters()) for model in (plain, fast))
    readable = SimpleAligned(plain_inner, DOMAINS, target=SEVERAL)
    optimizer = DoGEOptimizer(
        fast_inner, domains=DOMAINS, target=SEVERAL, score="aligned", micro_batches=2
    )
    names = readable.names
    for step in range(40):
        for model, ours in ((plain, readable), (fast, optimizer)):
            for half in range(2):
                batch = 2 * step + half

                def loss(name: str, model: Any = model, batch: int = batch) -> Any:
                    return model(domain_tokens(names.index(name), batch)) / 2

                enter(ours, names, loss)
            ours.step()
        optimizer.zero_grad()
    assert (optimizer.alpha - 1 / len(DOMAINS)).abs().max() > 0.05
    torch.testing.assert_close(readable.alpha_K, optimizer.alpha, rtol=0, atol=TOLERANCE)
    assert readable.weights == pytest.approx(optimizer.weights, abs=TOLERANCE)


def test_a_step_under_autocast_is_the_same():
    """Autocast is for the model: 16 bits would cost W its third digit."""
    found = []
    for is_on in (False, True):
        model = model_with_a_spare_layer().float()
        simple = SimpleDoGE(torch.optim.SGD(model.parameters(), lr=0.1), ["a", "b"], mu=0.1)
        for scale, name in enumerate("ab", 1):
            with simple.domain(name):
                sum((scale * p).square().sum() for p in model.parameters()).backward()
        with torch.autocast("cpu", enabled=is_on):
            simple.step()
        found.append([simple.alpha_K, *(p.detach() for p in model.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_overflow_is_skipped_as_by_the_fast_one(dtype):
    model, twin = nn.Linear(2, 1, dtype=dtype), nn.Linear(2, 1, dtype=dtype)
    twin.load_state_dict(model.state_dict())
    readable = SimpleDoGE(torch.optim.SGD(model.parameters(), lr=0.1), ["a", "b"])
    fast = DoGEOptimizer(torch.optim.SGD(twin.parameters(), lr=0.1), domains=["a", "b"])
    for scale in (1.0, float("inf"), 2.0):
        for each, net in ((readable, model), (fast, twin)):
            for name, sign in (("a", 1.0), ("b", -3.0)):
                with each.domain(name):
                    (scale * net(sign * torch.ones(1, 2, dtype=dtype)).square().sum()).backward()
            each.step()
        fast.zero_grad()
    assert fast.num_skipped == 1
    torch.testing.assert_close(model.weight, twin.weight)
    with pytest.warns(UserWarning, match="1 of 3 steps were skipped"):
        assert readable.weights == pytest.approx(fast.weights)


def freeze(model: nn.Module, name: str) -> None:
    """A domain that trains a part of the model."""
    model[0].requires_grad_(name == "a")


@pytest.mark.parametrize("prepare", [freeze, lambda *_: None])
def test_frozen_parts_and_other_strides_are_as_in_the_fast_one(prepare):
    """A fused optimizer takes the gradient to lie in memory as the parameter does."""
    found = []
    for kind in (SimpleDoGE, DoGEOptimizer):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 2, 2)).double()
        model.to(memory_format=torch.channels_last)
        inner = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
        # New tensors of others are elsewhere by default.
        with torch.device("meta"):
            optimizer = kind(inner, domains=["a", "b"], mu=0.1)
        for _ in range(3):
            for name in "ab":
                prepare(model, name)
                with optimizer.domain(name):
                    model(torch.rand(4, 3, 5, 5, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            inner.zero_grad()
        with torch.device("meta"):
            weights = list(optimizer.weights.values())
        found.append([*model.parameters(), torch.tensor(weights)])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_misuse_is_refused():
    model = nn.Linear(2, 1)
    readable = SimpleDoGE(torch.optim.SGD(model.parameters(), lr=0.1), ["a", "b"])
    assert readable.weights == {"a": 0.5, "b": 0.5}
    with readable.domain("a"):
        model(torch.ones(1, 2)).sum().backward()
    for name in ("a", "c"):
        with pytest.raises(ValueError, match=repr(name)), readable.domain(name):
            raise AssertionError("entered")
    with pytest.raises(KeyError, match="'b'"):
        readable.step()
