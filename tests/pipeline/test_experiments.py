"""Experiments run all their arms once, go on where they were killed, and say who won."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from doge_fast.mixture.counts import Phase
from doge_fast.pipeline import records, tables
from doge_fast.pipeline.base import resolve_phases, train_base
from doge_fast.pipeline.config import EvaluateConfig, ExperimentConfig
from doge_fast.pipeline.config.fields import filled
from doge_fast.pipeline.domains import load_corpus
from doge_fast.pipeline.evaluation import evaluate
from doge_fast.pipeline.experiments import runner
from doge_fast.pipeline.experiments.runner import run_experiment
from doge_fast.pipeline.proxy import learn_weights
from doge_fast.pipeline.reporting.study import open_study
from doge_fast.pipeline.trainer import RecordedTrainer
from tests.pipeline.stages import killed_at


def finished(out: Path) -> set[str]:
    return {path.parent.name for path in (out / "runs").glob("*/model")}


@pytest.mark.exhaustive
def test_universal_runs_every_arm_and_ends_in_a_table_and_a_page(experiment, monkeypatch):
    config = experiment("universal", seeds=(0, 1), doremi={"steps": (4, 6)})
    with killed_at(monkeypatch, "go_on", 6):
        run_experiment(config)
    done = {path: path.stat().st_mtime_ns for path in (config.out / "runs").glob("*/model/*")}
    assert len(finished(config.out)) == 5
    table, page = run_experiment(config)
    # What was done before is as it was.
    assert {path: path.stat().st_mtime_ns for path in done} == done
    record = json.loads((config.out / "experiment.json").read_text())
    assert finished(config.out) == set(record["runs"])
    assert len(record["runs"]) == 20
    assert page == f"report: {config.out / 'report.html'}"
    for column in ("uniform", "natural", "DoGE", "DoReMi, 4 steps", "DoReMi, 6 steps"):
        assert column in table
    assert ", 2 seeds" in table
    # Commands to copy stay whole, however long the paths in them are.
    lines = [line for line in table.splitlines() if not line.startswith("  doge-fast")]
    assert max(map(len, lines)) <= tables.PIPE_WIDTH
    source = (config.out / "report.html").read_text(encoding="utf-8")
    assert "What learning the weights costs" in source
    assert "Against uniform, seed by seed" in source


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("ood", {"targets": ("verse",)}, ["Perplexity on the target", "oracle", "for verse"]),
        pytest.param(
            "wiki40b",
            {"targets": ("verse",), "corpus": {"domains": ("code", "prose")}},
            ["DoGE, fine-tuned", "for verse"],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "scales",
            {},
            ["mean absolute difference from mini", "small"],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "doremi",
            {"doremi": {"steps": (4,)}},
            ["DoGE authors' variant", "FLOPs"],
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "curriculum",
            {"base": {"steps": 10}, "proxy": {"steps": 10}},
            ["K = 10", "global average"],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("proxy_vs_base", {}, ["DoGE proxy", "DoGE base"], marks=pytest.mark.soak),
        pytest.param("selection", {}, ["low5", "high10"], marks=pytest.mark.exhaustive),
    ],
)
def test_every_experiment_runs_and_a_second_call_trains_nothing(
    experiment, name, changes, words, monkeypatch
):
    config = experiment(name, **changes)
    table, page = run_experiment(config)
    for word in words:
        assert word in table
    assert "one seed" in " ".join(table.split())
    source = Path(page.removeprefix("report: ")).read_text(encoding="utf-8")
    assert "<svg" in source
    monkeypatch.setattr(RecordedTrainer, "go_on", lambda *_: pytest.fail("it was trained already"))
    again = run_experiment(config)
    assert again == [table, page]


def begun(config: ExperimentConfig) -> Path:
    """The experiment's directory as it is while its first run is under way."""
    assert config.out is not None
    records.write_experiment(config.out, runner._plan(config).record)
    (config.out / "runs").mkdir(exist_ok=True)
    return config.out


def test_what_may_change_while_an_experiment_is_under_way(experiment):
    """Seeds may be added; before there is a run, anything may be corrected."""
    config = experiment("scales", seeds=(0, 1))
    out = begun(config)
    for name, other in {
        "mu": filled(config, {"proxy": {"mu": 0.5}}),
        "name": replace(config, name="curriculum"),
        "further runs": replace(config, seeds=(0,)),
    }.items():
        with pytest.raises(ValueError, match=name):
            run_experiment(other)
    begun(replace(config, seeds=(0, 1, 2)))
    assert len(records.read_json(out / records.EXPERIMENT)["runs"]) == 9
    (out / "runs").rmdir()
    begun(filled(config, {"proxy": {"mu": 0.5}}))
    assert records.read_json(out / records.EXPERIMENT)["config"]["proxy"]["mu"] == 0.5


def test_an_arm_of_another_corpus_is_refused(experiment, small_corpus, tmp_path, monkeypatch):
    data = shutil.copytree(small_corpus, tmp_path / "data")
    config = experiment("proxy_vs_base", corpus={"data": str(data)})
    with killed_at(monkeypatch, "go_on", 2):
        run_experiment(config)
    with (data / "code.jsonl").open("a") as file:
        file.write(json.dumps({"text": "something that was not there before " * 40}) + "\n")
    with pytest.raises(ValueError, match="another corpus"):
        run_experiment(config)


@pytest.mark.exhaustive
def test_a_model_measured_otherwise_since_is_measured_again(experiment):
    config = experiment("proxy_vs_base")
    (table, _) = run_experiment(config)
    run = config.out / "runs" / "base-doge-seed0"
    evaluate(EvaluateConfig(run=run, blocks=1, device="cpu"))
    assert "base-doge-seed0" in open_study([config.out]).unmeasured
    assert run_experiment(config)[0] == table


def test_a_curriculum_takes_the_proxys_means_stage_by_stage(proxy, base):
    source = proxy("source", steps=6, mu=0.001)
    learn_weights(source)
    lines = {line["step"]: line["alpha"] for line in records.read_metrics(source.out, kind="train")}
    config = base("curriculum", weights=str(source.out), steps=9, stages=3)
    train_base(config)
    used = records.read_weights(config.out)
    assert [each["first_step"] for each in used["stages"]] == [0, 3, 6]
    for place, stage in enumerate(used["stages"]):
        first, second = lines[2 * place + 1], lines[2 * place + 2]
        for name, weight in stage["weights"].items():
            assert weight == pytest.approx((first[name] + second[name]) / 2, rel=1e-6)
    average = records.weights_by_name(records.read_weights(source.out))
    for name, weight in records.weights_by_name(used).items():
        assert weight == pytest.approx(average[name], rel=1e-5)
    # Asked again, they are the same to the bit: a resumed run has the weights it began with.
    again = resolve_phases(config, load_corpus(config.corpus))
    assert again == tuple(Phase(each["first_step"], each["weights"]) for each in used["stages"])
