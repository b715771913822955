"""The K x K step, in every implementation, against the reference and against plain torch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from doge_fast import reference
from doge_fast.kernels import reweight
from doge_fast.kernels.dispatch import OPERATORS
from doge_fast.kernels.reweight.packing import (
    Settings,
    new_settings,
    new_state,
    num_values,
    state_views,
)
from tests.laws import assert_simplex

pytestmark = pytest.mark.usefixtures("nan_memory")


@pytest.fixture
def implementation(implementation: str) -> str:
    """Those that the K x K step is written in."""
    if implementation not in OPERATORS["reweight"].implementations:
        pytest.skip(f"the K x K step is not written in {implementation}")
    return implementation


# Sums of at most a few hundred float64 terms, in another order.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-14}

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "published": {
        "scale_by_mean_norm": True,
        "low": 0.0,
        "high": 5.0,
        "domain_max_grad_norm": 5.0,
        "smoothing": 0.1,
    },
    "clipped": {"max_grad_norm": 0.5, "low": -2.0, "high": 2.0},
    "low bound only": {"low": 0.0},
}
SHAPES = [(1, 0), (3, 2), (7, 0), (22, 1), (50, 3), (130, 0)]


class Problem:
    """Rows with a scale, their Gram matrix, weights and an objective."""

    def __init__(self, num_domains: int, num_measured: int, device: torch.device) -> None:
        num_rows = num_domains + num_measured
        self.num_domains = num_domains
        grads_RN = torch.randn(num_rows, 40, dtype=torch.float64, device=device)
        self.grads_RN = grads_RN + torch.randn(40, dtype=torch.float64, device=device)
        self.alpha_K = torch.rand(num_domains, dtype=torch.float64, device=device).softmax(0)
        self.tau_R = torch.rand(num_rows, dtype=torch.float64, device=device)
        self.present_R = torch.ones(num_rows, dtype=torch.bool, device=device)
        self.state_S = new_state(self.alpha_K)

    def step(
        self, implementation: str, *, lr: float = 0.01, scale: float = 1.0, **rule: Any
    ) -> Any:
        gram_RR = scale**2 * self.grads_RN @ self.grads_RN.T
        return reweight(
            gram_RR,
            self.state_S,
            tau_R=self.tau_R,
            present_R=self.present_R,
            settings_C=self.settings(lr=lr, grad_scale=scale, **rule),
            implementation=implementation,
        )

    def settings(self, **rule: float) -> Tensor:
        return new_settings(Settings(**{"lr": 0.01, "mu": 0.5} | rule), self.tau_R.device)


@pytest.mark.parametrize("rule", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_step_is_the_reference(
    shape: tuple[int, int], rule: dict[str, Any], implementation: str, device: torch.device
) -> None:
    problem = Problem(*shape, device)
    step = problem.step(implementation, scale=8.0, **rule)
    alpha_K, gradient_N, gain_K = reference.step(
        problem.grads_RN,
        problem.alpha_K,
        tau_R=problem.tau_R,
        lr=0.01,
        mu=0.5,
        scale_by_mean_norm=rule.get("scale_by_mean_norm", False),
        bounds=(rule.get("low", -math.inf), rule.get("high", math.inf)),
        domain_max_grad_norm=rule.get("domain_max_grad_norm"),
        max_grad_norm=rule.get("max_grad_norm"),
        smoothing=rule.get("smoothing", 0.0),
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
    assert_simplex(step.alpha)
    assert not step.skipped
    assert step.found_inf == 0
    state = state_views(problem.state_S)
    assert torch.equal(state.alpha, step.alpha)
    assert torch.equal(state.gain, step.gain)
    assert (state.num_steps, state.num_skipped) == (1, 0)


def test_the_mean_is_that_of_the_steps(implementation: str, device: torch.device) -> None:
    problem = Problem(5, 1, device)
    alphas = []
    for _ in range(4):
        problem.grads_RN = torch.randn_like(problem.grads_RN)
        alphas.append(problem.step(implementation).alpha)
    state = state_views(problem.state_S)
    torch.testing.assert_close(state.alpha_mean, torch.stack(alphas).mean(0), **TOLERANCE)
    assert state.num_steps == 4


# Triton's interpreter computes with numpy, which warns where a GPU does not.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("fault", ["inf row", "nan row", "nan rate"])
def test_what_is_not_finite_moves_nothing(
    fault: str, implementation: str, device: torch.device
) -> None:
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


def test_absent_domains_keep_their_score(implementation: str, device: torch.device) -> None:
    problem = Problem(4, 1, device)
    first = problem.step(implementation)
    problem.grads_RN[1] = 0
    problem.present_R[1] = False
    second = problem.step(implementation, lr=0.02)
    assert second.gain[1] == first.gain[1]
    assert second.gain[0] != first.gain[0]
    assert second.coefficients[1] == 0
    problem.present_R[4] = False
    third = problem.step(implementation)
    assert torch.equal(third.gain, second.gain)
    problem.tau_R[4] = 0
    fourth = problem.step(implementation)
    assert fourth.gain[0] != third.gain[0]


def test_a_weight_of_zero_stays_zero(implementation: str, device: torch.device) -> None:
    problem = Problem(3, 0, device)
    alpha_K = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64, device=device)
    problem.state_S = new_state(alpha_K)
    step = problem.step(implementation)
    assert step.alpha[1] == 0
    assert not step.skipped


def test_norms_come_from_all_columns(implementation: str, device: torch.device) -> None:
    problem = Problem(3, 1, device)
    gram_RR = problem.grads_RN[:, :10] @ problem.grads_RN[:, :10].T
    full_RR = problem.grads_RN @ problem.grads_RN.T
    step = problem.step(implementation)
    again = Problem(3, 1, device)
    again.state_S = new_state(problem.alpha_K)
    selected = reweight(
        gram_RR,
        again.state_S,
        full_RR=full_RR,
        tau_R=problem.tau_R,
        present_R=problem.present_R,
        settings_C=problem.settings(),
        implementation=implementation,
    )
    assert torch.equal(selected.grad_norms, step.grad_norms)
    torch.testing.assert_close(selected.gram, gram_RR, **TOLERANCE)
    combined = (selected.coefficients @ problem.grads_RN).norm()
    torch.testing.assert_close(selected.combined_norm, combined, **TOLERANCE)


def test_two_runs_give_the_same_bits(implementation: str, device: torch.device) -> None:
    problem = Problem(50, 3, device)
    before_S = problem.state_S.clone()
    first = problem.step(implementation, max_grad_norm=0.1)
    problem.state_S = before_S
    second = problem.step(implementation, max_grad_norm=0.1)
    assert all(torch.equal(a, b) for a, b in zip(first[:-1], second[:-1], strict=True))


def test_it_is_a_registered_operator(device: torch.device) -> None:
    problem = Problem(3, 1, device)
    gram_RR = problem.grads_RN @ problem.grads_RN.T
    torch.library.opcheck(
        torch.ops.doge_fast.reweight.default,
        (
            gram_RR,
            gram_RR.clone(),
            problem.state_S,
            problem.tau_R,
            problem.present_R,
            problem.settings(
                scale_by_mean_norm=1.0, low=0.0, high=5.0, max_grad_norm=1.0, smoothing=0.1
            ),
        ),
    )


def test_the_layout_has_room_for_everything() -> None:
    assert num_values(5, 3) == 25 + 10 + 12 + 1
    assert new_state(torch.full((3,), 1 / 3, dtype=torch.float64)).shape == (11,)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"state_S": torch.ones(7, dtype=torch.float64)}, r"3 K \+ 2 numbers .* shape \[7\]"),
        ({"settings_C": torch.ones(9)}, r"settings_C contiguous, of shape \[9\] and torch.float64"),
        ({"tau_R": torch.ones(4)}, r"tau_R contiguous, of shape \[4\] and torch.float64"),
        ({"gram_RR": torch.ones(4, 3)}, r"gram_RR contiguous, of shape \[4, 4\]"),
    ],
    ids=["state", "settings", "tau", "gram"],
)
def test_misuse_speaks(
    spoil: dict[str, Tensor], message: str, implementation: str, device: torch.device
) -> None:
    problem = Problem(3, 1, device)
    arguments: dict[str, Any] = {
        "gram_RR": problem.grads_RN @ problem.grads_RN.T,
        "state_S": problem.state_S,
        "tau_R": problem.tau_R,
        "present_R": problem.present_R,
        "settings_C": problem.settings(),
    } | {name: tensor.to(device) for name, tensor in spoil.items()}
    gram_RR, state_S = arguments.pop("gram_RR"), arguments.pop("state_S")
    with pytest.raises(ValueError, match=message):
        reweight(gram_RR, state_S, implementation=implementation, **arguments)


@pytest.mark.parametrize("mu", [0.0, -1.0, math.nan])
def test_a_coefficient_that_is_not_positive_is_refused(mu: float) -> None:
    with pytest.raises(ValueError, match="mu must be positive; got"):
        new_settings(Settings(lr=0.1, mu=mu))
