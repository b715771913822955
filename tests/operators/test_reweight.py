"""The K x K step, in every implementation, against the reference and against plain torch."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from doge_fast import reference
from doge_fast.weights.reweight import StepSettings, reweight
from doge_fast.weights.rule import LastStep, new_state, state_views
from doge_fast.weights.scores import PAPER, PUBLISHED, PUBLISHED_BOUNDS, Score
from tests.laws import assert_simplex
from tests.models import Bounded

OPERATOR = "reweight"
pytestmark = pytest.mark.usefixtures("nan_memory")


# Sums of at most a few hundred float64 terms, in another order.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-14}

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "published": {"score": PUBLISHED, "domain_max_grad_norm": 5.0, "smoothing": 0.1},
    "clipped": {"max_grad_norm": 0.5},
    # Norms are those of all columns.
    "selected": {"selected": slice(10), "max_grad_norm": 0.5, "domain_max_grad_norm": 5.0},
}
SHAPES = [(1, 0), (3, 2), (7, 0), (22, 1), (50, 3), (130, 0)]


class Problem:
    """Rows with a scale, weights and an objective; some of the training domains may be drawn."""

    def __init__(
        self,
        num_domains: int,
        num_measured: int,
        device: torch.device,
        drawn: tuple[int, ...] | None = None,
    ) -> None:
        num_rows = num_domains + num_measured
        self.num_domains = num_domains
        grads_RN = torch.randn(num_rows, 40, dtype=torch.float64, device=device)
        self.grads_RN = grads_RN + torch.randn(40, dtype=torch.float64, device=device)
        self.alpha_K = torch.rand(num_domains, dtype=torch.float64, device=device).softmax(0)
        self.tau_R = torch.rand(num_rows, dtype=torch.float64, device=device)
        self.state_S = new_state(self.alpha_K)
        of_domains = range(num_domains) if drawn is None else drawn
        self.names_B = [*of_domains, *range(num_domains, num_rows)]
        self.absent: set[int] = set()

    @property
    def row_R(self) -> Tensor:
        row_of = {name: row for row, name in enumerate(self.names_B) if name not in self.absent}
        listed = [row_of.get(name, -1) for name in range(len(self.tau_R))]
        return torch.tensor(listed, dtype=torch.int32, device=self.tau_R.device)

    def gram(self, columns: slice = slice(None), scale: float = 1.0) -> Tensor:
        rows_BN = self.grads_RN[self.names_B][:, columns]
        return scale**2 * rows_BN @ rows_BN.T

    def step(
        self,
        implementation: str | None,
        *,
        scale: float = 1.0,
        selected: slice = slice(None),
        score: Score = PAPER,
        **rule: Any,
    ) -> LastStep:
        full_BB = self.gram(scale=scale)
        return reweight(
            full_BB if selected == slice(None) else self.gram(selected, scale),
            full_BB,
            self.state_S,
            tau_R=self.tau_R,
            row_R=self.row_R,
            settings_F=self.settings(grad_scale=scale, **rule),
            score=score,
            implementation=implementation,
        )

    def settings(self, **rule: float) -> Tensor:
        settings = StepSettings(**{"lr": 0.01, "mu": 0.5} | rule)
        return torch.tensor(settings, dtype=torch.float64, device=self.tau_R.device)


@pytest.mark.parametrize("rule", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_step_is_the_reference(shape, rule, implementation, device):
    problem = Problem(*shape, device)
    step = problem.step(implementation, scale=8.0, **rule)
    theirs = dict(rule)
    if theirs.pop("score", None):
        theirs |= {"scale_by_mean_norm": True, "bounds": PUBLISHED_BOUNDS}
    if columns := theirs.pop("selected", None):
        theirs["selected_N"] = torch.arange(40, device=device) < columns.stop
    alpha_K, gradient_N, gain_K = reference.step(
        problem.grads_RN, problem.alpha_K, tau_R=problem.tau_R, lr=0.01, mu=0.5, **theirs
    )
    torch.testing.assert_close(step.alpha, alpha_K, **TOLERANCE)
    torch.testing.assert_close(step.gain, gain_K, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        step.coefficients @ problem.grads_RN, gradient_N, rtol=1e-11, atol=1e-12
    )
    assert (step.coefficients[shape[0] :] == 0).all()
    torch.testing.assert_close(step.grad_norms, problem.grads_RN.norm(dim=1), **TOLERANCE)
    torch.testing.assert_close(
        step.influence + step.difficulty, (step.gram @ problem.tau_R)[: shape[0]], **TOLERANCE
    )
    own_K = (problem.tau_R * step.gram.diagonal())[: shape[0]]
    torch.testing.assert_close(step.difficulty, own_K, **TOLERANCE)
    assert_simplex(step.alpha)
    # What fused optimizers take.
    assert (step.skipped.dtype, step.found_inf.dtype) == (torch.bool, torch.float32)
    assert not step.skipped
    assert step.found_inf == 0
    state = state_views(problem.state_S)
    assert torch.equal(state.alpha, step.alpha)
    assert torch.equal(state.gain, step.gain)
    assert (state.num_steps, state.num_skipped) == (1, 0)


@pytest.mark.parametrize("num_drawn", [1, 2, 4])
def test_a_few_of_many_domains_stand_for_all(num_drawn, implementation, device):
    """In the mean over all draws W and the combined gradient are those of all domains."""
    whole = Problem(5, 2, device)
    if num_drawn == 1:
        # No pair of training domains is ever seen.
        whole.tau_R[:5] = 0
    everything = whole.step("torch", lr=0.0)
    raw_KD: list[list[Tensor]] = [[] for _ in range(5)]
    combined = []
    for drawn in itertools.combinations(range(5), num_drawn):
        some = Problem(5, 2, device, drawn)
        some.grads_RN, some.tau_R, some.alpha_K = whole.grads_RN, whole.tau_R, whole.alpha_K
        some.state_S = new_state(whole.alpha_K)
        step = some.step(implementation, lr=0.0)
        assert step.coefficients.shape == (num_drawn + 2,)
        gradient_N = step.coefficients @ some.grads_RN[some.names_B]
        torch.testing.assert_close(step.combined_norm, gradient_N.norm(), **TOLERANCE)
        combined.append(gradient_N)
        for j in range(5):
            if j in drawn:
                raw_KD[j].append(step.gain[j])
            else:
                assert step.gain[j] == step.grad_norms[j] == 0
                assert (step.gram[j] == 0).all()
        # Products as they are, without the factor that makes up for others.
        there = torch.tensor(some.names_B)
        torch.testing.assert_close(step.gram[there][:, there], some.gram(), **TOLERANCE)
    mean_K = torch.stack([torch.stack(each).mean() for each in raw_KD])
    torch.testing.assert_close(mean_K, everything.gain, rtol=1e-11, atol=1e-11)
    expected_N = everything.coefficients @ whole.grads_RN
    torch.testing.assert_close(torch.stack(combined).mean(0), expected_N, rtol=1e-11, atol=1e-12)


# Triton's interpreter computes with numpy, which warns where a GPU does not.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("fault", ["inf row", "nan row", "nan rate"])
def test_what_is_not_finite_moves_nothing(fault, implementation, device):
    problem = Problem(5, 2, device)
    problem.step(implementation)
    before_S = problem.state_S.clone()
    if fault == "nan rate":
        step = problem.step(implementation, lr=math.nan)
    else:
        problem.grads_RN[6] = math.inf if fault == "inf row" else math.nan
        step = problem.step(implementation, max_grad_norm=1.0, domain_max_grad_norm=1.0)
    assert step.skipped
    assert step.found_inf == 1
    assert step.coefficients[:5].isnan().all()
    before_S[-1] += 1
    assert torch.equal(problem.state_S, before_S)
    assert torch.equal(step.alpha, before_S[:5])


def test_absent_domains_keep_their_score(implementation, device):
    problem = Problem(4, 1, device)
    first = problem.step(implementation)
    # What stands in the buffer there does not count.
    problem.grads_RN[1] = math.nan
    problem.absent = {1}
    second = problem.step(implementation, lr=0.02)
    assert second.gain[1] == first.gain[1]
    assert second.gain[0] != first.gain[0]
    assert second.coefficients[1] == second.grad_norms[1] == 0
    assert not second.skipped
    problem.absent = {1, 4}
    third = problem.step(implementation)
    assert torch.equal(third.gain, second.gain)
    problem.tau_R[4] = 0
    fourth = problem.step(implementation)
    assert fourth.gain[0] != third.gain[0]


def test_the_mean_is_that_of_the_steps(implementation, device):
    problem = Problem(5, 1, device)
    # A weight of zero stays zero.
    problem.alpha_K[1] = 0
    problem.state_S = new_state(problem.alpha_K / problem.alpha_K.sum())
    alphas = []
    for _ in range(4):
        problem.grads_RN = torch.randn_like(problem.grads_RN)
        alphas.append(problem.step(implementation).alpha)
    state = state_views(problem.state_S)
    torch.testing.assert_close(state.alpha_mean, torch.stack(alphas).mean(0), **TOLERANCE)
    assert (state.alpha[1], state.num_steps, state.num_skipped) == (0, 4, 0)


def test_two_runs_give_the_same_bits(implementation, device):
    problem = Problem(50, 3, device, drawn=tuple(range(3, 40)))
    before_S = problem.state_S.clone()
    first = problem.step(implementation, max_grad_norm=0.1)
    problem.state_S = before_S
    second = problem.step(implementation, max_grad_norm=0.1)
    assert all(torch.equal(a, b) for a, b in zip(first[:-1], second[:-1], strict=True))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"state_S": torch.ones(7, dtype=torch.float64)}, r"state_S .* has shape \[7\]"),
        ({"settings_F": torch.ones(6)}, r"settings_F contiguous, of shape \[6\] and torch.float64"),
        ({"tau_R": torch.ones(4)}, r"tau_R contiguous, of shape \[4\] and torch.float64"),
        ({"row_R": torch.ones(4)}, r"row_R contiguous, of shape \[4\] and torch.int32"),
        ({"full_BB": torch.ones(4, 3)}, r"full_BB contiguous, of shape \[4, 4\]"),
        ({"gram_BB": torch.ones(1, 1)}, r"gram_BB .* B <= R; it has shape \[1, 1\]"),
        ({"gram_BB": torch.ones(5, 5)}, r"gram_BB .* B <= R; it has shape \[5, 5\]"),
    ],
    ids=["state", "settings", "tau", "rows", "full", "few", "many"],
)
# Twins of steps with such a score: test_optimizer_twins.
@pytest.mark.parametrize("score", [PAPER, Bounded(0.0, 1.0)], ids=["named", "of yours"])
def test_misuse_speaks(spoil, message, score, device):
    problem = Problem(3, 1, device)
    arguments: dict[str, Any] = {
        "gram_BB": problem.gram(),
        "full_BB": problem.gram(),
        "state_S": problem.state_S,
        "tau_R": problem.tau_R,
        "row_R": problem.row_R,
        "settings_F": problem.settings(),
    } | {name: tensor.to(device) for name, tensor in spoil.items()}
    with pytest.raises(ValueError, match=message):
        reweight(**arguments, score=score)
