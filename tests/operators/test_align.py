"""The K x K step of the aligned rule, in every implementation, against the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from doge_fast import reference
from doge_fast.weights.aligned import WAITING_STEPS, Aligned, AlignedSettings, align
from doge_fast.weights.reweight import new_state, state_views
from doge_fast.weights.rule import LastStep, Matrices, Names
from tests.laws import assert_simplex

OPERATOR = "align"
pytestmark = [
    pytest.mark.usefixtures("nan_memory"),
    # Triton's interpreter computes with numpy, which warns where a GPU does not.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]

# Sums of at most a few hundred float64 terms, in another order; over 25 steps.
TOLERANCE = {"rtol": 1e-11, "atol": 1e-13}
SHAPES = [(1, 0), (2, 1), (3, 2), (7, 0), (22, 1), (50, 3), (130, 0)]
STEPS = WAITING_STEPS + 5
COLUMNS = 300


class Problem:
    """Halves of gradients in a metric, which change from step to step, and an objective."""

    def __init__(self, num_domains: int, num_measured: int, device: torch.device) -> None:
        self.num_domains, num_names = num_domains, num_domains + num_measured
        self.device, self.step_number = device, 0
        generator = torch.Generator().manual_seed(num_names)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

        self.draw = draw
        self.common_RN = draw(num_names, COLUMNS) + draw(COLUMNS)
        self.tau_R = draw(num_names).abs()
        self.first_R = 0.25 + 0.5 * torch.rand(num_names, generator=generator).double().to(device)
        # The buffer has another order than the names.
        self.row_R = torch.randperm(num_names, generator=generator).to(device, torch.int32)
        self.metric_N = draw(COLUMNS).abs()
        self.alpha_K = draw(num_domains).softmax(0)
        self.state_S = new_state(self.alpha_K)
        memory_S = Aligned().new_memory(self.alpha_K, num_names)
        self.mean_RR = memory_S[:-num_names].view(num_names, num_names)
        self.mixture_R = memory_S[-num_names:]
        self.halves_2RN = self.turn()

    def turn(self) -> Tensor:
        """The halves of the next step."""
        shares_2R1 = torch.stack([self.first_R, 1 - self.first_R])[:, :, None]
        noise_2RN = self.draw(2, *self.common_RN.shape)
        self.halves_2RN = shares_2R1 * self.common_RN + shares_2R1.sqrt() * noise_2RN
        return self.halves_2RN

    def gram(self, columns: slice, scale: float) -> Tensor:
        """[B + 1, B]: of sums of halves, then of halves; names in the order of the buffer."""
        name_B = self.row_R.long().argsort()
        first_BN, second_BN = scale * self.halves_2RN[:, name_B][:, :, columns]
        rows_BN = first_BN + second_BN
        gram_BB = (rows_BN * self.metric_N[columns]) @ rows_BN.T
        products_B = (first_BN * self.metric_N[columns] * second_BN).sum(1)
        return torch.cat([gram_BB.tril() + gram_BB.tril(-1).T, products_B[None]])

    def step(
        self,
        implementation: str | None,
        *,
        scale: float = 1.0,
        selected: slice = slice(None),
        smoothing: float = 0.0,
    ) -> LastStep:
        full = self.gram(slice(None), scale)
        gram = full if selected == slice(None) else self.gram(selected, scale)
        settings = AlignedSettings(scale, smoothing)
        return align(
            Matrices(gram, full),
            self.state_S,
            self.mean_RR,
            self.mixture_R,
            Names(self.tau_R, self.row_R, self.first_R),
            torch.tensor(settings, dtype=torch.float64, device=self.device),
            implementation=implementation,
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_are_those_of_the_reference(shape, implementation, device):
    problem = Problem(*shape, device)
    alpha_K, mean_RR = problem.alpha_K, problem.mean_RR.clone()
    for number in range(STEPS):
        halves_2RN = problem.turn()
        step = problem.step(implementation, scale=8.0)
        alpha_K, gradient_N, mean_RR = reference.aligned_step(
            *(halves_2RN, alpha_K, mean_RR, number),
            tau_R=problem.tau_R,
            first_R=problem.first_R,
            metric_N=problem.metric_N,
        )
        torch.testing.assert_close(step.alpha, alpha_K, **TOLERANCE)
        torch.testing.assert_close(problem.mean_RR, mean_RR, **TOLERANCE)
    assert_simplex(step.alpha)
    if shape[0] > 1:
        assert (step.alpha / problem.alpha_K - 1).abs().max() > 5e-3
    rows_CN = halves_2RN[:, problem.row_R.long().argsort()].transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(step.coefficients @ rows_CN, gradient_N, rtol=1e-9, atol=1e-10)
    whole_RN = halves_2RN.sum(0)
    norms_R = (whole_RN.square() * problem.metric_N).sum(1).sqrt()
    torch.testing.assert_close(step.grad_norms, norms_R, **TOLERANCE)
    gain_K = (step.gram @ problem.tau_R)[: shape[0]]
    torch.testing.assert_close(step.gain, gain_K, rtol=1e-11, atol=1e-10)
    own_K = (problem.tau_R * step.gram.diagonal())[: shape[0]]
    torch.testing.assert_close(step.difficulty, own_K, **TOLERANCE)
    torch.testing.assert_close(step.influence, step.gain - step.difficulty, **TOLERANCE)
    assert step.combined_norm.isnan()
    # What fused optimizers take.
    assert (step.skipped.dtype, step.found_inf.dtype) == (torch.bool, torch.float32)
    assert not step.skipped
    assert step.found_inf == 0
    state = state_views(problem.state_S)
    assert torch.equal(state.alpha, step.alpha)
    assert torch.equal(state.alpha_mean, step.alpha)
    assert (state.num_steps, state.num_skipped) == (STEPS, 0)


@pytest.mark.parametrize(
    "options",
    [{"selected": slice(100)}, {"smoothing": 0.25}, {"scale": 0.125}],
    ids=lambda options: next(iter(options)),
)
def test_implementations_agree(options, implementation, device):
    """With a weight of zero, and a step in which all gradients are zero."""
    steps, problems = [], []
    for name in (implementation, "torch"):
        problem = Problem(9, 2, device)
        problem.state_S[3] = 0
        problem.state_S[:9] /= problem.state_S[:9].sum()
        for number in range(STEPS):
            problem.turn()
            if number == 3:
                problem.halves_2RN.zero_()
            last = problem.step(name, **options)
        steps.append(last)
        problems.append(problem)
    for ours, theirs in zip(*steps, strict=True):
        if isinstance(ours, Tensor):
            torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-10, atol=1e-10)
    mine, other = problems
    torch.testing.assert_close(mine.state_S, other.state_S, **TOLERANCE)
    torch.testing.assert_close(mine.mean_RR, other.mean_RR, **TOLERANCE)
    torch.testing.assert_close(mine.mixture_R, other.mixture_R, **TOLERANCE)
    assert (steps[0].alpha[3] == 0) == ("smoothing" not in options)


@pytest.mark.parametrize("fault", ["a half", "a product", "outside the selection"])
def test_what_is_not_finite_moves_nothing(fault, implementation, device):
    problem = Problem(5, 2, device)
    options: dict[str, Any] = {}
    problem.step(implementation)
    before_S, before_RR = problem.state_S.clone(), problem.mean_RR.clone()
    before_R = problem.mixture_R.clone()
    if fault == "a half":
        problem.halves_2RN[1, 6, 0] = torch.inf
    elif fault == "a product":
        # Each row is finite, and so is its square.
        problem.halves_2RN[:, 5:] *= 1e154
        problem.halves_2RN[:, 5] = problem.halves_2RN[:, 6] * 4
        problem.metric_N *= 1e-3
    else:
        problem.halves_2RN[0, 2, -1] = torch.nan
        options = {"selected": slice(100)}
    step = problem.step(implementation, **options)
    assert step.skipped
    assert step.found_inf == 1
    assert step.coefficients.isnan().all()
    before_S[-1] += 1
    assert torch.equal(problem.state_S, before_S)
    assert torch.equal(problem.mean_RR, before_RR)
    assert torch.equal(problem.mixture_R, before_R)
    assert torch.equal(step.alpha, before_S[:5])


def test_domains_that_cancel_do_not_move(implementation, device):
    """a'Ga is noise there, whatever a slope would say."""
    problem = Problem(2, 0, device)
    for _ in range(STEPS):
        problem.turn()
        problem.halves_2RN[:, 1] = 1e-3 * problem.halves_2RN[:, 1] - problem.halves_2RN[:, 0]
        problem.step(implementation)
    torch.testing.assert_close(state_views(problem.state_S).alpha, problem.alpha_K, **TOLERANCE)


def test_two_runs_give_the_same_bits(implementation, device):
    runs = []
    for _ in range(2):
        problem = Problem(50, 3, device)
        step = problem.step(implementation)
        runs.append([*step[:-4], step.skipped, problem.state_S, problem.mean_RR])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
