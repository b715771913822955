"""`benchmarks.scores`: its plain loop is the library's, and its scores are what they are called."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scores import VARIANTS, Score, learn, main
from doge_fast.pipeline import records
from doge_fast.pipeline.config import ProxyConfig
from doge_fast.pipeline.proxy import learn_weights
from doge_fast.weights.objective import Objective


@pytest.mark.parametrize(
    "target",
    [
        ("universal",),
        pytest.param(("verse",), marks=pytest.mark.exhaustive),
        pytest.param(("verse=0.5", "code=2"), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("variant", "score"), [("paper", "paper"), ("common, unbiased", "unbiased")]
)
def test_the_loop_learns_what_the_library_does(
    proxy: Callable[..., ProxyConfig], variant: str, score: str, target: tuple[str, ...]
) -> None:
    config = proxy(mu=0.01, score=score, target=target, domains=("code", "prose", "table"))
    found = records.weights_by_name(records.read_weights(learn_weights(config).path))
    assert max(found.values()) - min(found.values()) > 1e-3
    # Both compute in float32, in another order.
    assert learn(config, VARIANTS[variant])["weights"] == pytest.approx(found, abs=1e-5)


ALL = Objective.of(["a", "b", "c"])


def halves(seed: int = 0) -> np.ndarray:
    """[2 R, N]: gradients of the two halves of three rows' batches, of norms far from one."""
    return np.random.default_rng(seed).normal(size=(6, 20)) * np.repeat([1.0, 3.0, 9.0], 2)[:, None]


@pytest.mark.parametrize("name", ["paper", "unbiased", "influence"])
def test_scores_of_rows_that_are_cut(name: str) -> None:
    halves_HN = halves()
    rows_KN = halves_HN.reshape(3, 2, 20).mean(1)
    factors_K = np.minimum(1, 1 / np.linalg.norm(rows_KN, axis=1))
    gram_KK = (factors_K[:, None] * rows_KN) @ (factors_K[:, None] * rows_KN).T
    own_K = {
        "paper": gram_KK.diagonal(),
        "unbiased": factors_K**2 * (halves_HN[0::2] * halves_HN[1::2]).sum(1),
        "influence": np.zeros(3),
    }[name]
    gain_K, difficulty_K, cut_K = Score(VARIANTS[name], 1.0, ALL).of(halves_HN @ halves_HN.T)
    np.testing.assert_allclose(cut_K, factors_K, rtol=1e-5)
    np.testing.assert_allclose(difficulty_K, own_K, rtol=1e-5)
    np.testing.assert_allclose(gain_K, gram_KK.sum(1) - gram_KK.diagonal() + own_K, rtol=1e-5)


def test_one_scale_keeps_norms_apart_and_cuts_spikes() -> None:
    score = Score(VARIANTS["common"], 1.0, ALL)
    halves_HN = halves()
    _, difficulty_K, cut_K = score.of(halves_HN @ halves_HN.T)
    norms_K = np.linalg.norm(halves_HN.reshape(3, 2, 20).mean(1), axis=1)
    np.testing.assert_allclose(cut_K, 1.0)
    np.testing.assert_allclose(difficulty_K, (norms_K / norms_K.mean()) ** 2, rtol=1e-6)
    spiked_HN = halves_HN * np.repeat([10.0, 1.0, 1.0], 2)[:, None]
    _, _, cut_K = score.of(spiked_HN @ spiked_HN.T)
    # To twice the running norm.
    np.testing.assert_allclose(cut_K, [0.2, 1.0, 1.0], rtol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_towards_a_measured_row_scores_differ_by_their_scale_alone(name: str) -> None:
    halves_HN = halves()
    rows_KN = halves_HN.reshape(3, 2, 20).mean(1)
    norms_K = np.linalg.norm(rows_KN, axis=1)
    variant = VARIANTS[name]
    if variant.is_common:
        # That of the training domains.
        cut_K, scale = np.ones(3), norms_K[:2].mean()
    else:
        cut_K, scale = np.minimum(1, 1 / norms_K), 1.0
    cut_KN = cut_K[:, None] * rows_KN / scale
    towards = Objective.of(["a", "b"], {"c": 0.5})
    gain_K, difficulty_K, found_K = Score(variant, 1.0, towards).of(halves_HN @ halves_HN.T)
    np.testing.assert_allclose(gain_K, 0.5 * cut_KN[:2] @ cut_KN[2], rtol=1e-5)
    assert not difficulty_K.any()
    np.testing.assert_allclose(found_K, cut_K[:2], rtol=1e-5)


def test_a_running_mean_is_of_the_steps_so_far() -> None:
    score = Score(VARIANTS["averaged"], np.inf, ALL)
    grams = [each @ each.T for each in (halves(0), halves(1))]
    alone = [Score(VARIANTS["paper"], np.inf, ALL).of(gram)[0] for gram in grams]
    assert np.array_equal(score.of(grams[0])[0], alone[0])
    np.testing.assert_allclose(score.of(grams[1])[0], np.mean(alone, axis=0), rtol=1e-12)


def test_several_proxies_are_learned_once_and_shown(
    proxy: Callable[..., ProxyConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        learn_weights(proxy(f"proxy-{name}-seed0", steps=4, mu=0.01, target=(name,))).path
        for name in ("universal", "verse")
    ]
    out = tmp_path / "scores.json"
    options = ["--out", str(out), "--seeds", "0", "1", "--only", "paper"]
    assert main(["learn", str(runs[0]), *options]) == 0
    capsys.readouterr()
    assert main(["learn", *map(str, runs), *options]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in printed] == [
        f"proxy-verse, paper, seed {seed}" for seed in (0, 1)
    ]
    assert main(["weights", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("Weights of")] == [
        "Weights of proxy-universal",
        "Weights of proxy-verse",
    ]
    assert [line.split() for line in lines if line.startswith("seeds")] == 2 * [["seeds", "2"]]
