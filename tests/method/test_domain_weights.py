"""The domain weights of a run: where they start, how they move, what they warn of and record."""

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from doge_fast.weights import state
from doge_fast.weights.objective import UNIVERSAL, Objective, Target
from doge_fast.weights.reweight import MirrorStep
from doge_fast.weights.rule import LastStep, Matrices
from doge_fast.weights.state import DomainWeights

TARGET = {"a": 1.0, "c": 2.0, "x": 0.5, "y": 3.0}
UNCLIPPED = MirrorStep(mu=0.5, domain_max_grad_norm=None)


def rows(num_rows: int = 5, columns: int = 40, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, columns, generator=generator, dtype=torch.float64)


def weights_of(
    domains: str = "ab", target: Target = UNIVERSAL, rule: MirrorStep = UNCLIPPED, **where: Any
) -> DomainWeights:
    return DomainWeights(Objective.of(tuple(domains), target), rule, **where)


def move(
    weights: DomainWeights,
    gram_RR: Tensor,
    lr: float | Tensor = 0.01,
    *,
    grad_scale: float = 1.0,
    names_B: tuple[str, ...] | None = None,
    present: tuple[str, ...] | None = None,
) -> LastStep:
    names = names_B or weights.objective.names
    return weights.move(
        Matrices(gram_RR, gram_RR),
        names_B=names,
        first_shares=dict.fromkeys(present or names, 1.0),
        lr=lr,
        grad_scale=grad_scale,
    )


@pytest.mark.parametrize(
    ("initial", "message"),
    [
        ({"a": 0.5, "b": 0.25, "c": 0.0, "d": 0.25}, "that sum to 1"),
        ({"a": 1.5, "b": -0.5, "c": 0.0}, "weights >= 0 .*'b': -0.5"),
        ({"a": math.nan, "b": 0.5, "c": 0.5}, "that sum to 1"),
        ({"a": 0.5, "b": 0.5, "c": 1.1e-5}, r"sum to 1 \(within 1e-05\)"),
    ],
)
def test_a_start_is_on_the_simplex_of_these_domains(initial, message):
    with pytest.raises(ValueError, match=message):
        weights_of("abc", initial=initial)


def test_a_printed_start_is_made_to_sum_to_one():
    for error in (9e-6, -9e-6):
        weights = weights_of(initial={"a": 0.5, "b": 0.5 + error})
        assert weights.read("alpha").sum().item() == pytest.approx(1, abs=1e-15)
    # In the order of the domains, and the mean starts there too.
    weights = weights_of("abc", initial={"c": 0.7, "a": 0.3, "b": 0.0})
    for part in ("alpha", "alpha_mean"):
        assert weights.read(part).tolist() == [0.3, 0.0, 0.7]


def test_rates_may_live_on_the_device():
    """A tensor is looked at when the step runs, a number when it is called."""
    gram_RR = rows() @ rows().T

    def moved(*rates: float | Tensor) -> Tensor:
        weights = weights_of("abc", TARGET)
        return [move(weights, gram_RR, lr).alpha for lr in rates][-1]

    on_device = torch.tensor(0.5, dtype=torch.float64)
    # What a number said before the tensor is not taken for known after it.
    assert torch.equal(moved(0.02, on_device, 0.02), moved(0.02, 0.5, 0.02))
    # Nor is one that is changed in its place, as schedulers do.
    weights, changing = weights_of("abc", TARGET), torch.tensor(0.0, dtype=torch.float64)
    for rate in (0.02, 0.5, 0.02):
        last = move(weights, gram_RR, changing.fill_(rate)).alpha
    assert torch.equal(last, moved(0.02, 0.5, 0.02))
    # Nobody looks whether it is below zero.
    move(weights, gram_RR, torch.tensor(-1.0, dtype=torch.float64))


@pytest.mark.parametrize("lr", [-1e-9, math.nan])
def test_no_rate_below_zero_moves_the_weights(lr):
    weights = weights_of()
    with pytest.raises(ValueError, match=f"must be >= 0 .*got {lr}"):
        move(weights, torch.eye(2, dtype=torch.float64), lr)
    move(weights, torch.eye(2, dtype=torch.float64), 0)
    assert weights.read("alpha").tolist() == [0.5, 0.5]


def test_settings_that_stay_are_not_written_again(monkeypatch):
    """Each would be a kernel of its own on a GPU."""
    weights, gram_RR = weights_of(), rows(2) @ rows(2).T
    move(weights, gram_RR, 0.1)
    written: list[float] = []
    fill = Tensor.fill_
    monkeypatch.setattr(Tensor, "fill_", lambda t, v: written.append(v) or fill(t, v))
    for lr in (0.1, 0.1, 0.2, 0.2):
        move(weights, gram_RR, lr)
    weights.rule = replace(weights.rule, mu=0.75)
    move(weights, gram_RR, 0.2)
    assert written == [0.2, 0.75]


def test_settings_move_to_where_the_gradients_are():
    """As far as a device without values shows it."""
    vector = state.DeviceVector(2, torch.float64)
    first = vector.write([1.0, 2.0], torch.device("cpu")).clone()
    there = vector.write([1.0, 2.0], torch.device("meta"))
    assert there.device.type == "meta"
    assert vector.write([3.0, 2.0], torch.device("meta")) is there
    back = vector.write([1.0, 2.0], torch.device("cpu"))
    assert back.tolist() == first.tolist() == [1.0, 2.0]
    assert weights_of(device="meta").read("alpha").is_meta


def test_the_record_has_the_mean_and_the_last_weights():
    weights = weights_of(target={"a": 2.0})
    for step in range(3):
        move(weights, rows(2, seed=step) @ rows(2, seed=step).T)
    last, mean = weights.read("alpha").tolist(), weights.read("alpha_mean").tolist()
    assert last != mean
    assert weights.record() == {
        "method": "doge",
        "score": "paper",
        "target": {"a": 2.0},
        "mu": 0.5,
        "domains": [
            {"name": name, "weight": w, "weight_last": last_w}
            for name, w, last_w in zip("ab", mean, last, strict=True)
        ],
        "steps": 3,
        "versions": {"torch": torch.__version__},
    }


def learned(alpha: list[float], **arguments: Any) -> DomainWeights:
    """Weights at `alpha` after four steps with a score."""
    weights = weights_of("defg"[: len(alpha)], rule=MirrorStep(mu=0.25), **arguments)
    alpha_K = torch.tensor(alpha, dtype=torch.float64)
    parts = {"alpha": alpha_K, "alpha_mean": alpha_K, "gain": torch.ones_like(alpha_K)}
    counts = {"num_steps": torch.tensor(4.0), "num_skipped": torch.tensor(0.0)}
    weights.load(weights.state() | parts | counts)
    return weights


def assert_silent(weights: DomainWeights) -> None:
    # The warning names the caller's caller, which is not ours here.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights.warn_of_failure()


def test_collapsed_weights_warn_once_and_name_the_largest():
    weights = learned([0.001, 0.998, 0.001])
    with pytest.warns(UserWarning, match=r"collapsed onto e: .* 1\.02 of 3 .* 0\.25"):
        weights.warn_of_failure()
    assert_silent(weights)


@pytest.mark.parametrize(
    ("alpha", "arguments"),
    [
        # 1 + 0.1 (K - 1) domains in use are enough.
        ([0.05, 0.95], {}),
        # It was so from the beginning.
        ([0.001, 0.999], {"initial": {"d": 0.001, "e": 0.999}}),
        # One domain is asked for.
        ([0.001, 0.999], {"target": "e"}),
        ([0.001, 0.999], {"target": {"d": 1.0, "e": 2.0}}),
        ([0.001, 0.999], {"target": ["d", "e", "far"]}),
    ],
)
def test_weights_that_are_meant_to_be_few_do_not_warn(alpha, arguments):
    assert_silent(learned(alpha, **arguments))


def test_weights_without_a_score_warn_once_there_were_steps():
    weights = weights_of(target={"a": 1.0, "far": 2.0})
    assert_silent(weights)
    weights.load(weights.state() | {"num_steps": torch.tensor(2.0)})
    with pytest.warns(UserWarning, match=r"nothing in 2 steps.* the target \['far'\]"):
        weights.warn_of_failure()
    assert_silent(weights)
    # A score, or a mean that is not the start, is something.
    for part in ({"gain": torch.tensor([0.0, 1e-9])}, {"alpha_mean": torch.tensor([0.6, 0.4])}):
        other = weights_of()
        other.load(other.state() | {"num_steps": torch.tensor(2.0)} | part)
        assert_silent(other)
