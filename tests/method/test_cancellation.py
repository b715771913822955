"""Scores are the paper's sums of norms of every example's gradient."""

import math

import pytest
import torch
from torch import Tensor, nn

from doge_fast.cancellation import READINGS, CancellationEffect, Reading, select
from doge_fast.optimizer import DoGEOptimizer
from tests.models import domain_tokens, tiny_gpt2
from tests.packages import installed

installed("transformers")


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean over tokens."""
    # transformers' own loss is in float32, whatever the model is in.
    logits = model(input_ids=tokens).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(step: int) -> Tensor:
    return domain_tokens(0, step, batch=3, length=12)


def by_definition(steps: int) -> dict[Reading, dict[str, float]]:
    """C(w) from gradients of every example and copies of the weights, in every reading."""
    model = tiny_gpt2().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    params = dict(model.named_parameters())
    scores: dict[Reading, dict[str, float]] = {
        reading: dict.fromkeys(params, 0.0) for reading in READINGS
    }
    for step in range(steps):
        optimizer.zero_grad()
        tokens = tokens_of(step)
        grads_BP = [
            torch.autograd.grad(
                loss_of(model, row[None]), [*params.values()], materialize_grads=True
            )
            for row in tokens
        ]
        before = {name: param.detach().clone() for name, param in params.items()}
        loss_of(model, tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        for (name, param), *grads_B in zip(params.items(), *grads_BP, strict=True):
            change = float((param.detach() - before[name]).norm())
            of_each, of_sum = float(sum(g.norm() for g in grads_B)), float(sum(grads_B).norm())
            scores["norms-over-change"][name] += of_each / change
            scores["sum-over-change"][name] += of_sum / change
            scores["change-over-sum"][name] += change / of_sum
            scores["change-over-norms"][name] += change / of_each
    return scores


def follow(steps: int) -> tuple[CancellationEffect, nn.Module, torch.optim.Optimizer]:
    """The same loop, watched."""
    model = tiny_gpt2().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    effect = CancellationEffect(model, optimizer)
    go_on(effect, model, optimizer, range(steps))
    return effect, model, optimizer


def go_on(
    effect: CancellationEffect, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> None:
    for step in steps:
        optimizer.zero_grad()
        for tokens in tokens_of(step).split(1):
            with effect.watching(weight=1 / 3):
                (loss_of(model, tokens) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def test_every_reading_is_its_definition():
    exact = by_definition(3)
    effect, _, _ = follow(3)
    for reading in READINGS:
        scores = effect.scores(reading)
        assert list(scores) == list(exact[reading])
        for name, score in exact[reading].items():
            # AdamW's steps amplify rounding in gradients that are near zero.
            assert scores[name] == pytest.approx(score, rel=1e-8), (reading, name)
        assert set(effect.terms(reading).values()) == {3}


def test_a_step_that_moves_nothing_adds_no_term():
    effect, model, optimizer = follow(1)
    before = effect.scores()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    go_on(effect, model, optimizer, range(1, 2))
    assert effect.num_steps == 2
    assert effect.scores() == before
    assert set(effect.terms().values()) == {1}
    # A ratio over the gradient is zero then, and a term.
    assert set(effect.terms("change-over-sum").values()) == {2}
    # Nor does an unwatched step, or any after the release.
    optimizer.step()
    effect.release()
    go_on(effect, model, optimizer, range(2, 3))
    assert (effect.num_steps, effect.scores()) == (2, before)


def test_a_saved_and_loaded_effect_goes_on_to_the_same_bits():
    whole, _, _ = follow(4)
    first, model, optimizer = follow(2)
    second = CancellationEffect(model, optimizer)
    second.load_state_dict(first.state_dict())
    first.release()
    go_on(second, model, optimizer, range(2, 4))
    for reading in READINGS:
        assert second.scores(reading) == whole.scores(reading)
        assert second.terms(reading) == whole.terms(reading)
    other = nn.Linear(2, 2)
    effect = CancellationEffect(other, torch.optim.SGD(other.parameters()))
    with pytest.raises(ValueError, match=r"those of this model have \[4, 2\]"):
        effect.load_state_dict(first.state_dict())


def one_step(effect: CancellationEffect, model: nn.Module, x: Tensor) -> None:
    for row in x:
        with effect.watching(weight=0.5):
            (model(row).square().mean() / 2).backward()


@pytest.mark.parametrize("kind", ["nested", "left out", "left out, zeros", "raised", "closure"])
def test_only_what_is_stepped_counts(kind):
    """Steps that are left out, in closures, or of a class that calls its base class's step."""

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    param.mul_(0.5)

    def scores(kind: str) -> dict[str, float]:
        torch.manual_seed(0)
        model, x = nn.Linear(3, 2).double(), torch.randn(2, 2, 3).double()
        torch.optim.SGD(nn.Linear(1, 1).parameters())
        cls = torch.optim.SGD if kind in ("closure", "by hand") else Outer
        optimizer = cls(model.parameters(), lr=0.1)
        effect = CancellationEffect(model, optimizer)
        if kind.startswith("left out"):
            one_step(effect, model, 100 * x[0])
            optimizer.zero_grad(set_to_none=kind == "left out")
        if kind == "raised":
            one_step(effect, model, 100 * x[0])
            handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            handle.remove()
            optimizer.zero_grad()
        if kind == "closure":
            optimizer.step(lambda: one_step(effect, model, x[1]))
        else:
            one_step(effect, model, x[1])
            optimizer.step()
        return effect.scores()

    expected = scores("by hand") if kind == "closure" else by_hand_of_outer()
    assert scores(kind) == pytest.approx(expected, rel=1e-12)


def by_hand_of_outer() -> dict[str, float]:
    """The first step of `Outer` above, in autograd's own terms."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(2, 2, 3).double()
    scores = {}
    for name, param in model.named_parameters():
        grads = [torch.autograd.grad(model(row).square().mean(), param)[0] for row in x[1]]
        moved = 0.5 * (param - 0.1 * sum(grads) / 2)
        change = (moved - param).detach()
        scores[name] = float(sum(grad.norm() for grad in grads) / change.norm())
    return scores


def test_gradients_that_an_optimizer_takes_are_refused():
    model = nn.Linear(2, 1)
    optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=["a", "b", "c"])
    effect = CancellationEffect(model, optimizer.inner)
    with (
        optimizer.domain("a"),
        pytest.raises(RuntimeError, match="outside the domains of a DoGEOptimizer"),
        effect.watching(),
    ):
        model(torch.randn(1, 2)).mean().backward()
    with (
        pytest.raises(RuntimeError, match="no parameter has a gradient"),
        effect.watching(),
        optimizer.domain("b"),
    ):
        model(torch.randn(1, 2)).mean().backward()


def test_parameters_that_are_not_stepped_are_not_scored():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model[0].bias, *model[1].parameters()], lr=0.1)
    effect = CancellationEffect(model, optimizer)
    with effect.watching():
        model(torch.randn(1, 2)).mean().backward()
    optimizer.step()
    assert effect.columns == {"0.bias": 2, "1.weight": 2}
    assert all(score > 0 for score in effect.scores().values())


def test_what_ranks_have_is_summed():
    """Of ranks with one example: gradients, norms and changes are so many times as long."""
    scores = []
    for num_ranks in (1, 2):
        torch.manual_seed(0)
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)}).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        effect = CancellationEffect(model, optimizer)
        with effect.watching():
            model["used"](torch.ones(1, 2).double()).square().sum().backward()
        effect.sum_over_ranks(lambda values, times=num_ranks: times * values)
        optimizer.step()
        assert (model["unused"].weight.grad == 0).all()
        scores.append([effect.scores(reading) for reading in READINGS])
    for one, two in zip(*scores, strict=True):
        assert one["used.weight"] > 0
        assert two == pytest.approx(one, rel=1e-12)


def test_misuse_speaks():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    effect = CancellationEffect(model, optimizer)
    with pytest.raises(RuntimeError, match="No step has counted"):
        effect.scores()
    with pytest.raises(ValueError, match="than zero; got -1"), effect.watching(weight=-1):
        pass
    with effect.watching(weight=0.5):
        model(torch.randn(1, 2)).mean().backward()
    with pytest.raises(ValueError, match="same weight"), effect.watching():
        pass


SCORES = {"a": 2.0, "b": 1.0, "c": 3.0, "d": 2.0}
COLUMNS = {"a": 10, "b": 20, "c": 30, "d": 40}


@pytest.mark.parametrize(
    ("strategy", "names", "num_columns"),
    [("low1", "b", 20), ("low3", "bad", 70), ("high2", "ca", 40), ("high4", "cadb", 100)],
)
def test_select(strategy, names, num_columns):
    for scores in (SCORES, dict(reversed(SCORES.items()))):
        selection = select(scores, strategy, columns=COLUMNS)
        assert selection.names == tuple(names)
        assert (selection.num_columns, selection.share) == (num_columns, num_columns / 100)


@pytest.mark.parametrize(
    ("strategy", "changes", "text"),
    [
        ("low5", {}, "low5 selects 5 parameters; the model has 4"),
        ("low0", {}, "got 'low0'"),
        ("middle3", {}, "got 'middle3'"),
        ("low1", {"b": math.nan}, "that of b is nan"),
        ("low1", {"e": 1.0}, "of the same names; not 'e'"),
    ],
)
def test_select_refuses(strategy, changes, text):
    with pytest.raises(ValueError, match=text):
        select(SCORES | changes, strategy, columns=COLUMNS)
