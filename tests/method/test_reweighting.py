"""The K x K algebra: W and its parts, clipping, norms, scores, carried scores."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from doge_fast import reference
from doge_fast.optimizer import DoGEOptimizer
from doge_fast.weights import scores as generalization
from doge_fast.weights import state as reweighting
from doge_fast.weights.objective import Objective
from doge_fast.weights.scores import PAPER, PUBLISHED, Score
from doge_fast.weights.state import DomainWeights, UpdateRule


def rows(num_rows: int = 5, columns: int = 40, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, columns, generator=generator, dtype=torch.float64)


TAU = torch.tensor([1.0, 0.0, 2.0, 0.5, 3.0], dtype=torch.float64)


def test_gain_is_the_inner_product_with_the_target_gradient() -> None:
    grads_RN = rows()
    direct_K = grads_RN[:3] @ (TAU @ grads_RN)
    ours_K = generalization.gain(grads_RN @ grads_RN.T, TAU, 3)
    torch.testing.assert_close(ours_K, direct_K, rtol=1e-13, atol=1e-13)


def test_influence_and_difficulty_add_up_to_the_gain() -> None:
    grads_RN = rows()
    gram_RR = grads_RN @ grads_RN.T
    difficulty_K = generalization.difficulty(gram_RR, TAU, 3)
    direct_K = (grads_RN[:3] ** 2).sum(1) * TAU[:3]
    torch.testing.assert_close(difficulty_K, direct_K, rtol=1e-13, atol=0)
    influence_K = torch.stack(
        [sum(TAU[r] * grads_RN[j] @ grads_RN[r] for r in range(5) if r != j) for j in range(3)]
    )
    ours_K = generalization.gain(gram_RR, TAU, 3) - difficulty_K
    torch.testing.assert_close(ours_K, influence_K, rtol=1e-12, atol=1e-12)


def test_gain_is_the_loss_decrease_of_a_step() -> None:
    """The estimate's meaning: minus the derivative of the objective along domain j's step."""
    theta = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    centers_RN = rows()
    grads_RN = theta - centers_RN

    def objective(point: Tensor) -> Tensor:
        return (TAU * 0.5 * (point - centers_RN).square().sum(1)).sum()

    gain_K = generalization.gain(grads_RN @ grads_RN.T, TAU, 3)
    lr = 1e-6
    for j in range(3):
        decrease = (objective(theta) - objective(theta - lr * grads_RN[j])) / lr
        # Second order: lr / 2 * ||g_j||^2 * sum tau.
        assert abs(decrease - gain_K[j]) < lr * grads_RN[j].square().sum() * TAU.sum()


def test_clip_factors_make_the_gram_matrix_of_clipped_rows() -> None:
    grads_RN = rows()
    gram_RR = grads_RN @ grads_RN.T
    norms_R = gram_RR.diagonal().sqrt()
    factors_R = generalization.clip_factors(norms_R, 6.0)
    assert 0 < (factors_R < 1).sum() < 5
    clipped_RN = torch.stack([row.clone() for row in grads_RN])
    for row in clipped_RN:
        param = torch.zeros_like(row, requires_grad=True)
        param.grad = row
        torch.nn.utils.clip_grad_norm_([param], 6.0)
    ours = factors_R[:, None] * gram_RR * factors_R
    torch.testing.assert_close(ours, clipped_RN @ clipped_RN.T, rtol=1e-12, atol=1e-12)


def test_combined_norm_is_known_before_the_sum() -> None:
    grads_RN = rows()
    coefficients_R = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0], dtype=torch.float64)
    norm = generalization.combined_norm(grads_RN @ grads_RN.T, coefficients_R)
    torch.testing.assert_close(norm, (coefficients_R @ grads_RN).norm(), rtol=1e-13, atol=0)


def test_cosine_has_ones_on_the_diagonal_and_zeros_for_zero_rows() -> None:
    grads_RN = rows()
    grads_RN[1] = 0
    cosine_RR = generalization.cosine(grads_RN @ grads_RN.T)
    assert cosine_RR.isfinite().all()
    assert (cosine_RR[1] == 0).all()
    expected = torch.nn.functional.cosine_similarity(grads_RN[0], grads_RN[2], dim=0)
    torch.testing.assert_close(cosine_RR[0, 2], expected)


def scored(gain_K: Tensor, norms_K: Tensor, present_K: Tensor, score: Score) -> Tensor:
    low, high = score.bounds or (-math.inf, math.inf)
    parts = {"scale_by_mean_norm": score.scale_by_mean_norm, "low": low, "high": high}
    as_tensors = {name: torch.tensor(part, dtype=torch.float64) for name, part in parts.items()}
    return generalization.scored(gain_K, norms_K, present_K, **as_tensors)


def test_scores_of_both_texts() -> None:
    gain_K = torch.tensor([-1.0, 2.0, 400.0], dtype=torch.float64)
    norms_K = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    present_K = torch.ones(3, dtype=torch.bool)
    assert torch.equal(scored(gain_K, norms_K, present_K, PAPER), gain_K)
    published = scored(gain_K, norms_K, present_K, PUBLISHED)
    expected = torch.tensor([0.0, 2 / (2 + 1e-6), 5.0], dtype=torch.float64)
    torch.testing.assert_close(published, expected, rtol=1e-15, atol=0)
    for absent, mean_norm in ((2, 1.5), (0, 2.0), (1, 0.0)):
        present_K[absent] = False
        scaled = scored(gain_K, norms_K, present_K, Score(scale_by_mean_norm=True))
        torch.testing.assert_close(scaled, gain_K / (mean_norm + 1e-6), rtol=1e-15, atol=0)


def test_published_score_is_linear_in_the_scale_of_the_gradients() -> None:
    grads_RN = rows() * 1e3
    for score, power in ((Score(), 2), (Score(scale_by_mean_norm=True), 1)):
        scores = []
        for scale in (1.0, 10.0):
            gram_RR = scale**2 * grads_RN @ grads_RN.T
            norms_K = gram_RR.diagonal()[:3].sqrt()
            gain_K = generalization.gain(gram_RR, TAU, 3)
            scores.append(scored(gain_K, norms_K, torch.ones(3).bool(), score))
        torch.testing.assert_close(scores[1], 10**power * scores[0], rtol=1e-9, atol=0)


@pytest.mark.parametrize("bounds", [(5.0, 0.0), (1.0, 1.0), (math.nan, 1.0)])
def test_bounds_need_room(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="bounds must be low < high; got"):
        Score(bounds=bounds)


def test_scores_are_named_or_say_their_parts() -> None:
    assert (PAPER.name, PUBLISHED.name) == ("paper", "published")
    other = Score(bounds=(0.0, 1.0))
    assert other.name == repr(other)
    assert "bounds=(0.0, 1.0)" in other.name
    assert generalization.score_of(other) is other
    assert generalization.score_of("published") is PUBLISHED
    for wrong in ("best", None):
        with pytest.raises(ValueError, match=f"a Score; got {wrong!r}"):
            generalization.score_of(wrong)  # type: ignore[arg-type]


def test_without_a_cut_nothing_is_cut() -> None:
    norms_R = torch.tensor([0.0, 1.0, 1e30], dtype=torch.float64)
    assert torch.equal(generalization.clip_factors(norms_R, None), torch.ones_like(norms_R))


def test_norms_and_cosines_of_small_gradients() -> None:
    """As of any others: nothing is cut at one."""
    grads_RN = 1e-3 * rows() / rows().norm()
    gram_RR = grads_RN @ grads_RN.T
    coefficients_R = torch.full((5,), 0.2, dtype=torch.float64)
    norm = generalization.combined_norm(gram_RR, coefficients_R)
    torch.testing.assert_close(norm, (coefficients_R @ grads_RN).norm(), rtol=1e-12, atol=0)
    unit_RN = grads_RN / grads_RN.norm(dim=1, keepdim=True)
    cosine_RR = generalization.cosine(gram_RR)
    torch.testing.assert_close(cosine_RR, unit_RN @ unit_RN.T, rtol=1e-12, atol=1e-15)
    # Rounding may make the square of a sum that cancels negative.
    assert generalization.combined_norm(-gram_RR, coefficients_R) == 0
    assert (generalization.cosine(-gram_RR) == 0).all()


def test_a_mean_norm_of_nobody_is_no_division_by_zero() -> None:
    gain_K, norms_K = torch.ones(2).double(), torch.full((2,), 7.0).double()
    scored_K = scored(gain_K, norms_K, torch.zeros(2).bool(), Score(scale_by_mean_norm=True))
    torch.testing.assert_close(scored_K, gain_K / 1e-6, rtol=1e-12, atol=0)


def test_only_nonzero_norms_count_as_directions() -> None:
    """A row of zeros has no direction: cosine 0, also with itself."""
    gram_RR = torch.diag(torch.tensor([0.0, 4.0], dtype=torch.float64))
    gram_RR[0, 1] = gram_RR[1, 0] = 3.0
    assert generalization.cosine(gram_RR).tolist() == [[0.0, 0.0], [0.0, 1.0]]


def test_objective_orders_rows_and_names_the_target() -> None:
    objective = Objective.of(["a", "b"], {"x": 0.7, "b": 2.0, "y": 0.0})
    assert objective.rows == ("a", "b", "x", "y")
    assert objective.tau == (0.0, 2.0, 0.7, 0.0)
    assert objective.measured == ("x", "y")
    assert objective.target == {"b": 2.0, "x": 0.7}
    assert Objective.of(["a", "b"]).target == "universal"
    assert Objective.of(["a", "b"]).tau == (1.0, 1.0)
    assert Objective.of(["a", "worst"], "worst").tau == (0.0, 1.0)
    assert Objective.of(["a", "b"], "b").tau == (0.0, 1.0)
    assert Objective.of(["a", "b"], ("x", "a")).tau == (1.0, 0.0, 1.0)
    assert Objective.of(["a", "b"], "x").tau == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    "rule",
    [
        UpdateRule(0.5, PAPER, None, None, 0.0),
        UpdateRule(0.5, PUBLISHED, 5.0, 0.5, 0.1),
        UpdateRule(0.5, Score(bounds=(-2.0, 2.0)), 1.0, None, 0.0),
    ],
    ids=["paper", "published", "bounded"],
)
@pytest.mark.parametrize(
    "initial", [None, {"c": 0.7, "a": 0.3, "b": 0.0}], ids=["uniform", "given"]
)
def test_weights_move_as_the_reference_over_steps(
    rule: UpdateRule, initial: dict[str, float] | None
) -> None:
    objective = Objective.of(["a", "b", "c"], {"a": 1.0, "c": 2.0, "x": 0.5, "y": 3.0})
    weights = DomainWeights(objective, rule, torch.device("cpu"), initial)
    start = [1 / 3] * 3 if initial is None else [0.3, 0.0, 0.7]
    alpha_K = torch.tensor(start, dtype=torch.float64)
    assert weights.read("alpha").tolist() == weights.read("alpha_mean").tolist() == start
    alphas = []
    for step in range(5):
        grads_RN = rows(seed=step)
        gram_RR = 16.0 * grads_RN @ grads_RN.T
        lr = 0.01 * (step + 1)
        new = weights.move(gram_RR, full_RR=gram_RR, seen=objective.rows, lr=lr, grad_scale=4.0)
        alpha_K, gradient_N, gain_K = reference.step(
            grads_RN,
            alpha_K,
            tau_R=TAU,
            lr=lr,
            mu=rule.mu,
            scale_by_mean_norm=rule.score.scale_by_mean_norm,
            bounds=rule.score.bounds,
            domain_max_grad_norm=rule.domain_max_grad_norm,
            max_grad_norm=rule.max_grad_norm,
            smoothing=rule.smoothing,
        )
        alphas.append(alpha_K)
        torch.testing.assert_close(new.alpha, alpha_K, rtol=1e-11, atol=0)
        torch.testing.assert_close(new.gain, gain_K, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(new.coefficients @ grads_RN, gradient_N, rtol=1e-11, atol=1e-12)
        assert (new.coefficients[3:] == 0).all()
    torch.testing.assert_close(weights.read("alpha_mean"), torch.stack(alphas).mean(0))
    assert weights.state()["num_steps"] == 5


@pytest.mark.parametrize(
    ("initial", "message"),
    [
        ({"a": 0.5, "b": 0.5}, r"for each of \['a', 'b', 'c'\] and no other; it lacks \['c'\]"),
        ({"a": 0.5, "b": 0.3, "c": 0.2, "d": 0.0}, r"lacks \[\] and has \['d'\] besides"),
        ({"a": 0.5, "b": 0.3, "c": 0.1}, "sum to 1 .* got .*'c': 0.1}. Divide each by the sum"),
        ({"a": 1.5, "b": -0.5, "c": 0.0}, "weights >= 0; 'b' has -0.5"),
        ({"a": 0.5, "b": "0.5", "c": 0.0}, "weights >= 0; 'b' has '0.5'"),
        ([0.2, 0.3, 0.5], r"a dict {domain: weight} of \['a', 'b', 'c'\]; got \[0.2, 0.3, 0.5\]"),
        ({"a": math.nan, "b": 0.5, "c": 0.5}, "weights >= 0 that sum to 1"),
        ({"a": math.inf, "b": 0.0, "c": 0.0}, "weights >= 0 that sum to 1"),
    ],
)
def test_a_start_is_on_the_simplex_of_these_domains(initial: Any, message: str) -> None:
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        DoGEOptimizer(torch.optim.SGD([weight], lr=0.1), domains=["a", "b", "c"], initial=initial)


def test_a_printed_start_is_made_to_sum_to_one() -> None:
    """And a checkpoint of it is read, before any step and after one."""
    initial = {"a": 0.333333, "b": 0.333333, "c": 0.333333}
    weight = torch.ones(2, requires_grad=True)

    def fresh(start: dict[str, float] | None) -> DoGEOptimizer:
        inner = torch.optim.SGD([weight], lr=0.1)
        return DoGEOptimizer(inner, domains=["a", "b", "c"], initial=start)

    optimizer = fresh(initial)
    assert optimizer.weights == pytest.approx(dict.fromkeys(initial, 1 / 3), rel=1e-15)
    optimizer = fresh({"a": 0.0, "b": 0.25, "c": 0.75})
    for has_stepped in (False, True):
        if has_stepped:
            for scale, name in enumerate(optimizer.domains, start=1):
                with optimizer.domain(name):
                    (scale * weight).sum().backward()
            optimizer.step()
        other = fresh(None)
        other.load_state_dict(optimizer.state_dict())
        assert torch.equal(other.alpha, optimizer.alpha)
        assert optimizer.alpha[0] == 0
        other.release()


def test_rates_may_live_on_the_device() -> None:
    """A tensor is looked at when the step runs, a number when it is called."""
    objective = Objective.of(["a", "b", "c"], {"a": 1.0, "x": 1.0, "y": 1.0})
    rule = UpdateRule(0.5, PAPER, None, None, 0.0)
    gram_RR = rows() @ rows().T
    moved = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        weights = DomainWeights(objective, rule, torch.device("cpu"))
        for _ in range(2):
            new = weights.move(gram_RR, full_RR=gram_RR, seen=objective.rows, lr=lr, grad_scale=1.0)
        moved.append(new.alpha)
    assert torch.equal(*moved)
    # What a number said before the tensor is not taken for known after it.
    for rate in (0.02, torch.tensor(0.5, dtype=torch.float64), 0.02):
        new = weights.move(gram_RR, full_RR=gram_RR, seen=objective.rows, lr=rate, grad_scale=1.0)
    other = DomainWeights(objective, rule, torch.device("cpu"))
    for rate in (0.01, 0.01, 0.02, 0.5, 0.02):
        expected = other.move(gram_RR, full_RR=gram_RR, seen="abcxy", lr=rate, grad_scale=1.0)
    assert torch.equal(new.alpha, expected.alpha)
    # Nor is one that is changed in its place, as schedulers do.
    inside = DomainWeights(objective, rule, torch.device("cpu"))
    changing = torch.tensor(0.0, dtype=torch.float64)
    for rate in (0.01, 0.01, 0.02, 0.5, 0.02):
        changing.fill_(rate)
        new = inside.move(gram_RR, full_RR=gram_RR, seen="abcxy", lr=changing, grad_scale=1.0)
    assert torch.equal(new.alpha, expected.alpha)
    # Not below zero: nobody looks.
    minus = torch.tensor(-1.0, dtype=torch.float64)
    weights.move(gram_RR, full_RR=gram_RR, seen=objective.rows, lr=minus, grad_scale=1.0)


def test_settings_that_stay_are_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be a kernel of its own on a GPU."""
    weights = DomainWeights.of(["a", "b"], mu=1.0)
    gram_RR = rows(2) @ rows(2).T
    weights.move(gram_RR, full_RR=gram_RR, seen="ab", lr=0.1, grad_scale=1.0)
    written: list[float] = []
    fill = Tensor.fill_
    monkeypatch.setattr(Tensor, "fill_", lambda t, v: written.append(v) or fill(t, v))
    for lr in (0.1, 0.1, 0.2, 0.2):
        weights.move(gram_RR, full_RR=gram_RR, seen="ab", lr=lr, grad_scale=1.0)
    assert written == [0.2]


def test_settings_move_to_where_the_gradients_are() -> None:
    """As far as a device without values shows it."""
    written = reweighting._Written(2, torch.float64)
    first = written.of([1.0, 2.0], torch.device("cpu"))
    there = written.of([1.0, 2.0], torch.device("meta"))
    assert there.device.type == "meta"
    assert written.of([3.0, 2.0], torch.device("meta")) is there
    back = written.of([1.0, 2.0], torch.device("cpu"))
    assert back.tolist() == first.tolist() == [1.0, 2.0]


def test_weights_begin_where_they_are_wanted() -> None:
    assert DomainWeights.of(["a"], mu=1.0, device="meta").read("alpha").device.type == "meta"


def test_what_is_read_does_not_move() -> None:
    objective = Objective.of(["a", "b", "c"], {"a": 1.0, "x": 1.0, "y": 1.0})
    weights = DomainWeights(objective, UpdateRule(0.5, PAPER, None, None, 0.0), torch.device("cpu"))
    alpha_K, parts = weights.read("alpha"), weights.state()
    address = weights.shared_state.data_ptr()
    gram_RR = rows() @ rows().T
    weights.move(gram_RR, full_RR=gram_RR, seen=objective.rows, lr=0.01, grad_scale=1.0)
    assert weights.shared_state.data_ptr() == address
    assert alpha_K.tolist() == parts["alpha"].tolist() == [1 / 3] * 3
    assert weights.read("alpha")[0] != 1 / 3


def test_the_record_has_the_mean_and_the_last_weights() -> None:
    objective = Objective.of(["a", "b"], {"a": 2.0})
    weights = DomainWeights(objective, UpdateRule(0.5, PAPER, None, None, 0.0), torch.device("cpu"))
    for step in range(3):
        gram_RR = rows(2, seed=step) @ rows(2, seed=step).T
        weights.move(gram_RR, full_RR=gram_RR, seen=objective.rows, lr=0.01, grad_scale=1.0)
    record = weights.record()
    last, mean = weights.read("alpha").tolist(), weights.read("alpha_mean").tolist()
    assert last != mean
    assert record["domains"] == [
        {"name": name, "weight": w, "weight_last": last_w}
        for name, w, last_w in zip("ab", mean, last, strict=True)
    ]
    assert record == {
        "method": "doge",
        "score": "paper",
        "target": {"a": 2.0},
        "mu": 0.5,
        "domains": record["domains"],
        "steps": 3,
        "versions": {"torch": torch.__version__},
    }


@pytest.mark.parametrize(("error", "is_read"), [(9e-6, True), (1.1e-5, False)])
def test_a_start_sums_to_one_as_printed_numbers_do(error: float, is_read: bool) -> None:
    for sign in (1, -1):
        initial = {"a": 0.5, "b": 0.5 + sign * error}
        if is_read:
            weights = DomainWeights.of(["a", "b"], mu=1.0, initial=initial)
            assert weights.read("alpha").sum().item() == pytest.approx(1, abs=1e-15)
        else:
            with pytest.raises(ValueError, match=r"sum to 1 \(within 1e-05\)"):
                DomainWeights.of(["a", "b"], mu=1.0, initial=initial)


def test_no_rate_below_zero_moves_the_weights() -> None:
    weights = DomainWeights.of(["a", "b"], mu=1.0, domain_max_grad_norm=None)
    gram_RR = torch.eye(2, dtype=torch.float64)
    for lr in (-1e-9, math.nan):
        with pytest.raises(ValueError, match=f"must be >= 0; got {lr}"):
            weights.move(gram_RR, full_RR=gram_RR, seen="ab", lr=lr, grad_scale=1.0)
    weights.move(gram_RR, full_RR=gram_RR, seen="ab", lr=0, grad_scale=1.0)
    assert weights.read("alpha").tolist() == [0.5, 0.5]


def moved(alpha: list[float], **arguments: Any) -> DomainWeights:
    """Weights at `alpha` after four steps with a score."""
    names = [f"d{i}" for i in range(len(alpha))]
    weights = DomainWeights.of(names, **({"mu": 0.25} | arguments))
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


def test_collapsed_weights_warn_once_and_name_the_largest() -> None:
    weights = moved([0.001, 0.998, 0.001])
    said = (
        r"have collapsed: 1\.02 of 3 domains are in use after 4 steps, most of it 'd1'\. Pass a "
        r"larger mu \(it is 0\.25\), domain_max_grad_norm=1 where it is off, or smoothing=0\.1"
    )
    with pytest.warns(UserWarning, match=said):
        weights.warn_of_failure()
    assert_silent(weights)


@pytest.mark.parametrize(
    ("alpha", "arguments"),
    [
        # 1 + 0.1 (K - 1) domains in use are enough.
        ([0.05, 0.95], {}),
        # It was so from the beginning.
        ([0.001, 0.999], {"initial": {"d0": 0.001, "d1": 0.999}}),
        # One domain is asked for.
        ([0.001, 0.999], {"target": "d1"}),
        ([0.001, 0.999], {"target": {"d0": 1.0, "d1": 2.0}}),
        ([0.001, 0.999], {"target": ["d0", "d1", "far"]}),
    ],
)
def test_weights_that_are_meant_to_be_few_do_not_warn(
    alpha: list[float], arguments: dict[str, Any]
) -> None:
    assert_silent(moved(alpha, **arguments))


def test_weights_without_a_score_warn_once_there_were_steps() -> None:
    weights = DomainWeights.of(["a", "b"], mu=1.0, target={"a": 1.0, "far": 2.0})
    assert_silent(weights)
    weights.load(weights.state() | {"num_steps": torch.tensor(2.0)})
    said = r"learned nothing in 2 steps: every score is zero.* of the target \['far'\]"
    with pytest.warns(UserWarning, match=said):
        weights.warn_of_failure()
    assert_silent(weights)
    # A score, or a mean that is not the start, is something.
    for part in ({"gain": torch.tensor([0.0, 1e-9])}, {"alpha_mean": torch.tensor([0.6, 0.4])}):
        other = DomainWeights.of(["a", "b"], mu=1.0)
        other.load(other.state() | {"num_steps": torch.tensor(2.0)} | part)
        assert_silent(other)


def test_another_mu_holds_from_the_next_step_on() -> None:
    gram_RR = rows(2) @ rows(2).T
    moves = []
    for mu in (None, 2.0):
        weights = DomainWeights.of(["a", "b"], mu=1.0, domain_max_grad_norm=None)
        if mu is not None:
            weights.set_mu(mu)
            assert weights.rule == UpdateRule(mu, PAPER, None, None, 0.0)
        lr = 0.01 if mu is None else 0.01 * mu
        weights.move(gram_RR, full_RR=gram_RR, seen="ab", lr=lr, grad_scale=1.0)
        moves.append(weights.read("alpha"))
    torch.testing.assert_close(*moves, rtol=1e-12, atol=0)
    assert moves[0][0] != 0.5


def test_the_cut_of_the_combined_gradient_is_as_much_less_as_the_step_has_domains() -> None:
    gram_RR = torch.diag(torch.tensor([100.0, 100.0], dtype=torch.float64))
    cuts = []
    for share, most in ((1.0, 0.5), (0.5, 1.0)):
        weights = DomainWeights.of(["a", "b"], mu=1e9, max_grad_norm=most)
        step = weights.move(
            gram_RR, full_RR=gram_RR, seen="ab", lr=0.01, grad_scale=1.0, share=share
        )
        cuts.append(step.coefficients)
    assert torch.equal(*cuts)
    assert (cuts[0] < 0.05).all()


def test_what_ranks_must_share_is_named() -> None:
    weights = DomainWeights.of(["a", "b"], mu=1.0, target="b")
    settings = weights.settings(with_values=True)
    assert settings["the domains or the target"] == [("a", "b"), {"b": 1.0}]
    assert settings["the settings of DoGEOptimizer"] == repr(weights.rule)
    assert settings["the domain weights"] == weights.shared_state.tolist()
    assert weights.settings(with_values=False)["the domain weights"] is None


def test_absent_domains_carry_their_score() -> None:
    objective = Objective.of(["a", "b", "c"], {"a": 1.0, "c": 2.0, "x": 0.5, "y": 3.0})
    weights = DomainWeights(objective, UpdateRule(0.5, PAPER, None, None, 0.0), torch.device("cpu"))
    carried_K = torch.tensor([7.0, 8.0, 9.0], dtype=torch.float64)
    grads_RN = rows()
    grads_RN[1] = 0
    gram_RR = grads_RN @ grads_RN.T

    def gains(seen: str) -> Tensor:
        weights.load(weights.state() | {"gain": carried_K})
        return weights.move(gram_RR, full_RR=gram_RR, seen=seen, lr=0.01, grad_scale=1.0).gain

    partly = gains("acxy")
    assert partly[1] == 8
    torch.testing.assert_close(partly[::2], generalization.gain(gram_RR, TAU, 3)[::2])
    # The target's row y is absent, so every W lacks a term.
    assert gains("abcx").tolist() == [7.0, 8.0, 9.0]


def test_settings_are_checked_as_the_optimizer_checks_them() -> None:
    """Without a model: no hook, and the same weights, rule and default of mu."""
    options: dict[str, Any] = {
        "domains": ["a", "b"],
        "target": {"c": 2.0},
        "smoothing": 0.1,
        "initial": {"a": 0.25, "b": 0.75},
    }
    params = [torch.nn.Parameter(torch.zeros(2))]
    optimizer = DoGEOptimizer(torch.optim.SGD(params, lr=0.5), **options)
    weights = DomainWeights.of(lr=0.5, **options)
    assert weights.objective == optimizer.objective
    assert weights.rule == optimizer.rule
    assert torch.equal(weights.read("alpha"), optimizer.alpha)
    for wrong in ({"score": "best"}, {"mu": 0.0}, {"initial": {"a": 1.0}}, {"target": ()}):
        changed = options | wrong
        with pytest.raises(ValueError) as by_optimizer:  # noqa: PT011
            DoGEOptimizer(torch.optim.SGD(params, lr=0.5), **changed)
        with pytest.raises(ValueError) as alone:  # noqa: PT011
            DomainWeights.of(lr=0.5, **changed)
        assert str(alone.value) == str(by_optimizer.value)
