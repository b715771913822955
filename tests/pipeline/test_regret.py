"""How far from the best mixture: the swarm, its regression, and who is judged by it."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import evidence
from doge_fast import cli
from doge_fast.pipeline import records, stage, swarm
from doge_fast.pipeline.config import BaseConfig, EvaluateConfig, ExperimentConfig
from doge_fast.pipeline.config.fields import filled
from doge_fast.pipeline.evaluation import evaluate
from doge_fast.pipeline.experiments import runner
from doge_fast.pipeline.experiments.plans import plan_of
from doge_fast.pipeline.experiments.runner import run_experiment
from doge_fast.pipeline.report import terminal_table
from doge_fast.pipeline.reporting import regret
from doge_fast.pipeline.reporting.statistics import NO_PAIR, Arm, compared
from doge_fast.pipeline.reporting.study import open_study
from doge_fast.pipeline.swarm import LINEAR, MIXING, Error, Swarm

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

Make = Callable[..., ExperimentConfig]
Matrix = np.ndarray
NAMES = tuple("abcde")
# Of the small corpus.
DOMAINS = ("code", "prose", "table", "verse")
# Of a domain for another: each helps itself most, and a helps all.
HELP = 0.1 * np.eye(5) + 0.01 + 0.04 * (np.arange(5) == 0)


@pytest.fixture(autouse=True)
def few_refits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm, "_BOOTSTRAPS", 20)


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


def entries_of(weights: dict[str, float]) -> dict[str, Any]:
    entries = [{"name": name, "weight": weight} for name, weight in weights.items()]
    return {"method": "given", "domains": entries}


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


def test_runs_far_from_the_best_are_left_out() -> None:
    """A law that holds nearby is not bent by a mixture that nobody would take."""
    near = swarm_of(log_loss)
    far = replace(
        near,
        weights=(*near.weights, (0.96, 0.01, 0.01, 0.01, 0.01)),
        losses=(*near.losses, tuple(9.0 + place for place in range(5))),
        seeds=(*near.seeds, 0),
    )
    assert swarm.fitted(far).swarm == swarm.fitted(near).swarm == near
    wide = swarm_of(lambda weights: 10 * log_loss(weights))
    assert len(swarm.fitted(wide).swarm.losses) == 15


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 8 runs and more, with finite losses; got 7"):
        swarm.fitted(swarm_of(log_loss, count=7))


def test_every_method_is_judged_by_the_swarm(
    experiment: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = experiment("regret", doremi={"steps": (2,)}, proxy={"steps": 2}, base={"steps": 2})
    assert config.out is not None

    # The regression waits until its whole swarm is measured; trained is not enough.
    def fail_once(asked: EvaluateConfig) -> None:
        if asked.run.name == "base-drawn-6-seed0":
            raise ValueError("no measure of this one.")
        evaluate(asked)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "evaluate", fail_once)
        with pytest.raises(RuntimeError, match="2 of 16 runs are not complete") as failed:
            run_experiment(config)
    assert "base-drawn-6-seed0: no measure of this one" in str(failed.value)
    assert "base-best-of-8-seed0: reads a run that is not complete" in str(failed.value)
    with pytest.raises(ValueError, match="reads base-drawn-6-seed0, not complete yet"):
        run_experiment(replace(config, only=("base-best-of-8-seed0",)))
    (best,) = (job for job in plan_of(config, DOMAINS, config.out).jobs if "best" in job.name)
    assert best.recipe is not None
    assert isinstance(best.config, BaseConfig)
    with pytest.raises(RuntimeError, match="base-drawn-6-seed0 has not been measured"):
        best.recipe(best.config)

    table, _ = run_experiment(config)
    assert "Regret: distance from the best" in table
    assert "trained at another mixture" not in table
    study = open_study([config.out])
    (group, *_) = study.groups
    found = regret.regrets_of(study, group)
    assert found.regression is not None
    # DoReMi's reference is a base model at uniform weights.
    own = {*group["swarm"], "base-reference-2-seed0"}
    assert {run.name for run in found.swarm} == own
    assert len(group["swarm"]) == 8 + 4
    assert 8 <= len(found.regression.swarm.losses) <= 12
    methods = {method.label: method for method in found.methods}
    assert list(methods) == ["uniform", "natural", "DoGE", "DoReMi, 2 steps", "regression"]
    # The best has no regret, and the others are set against it; a seed has no interval.
    measured = {label: method.measured for label, method in methods.items()}
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
    assert methods["regression"].predicted.mean == pytest.approx(0, abs=1e-9)
    # What was spent: a proxy, a reference and its proxy, the swarm and what it was drawn around.
    block, steps, batch = config.corpus.block_size, 2, config.base.batch_size
    proxy, reference = 4 * steps * block, steps * batch * block
    spent = [0, 0, proxy, 2 * reference, 12 * reference + proxy + 2 * reference]
    assert [method.tokens for method in found.methods] == spent

    # A base model from elsewhere counts, unless it is the same run or differs in a setting.
    runs = config.out / "runs"
    for name, weight, size in (("same", None, 4), ("other", 0.4, 4), ("larger", 0.4, 5)):
        copy = shutil.copytree(runs / "base-uniform-seed0", runs / f"base-{name}")
        record = records.read_config(copy)
        record["config"]["batch_size"] = size
        records.write_json(copy / records.CONFIG, record)
        if weight is not None:
            weights = dict.fromkeys(study.groups[0]["aim"], (1 - weight) / 3) | {"code": weight}
            records.write_weights(copy, entries_of(weights))
    more = regret.regrets_of(open_study([config.out]), group)
    assert {run.name for run in more.swarm} - own == {"base-same", "base-other"}
    swarm_read = swarm.read([run.path for run in more.swarm], group["aim"])
    assert len(swarm_read.losses) == 13
    # What was trained before is not what the regression finds now, and both are shown.
    told = " ".join(terminal_table([config.out]).split())
    assert "The base models of regression were trained at another mixture" in told
    assert "DoReMi, 2 steps regression" in told
    kept = evidence.packed(config.out)["runs"]
    assert {"base-other", "base-larger"} < set(kept)
    for name in ("same", "other", "larger"):
        shutil.rmtree(runs / f"base-{name}")

    # Other weights are judged without a step of training.
    given = tmp_path / "given.json"
    records.write_weights(given, entries_of(dict.fromkeys(group["aim"], 0.25)))
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
    # Of weights that are far from all that were tried nothing is said.
    records.write_weights(given, entries_of(dict.fromkeys(group["aim"], 0.0) | {"code": 1.0}))
    assert cli.main([*words, f"alone={given}"]) == 0
    printed = capsys.readouterr().out
    (alone_line,) = (line for line in printed.splitlines() if line.startswith("alone "))
    assert not predicted.findall(alone_line)
    assert "Nothing is predicted of alone: a weight is outside" in " ".join(printed.split())
    assert cli.main([*words, "even"]) == 2
    assert "weights must be NAME=FILE" in capsys.readouterr().err
    # Nor is what base models of another method came to told of them.
    assert cli.main([*words, f"DoGE={given}"]) == 2
    assert "need names that the experiment has not given; DoGE is" in capsys.readouterr().err
    assert run_experiment(config)[0] == table

    # The swarm may grow, and then has another best mixture; it may not shrink.
    monkeypatch.undo()
    grown = filled(config, {"swarm": {"mixtures": 9}})
    run_experiment(replace(grown, only=("base-drawn-8-seed0",)))
    assert "base-best-of-9-seed0" in records.read_experiment(config.out)["runs"]
    with pytest.raises(ValueError, match="holds the experiment regret with other runs"):
        run_experiment(config)


def test_given_weights_are_arms_of_a_plan(experiment: Make, tmp_path: Path) -> None:
    file = tmp_path / "given.json"
    records.write_weights(file, entries_of(dict.fromkeys(DOMAINS, 0.25)))
    config = experiment("regret", weights=(f"mine={file}",))
    lines = "\n".join(run_experiment(replace(config, plan=True)))
    assert "--only base-given-mine-seed0" in lines
    records.write_weights(file, entries_of({"code": 1.0}))
    with pytest.raises(ValueError, match="it has no weight for"):
        run_experiment(config)
    assert config.out is not None
    assert not config.out.exists()


def test_a_domain_alone_is_refused(experiment: Make) -> None:
    config = experiment("regret", corpus={"domains": ("prose",)})
    with pytest.raises(ValueError, match="regret needs 2 domains and more; got prose"):
        run_experiment(config)
    assert config.out is not None
    assert not config.out.exists()


@pytest.mark.parametrize("has_tried", [False, True])
def test_uniform_weights_that_were_not_tried_are_not_judged(has_tried: bool) -> None:
    error = Error(0.01, 0.02)
    regression: Any = SimpleNamespace(
        swarm=SimpleNamespace(names=("a", "b")),
        law="law",
        errors={"law": error},
        spread=error,
        best_K=np.array([0.9, 0.1]),
        has_tried=lambda _: has_tried,
        loss=lambda pair: pair[:, 0],
        loss_B=lambda pair: pair[None, :, 0],
    )
    told = " ".join(
        regret._predictions({}, regret.Regrets([], regression, compared({"aim": ["a"]}, []), ()))
    )
    assert ("against uniform weights" in told) == has_tried
    assert "predicts the average of models left out to" in told


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ((0.1,), "does not hold on this corpus, by one seed"),
        ((-0.1,), "the construction holds on this corpus, by one seed"),
        ((0.1, -0.09, 0.1), "whether the construction holds on this corpus is undecided"),
        ((0.1, 0.11, 0.1), "the construction does not hold on this corpus."),
        ((-0.1, -0.11, -0.1), "the construction holds on this corpus."),
    ],
)
def test_a_construction_is_judged_by_both_sides(changes: tuple[float, ...], sentence: str) -> None:
    """The best arm with less than uniform's share against the best with as much and more."""
    arms, methods = [], []
    for label, share, above in (("uniform", 0.5, 0.0), ("less", 0.2, 0.0), ("more", 0.8, 1.0)):
        by = changes if label == "less" else [above] * len(changes)
        losses = {seed: {"a": 3.0 + seed + each} for seed, each in enumerate(by)}
        arms.append(Arm(label, "", {}, losses, is_baseline=label == "uniform"))
        methods.append(regret.Method(label, "", {}, NO_PAIR, NO_PAIR, share, 0.0))
    group = {"special": ["b"], "is_more": False, "focus": "less", "aim": ["a"], "arms": []}
    found = regret.Regrets(methods, None, compared(group, arms), ())
    *_, told = regret._sentences(group, found)
    assert sentence in told
    assert (
        "less (0.200) has the lowest loss; against the best of the others, uniform (0.500)" in told
    )
