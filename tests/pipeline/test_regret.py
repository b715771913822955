"""How far from the best mixture: the swarm, its regression, and who is judged by it."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from doge_fast import cli
from doge_fast.pipeline import records, stage, swarm
from doge_fast.pipeline.config import ExperimentConfig
from doge_fast.pipeline.experiments.runner import run_experiment
from doge_fast.pipeline.reporting import regret
from doge_fast.pipeline.reporting.study import open_study
from doge_fast.pipeline.swarm import LINEAR, MIXING, Swarm

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

Make = Callable[..., ExperimentConfig]
Matrix = np.ndarray
NAMES = tuple("abcde")
# Of a domain for another: each helps itself most, and a helps all.
HELP = 0.1 * np.eye(5) + 0.01 + 0.04 * (np.arange(5) == 0)


def swarm_of(
    loss: Callable[[Matrix], Matrix], count: int = 30, noise: float = 0.0, shift: float = 0.3
) -> Swarm:
    """Runs at drawn mixtures, of three seeds that differ by more than mixtures do."""
    draw = np.random.default_rng(3)
    weights = 0.98 * draw.dirichlet(np.full(5, 3.0), size=count) + 0.02 / 5
    seeds = np.arange(count) % 3
    losses = loss(weights) + shift * seeds[:, None]
    losses = losses + noise * draw.standard_normal(losses.shape)
    rows = (tuple(map(tuple, array.tolist())) for array in (weights, losses))
    return Swarm(NAMES, *rows, seeds=tuple(seeds.tolist()))


def log_loss(weights: Matrix) -> Matrix:
    return 4 - np.log(weights + 0.1 / 5) @ HELP.T


def mixing_loss(weights: Matrix) -> Matrix:
    return 3 + np.exp(1 - 40 * weights @ HELP.T)


def test_the_regression_finds_the_best_of_a_law_that_it_knows() -> None:
    found = swarm.fitted(swarm_of(log_loss))
    assert found.law == LINEAR
    assert found.errors[LINEAR].average < 0.02 * found.spread.average
    # The minimum of -sum_j b_j log(w_j + f), b the column sums of HELP, lies at w_j + f ~ b_j.
    column = HELP.sum(0)
    best = (1 + 0.1) * column / column.sum() - 0.1 / 5
    assert np.abs(found.best_K - best).max() < 0.03
    exact = log_loss(np.stack([np.full(5, 0.2), best])).mean(1)
    told = found.loss(np.stack([np.full(5, 0.2), best]))
    assert told[0] - told[1] == pytest.approx(exact[0] - exact[1], rel=0.1)


def test_the_law_that_predicts_runs_left_out_is_kept() -> None:
    found = swarm.fitted(swarm_of(mixing_loss, shift=0.0))
    assert found.law == MIXING
    assert found.errors[MIXING].average < found.errors[LINEAR].average


def test_noise_is_told_as_error_and_as_width() -> None:
    calm, noisy = (swarm.fitted(swarm_of(log_loss, noise=noise)) for noise in (0.001, 0.05))
    assert calm.errors[LINEAR].domain < 0.01 < noisy.errors[LINEAR].domain < 0.1
    widths = [np.ptp(found.best_BK, axis=0).mean() for found in (calm, noisy)]
    assert widths[0] < widths[1]
    assert np.allclose(noisy.best_BK.sum(1), 1)
    # Nothing is said of mixtures beyond those that were tried.
    tried = np.array(noisy.swarm.weights)
    assert (noisy.best_BK >= tried.min(0) - 1e-12).all()
    assert (noisy.best_BK <= tried.max(0) + 1e-12).all()


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 8 runs and more, with finite losses; got 7"):
        swarm.fitted(swarm_of(log_loss, count=7))


def test_every_method_is_judged_by_the_swarm(
    experiment: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(swarm, "_BOOTSTRAPS", 20)
    config = experiment("regret", doremi={"steps": (2,)}, proxy={"steps": 2}, base={"steps": 2})
    assert config.out is not None
    table, _ = run_experiment(config)
    assert "Regret: distance from the best" in table
    study = open_study([config.out])
    (group, *_) = study.groups
    found = regret.regrets_of(study, group)
    assert found.regression is not None
    assert len(found.regression.swarm.losses) == len(group["swarm"]) == 8 + 4
    labels = [arm["label"] for arm in found.arms]
    assert labels == ["uniform", "natural", "DoGE", "DoReMi, 2 steps", "regression"]
    # The best has no regret, and the others are set against it; a seed has no interval.
    measured = {arm["label"]: found.measured(arm) for arm in found.arms}
    assert min(each.mean for each in measured.values()) == 0
    losses = {
        name: np.mean(list(records.read_evaluation(run)["loss"].values()))
        for name, run in (
            (arm["label"], config.out / "runs" / arm["runs"][0]) for arm in group["arms"]
        )
    }
    for label, difference in measured.items():
        assert difference.mean == pytest.approx(losses[label] - min(losses.values()))
    # The base models at the best mixture were trained at what the regression finds.
    best = study.weights(group["arms"][-1])
    expected = dict(zip(found.regression.swarm.names, found.regression.best_K, strict=True))
    assert {name: stat.mean for name, stat in best.items()} == pytest.approx(expected)
    assert found.predicted(group["arms"][-1]).mean == pytest.approx(0, abs=1e-9)
    # What was spent: a proxy, a reference and its proxy, the swarm and what it was drawn around.
    block, steps, batch = config.corpus.block_size, 2, config.base.batch_size
    proxy, reference = 4 * steps * block, steps * batch * block
    spent = [0, 0, proxy, 2 * reference, 12 * reference + proxy + 2 * reference]
    assert [found.tokens(arm) for arm in group["arms"]] == spent

    # Other weights are judged without a step of training.
    given = tmp_path / "given.json"
    uniform = [{"name": name, "weight": 0.25} for name in found.regression.swarm.names]
    records.write_weights(given, {"method": "given", "domains": uniform})
    monkeypatch.setattr(stage, "train", None)
    capsys.readouterr()
    words = ["report", "--runs", str(config.out), "--weights"]
    assert cli.main([*words, f"even={given}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    uniform_line, even_line = (
        next(line for line in lines if line.startswith(name)) for name in ("uniform ", "even ")
    )
    predicted = re.compile(r"[+-]\d+\.\d % \[.*?\]")
    assert predicted.findall(uniform_line)[0] == predicted.findall(even_line)[0]
    assert cli.main([*words, "even"]) == 2
    assert "weights must be NAME=FILE" in capsys.readouterr().err
    assert run_experiment(config)[0] == table


def test_given_weights_are_arms_of_a_plan(experiment: Make, tmp_path: Path) -> None:
    file = tmp_path / "given.json"
    entries = [{"name": name, "weight": 0.25} for name in ("code", "prose", "table", "verse")]
    records.write_weights(file, {"method": "given", "domains": entries})
    config = experiment("regret", weights=(f"mine={file}",))
    lines = "\n".join(run_experiment(replace(config, plan=True)))
    assert "--only base-given-mine-seed0" in lines
    record = json.loads(file.read_text(encoding="utf-8"))
    records.write_weights(file, record | {"domains": [{"name": "code", "weight": 1.0}]})
    with pytest.raises(ValueError, match="it has no weight for"):
        run_experiment(config)
    assert config.out is not None
    assert not config.out.exists()
