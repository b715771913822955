"""From a Gram matrix to W: its parts, clipping, norms, cosines, and the two scores."""

import enum

import pytest
import torch
from torch import Tensor

from doge_fast.weights import scores
from doge_fast.weights.objective import Objective
from doge_fast.weights.scores import PAPER, PUBLISHED
from tests.models import Bounded

TAU = torch.tensor([1.0, 0.0, 2.0, 0.5, 3.0], dtype=torch.float64)
EVERY = torch.ones(3, dtype=torch.bool)


def test_gain_is_the_loss_decrease_of_a_step():
    """The estimate's meaning: minus the derivative of the objective along domain j's step."""
    theta = torch.randn(40, dtype=torch.float64)
    centers_RN = torch.randn(5, 40, dtype=torch.float64)
    grads_RN = theta - centers_RN

    def objective(point: Tensor) -> Tensor:
        return (TAU * 0.5 * (point - centers_RN).square().sum(1)).sum()

    gain_K = scores.gain(grads_RN @ grads_RN.T, TAU, 3)
    lr = 1e-6
    for j in range(3):
        decrease = (objective(theta) - objective(theta - lr * grads_RN[j])) / lr
        # Second order: lr / 2 * ||g_j||^2 * sum tau.
        assert abs(decrease - gain_K[j]) < lr * grads_RN[j].square().sum() * TAU.sum()


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_norms_and_cosines_are_known_before_the_sum(scale):
    grads_RN = scale * torch.randn(5, 40, dtype=torch.float64)
    gram_RR = grads_RN @ grads_RN.T
    coefficients_R = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0], dtype=torch.float64)
    norm = scores.combined_norm(gram_RR, coefficients_R)
    torch.testing.assert_close(norm, (coefficients_R @ grads_RN).norm(), rtol=1e-12, atol=0)
    unit_RN = grads_RN / grads_RN.norm(dim=1, keepdim=True)
    torch.testing.assert_close(scores.cosine(gram_RR), unit_RN @ unit_RN.T, rtol=1e-12, atol=1e-15)
    # Rounding may make the square of a sum that cancels negative.
    assert scores.combined_norm(-gram_RR, coefficients_R) == 0
    assert (scores.cosine(-gram_RR) == 0).all()
    # A row of zeros has no direction.
    gram_RR = torch.tensor([[0.0, 3.0], [3.0, 4.0]], dtype=torch.float64)
    assert scores.cosine(gram_RR).tolist() == [[0.0, 0.0], [0.0, 1.0]]


def test_scores_of_both_texts():
    grads_RN = 10 * torch.randn(5, 40, dtype=torch.float64)
    gram_RR = grads_RN @ grads_RN.T
    gain_K = scores.gain(gram_RR, TAU, 3)
    assert torch.equal(PAPER.gain(gram_RR, TAU, EVERY), gain_K)
    norms_K = grads_RN[:3].norm(dim=1)
    for present in ([1, 1, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0]):
        present_K = torch.tensor(present, dtype=torch.bool)
        mean = norms_K[present_K].mean() if present_K.any() else 0.0
        expected_K = (gain_K / (mean + 1e-6)).clamp(0, 5)
        found_K = PUBLISHED.gain(gram_RR, TAU, present_K)
        torch.testing.assert_close(found_K, expected_K, rtol=1e-12, atol=0)


def test_scores_have_names():
    assert (PAPER.name, PUBLISHED.name) == ("paper", "published")
    assert Bounded(0.0, 2.5).name == "Bounded(low=0.0, high=2.5)"
    assert scores.score_of("published") is PUBLISHED
    assert scores.score_of(PAPER) is PAPER
    assert type(PAPER)() == PAPER


def test_an_objective_orders_rows_and_names_the_target():
    objective = Objective.of(["a", "b"], {"x": 0.7, "b": 2.0, "y": 0.0})
    assert objective.names == ("a", "b", "x", "y")
    assert objective.tau == (0.0, 2.0, 0.7, 0.0)
    assert objective.measured == ("x", "y")
    assert objective.needed == ("x",)
    assert objective.target == {"b": 2.0, "x": 0.7}
    assert not objective.is_universal
    assert not objective.has_equal_targets
    everything = Objective.of(["a", "b"])
    assert (everything.target, everything.tau) == ("universal", (1.0, 1.0))
    assert everything.is_universal
    assert everything.has_equal_targets
    assert everything.needed == ("a", "b")
    assert Objective.of(["a", "worst"], "worst").tau == (0.0, 1.0)
    assert Objective.of(["a", "b"], ("x", "a")).tau == (1.0, 0.0, 1.0)
    assert Objective.of(["a", "b"], "x").tau == (0.0, 0.0, 1.0)
    # str() of a member is its name in the class.
    member = enum.Enum("Kind", {"ONE": "a", "TWO": "x"}, type=str)
    assert Objective.of([member.ONE, "b"], {member.TWO: 1.0}) == Objective.of(
        ["a", "b"], {"x": 1.0}
    )


def test_smoothing_and_running_mean():
    alpha_K = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert scores.smooth(alpha_K, 0.2).min() == 0.05
    assert torch.equal(scores.smooth(alpha_K, 0.0), alpha_K)
    points = torch.rand(10, 7, dtype=torch.float64).softmax(1)
    mean_K = torch.full((7,), 0.3, dtype=torch.float64)
    for count, point_K in enumerate(points, start=1):
        mean_K = scores.running_mean(mean_K, point_K, count)
    torch.testing.assert_close(mean_K, points.mean(0), rtol=1e-14, atol=0)
