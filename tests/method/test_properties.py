"""Laws of the method's public functions, for whatever numbers and names hypothesis draws."""

import itertools
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
from doge_fast import cancellation, losses, reference, sampling, scale, wrapper
from doge_fast.optimizer import DoGEOptimizer
from doge_fast.weights import (
    checkpoint,
    defaults,
    group_dro,
    projection,
    scores,
    simplex,
    weights_file,
)
from doge_fast.weights.objective import UNIVERSAL, Objective
from doge_fast.weights.state import DomainWeights, UpdateRule
from tests.laws import assert_psd, assert_simplex, assert_symmetric
from tests.properties import (
    attempt,
    below,
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


@given(SIZES)
def test_uniform_gives_all_domains_the_same(size: int) -> None:
    alpha_K = simplex.uniform(size)
    assert_simplex(alpha_K)
    assert (alpha_K == alpha_K[0]).all()
    assert alpha_K.dtype == torch.float64


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


@given(below(0.0), below(0.0) | st.sampled_from([0.0, math.inf]))
def test_a_mirror_step_refuses_what_is_no_rate(lr: float, mu: float) -> None:
    alpha_K = simplex.uniform(3)
    with pytest.raises(ValueError, match="learning rate of a mirror step must be >= 0"):
        simplex.mirror_step(alpha_K, alpha_K, lr=lr, mu=1.0)
    with pytest.raises(ValueError, match="must be positive and finite"):
        simplex.mirror_step(alpha_K, alpha_K, lr=1.0, mu=mu)


@given(points(SIZES), reals(0.0, 0.999))
def test_smoothing_keeps_a_floor(alpha_K: Tensor, smoothing: float) -> None:
    smooth_K = simplex.smooth(alpha_K, smoothing)
    assert_simplex(smooth_K, ulps=4 * len(alpha_K))
    assert (smooth_K >= smoothing / len(alpha_K) * (1 - 4 * EPS)).all()
    torch.testing.assert_close(smooth_K, reference.smooth(alpha_K, smoothing))


@given(st.lists(points(4), min_size=1, max_size=8))
def test_the_running_mean_is_the_mean(alphas: list[Tensor]) -> None:
    mean_K = torch.full((4,), math.pi, dtype=torch.float64)
    for count, alpha_K in enumerate(alphas, start=1):
        mean_K = simplex.running_mean(mean_K, alpha_K, count)
    torch.testing.assert_close(mean_K, torch.stack(alphas).mean(0), rtol=1e-12, atol=1e-13)


@given(points(SIZES))
def test_effective_domains_are_between_one_and_all(alpha_K: Tensor) -> None:
    number = simplex.effective_domains(alpha_K).item()
    assert 1 - 1e-12 <= number <= len(alpha_K) * (1 + 1e-12)


@given(not_numbers)
def test_what_is_no_number_is_refused(value: Any) -> None:
    assert not simplex.is_number(value)
    for check in (simplex.check_mu, simplex.check_smoothing):
        with pytest.raises(ValueError, match="must be"):
            check(value)


@given(st.integers() | st.floats())
def test_numbers_are_numbers(value: float) -> None:
    assert simplex.is_number(value)
    assert simplex.is_number(torch.tensor(float(value)))
    assert simplex.is_integer(value) == isinstance(value, int)


@given(outside(0.0, math.nextafter(1.0, 0.0)))
def test_smoothing_out_of_range_is_refused(smoothing: float) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 1\)"):
        simplex.smooth(simplex.uniform(2), smoothing)


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


@given(gradients())
def test_cosines_are_cosines(grads_RN: Tensor) -> None:
    gram_RR = reference.gram(grads_RN)
    cosine_RR = scores.cosine(gram_RR)
    assert cosine_RR.abs().max() <= 1 + 1e-12
    ones = gram_RR.diagonal() > 0
    expected_R = ones.double()
    torch.testing.assert_close(cosine_RR.diagonal(), expected_R, rtol=1e-12, atol=0)


@given(vectors(SIZES, 0.0, 1e6), st.none() | reals(1e-6, 1e6))
def test_no_row_is_longer_than_its_cut(norms_R: Tensor, most: float | None) -> None:
    factors_R = scores.clip_factors(norms_R, math.inf if most is None else most)
    assert torch.equal(factors_R, reference.clip_factors(norms_R, most))
    assert ((factors_R > 0) & (factors_R <= 1)).all()
    if most is not None:
        assert (factors_R * norms_R <= most).all()


@given(gradients(), st.data())
def test_the_combined_norm_is_that_of_the_sum(grads_RN: Tensor, data: st.DataObject) -> None:
    coefficients_R = data.draw(vectors(len(grads_RN), -10.0, 10.0))
    norm = scores.combined_norm(reference.gram(grads_RN), coefficients_R)
    direct = reference.weighted_sum(grads_RN, coefficients_R).norm()
    # A cancelled sum is as exact as the terms: squared, it loses half the digits. Squares of
    # numbers below 1e-160 are zero.
    terms = (coefficients_R.abs() * grads_RN.norm(dim=1)).sum().item()
    assert abs(norm.item() - direct.item()) <= 1e-6 * terms + 1e-150


@given(gradients(), st.data())
def test_the_published_score_is_within_its_bounds(grads_RN: Tensor, data: st.DataObject) -> None:
    num_domains = data.draw(st.integers(1, len(grads_RN)))
    tau_R = data.draw(vectors(len(grads_RN), 0.0, 5.0))
    gram_RR = reference.gram(grads_RN)
    every_K = torch.ones(num_domains, dtype=torch.bool)
    scored_K = scores.PUBLISHED.gain(gram_RR, tau_R, every_K)
    plain_K = reference.scaled_by_mean_norm(
        scores.gain(gram_RR, tau_R, num_domains), gram_RR.diagonal()[:num_domains].sqrt()
    )
    torch.testing.assert_close(scored_K, plain_K.clamp(0, 5), rtol=1e-12, atol=0)


@given(st.text(max_size=12) | st.none() | st.integers())
def test_other_scores_are_refused(name: Any) -> None:
    assume(name not in scores.NAMED_SCORES)
    with pytest.raises(ValueError, match="score must be"):
        scores.score_of(name)


@given(gradients())
def test_gram_matrices_are_symmetric_and_psd(grads_RN: Tensor) -> None:
    gram_RR = reference.gram(grads_RN)
    assert_symmetric(0.5 * (gram_RR + gram_RR.T))
    assert_psd(0.5 * (gram_RR + gram_RR.T), 1e-12)


@given(st.data(), reals(0, 1), reals(0.01, 10), reals(0, 0.9), st.none() | reals(0.1, 10))
def test_a_reference_step_stays_on_the_simplex_and_within_its_cut(
    data: st.DataObject, lr: float, mu: float, smoothing: float, most: float | None
) -> None:
    grads_RN = data.draw(gradients())
    num_domains = data.draw(st.integers(1, len(grads_RN)))
    alpha_K, gradient_N, gain_K = reference.step(
        grads_RN,
        data.draw(points(num_domains)),
        tau_R=data.draw(vectors(len(grads_RN), 0.0, 3.0)),
        lr=lr,
        mu=mu,
        domain_max_grad_norm=1.0,
        smoothing=smoothing,
        max_grad_norm=most,
    )
    assert_simplex(alpha_K, ulps=8 * num_domains)
    assert gain_K.isfinite().all()
    assert gradient_N.norm() <= min(1.0, math.inf if most is None else most) * (1 + 1e-9)


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


@given(json_values)
def test_another_start_is_refused_in_a_sentence(initial: Any) -> None:
    assume(initial is not None)
    with pytest.raises(ValueError, match="initial must"):
        DomainWeights(Objective.of(["a", "b"]), UpdateRule(1.0), initial=initial)


@given(not_numbers | outside(0, 1e308))
def test_a_scale_is_positive_and_finite(scale_: Any) -> None:
    assume(scale_ is not None and not isinstance(scale_, Tensor))
    assume(not (isinstance(scale_, float) and 0 < scale_ < math.inf))
    with pytest.raises(ValueError, match="grad_scale must be positive and finite"):
        wrapper.loss_scale(scale_, None, torch.device("cpu"))


@given(reals(1e-9, 1e3), reals(1e-3, 1e3))
def test_the_default_mu_follows_rate_and_targets(lr: float, total: float) -> None:
    assert defaults.default_mu(lr, total) == pytest.approx(10 * lr * (total + 1))
    with pytest.raises(ValueError, match="must be positive"):
        defaults.default_mu(-lr, total)


# The optimizer.


def _quadratic_run(
    centers_KN: Tensor, steps: int, **arguments: Any
) -> tuple[DoGEOptimizer, Tensor, list[str]]:
    names = [f"d{i}" for i in range(len(centers_KN))]
    theta = torch.zeros(centers_KN.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = DoGEOptimizer(torch.optim.SGD([theta], lr=0.01), domains=names, **arguments)
    for _ in range(steps):
        for name, center in zip(names, centers_KN, strict=True):
            with optimizer.domain(name):
                (0.5 * (theta - center).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, theta.detach(), names


@given(gradients(), st.integers(1, 4), reals(0.01, 1), reals(0, 0.5))
def test_the_optimizer_is_the_reference(
    centers_KN: Tensor, steps: int, mu: float, smoothing: float
) -> None:
    optimizer, theta, names = _quadratic_run(centers_KN, steps, mu=mu, smoothing=smoothing)
    alpha_K, point = simplex.uniform(len(names)), torch.zeros_like(theta)
    for _ in range(steps):
        alpha_K, gradient_N, _ = reference.step(
            point - centers_KN,
            alpha_K,
            tau_R=torch.ones_like(alpha_K),
            lr=0.01,
            mu=mu,
            domain_max_grad_norm=1.0,
            smoothing=smoothing,
        )
        point = point - 0.01 * gradient_N
    torch.testing.assert_close(optimizer.alpha, alpha_K, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(theta, point, rtol=1e-9, atol=1e-12)
    assert optimizer.num_steps == steps
    assert optimizer.domains == tuple(names)


@given(gradients(), st.integers(0, 3), st.integers(1, 3))
def test_a_run_goes_on_to_the_bit(centers_KN: Tensor, before: int, after: int) -> None:
    whole, _, _ = _quadratic_run(centers_KN, before, mu=0.1)
    state = whole.state_dict()
    other, _, _ = _quadratic_run(centers_KN, after, mu=0.1)
    other.load_state_dict(state)
    assert torch.equal(other.alpha, whole.alpha)
    assert torch.equal(other.alpha_mean, whole.alpha_mean)
    assert other.num_steps == before
    # The other form, without the named one.
    third, _, _ = _quadratic_run(centers_KN, after, mu=0.1)
    third.load_state_dict({key: value for key, value in state.items() if key != "doge"})
    assert torch.equal(third.alpha, whole.alpha)


@given(
    st.sampled_from(
        ["version", "domains", "rows", "draws", "mu", "alpha", "alpha_mean", "gain", "num_steps"]
    ),
    json_values | not_numbers,
)
def test_a_changed_state_is_refused_before_anything_moves(part: str, value: Any) -> None:
    optimizer, _, _ = _quadratic_run(torch.eye(3, dtype=torch.float64), 1, mu=0.1)
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
    optimizer, _, _ = _quadratic_run(torch.eye(2, dtype=torch.float64), 1, mu=0.1)
    with pytest.raises((TypeError, ValueError), match="state"):
        optimizer.doge.load_state_dict(value)


# Batches.


@st.composite
def batches(draw: st.DrawFn) -> tuple[dict[str, int], int]:
    """Examples by domain, and a number of ranks."""
    sizes = draw(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 30), min_size=1))
    return sizes, draw(st.integers(1, 9))


@given(batches())
def test_pieces_cover_the_batch_once(batch: tuple[dict[str, int], int]) -> None:
    sizes, num_ranks = batch
    seen = {name: [] for name in sizes}
    held = []
    for rank in range(num_ranks):
        mine = sampling.pieces(sizes, rank, num_ranks)
        held.append(sum(last - first for first, last in mine.values()))
        for name, piece in mine.items():
            seen[name].append(piece)
    assert max(held) - min(held) <= 1
    for name, parts in seen.items():
        ends = [0, *itertools.chain.from_iterable(parts), sizes[name]]
        assert all(ends[i] == ends[i + 1] for i in range(0, len(ends), 2))


@given(st.integers(1, 40), st.integers(1, 40))
def test_formulas_of_pieces_are_what_is_cut(num_rows: int, num_ranks: int) -> None:
    sizes = {str(row): num_ranks for row in range(num_rows)}
    held = [len(sampling.pieces(sizes, rank, num_ranks)) for rank in range(num_ranks)]
    assert sum(held) == scale.num_pieces(num_rows, num_ranks)
    assert max(held) == scale.most_rows(num_rows, num_ranks)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(2, 5), st.integers(2, 6))
def test_domain_losses_are_means_of_each_domain(
    examples: list[int], length: int, vocab: int
) -> None:
    assume(sum(examples))
    generator = torch.Generator().manual_seed(sum(examples) * length * vocab)
    logits = torch.randn(sum(examples), length, vocab, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab, (sum(examples), length), generator=generator)
    sizes = {str(i): number for i, number in enumerate(examples)}
    ours_D = losses.domain_losses(logits, labels, sizes)
    parts = zip(logits.split(examples), labels.split(examples), strict=True)
    direct = [
        torch.nn.functional.cross_entropy(part[:, :-1].flatten(0, 1), label[:, 1:].flatten())
        for part, label in parts
        if len(part)
    ]
    torch.testing.assert_close(ours_D, torch.stack(direct), rtol=1e-12, atol=1e-12)
    weight = torch.eye(vocab, dtype=torch.float64)
    theirs_D = losses.linear_domain_losses(logits, weight, labels, sizes, chunk_tokens=2)
    torch.testing.assert_close(theirs_D, ours_D, rtol=1e-12, atol=1e-12)


# DoReMi, bounds, selection, files.


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


@given(st.data())
def test_projected_weights_are_within_their_bounds(data: st.DataObject) -> None:
    size = data.draw(SIZES)
    weights = data.draw(points(size)).tolist()
    floors = [data.draw(reals(0, 1 / size)) for _ in range(size)]
    caps = [data.draw(reals(floor, 1)) for floor in floors]
    projected, message = attempt(lambda: projection.project(weights, floors=floors, caps=caps))
    if projected is None:
        assert "room" in message
        return
    assert all(f <= q <= c for f, q, c in zip(floors, projected, caps, strict=True))
    assert math.fsum(projected) == pytest.approx(1, abs=2e-6)
    again = projection.project(projected, floors=floors, caps=caps)
    assert again == pytest.approx(projected, abs=1e-5)


@given(SIZES.flatmap(lambda n: st.tuples(points(n), points(n))))
def test_a_divergence_is_not_negative_and_zero_for_the_same(both: tuple[Tensor, Tensor]) -> None:
    weights, others = (point.tolist() for point in both)
    assert projection.kl(weights, weights) <= 1e-14
    assert projection.kl(weights, others) >= 0


@given(
    st.dictionaries(st.text("abc", min_size=1), reals(-1e3, 1e3), min_size=1),
    st.sampled_from(["low", "high"]),
    st.integers(1, 9),
)
def test_a_selection_takes_the_extremes(scores: dict[str, float], side: str, count: int) -> None:
    columns = dict.fromkeys(scores, 3)
    if count > len(scores):
        with pytest.raises(ValueError, match="the model has"):
            cancellation.select(scores, f"{side}{count}", columns=columns)
        return
    chosen = cancellation.select(scores, f"{side}{count}", columns=columns)
    inside = [scores[name] for name in chosen.names]
    rest = [score for name, score in scores.items() if name not in chosen.names]
    assert len(inside) == count
    if rest:
        assert max(inside) <= min(rest) if side == "low" else min(inside) >= max(rest)
    assert chosen.share == pytest.approx(count / len(scores))


@given(st.text(max_size=8))
def test_a_strategy_is_read_back_or_refused(strategy: str) -> None:
    parsed, message = attempt(lambda: cancellation.parse_strategy(strategy))
    if parsed is None:
        assert "lowN or highN" in message
    else:
        assert f"{parsed[0]}{parsed[1]}" == strategy


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
