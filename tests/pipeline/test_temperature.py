"""The distance along a proxy's direction: which temperatures are tried, and what is written."""

import json
import logging
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config

from doge_fast import cli
from doge_fast.pipeline import failures, records
from doge_fast.pipeline import temperature as search
from doge_fast.pipeline.config import DemoConfig, ModelConfig, ProxyConfig, TemperatureConfig
from doge_fast.pipeline.demo import MOST_RUNS, demo
from doge_fast.pipeline.failures import Diverged
from doge_fast.pipeline.proxy import learn_weights
from doge_fast.pipeline.report import terminal_table
from doge_fast.pipeline.reporting.study import open_study
from doge_fast.pipeline.run import Run
from doge_fast.pipeline.temperature import Job, lines_of, next_inverses, sharpened, temperature
from doge_fast.pipeline.weights import bounds
from doge_fast.pipeline.weights.summary import story
from doge_fast.pipeline.wording import as_ascii
from tests.pipeline.stages import NAMES, write_weights


@pytest.mark.parametrize(
    ("loss", "tried", "most"),
    [
        # 1 is the best, 2 its better neighbour, then between them and no further.
        (lambda x: (x - 1.2) ** 2, [0, 1, 2, 1.5], 6),
        (lambda x: (x - 0.8) ** 2, [0, 1, 2, 0.5], 6),
        # Outwards while the farthest is the best, then back between.
        (lambda x: (x - 3) ** 2, [0, 1, 2, 4, 3], 6),
        (lambda x: (x - 3.9) ** 2, [0, 1, 2, 4, 6, 3], 6),
        (lambda x: -x, [0, 1, 2, 4, 6, 8], 6),
        # Uniform is the best: inwards, and one more beside it.
        (lambda x: x, [0, 1, 2, 0.5, 0.25, 0.125], 6),
        (lambda x: abs(x - 0.4), [0, 1, 2, 0.5, 0.25], 6),
        # A model that diverged is no best one, and no neighbour that is gone towards.
        (lambda x: math.inf if x > 1 else -x, [0, 1, 2, 0.5], 6),
        # No more than it may.
        (lambda x: -x, [0, 1, 2, 4], 4),
        (lambda x: x, [0, 1, 2], 3),
    ],
)
def test_the_search_goes_where_the_loss_falls(loss, tried, most):
    losses: dict[float, float] = {}
    while new := next_inverses(losses, most):
        losses |= {inverse: loss(inverse) for inverse in new}
    assert list(losses) == tried


@pytest.mark.parametrize("inverse", [0, 0.25, 1, 2, 4, 300])
def test_sharpened_weights_are_powers(inverse):
    weights = {"none": 0.0, "b": 0.3, "a": 0.5, "c": 0.2}
    found = sharpened(weights, inverse)
    total = sum(value**inverse for value in weights.values() if value)
    powers = {name: value**inverse / total if value else 0 for name, value in weights.items()}
    assert list(found) == list(weights)
    assert found == pytest.approx(powers)
    assert math.fsum(found.values()) == pytest.approx(1, abs=1e-15)
    assert found["none"] == 0
    assert sharpened({"a": 1e-300, "b": 1e-301}, 50) == pytest.approx({"a": 1.0, "b": 0.0})


@pytest.fixture(scope="module")
def trained(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proxy whose weights are far from uniform."""
    out = tmp_path_factory.mktemp("temperature") / "proxy"
    return learn_weights(ProxyConfig(out=out, sequences_per_domain=2, mu=1e-3, **settings)).path


@pytest.fixture
def learned(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "proxy"))


def asked(learned: Path, **changes: Any) -> TemperatureConfig:
    told: dict[str, Any] = {"steps": 4, "seeds": (0,), "most_runs": 3, "device": "cpu"}
    return TemperatureConfig(learned, **(told | changes))


def test_the_lowest_measured_loss_is_written(learned):
    config = asked(learned, seeds=(0, 1), most_runs=4)
    run = temperature(config)
    record, alpha = run.record, Run(learned).weights
    assert len(record["points"]) == 4
    for point in record["points"]:
        inverse, weights = point["inverse_temperature"], point["weights"]
        total = sum(value**inverse for value in alpha.values())
        assert weights == pytest.approx({k: v**inverse / total for k, v in alpha.items()})
        # Each loss again from what the base models' own evaluations say.
        for seed in config.seeds:
            base = run.path / "runs" / f"base-{inverse:g}-seed{seed}"
            loss = json.loads((base / "evaluation.json").read_text())["loss"]
            assert point["losses"][str(seed)] == pytest.approx(sum(loss.values()) / len(NAMES))
            assert Run(base).weights == pytest.approx(weights)
        assert point["loss"] == pytest.approx(sum(point["losses"].values()) / 2)
    best = min(record["points"], key=lambda point: point["loss"])
    assert record["inverse_temperature"] == best["inverse_temperature"]
    assert run.weights == best["weights"]
    assert (record["method"], record["target"]) == ("doge", "universal")
    # The file says without its runs what it is of.
    told = records.read_weights(learned)
    assert record["corpus"] == told["corpus"] == records.load_config(learned)[1].corpus.data
    assert record["proxy"]["seed"] == told["seed"] == 0
    assert record["proxy"]["learning_rate"] == told["learning_rate"]
    (_, base), seen = records.load_config(run.path / "runs/base-0-seed0"), record["tokens"]
    assert seen == told["tokens"] + 8 * 4 * base.batch_size * base.corpus.block_size
    (farthest,) = [each for each in record["warnings"] if "short" in each.lower()]
    assert f"{4 * base.batch_size * base.corpus.block_size} tokens each" in farthest
    assert f"The proxy: {told['warnings'][0]}" in record["warnings"]
    # The page says what the terminal says, and counts the proxy too.
    shown = " ".join(terminal_table([run.path]).split())
    assert all(as_ascii(each) in shown for each in record["warnings"])
    (cost,) = re.findall(r"proxy and 8 base models .*? tokens ([\d.]+) .*?x\) ([\d.]+)", shown)
    assert float(cost[0]) == pytest.approx(seen / 1000, rel=0.01)
    assert float(cost[1]) == pytest.approx(told["tokens"] / 1000, rel=0.01)
    assert story(bounds.constrain(record, floor=0.1)).startswith("search, target universal")
    # A directory like a proxy's: it is drawn, exported and trained at.
    assert run.figures()
    assert (run.path / "report.html").exists()
    assert "Loss at each temperature" in terminal_table([run.path])
    assert cli.main(["export", str(run.path), "--to", "json"]) == 0
    assert cli.main(["weights", "show", str(run.path)]) == 0


def test_runs_are_planned_and_made_one_by_one(learned, capsys, caplog):
    words = ["temperature", str(learned), "--steps", "2", "--seeds", "0", "--most-runs", "3"]
    whole = [*words, "--out", str(learned.parent / "whole")]
    with caplog.at_level(logging.INFO, "doge_fast"):
        assert cli.main(whole) == 0
    assert [each for each in caplog.messages if each.startswith("run ")] == [
        f"run {number} of at most 3: base-{number - 1}-seed0" for number in (1, 2, 3)
    ]
    # What is alike in all of them is said for the first one alone.
    second = next(k for k, each in enumerate(caplog.messages) if each.startswith("run 2"))
    assert len(caplog.messages[second:]) == 2
    (cost,) = [each for each in caplog.messages if each.startswith("at most")]
    assert cost.startswith("at most 3 base models (3 temperatures, 1 seed) of 2 steps: ")
    assert cost.endswith("at the time of the proxy's steps")
    words += ["--out", str(learned.parent / "parts")]
    capsys.readouterr()
    assert cli.main([*words, "--plan"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    names = [line.split("  #")[0].split()[-1] for line in lines]
    assert names == ["base-0-seed0", "base-1-seed0", "base-2-seed0"]
    assert "--only" not in last
    assert cli.main([*words, "--plan", "--only", names[0]]) == 2
    assert "leave out --only" in capsys.readouterr().err
    for name in reversed(names):
        assert cli.main([*words, "--only", name]) == 0
    capsys.readouterr()
    assert cli.main([*words, "--plan"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert cli.main([*words, "--only", "base-7-seed9"]) == 2
    assert cli.main(words) == 0
    assert cli.main([*words, "--only", names[0]]) == 0
    assert open_study([learned.parent / "parts"]).groups
    found = [
        json.loads((learned.parent / each / "weights.json").read_text())
        for each in ("whole", "parts")
    ]
    assert found[0]["points"] == found[1]["points"]


def test_targets_count_by_their_weights(proxy):
    learned = learn_weights(proxy(target=("verse=0.75", "table=0.25"), mu=1e-3)).path
    run = temperature(asked(learned, seeds=(0, 1)))
    assert run.record["objective"] == {"verse": 0.75, "table": 0.25}
    # In the order that was asked for, whatever the process: a killed search compares them.
    assert list(run.record["objective"]) == ["verse", "table"]
    # The report's table of perplexities ends in that objective too.
    study = open_study([run.path])
    *_, total = study.lines(study.of(records.PerplexityGroup)[0])
    lost = run.record["points"][2]["losses"]
    assert total.mean_losses("1/T = 2") == pytest.approx({0: lost["0"], 1: lost["1"]})
    for point in run.record["points"]:
        base = run.path / "runs" / f"base-{point['inverse_temperature']:g}-seed0"
        loss = records.read_json(base / records.EVALUATION)["loss"]
        own = point["losses"]["0"]
        assert own == pytest.approx(0.75 * loss["verse"] + 0.25 * loss["table"])
        assert set(point["weights"]) == {"code", "prose"}
    # What it compares is named, and what the training domains lose stands beside it.
    aim = "held-out text of verse (0.75) and table (0.25)"
    first, *_ = lines_of(run.path)
    assert first == f"loss on {aim}:"
    page = " ".join(terminal_table([run.path]).split())
    # In the headline, and below the losses.
    assert page.count(f" on {aim}") == 2
    for title, group in zip(
        ("verse and table", "the training domains"), study.of(records.PerplexityGroup), strict=True
    ):
        *_, total = study.lines(group)
        average = total.perplexity("uniform").mean
        (told,) = re.findall(
            rf"Perplexity per domain: Base models on {title} .*? average ([\d.]+)", page
        )
        assert float(told) == pytest.approx(average, rel=0.01)


def test_a_mixture_of_all_domains_is_a_target_beside_others(proxy):
    learned = learn_weights(proxy(target=("mix=2", "verse"), mu=1e-3)).path
    found = temperature(asked(learned)).record["objective"]
    assert found == pytest.approx({"code": 2 / 9, "prose": 2 / 9, "table": 2 / 9, "verse": 1 / 3})


def test_all_that_is_measured_is_of_the_text_of_the_proxy(settings, tmp_path, monkeypatch):
    """Wherever the search goes on: relative paths lead from where the proxy was begun."""
    corpus = settings["corpus"]
    data = Path(shutil.copytree(corpus.data, tmp_path / "data"))
    GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=16).save_pretrained(tmp_path / "shape")
    told = settings | {"corpus": replace(corpus, data="data"), "model": ModelConfig("shape")}
    monkeypatch.chdir(tmp_path)
    learned = learn_weights(ProxyConfig(out=tmp_path / "proxy", mu=1e-3, **told)).path
    config = asked(learned)
    temperature(replace(config, only=("base-0-seed0",)))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file = data / "code.jsonl"
    text = file.read_text()
    file.write_text(text.replace("the", "a"))
    with pytest.raises(ValueError, match="another corpus"):
        temperature(config)
    file.write_text(text)
    assert len(temperature(config).record["points"]) == 3


@pytest.mark.exhaustive
def test_a_model_that_diverges_is_no_choice(learned, monkeypatch, capsys):
    train = Job.train

    def diverging(job: Job) -> None:
        if not job.name.startswith(survivors):
            raise Diverged("no numbers")
        train(job)

    monkeypatch.setattr(Job, "train", diverging)
    survivors: tuple[str, ...] = ("base-0-",)
    words = ["temperature", str(learned), "--steps", "4", "--seeds", "0", "--device", "cpu"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert said.count("diverged") == 5
    record = records.read_weights(learned.with_name("proxy-temperature"))
    assert record["inverse_temperature"] == 0
    assert records.weights_by_name(record) == pytest.approx(dict.fromkeys(NAMES, 0.25))
    # Also where it is uniform weights that have no loss to compare with.
    survivors = ("base-1-",)
    run = temperature(asked(learned, out=learned.parent / "other", most_runs=4))
    assert run.record["inverse_temperature"] == 1
    assert not run.record["is_decided"]
    survivors = ("base-0-", "base-1-", "base-2-seed0")
    run = temperature(asked(learned, out=learned.parent / "lost", seeds=(0, 1)))
    assert run.record["points"][2]["loss"] is None
    text = terminal_table([run.path])
    assert "not complete" not in text
    assert text.replace("Diverged, so left out: 1/T = 2.", "").count("1/T = 2") == 0
    assert "left out: 1/T = 2." in text
    # Uniform weights have no place in the curve.
    survivors = ("base-1-", "base-0-seed0", "base-0-seed1")
    run = temperature(asked(learned, out=learned.parent / "others", seeds=(0, 1, 2)))
    assert (run.path / "report.html").exists()
    survivors = ()
    with pytest.raises(Diverged, match="base-2-seed0"):
        temperature(asked(learned, out=learned.parent / "one", only=("base-2-seed0",)))
    with pytest.raises(Diverged, match="Every base model"):
        temperature(asked(learned, out=learned.parent / "none", most_runs=4))
    assert not (learned.parent / "none" / "weights.json").exists()


def test_a_search_may_go_on_with_more_runs_and_another_budget(learned, monkeypatch):
    run = temperature(asked(learned))
    first, before = run.record, (run.path / "weights.json").read_bytes()
    with monkeypatch.context() as patch:
        # A complete one is left as it is.
        patch.setattr(Job, "train", lambda job: pytest.fail("it was trained already"))
        temperature(asked(learned))
    assert (run.path / "weights.json").read_bytes() == before
    more = temperature(asked(learned, most_runs=4, budget_tokens=1e4)).record
    kept = {point["inverse_temperature"]: point["losses"] for point in first["points"]}
    found = {point["inverse_temperature"]: point["losses"] for point in more["points"]}
    assert len(found) == 4
    assert kept.items() <= found.items()
    with pytest.raises(ValueError, match="steps"):
        temperature(asked(learned, steps=5))
    # What was measured is of the direction that the proxy had, and so is the report.
    assert open_study([run.path]).proxies
    write_weights(learned / "weights.json", dict(zip(NAMES, (0.1, 0.2, 0.3, 0.4), strict=True)))
    assert not open_study([run.path]).proxies
    with pytest.raises(ValueError, match="trained again"):
        temperature(asked(learned, most_runs=4, budget_tokens=1e4))


def test_between_two_models_a_search_ends_as_a_late_signal_asked(learned, monkeypatch):
    evaluate_run = search.evaluate

    def signalled(config: Any) -> Any:
        # As one that comes with the last step of a training.
        failures.late.append(KeyboardInterrupt())
        return evaluate_run(config)

    monkeypatch.setattr(search, "evaluate", signalled)
    with pytest.raises(KeyboardInterrupt):
        temperature(asked(learned))
    assert len(list(learned.parent.glob("proxy-temperature/runs/*/model"))) == 1


def test_a_search_shorter_than_the_proxys_warm_up_has_its_own(settings, tmp_path):
    told = settings | {"training": replace(settings["training"], steps=8, warmup_steps=6)}
    proxy = learn_weights(ProxyConfig(out=tmp_path / "p", mu=1e-3, **told)).path
    (base, *_) = (temperature(asked(proxy)).path / "runs").iterdir()
    config = json.loads((base / "config.json").read_text())["config"]
    assert config["training"]["warmup_steps"] == 0


def test_it_refuses_what_leaves_nothing_to_measure(learned):
    write_weights(learned / "weights.json", dict.fromkeys(NAMES, 0.25))
    with pytest.raises(ValueError, match=r"equal.*longer"):
        temperature(asked(learned))
    # What the proxy's own warnings say of it.
    told = records.read_weights(learned) | {"warnings": ["gradients of one norm"]}
    records.write_weights(learned / "weights.json", told)
    with pytest.raises(ValueError, match=r"equal.*gradients of one norm"):
        temperature(asked(learned))
    write_weights(learned / "weights.json", {"code": 1.0})
    with pytest.raises(ValueError, match="one domain"):
        temperature(asked(learned))


def test_epochs_beyond_four_are_said_before_training(learned, caplog):
    run = temperature(asked(learned, budget_tokens=1e9))
    # Once for the three that are begun together.
    (told,) = [record.getMessage() for record in caplog.records if "constrain" in record.message]
    assert all(f"1/T = {inverse}: " in " ".join(told.split()) for inverse in (0, 1, 2))
    tokens = {each["name"]: each["tokens"] for each in run.record["domains"]}
    for point in run.record["points"]:
        expected = {k: v * 1e9 / tokens[k] for k, v in point["weights"].items()}
        assert point["epochs"] == pytest.approx(expected)


@pytest.mark.exhaustive
def test_the_demo_says_how_long_it_takes_and_writes_one_page(
    tmp_path, small_corpus, blocks_cache, caplog
):
    config = DemoConfig(
        tmp_path / "demo", str(small_corpus), target="verse", steps=24, cache_dir=blocks_cache
    )
    with caplog.at_level("INFO", logger="doge_fast"):
        lines = demo(config)
    told = caplog.messages
    (time,) = [place for place, line in enumerate(told) if line.startswith("about ")]
    assert time < min(place for place, line in enumerate(told) if line.startswith("run 1"))
    # What is read and which rule is in use are said once, not for every run.
    assert sum(": read are " in line for line in told) <= 1
    assert len({*told}) == len(told)
    page = (config.out / "temperature" / "report.html").read_text(encoding="utf-8")
    # The proxy's course is on the page of the search.
    assert "Loss over 1/T" in page
    assert "How the weights moved" in page
    search = records.read_weights(config.out / "temperature")
    assert 3 <= len(search["points"]) <= MOST_RUNS
    assert search["objective"] == {"verse": 1.0}
    assert "verse" not in records.weights_by_name(search)
    # Nothing is left to do.
    caplog.clear()
    assert demo(config) == lines
    assert not [line for line in caplog.messages if line.startswith(("about", "run "))]
