"""Targets whose weights move to those that improve least: `target="worst"` and `target_mu`."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from doge_fast import DoGEOptimizer, reference
from doge_fast.weights import checkpoint
from doge_fast.weights import scores as generalization
from doge_fast.weights.state import DomainWeights
from tests.models import domain_tokens, tied_transformer

LR, MU, TARGET_MU = 0.1, 2.0, 0.5


def rows(num_rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, 30, generator=generator, dtype=torch.float64)


def move(weights: DomainWeights, grads_RN: Tensor, seen: str | None = None, **how: Any) -> None:
    gram_RR = grads_RN @ grads_RN.T
    names = weights.objective.rows if seen is None else seen
    told = {"lr": LR, "grad_scale": 1.0} | how
    weights.move(gram_RR, full_RR=gram_RR, seen=names, **told)


@pytest.mark.parametrize("clip", [None, 4.0])
def test_weights_and_targets_are_those_of_the_reference(clip: float | None) -> None:
    objective = {"a": 1.0, "x": 2.0, "y": 0.5}
    weights = DomainWeights.of(
        [*"abc"], target=objective, mu=MU, target_mu=TARGET_MU, domain_max_grad_norm=clip
    )
    tau_R = torch.tensor([1.0, 0.0, 0.0, 2.0, 0.5], dtype=torch.float64)
    alpha_K = torch.full((3,), 1 / 3, dtype=torch.float64)
    for step in range(4):
        grads_RN = rows(5, step)
        alpha_K, _, _ = reference.step(
            grads_RN, alpha_K, tau_R=tau_R, lr=LR, mu=MU, domain_max_grad_norm=clip
        )
        factors_R = reference.clip_factors(grads_RN.norm(dim=1), clip)
        tau_R = reference.target_step(tau_R, factors_R[:, None] * grads_RN, alpha_K, LR, TARGET_MU)
        move(weights, grads_RN)
        torch.testing.assert_close(weights.read("alpha"), alpha_K, rtol=0, atol=1e-13)
        torch.testing.assert_close(weights.read("tau"), tau_R, rtol=0, atol=1e-13)
    assert tau_R[0] != 1.0
    torch.testing.assert_close(tau_R.sum(), torch.tensor(3.5, dtype=torch.float64))


def test_without_a_pace_they_stay() -> None:
    weights = DomainWeights.of([*"abc"], mu=MU)
    move(weights, rows(3))
    assert weights.read("tau").tolist() == [1.0, 1.0, 1.0]
    assert "tau" not in weights.state()


def test_worst_is_universal_with_a_pace() -> None:
    worst = DomainWeights.of([*"abc"], target="worst", mu=MU)
    assert worst.rule.target_mu == 2 * MU / 4
    universal = DomainWeights.of([*"abc"], mu=MU, target_mu=worst.rule.target_mu)
    for step in range(3):
        move(worst, rows(3, step))
        move(universal, rows(3, step))
    assert torch.equal(worst.snapshot(), universal.snapshot())
    assert DomainWeights.of([*"abc"], target="worst", lr=1e-3).rule.target_mu == pytest.approx(0.02)
    assert (worst.objective.target, universal.objective.target) == ("worst", "universal")


def test_it_goes_to_the_target_that_improves_least() -> None:
    """Two of three pull one way, and the average leaves the third behind."""
    grads_RN = torch.tensor([[1.0, 0.0], [1.0, 0.1], [-0.5, 1.0]], dtype=torch.float64)
    reached = {}
    for target in ("universal", "worst"):
        weights = DomainWeights.of([*"abc"], target=target, mu=MU, domain_max_grad_norm=None)
        for _ in range(300):
            move(weights, grads_RN)
        alpha_K = weights.read("alpha_mean")
        reached[target] = generalization.improvement(grads_RN @ grads_RN.T, alpha_K)
    assert reached["universal"].min() < 0 < reached["worst"].min()
    assert reached["worst"].min() > reached["universal"].min() + 0.3


def test_a_pace_next_to_none_loses_no_weight() -> None:
    weights = DomainWeights.of([*"abc"], mu=MU, target_mu=1e-320)
    move(weights, rows(3))
    assert weights.read("tau").tolist() == [1.0, 1.0, 1.0]


def test_a_skipped_step_moves_no_target() -> None:
    weights = DomainWeights.of([*"abc"], target="worst", mu=MU)
    move(weights, rows(3))
    before = weights.read("tau")
    move(weights, rows(3) * torch.inf)
    assert weights.state()["num_skipped"] == 1
    assert torch.equal(weights.read("tau"), before)


def test_a_step_that_is_taken_back_takes_the_targets_back() -> None:
    weights = DomainWeights.of([*"abc"], target="worst", mu=MU)
    before = weights.snapshot()
    move(weights, rows(3))
    assert weights.read("tau").tolist() != [1.0, 1.0, 1.0]
    weights.retract(before, torch.tensor(True))
    assert weights.read("tau").tolist() == [1.0, 1.0, 1.0]


def test_a_target_that_does_not_come_keeps_its_share_of_the_others() -> None:
    weights = DomainWeights.of([*"abc"], target="worst", mu=MU)
    grads_RN = rows(3)
    grads_RN[1] = 0.0
    move(weights, grads_RN, seen="ac")
    tau_R = weights.read("tau")
    assert tau_R[0] != tau_R[2]
    low, high = tau_R[[0, 2]].min(), tau_R[[0, 2]].max()
    assert low < tau_R[1] < high


@pytest.mark.parametrize("pace", [0.0, -1.0, float("inf"), True, "fast"])
def test_a_pace_out_of_range_is_refused(pace: Any) -> None:
    with pytest.raises(ValueError, match="target_mu, the Bregman coefficient, must be positive"):
        DomainWeights.of([*"abc"], mu=MU, target_mu=pace)


def test_a_domain_cannot_have_its_name() -> None:
    with pytest.raises(ValueError, match="'worst' means all training domains"):
        DomainWeights.of(["a", "worst"], mu=MU)


def build(**options: Any) -> tuple[Any, DoGEOptimizer]:
    model = tied_transformer()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, DoGEOptimizer(inner, domains=[*"abc"], mu=0.05, **options)


def train(model: Any, optimizer: DoGEOptimizer, steps: range) -> None:
    for step in steps:
        for row, name in enumerate(optimizer.rows):
            with optimizer.domain(name):
                model(domain_tokens(row, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("carrier", ["whole", "groups alone"])
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(carrier: str) -> None:
    options: dict[str, Any] = {"target": {"x": 1.0, "a": 1.0}, "target_mu": 0.01}
    model, optimizer = build(**options)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, range(2, 4))
    other, resumed = build(**options)
    other.load_state_dict(saved[1])
    if carrier == "groups alone":
        # As torch.distributed.checkpoint brings it back.
        del saved[0][checkpoint.KEY]
    resumed.load_state_dict(saved[0])
    train(other, resumed, range(2, 4))
    assert torch.equal(resumed.alpha, optimizer.alpha)
    assert torch.equal(resumed.tau, optimizer.tau)
    assert optimizer.tau[0] != 1.0


@pytest.mark.parametrize("named", [{}, {"mu": 0.5}, {"target_mu": 0.3}], ids=str)
def test_a_default_pace_follows_the_mu_of_a_checkpoint(named: dict[str, float]) -> None:
    def built(lr: float) -> DoGEOptimizer:
        inner = torch.optim.AdamW(tied_transformer().parameters(), lr=lr)
        return DoGEOptimizer(inner, domains=[*"abc"], target="worst", **named)  # type: ignore[arg-type]

    began, resumed = built(1e-2), built(1e-3)
    resumed.load_state_dict(began.state_dict())
    assert resumed.rule == began.rule


def test_a_checkpoint_of_targets_that_stay_is_read() -> None:
    """And begins to move them; one whose targets moved leaves those of a run that keeps them."""
    model, stays = build()
    train(model, stays, range(2))
    other, moves = build(target_mu=0.01)
    moves.load_state_dict(stays.state_dict())
    assert torch.equal(moves.alpha, stays.alpha)
    assert moves.tau.tolist() == [1.0, 1.0, 1.0]
    train(other, moves, range(2, 4))
    _, again = build()
    again.load_state_dict(moves.state_dict())
    assert torch.equal(again.alpha, moves.alpha)
    assert again.tau.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "tau",
    [torch.ones(2), torch.tensor([1.0, -1.0, 3.0]), torch.full((3,), torch.nan), torch.zeros(3)],
    ids=str,
)
def test_a_damaged_checkpoint_changes_nothing(tau: Tensor) -> None:
    _, optimizer = build(target="worst")
    ours = optimizer.doge.state_dict() | {"tau": tau}
    with pytest.raises(ValueError, match="tau must be 3 weights >= 0, one of them > 0"):
        optimizer.doge.load_state_dict(ours)
    assert optimizer.tau.tolist() == [1.0, 1.0, 1.0]
