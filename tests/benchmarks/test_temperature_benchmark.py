"""The temperature against other ways to spend its cost: the regression, the table, a whole run."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import known, temperature
from doge_fast.pipeline import records


def test_the_regression_moves_towards_mixtures_with_less_loss():
    names = ["a", "b", "c", "d"]
    mixtures = temperature.random_mixtures(names, 6, seed=0)
    # "a" lowers the loss, "d" raises it.
    losses = [6 - each["a"] + each["d"] for each in mixtures]
    found = temperature.regressed(mixtures, losses, seed=0)
    assert math.fsum(found.values()) == pytest.approx(1)
    assert found["a"] > 0.4 > 0.25 > found["d"]


def test_random_mixtures_are_on_the_simplex_and_the_seeds():
    first, again = (temperature.random_mixtures("xyz", 5, seed=3) for _ in range(2))
    assert first == again != temperature.random_mixtures("xyz", 5, seed=4)
    for mixture in first:
        assert math.fsum(mixture.values()) == pytest.approx(1)


def test_the_table_pairs_the_seeds():
    def seed(uniform: float, measured: float) -> records.Json:
        methods = {
            name: {"weights": {"a": 0.5, "b": 0.5}, "trainings": cost, "loss": loss}
            for name, loss, cost in (("uniform", uniform, 0), (temperature.MEASURED, measured, 6))
        }
        return {"inverse_temperature": 2.0, "methods": methods}

    # The seeds differ by a whole nat, the methods by a tenth in each.
    record = {"seeds": [seed(5.0, 4.9), seed(6.0, 5.9)], "target": ["c"], "steps": 1000}
    text = temperature.table(record)
    assert "1/T found: 2, 2" in text
    assert f"{100 * (math.exp(-0.1) - 1):.1f} %" in text
    assert f"{math.exp(5.4):.1f}" in text
    # A proxy of three rows and five base models of two domains, two blocks of each in a step.
    assert f"{(3 + 5 * 2) * 2 * 1000 * 128 / 1e6:.1f}M" in text


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., records.Json]:
    """Runs the program on a corpus whose answer is known, of one seed; gives that seed's record."""
    monkeypatch.setenv("DOGE_FAST_CACHE", str(tmp_path / "cache"))
    assert known.main([str(tmp_path / "known")]) == 0

    def run(*words: str) -> records.Json:
        data = str(tmp_path / "known" / "noise")
        of_all = [str(tmp_path / "out"), "--data", data, "--vocab-size", "320", "--seeds", "0"]
        assert temperature.main([*of_all, *words]) == 0
        (seed,) = json.loads((tmp_path / "out" / temperature.RECORD).read_text())["seeds"]
        return seed

    return run


@pytest.mark.exhaustive
def test_every_method_is_judged_by_a_seed_that_chose_nothing(tmp_path, measure):
    seed = measure("--steps", "2")
    judged = tmp_path / "out" / "runs"
    assert len(list(judged.glob("judge-*-seed200"))) == len(seed["methods"]) == 7
    number = len(seed["points"])
    assert len(list(judged.glob("random*-seed100"))) == number
    assert seed["methods"][temperature.MEASURED]["trainings"] == number + 1
    for name, method in seed["methods"].items():
        run = judged / f"{temperature._slug(name)}-seed200"
        losses = json.loads((run / "evaluation.json").read_text())["loss"]
        assert method["loss"] == pytest.approx(sum(losses.values()) / len(losses))


@pytest.mark.exhaustive
def test_longer_models_are_measured_where_short_ones_found_the_best(measure, capsys):
    seed = measure("--steps", "2", "--longer", "4")
    short, longer = seed["searches"]["2"], seed["searches"]["4"]
    assert f"{short['found']:g}" in longer["points"]
    assert {"0", "1", "2"} <= set(short["points"]) & set(longer["points"])
    printed = capsys.readouterr().out
    for search in (short, longer):
        assert f"{math.exp(min(search['points'].values())):.1f} *" in printed
