"""Laws of the method's public functions, for whatever numbers and names hypothesis draws."""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import doge_fast
from doge_fast import reference
from doge_fast.optimizer import DoGEOptimizer
from doge_fast.weights import (
    checkpoint,
    defaults,
    group_dro,
    scores,
    simplex,
    weights_file,
)
from doge_fast.weights.objective import UNIVERSAL, Objective
from doge_fast.weights.state import DomainWeights, UpdateRule
from tests.laws import assert_simplex
from tests.properties import (
    attempt,
    distinct_names,
    gradients,
    json_values,
    not_numbers,
    outside,
    points,
    reals,
    vectors,
)

EPS = torch.finfo(torch.float64).eps
SIZES = st.integers(1, 8)

# The simplex.


@given(SIZES.flatmap(lambda n: st.tuples(points(n), vectors(n))), reals(0, 10), reals(1e-6, 1e6))
def test_a_mirror_step_is_a_softmax_of_what_the_paper_writes(
    both: tuple[Tensor, Tensor], lr: float, mu: float
) -> None:
    alpha_K, gain_K = both
    moved_K = simplex.mirror_step(alpha_K, gain_K, lr=lr, mu=mu)
    assert_simplex(moved_K, ulps=4 * len(alpha_K))
    assert (moved_K[alpha_K == 0] == 0).all()
    # All gains more by one number: nothing else.
    shifted_K = simplex.mirror_step(alpha_K, gain_K + 1.0, lr=lr, mu=mu)
    slack = 16 * EPS * (1 + lr / mu * (1 + gain_K.abs().max().item()))
    torch.testing.assert_close(shifted_K, moved_K, rtol=slack, atol=slack)
    if lr / mu * gain_K.abs().max() < 300:
        theirs_K = reference.mirror_step(alpha_K, gain_K, lr, mu)
        torch.testing.assert_close(moved_K, theirs_K, rtol=slack, atol=slack)


@given(points(SIZES), reals(0.0, 0.999))
def test_smoothing_keeps_a_floor(alpha_K: Tensor, smoothing: float) -> None:
    smooth_K = simplex.smooth(alpha_K, smoothing)
    assert_simplex(smooth_K, ulps=4 * len(alpha_K))
    assert (smooth_K >= smoothing / len(alpha_K) * (1 - 4 * EPS)).all()
    torch.testing.assert_close(smooth_K, reference.smooth(alpha_K, smoothing))


@given(points(SIZES))
def test_effective_domains_are_between_one_and_all(alpha_K: Tensor) -> None:
    number = simplex.effective_domains(alpha_K).item()
    assert 1 - 1e-12 <= number <= len(alpha_K) * (1 + 1e-12)


# The K x K algebra.


@given(gradients(), st.data())
def test_gains_are_the_reference_and_split_in_two(grads_RN: Tensor, data: st.DataObject) -> None:
    num_rows = len(grads_RN)
    num_domains = data.draw(st.integers(1, num_rows))
    tau_R = data.draw(vectors(num_rows, 0.0, 5.0))
    gram_RR = reference.gram(grads_RN)
    gain_K = scores.gain(gram_RR, tau_R, num_domains)
    difficulty_K = scores.difficulty(gram_RR, tau_R, num_domains)
    bound = gram_RR.abs().max().item() * tau_R.sum().item() * num_rows * EPS * 4
    both_K = reference.influence(gram_RR, tau_R, num_domains) + difficulty_K
    torch.testing.assert_close(gain_K, both_K, rtol=1e-12, atol=bound)
    torch.testing.assert_close(
        gain_K, reference.gain(gram_RR, tau_R, num_domains), rtol=1e-12, atol=bound
    )
    torch.testing.assert_close(
        difficulty_K, reference.difficulty(gram_RR, tau_R, num_domains), rtol=0, atol=0
    )
    assert (difficulty_K >= 0).all()


@given(vectors(SIZES, 0.0, 1e6), st.just(math.inf) | reals(1e-6, 1e6))
def test_no_row_is_longer_than_the_clip(norms_R: Tensor, most: float) -> None:
    factors_R = scores.clip_factors(norms_R, most)
    theirs_R = reference.clip_factors(norms_R, None if most == math.inf else most)
    assert torch.equal(factors_R, theirs_R)
    assert ((factors_R > 0) & (factors_R <= 1)).all()
    assert (factors_R * norms_R <= most).all()


# Names and targets.


@given(distinct_names(), st.data())
def test_an_objective_keeps_names_and_weights(domains: list[str], data: st.DataObject) -> None:
    target = data.draw(
        st.just(UNIVERSAL)
        | st.sampled_from(domains)
        | distinct_names()
        | st.dictionaries(
            st.sampled_from(domains) | st.text("xyz", min_size=1), reals(0.1, 9), min_size=1
        )
    )
    objective = Objective.of(domains, target)
    assert objective.domains == tuple(domains)
    assert objective.rows[: len(domains)] == tuple(domains)
    assert len(set(objective.rows)) == len(objective.rows) == len(objective.tau)
    assert objective.is_universal == (target == UNIVERSAL)
    assert set(objective.needed) <= set(objective.rows)
    assert objective.measured == objective.rows[len(domains) :]
    if isinstance(target, Mapping):
        assert objective.target == target
    # As a user would write it, it is the same again.
    again = Objective.of(domains, objective.target)
    assert dict(zip(again.rows, again.tau, strict=True)) == dict(
        zip(objective.rows, objective.tau, strict=True)
    )
    assert checkpoint.fingerprint(objective) == checkpoint.fingerprint(
        Objective.of(domains, target)
    )


@given(json_values, json_values)
def test_other_names_and_targets_are_refused_in_a_sentence(domains: Any, target: Any) -> None:
    for arguments in ((domains, UNIVERSAL), (["a", "b"], target)):
        objective, message = attempt(partial(Objective.of, *arguments))
        if objective is None:
            assert message.endswith((".", "]"))
        else:
            assert any(tau > 0 for tau in objective.tau)
            assert all(isinstance(name, str) and name for name in objective.rows)


# Weights that move.


@given(st.data(), reals(0, 1), reals(0.05, 10), reals(0, 0.9), st.none() | reals(0.05, 10))
def test_weights_move_as_in_the_reference(
    data: st.DataObject, lr: float, mu: float, smoothing: float, most: float | None
) -> None:
    grads_RN = data.draw(gradients())
    names = [f"d{i}" for i in range(len(grads_RN))]
    target = data.draw(st.dictionaries(st.sampled_from(names), reals(0.1, 3), min_size=1))
    weights = DomainWeights(
        Objective.of(names, target),
        UpdateRule(mu, domain_max_grad_norm=most, smoothing=smoothing),
        initial=dict(zip(names, data.draw(points(len(names))).tolist(), strict=True)),
    )
    alpha_K = weights.read("alpha")
    tau_R = torch.tensor([target.get(name, 0.0) for name in names], dtype=torch.float64)
    gram_RR = reference.gram(grads_RN)
    step = weights.move(gram_RR, gram_RR, rows_B=names, present=names, lr=lr, grad_scale=1.0)
    expected_K, _, gain_K = reference.step(
        grads_RN,
        alpha_K,
        tau_R=tau_R,
        lr=lr,
        mu=mu,
        domain_max_grad_norm=most,
        smoothing=smoothing,
    )
    bound = 1e-9 * max(1.0, gram_RR.abs().max().item()) * tau_R.sum().item()
    torch.testing.assert_close(step.gain, gain_K, rtol=1e-9, atol=bound)
    assert_simplex(weights.read("alpha"), ulps=8 * len(names))
    if lr / mu * bound < 1e-6:
        torch.testing.assert_close(step.alpha, expected_K, rtol=1e-5, atol=1e-6)
    record = weights.record()
    assert [each["name"] for each in record["domains"]] == names
    assert [each["weight_last"] for each in record["domains"]] == weights.read("alpha").tolist()


@given(st.sampled_from(["max_grad_norm", "domain_max_grad_norm"]), outside(0, 1e308) | not_numbers)
def test_a_rule_refuses_what_is_no_norm(name: str, value: Any) -> None:
    assume(value is not None)
    if isinstance(value, float) and value > 0:
        return
    parts: dict[str, Any] = {"max_grad_norm": None, "domain_max_grad_norm": None}
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        UpdateRule(mu=1.0, **parts | {name: value})


@given(reals(1e-9, 1e3), reals(1e-3, 1e3))
def test_the_default_mu_follows_rate_and_targets(lr: float, total: float) -> None:
    assert defaults.default_mu(lr, total) == pytest.approx(10 * lr * (total + 1))
    with pytest.raises(ValueError, match="must be positive"):
        defaults.default_mu(-lr, total)


# The optimizer.


def _after_a_step(num_domains: int) -> DoGEOptimizer:
    theta = torch.zeros(num_domains, dtype=torch.float64, requires_grad=True)
    names = [f"d{i}" for i in range(num_domains)]
    optimizer = DoGEOptimizer(torch.optim.SGD([theta], lr=0.01), domains=names, mu=0.1)
    for row, name in enumerate(names):
        with optimizer.domain(name):
            theta[row].sub(1.0).square().backward()
    optimizer.step()
    return optimizer


@given(
    st.sampled_from(
        ["version", "domains", "rows", "draws", "mu", "alpha", "alpha_mean", "gain", "num_steps"]
    ),
    json_values | not_numbers,
)
def test_a_changed_state_is_refused_before_anything_moves(part: str, value: Any) -> None:
    optimizer = _after_a_step(3)
    state = optimizer.doge.state_dict()
    assume(type(value) is not type(state[part]) or isinstance(value, Tensor | list))
    assume(value != state[part] if isinstance(value, list) else True)
    # A number of another kind may be the same one.
    assume(not (isinstance(value, int | float) and isinstance(state[part], int | float)))
    before = optimizer.alpha
    with pytest.raises(ValueError, match=r"checkpoint|mu, the Bregman"):
        optimizer.doge.load_state_dict({**state, part: value})
    assert torch.equal(optimizer.alpha, before)


@given(json_values)
def test_what_is_no_state_is_refused_by_name(value: Any) -> None:
    optimizer = _after_a_step(2)
    with pytest.raises((TypeError, ValueError), match="state"):
        optimizer.doge.load_state_dict(value)


# DoReMi and files.


@given(points(4), vectors(4, 0.0, 50.0), reals(1e-3, 2), reals(0, 0.9))
def test_group_dro_stays_on_the_simplex(
    alpha_K: Tensor, excess_K: Tensor, step_size: float, smoothing: float
) -> None:
    start = group_dro.ExcessWeights(alpha_K, alpha_K, excess_K, torch.zeros((), dtype=torch.double))
    moved = start.moved(excess_K, step_size=step_size, smoothing=smoothing)
    assert_simplex(moved.alpha, ulps=32)
    torch.testing.assert_close(moved.alpha_mean, moved.alpha)
    assert moved.num_steps == 1


@given(points(3), st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_shares_of_examples_sum_to_what_they_say(alpha_K: Tensor, ids: list[int]) -> None:
    ids_B = torch.tensor(ids)
    assume(float(alpha_K[ids_B].sum()) > 1e-6)
    uniform_K = simplex.uniform(3)
    doremi_B = group_dro.example_shares(alpha_K, uniform_K, ids_B)
    assert doremi_B.sum().item() == pytest.approx(1)
    doge_B = group_dro.example_shares(alpha_K, uniform_K, ids_B, variant="doge")
    present = sorted(set(ids))
    assert doge_B.sum().item() == pytest.approx(alpha_K[present].sum().item())


@given(st.data())
def test_excess_is_never_negative_and_the_first_never_smaller(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 6))
    ids_B = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=number, max_size=number)))
    proxy_BT = data.draw(vectors(number * 3, 0.0, 9.0)).view(number, 3)
    reference_BT = data.draw(vectors(number * 3, 0.0, 9.0)).view(number, 3)
    last_K = data.draw(vectors(3, 0.0, 9.0))
    doremi_K, doge_K = (
        group_dro.excess_losses(proxy_BT, reference_BT, ids_B, last_K, variant=variant)
        for variant in ("doremi", "doge")
    )
    absent = [k for k in range(3) if k not in ids_B.tolist()]
    assert (doremi_K >= doge_K - 1e-12).all()
    assert (doge_K >= 0).all()
    assert torch.equal(doremi_K[absent], last_K[absent])


@given(json_values)
def test_json_is_written_whole_and_read_back(value: Any) -> None:
    plain = weights_file.plain(value)
    text = json.dumps(plain, allow_nan=False)
    assert json.loads(text) == plain
    assert weights_file.plain(plain) == plain


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4))
def test_a_weights_file_is_what_was_recorded(
    tmp_path_factory: pytest.TempPathFactory, record: dict[str, Any]
) -> None:
    path: Path = tmp_path_factory.mktemp("weights") / "weights.json"
    weights_file.write(path, record)
    assert json.loads(path.read_text("utf-8")) == {
        "schema_version": weights_file.SCHEMA_VERSION,
        **weights_file.plain(record),
    }


@given(st.text(min_size=1, max_size=12))
def test_the_package_has_its_names_and_no_other(name: str) -> None:
    assert all(hasattr(doge_fast, each) for each in doge_fast.__all__)
    assume(not hasattr(doge_fast, name))
    with pytest.raises(AttributeError, match="has no attribute"):
        getattr(doge_fast, name)
