"""An unbiased score where its parts meet other options."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from doge_fast import DoGEOptimizer
from doge_fast.stacked.losses import linear_domain_losses
from doge_fast.weights import checkpoint
from doge_fast.weights.scores import Score
from tests.method.test_unbiased_score import (
    NAMES,
    TO_ROUNDING,
    half_gradients,
    model_of,
    optimizer_of,
    run_by_halves,
)


def test_a_negative_difficulty_is_no_overflow() -> None:
    """Columns are selected and no row is cut: norms come from the columns that enter W."""
    model = model_of()
    options = {"selection": ["2.weight"], "domain_max_grad_norm": None}
    optimizer = optimizer_of(model, score=Score(is_unbiased=True), **options)
    lowest = 0.0
    for step in range(12):
        norms_K = [
            torch.stack(half_gradients(model, name, step)).sum(0)[30:55].norm() for name in NAMES
        ]
        run_by_halves(optimizer, model, step)
        last = optimizer.last
        assert last is not None
        torch.testing.assert_close(last.grad_norms, torch.stack(norms_K), **TO_ROUNDING)
        lowest = min(lowest, float(last.difficulty.min()))
        optimizer.step()
        optimizer.zero_grad()
    assert lowest < 0
    assert optimizer.num_skipped == 0


def test_an_unbiased_score_has_no_mean_norm() -> None:
    with pytest.raises(ValueError, match="cannot both be is_unbiased and scale_by_mean_norm"):
        Score(is_unbiased=True, scale_by_mean_norm=True)


def test_a_domain_named_like_a_half_is_refused() -> None:
    model = model_of()
    names = ["a", "a, second half"]
    with pytest.raises(ValueError, match="would name the second half of another domain's batch"):
        optimizer_of(model, domains=names)
    optimizer_of(model, domains=names, score="paper")
    optimizer_of(model, domains=names, target="x")


def test_a_state_without_norms_leaves_none() -> None:
    """What a run has measured before it loads another's state is not that one's."""
    model = model_of()
    optimizer = optimizer_of(model)
    run_by_halves(optimizer, model, 3)
    optimizer.step()
    optimizer.zero_grad()
    paper = optimizer_of(model_of(), score="paper", micro_batches=1)
    optimizer.load_state_dict(paper.state_dict())
    assert not optimizer.doge.state_dict()["norms"].any()


@pytest.mark.parametrize("form", ["whole", "groups"])
@pytest.mark.parametrize("target_mu", [None, 0.5])
def test_targets_that_stayed_are_not_loaded(form: str, target_mu: float | None) -> None:
    model = model_of()
    optimizer = optimizer_of(model, target={"a": 1.0, "b": 3.0}, target_mu=target_mu)
    run_by_halves(optimizer, model, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    if form == "groups":
        del saved[checkpoint.KEY]
    worst = optimizer_of(model_of(), target="worst")
    worst.load_state_dict(saved)
    expected = [1.0] * 3 if target_mu is None else optimizer.tau.tolist()
    assert worst.tau.tolist() == expected
    norms_R = optimizer.doge.state_dict()["norms"]
    assert torch.equal(worst.doge.state_dict()["norms"], norms_R)


@pytest.mark.parametrize("names_in_halves", [["weight"], ["bias"]], ids=str)
@pytest.mark.parametrize("target", ["universal", {"a": 1.0, "x": 0.5}], ids=str)
def test_a_head_may_belong_to_two_passes_of_which_one_has_halves(
    names_in_halves: list[str], target: Any
) -> None:
    """Of both a target that is measured has one row, and the loss is that of the domains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)).double()
    tokens_BL, sizes = torch.randint(7, (8, 6)), {"a": 2, "x": 2, "b": 4}
    if target == "universal":
        sizes = {"a": 2, "b": 6}
    params = dict(model[1].named_parameters())
    halved = [params.pop(name) for name in names_in_halves]
    options: dict[str, Any] = {"domains": ["a", "b"], "target": target, "mu": 1.0}
    options["domain_max_grad_norm"] = None
    unbiased, paper = (
        DoGEOptimizer(torch.optim.SGD(each, lr=0.1), score=score, **options)
        for each, score in ((halved, Score(is_unbiased=True)), ([*params.values()], "paper"))
    )
    with unbiased.stacked(model, sizes), paper.stacked(model, sizes):
        hidden, head = model[0](tokens_BL), model[1]
        losses = linear_domain_losses(
            hidden, head.weight, tokens_BL, sizes, bias_V=head.bias, chunk_tokens=4
        )
        losses.sum().backward()
    rows = dict(zip(sizes, tokens_BL.split(list(sizes.values())), strict=True))

    def loss_of(name: str) -> torch.Tensor:
        logits = model(rows[name])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), rows[name][:, 1:].flatten())

    torch.testing.assert_close(losses, torch.stack([*map(loss_of, sizes)]), **TO_ROUNDING)
    for optimizer, its in ((unbiased, halved), (paper, [*params.values()])):
        grads = [torch.autograd.grad(loss_of(name), its) for name in optimizer.rows]
        rows_RN = torch.stack([torch.cat([each.flatten() for each in parts]) for parts in grads])
        assert optimizer.last is not None
        torch.testing.assert_close(optimizer.last.gram, rows_RN @ rows_RN.T, **TO_ROUNDING)
