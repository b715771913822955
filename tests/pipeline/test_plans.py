"""The plan of an experiment: which runs, how large, in which order."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from doge_fast import cli
from doge_fast.pipeline.config import (
    BaseConfig,
    DoReMiConfig,
    Experiment,
    ExperimentConfig,
    ProxyConfig,
)
from doge_fast.pipeline.config.fields import filled
from doge_fast.pipeline.experiments.jobs import Job
from doge_fast.pipeline.experiments.planner import Plan
from doge_fast.pipeline.experiments.plans import plan_of
from doge_fast.pipeline.experiments.presets import known_domains, preset_of
from doge_fast.pipeline.experiments.runner import run_experiment
from doge_fast.pipeline.sources import find_parts
from doge_fast.weights.weights_file import plain, write_json

SLIMPAJAMA = ("arxiv", "book", "c4", "commoncrawl", "github", "stackexchange", "wikipedia")


def planned(config: ExperimentConfig, names: Sequence[str] | None = None) -> Plan:
    names = names or known_domains(config) or tuple(sorted(find_parts(config.corpus, [])))
    return plan_of(config, names, config.out or Path("x"))


@pytest.mark.parametrize("off", [0.0, None])
def test_the_clip_can_be_switched_off(off):
    config = preset_of("scales", data="x")
    for asked, clip in (
        (config, 1.0),
        (filled(config, {"proxy": {"domain_max_grad_norm": off}}), None),
    ):
        proxies = [job.config for job in planned(asked, "ab").jobs if job.config.stage == "proxy"]
        assert {proxy.domain_max_grad_norm for proxy in proxies} == {clip}  # type: ignore[union-attr]


def test_the_plan_is_commands_in_an_order_that_can_be_run(experiment, capsys):
    config = experiment("ood", targets=("verse",))
    words = ["experiment", "ood", "--preset", "smoke", "--data", config.corpus.data]
    words += ["--out", str(config.out), "--seeds", "0", "--targets", "verse"]
    assert cli.main([*words, "--plan"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert shlex.split(last, comments=True)[1:] == words
    jobs, groups = {job.name: job for job in planned(config).jobs}, dict[str, int]()
    for line in lines:
        (name,) = cli.parse(shlex.split(line, comments=True)[1:]).only
        group = groups[name] = int(re.findall("# group ([0-9]+):", line)[0])
        # Those that it reads stand above it, in an earlier group.
        needed = planned(config).needed_by(jobs[name])
        assert all(groups[each] < group for each in needed)
    assert groups.keys() == jobs.keys()
    assert set(groups.values()) == {1, 2, 3}
    assert not config.out.exists()


def test_commands_of_a_file_that_asks_for_the_plan_run(experiment, tmp_path, capsys):
    config = experiment("scales", plan=True)
    file = tmp_path / "plan.json"
    write_json(file, config)
    assert cli.main(["experiment", "--config", str(file)]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if "--only" in line]
    assert len(commands) == 3
    assert not cli.parse(shlex.split(commands[0], comments=True)[1:]).plan
    with pytest.raises(ValueError, match="only"):
        run_experiment(replace(config, only=("proxy-tiny-seed0",)))


def test_runs_made_one_by_one_make_the_experiment(experiment):
    config = experiment("proxy_vs_base")
    with pytest.raises(ValueError, match="proxy-doge-seed0"):
        run_experiment(replace(config, only=("base-doge-seed0",)))
    assert not config.out.exists()
    for job in planned(config).jobs:
        assert run_experiment(replace(config, only=(job.name,))) == [f"run: {job.config.out}"]
    assert not (config.out / "report.html").exists()
    models = {file: file.stat().st_mtime_ns for file in config.out.rglob("*.safetensors")}
    table, _ = run_experiment(config)
    assert "DoGE proxy" in table
    # A run that is complete is skipped.
    run_experiment(replace(config, only=("proxy-doge-seed0",)))
    assert {file: file.stat().st_mtime_ns for file in models} == models


def test_a_path_that_has_the_name_of_a_run_is_not_of_the_plan(experiment):
    config = experiment("proxy_vs_base")
    first = planned(config).jobs[0].name
    elsewhere = replace(config.corpus, tokenizer=f"before/runs/{first}/model")
    plan = planned(replace(config, corpus=elsewhere))
    assert plan.needed_by(plan.jobs[0]) == []
    assert [job.name for job in plan.waves()[0]] == [job.name for job in planned(config).waves()[0]]


def test_a_run_that_fails_is_named_and_the_others_are_made(experiment, monkeypatch):
    config = experiment("proxy_vs_base")
    train = Job.train

    def failing(job: Job) -> None:
        if job.name == "proxy-doge-seed0":
            raise ValueError("The domains are at odds.")
        train(job)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "train", failing)
        with pytest.raises(RuntimeError, match="at odds") as told:
            run_experiment(config)
    assert "2 of 3 runs" in str(told.value)
    assert "base-doge-seed0: read proxy-doge-seed0" in str(told.value)
    (made,) = (config.out / "runs").glob("*/model")
    assert made.parent.name == "base-uniform-seed0"
    run_experiment(config)
    assert len(list((config.out / "runs").glob("*/model"))) == 3


def test_the_papers_universal_experiment():
    plan = planned(preset_of("universal", "paper"))
    by_stage: dict[type, list[Any]] = {}
    for job in plan.jobs:
        by_stage.setdefault(type(job.config), []).append(job.config)
    proxies, bases = by_stage[ProxyConfig], by_stage[BaseConfig]
    assert {proxy.model.model for proxy in proxies} == {"82M"}
    assert [proxy.training.seed for proxy in proxies] == [0, 1, 2]
    proxy = proxies[0]
    assert (proxy.training.steps, proxy.corpus.block_size) == (10_000, 512)
    assert proxy.sequences_per_domain * 7 == 126
    assert (proxy.training.learning_rate, proxy.training.min_learning_rate) == (5e-4, 1e-4)
    # Five arms of three sizes, and the references of DoReMi's two lengths.
    assert len(bases) == 3 * (5 * 3 + 2)
    large = [base for base in bases if base.model.model == "684M"]
    assert {base.training.learning_rate for base in large} == {1.5e-4}
    assert sorted({doremi.training.steps for doremi in by_stage[DoReMiConfig]}) == [10_000, 50_000]
    assert len(proxy.corpus.domains) == 7
    assert proxy.corpus.domain_column == "meta.redpajama_set_name"


def test_a_target_is_never_trained_on_but_by_the_oracle_and_afterwards():
    config = replace(preset_of("ood", "paper"), targets=("RedPajamaGithub",))
    for job in planned(config).jobs:
        name, stage = job.config.out.name, job.config
        assert isinstance(stage, ProxyConfig | BaseConfig)
        trains = "RedPajamaGithub" in stage.corpus.domains
        assert trains == name.startswith(("base-uniform-with-", "finetuned-")), name


@pytest.mark.parametrize("preset", ["small", "paper"])
@pytest.mark.parametrize("name", get_args(Experiment))
def test_runs_come_after_what_they_read(name, preset):
    names = None
    config = preset_of(name, preset)
    if preset == "small":
        config = preset_of(name, preset, data="nowhere")
        names = (*SLIMPAJAMA, "en", "de", "fr", "es", "ru", "ca", "nl")
    plan = planned(config, names)
    outs = {str(job.config.out) for job in plan.jobs}
    seen = set[str]()
    for job in plan.jobs:
        told = json.dumps(plain(job.config))
        # Whatever path of the experiment its configuration holds.
        read = {str(Path("x/runs") / name) for name in re.findall(r"x/runs/([^/\"]+)", told)}
        assert read - {str(job.config.out)} <= seen & outs, job.name
        assert {Path(path).name for path in read} == {job.name, *plan.needed_by(job)}
        seen.add(str(job.config.out))
    assert seen


def test_the_papers_languages():
    plan = planned(preset_of("wiki40b", "paper"))
    corpora = [job.config.corpus for job in plan.jobs if isinstance(job.config, ProxyConfig)]
    assert {corpus.domains for corpus in corpora} == {("en", "de", "fr", "es", "ru")}
    assert {(corpus.data, corpus.domain_column) for corpus in corpora} == {("google/wiki40b", None)}
    # Two targets, two seeds.
    assert len(corpora) == 4


def test_a_preset_makes_way_for_another_corpus():
    paper = preset_of("ood", "paper")
    assert len(paper.corpus.domains) == 7
    assert paper.seeds == (0, 1)
    other = preset_of("ood", "paper", data="DIR").corpus
    assert (other.data, other.domains, other.domain_column) == ("DIR", (), None)
    assert other.block_size == paper.corpus.block_size
    words = "experiment ood --preset paper --data DIR --proxy.steps 3 --block-size 64"
    parsed = cli.parse(words.split())
    assert parsed.corpus == replace(other, block_size=64)
    assert (parsed.proxy.steps, parsed.base.steps) == (3, 10_000)
