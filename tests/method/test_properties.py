"""Laws of the method's public functions, for whatever numbers and names hypothesis draws."""

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from doge_fast import reference
from doge_fast.weights import scores, weights_file
from doge_fast.weights.objective import UNIVERSAL, Objective
from tests.laws import assert_simplex
from tests.properties import gradients, json_values, points, reals, vectors

EPS = torch.finfo(torch.float64).eps
SIZES = st.integers(1, 8)


@given(SIZES.flatmap(lambda n: st.tuples(points(n), vectors(n))), reals(0, 10), reals(1e-6, 1e6))
def test_a_mirror_step_is_a_softmax_of_what_the_paper_writes(both, lr, mu):
    alpha_K, gain_K = both
    moved_K = scores.mirror_step(alpha_K, gain_K, lr=lr, mu=mu)
    assert_simplex(moved_K, ulps=4 * len(alpha_K))
    assert (moved_K[alpha_K == 0] == 0).all()
    slack = 16 * EPS * (1 + lr / mu * (1 + gain_K.abs().max().item()))
    # All gains more by one number: nothing else. All gains equal, or a rate of zero: nothing moves.
    shifted_K = scores.mirror_step(alpha_K, gain_K + 1.0, lr=lr, mu=mu)
    torch.testing.assert_close(shifted_K, moved_K, rtol=slack, atol=slack)
    for still_K, rate in ((torch.ones_like(gain_K), lr), (gain_K, 0.0)):
        same_K = scores.mirror_step(alpha_K, still_K, lr=rate, mu=mu)
        torch.testing.assert_close(same_K, alpha_K, rtol=slack, atol=slack)
    gain_K[0] += 1.0
    assert scores.mirror_step(alpha_K, gain_K, lr=lr, mu=mu)[0] >= moved_K[0] - slack
    if lr / mu * gain_K.abs().max() < 300:
        moved_K = scores.mirror_step(alpha_K, gain_K, lr=lr, mu=mu)
        theirs_K = reference.mirror_step(alpha_K, gain_K, lr, mu)
        torch.testing.assert_close(moved_K, theirs_K, rtol=slack, atol=slack)


@given(points(SIZES), reals(0.0, 0.999))
def test_smoothing_keeps_a_floor(alpha_K, smoothing):
    smooth_K = scores.smooth(alpha_K, smoothing)
    assert_simplex(smooth_K, ulps=4 * len(alpha_K))
    assert (smooth_K >= smoothing / len(alpha_K) * (1 - 4 * EPS)).all()
    torch.testing.assert_close(smooth_K, reference.smooth(alpha_K, smoothing))


@given(gradients(), st.data())
def test_gains_are_the_reference_and_a_difficulty_is_ones_own(grads_RN, data):
    num_rows = len(grads_RN)
    num_domains = data.draw(st.integers(1, num_rows))
    tau_R = data.draw(vectors(num_rows, 0.0, 5.0))
    gram_RR = reference.gram(grads_RN)
    gain_K = scores.gain(gram_RR, tau_R, num_domains)
    difficulty_K = scores.difficulty(gram_RR, tau_R, num_domains)
    bound = gram_RR.abs().max().item() * tau_R.sum().item() * num_rows * EPS * 4
    theirs_K = reference.gain(gram_RR, tau_R, num_domains)
    torch.testing.assert_close(gain_K, theirs_K, rtol=1e-12, atol=bound)
    own_K = (tau_R * grads_RN.square().sum(1))[:num_domains]
    torch.testing.assert_close(difficulty_K, own_K, rtol=1e-12, atol=bound)


@given(vectors(SIZES, 0.0, 1e6), st.just(math.inf) | reals(1e-6, 1e6))
def test_no_row_is_longer_than_the_clip(norms_R, most):
    factors_R = scores.clip_factors(norms_R, most)
    theirs_R = reference.clip_factors(norms_R, None if most == math.inf else most)
    assert torch.equal(factors_R, theirs_R)
    assert ((factors_R > 0) & (factors_R <= 1)).all()
    assert (factors_R * norms_R <= most).all()


@given(json_values, json_values)
def test_an_objective_has_distinct_names_and_a_target(domains, target):
    for arguments in ((domains, UNIVERSAL), (["a", "b"], target)):
        try:
            objective = Objective.of(*arguments)
        except (TypeError, ValueError):
            continue
        assert all(tau >= 0 for tau in objective.tau)
        assert sum(objective.tau) > 0
        assert all(isinstance(name, str) and name for name in objective.names)
        assert len(set(objective.names)) == len(objective.names)


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4))
def test_a_weights_file_is_what_was_recorded(tmp_path_factory, record):
    path: Path = tmp_path_factory.mktemp("weights") / "weights.json"
    weights_file.write(path, record)
    written = json.loads(path.read_text("utf-8"))
    assert written.pop("sha256") == weights_file.digest_of(written)
    assert written == {
        "schema_version": weights_file.SCHEMA_VERSION,
        **weights_file.plain({k: v for k, v in record.items() if k != "sha256"}),
    }
