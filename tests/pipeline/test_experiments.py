"""Experiments run all their arms once, go on where they were killed, and say who won."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from doge_fast.mixture.counts import Phase
from doge_fast.pipeline import records, report
from doge_fast.pipeline.config import (
    BaseConfig,
    DoReMiConfig,
    EvaluateConfig,
    Experiment,
    ExperimentConfig,
    ProxyConfig,
    SelectConfig,
)
from doge_fast.pipeline.evaluation import evaluate
from doge_fast.pipeline.experiments import presets, runner
from doge_fast.pipeline.experiments.plans import Plan, plan_of
from doge_fast.pipeline.experiments.runner import run_experiment
from doge_fast.pipeline.reporting import study
from doge_fast.pipeline.reporting.arm_figures import arms_figure, extremes
from doge_fast.pipeline.reporting.experiment import Measured, open_experiment
from doge_fast.pipeline.reporting.findings import findings_of
from doge_fast.pipeline.reporting.kinds import perplexity
from doge_fast.pipeline.reporting.statistics import Difference
from tests.pipeline.written_runs import write_experiment

Make = Callable[..., ExperimentConfig]
SLIMPAJAMA = ("arxiv", "book", "c4", "commoncrawl", "github", "stackexchange", "wikipedia")


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a run that was done is trained again")

    monkeypatch.setattr("doge_fast.pipeline.stage.train", refuse)


def finished(out: Path) -> set[str]:
    return {path.parent.name for path in (out / "runs").glob("*/model")}


def test_universal_runs_every_arm_and_ends_in_a_table_and_a_page(
    experiment: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = experiment("universal", seeds=(0, 1), doremi_steps=(4, 6))
    assert config.out is not None
    stop = StopAfter(5, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(config)
    done = {path: path.stat().st_mtime_ns for path in (config.out / "runs").glob("*/model/*")}
    assert len(finished(config.out)) == 5
    stop.undo()
    table, page = run_experiment(config)
    # What was done before is as it was.
    assert {path: path.stat().st_mtime_ns for path in done} == done
    record = json.loads((config.out / "experiment.json").read_text())
    assert finished(config.out) == set(record["runs"])
    assert len(record["runs"]) == 20
    assert page == f"report: {config.out / 'report.html'}"
    for column in ("uniform", "natural", "DoGE", "DoReMi, 4 steps", "DoReMi, 6 steps"):
        assert column in table
    assert "over 2 paired seeds" in table
    assert max(map(len, table.splitlines())) <= report.TERMINAL_WIDTH
    source = (config.out / "report.html").read_text(encoding="utf-8")
    assert "What learning the weights costs" in source
    assert list((config.out / "report-figures").glob("experiment-1-change.*"))
    # Arms of a seed begin alike: the same numbers, the same first loss on the same blocks.
    first = {
        name: records.read_metrics(config.out / "runs" / name, kind="eval")[0]
        for name in ("base-uniform-tiny-seed0", "base-uniform-tiny-seed1")
    }
    assert first["base-uniform-tiny-seed0"] != first["base-uniform-tiny-seed1"]


class StopAfter:
    """An interruption once so many runs are done."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.is_on = count, True
        run = runner._run

        def counted(config: Any) -> Path:
            if self.is_on and not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            return run(config)

        monkeypatch.setattr(runner, "_run", counted)

    def undo(self) -> None:
        self.is_on = False


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("ood", {"targets": ("verse",)}, ["Perplexity on the target", "oracle", "for verse"]),
        pytest.param(
            "wiki40b",
            {"targets": ("verse",), "domains": ("code", "prose")},
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
            {"doremi_steps": (4,)},
            ["DoGE authors' variant", "FLOPs, against DoGE"],
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "curriculum",
            {"base_steps": 10, "proxy_steps": 10},
            ["K = 10", "global average"],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "early",
            {"base_steps": 8},
            ["After a quarter of the steps", "At the end"],
            marks=pytest.mark.soak,
        ),
        pytest.param("proxy_vs_base", {}, ["DoGE proxy", "DoGE base"], marks=pytest.mark.soak),
        pytest.param(
            "settings",
            {"proxy_steps": 3},
            ["mu x 16", "DoGE, average from 1/3", "score published", "learning rate and mu / 2"],
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "selection", {}, ["columns left out", "low5", "high10"], marks=pytest.mark.exhaustive
        ),
    ],
)
def test_every_experiment_runs_and_a_second_call_trains_nothing(
    experiment: Make,
    name: str,
    changes: dict[str, Any],
    words: Sequence[str],
    request: pytest.FixtureRequest,
) -> None:
    config = experiment(name, **changes)
    table, page = run_experiment(config)
    for word in words:
        assert word in table
    assert "1 seed: differences cannot be told from chance" in " ".join(table.split())
    source = Path(page.removeprefix("report: ")).read_text(encoding="utf-8")
    assert "<svg" in source
    request.getfixturevalue("no_training")
    again = run_experiment(config)
    assert again == [table, page]


def settled(config: ExperimentConfig, names: Sequence[str] | None = None) -> presets.Settings:
    settings = presets.settings_of(config)
    names = names or runner._domains_of(config, settings)
    return presets.with_mu(settings, config, names)


def begun(config: ExperimentConfig) -> Path:
    """The experiment's directory as it is while its first run is under way."""
    assert config.out is not None
    settings = settled(config)
    records.write_experiment(config.out, runner._record(config, settings, planned(config)))
    (config.out / "runs").mkdir(exist_ok=True)
    return config.out


def test_another_experiment_in_the_directory_is_refused(experiment: Make) -> None:
    config = experiment("scales")
    begun(config)
    with pytest.raises(ValueError, match="holds the experiment scales with other settings"):
        run_experiment(replace(config, mu=0.5))
    with pytest.raises(ValueError, match="holds the experiment scales with another name"):
        run_experiment(replace(config, name="early"))


def test_seeds_may_be_added_and_not_taken_away(experiment: Make) -> None:
    config = experiment("scales", seeds=(0, 1))
    out = begun(config)
    begun(replace(config, seeds=(0, 1, 2)))
    assert records.read_experiment(out)["settings"]["seeds"] == [0, 1, 2]
    assert len(records.read_experiment(out)["runs"]) == 9
    with pytest.raises(ValueError, match="other runs"):
        begun(replace(config, seeds=(0,)))


def test_what_was_refused_before_any_run_may_be_corrected(experiment: Make) -> None:
    config = experiment("scales")
    out = begun(config)
    (out / "runs").rmdir()
    begun(replace(config, mu=0.5))
    assert records.read_experiment(out)["settings"]["mu"] == 0.5


def test_an_arm_of_another_corpus_is_refused(
    experiment: Make, small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shutil.copytree(small_corpus, tmp_path / "data")
    config = experiment("early", data=str(data))
    stop = StopAfter(1, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(config)
    stop.undo()
    runner._described.cache_clear()
    with (data / "code.jsonl").open("a") as file:
        file.write(json.dumps({"text": "something that was not there before " * 40}) + "\n")
    with pytest.raises(ValueError, match="was trained on another corpus"):
        run_experiment(config)


@pytest.mark.exhaustive
def test_a_model_measured_otherwise_since_is_measured_again(experiment: Make) -> None:
    config = experiment("proxy_vs_base")
    (table, _) = run_experiment(config)
    assert config.out is not None
    run = config.out / "runs" / "base-doge-seed0"
    evaluate(EvaluateConfig(run=run, blocks=1, domains=("code",), device="cpu"))
    assert "base-doge-seed0" in open_experiment(config.out).missing
    assert run_experiment(config)[0] == table


def test_any_name_makes_one_directory() -> None:
    config = ExperimentConfig("ood", preset="small", data="x", targets=("w/en", "w-en"))
    plan = planned(config, ("w/en", "w-en", "zh 文"))
    paths = [job.config.out for job in plan.jobs]
    assert len({path.name for path in paths}) == len(paths)
    assert {path.parent for path in paths} == {Path("x/runs")}


def test_the_clip_can_be_switched_off() -> None:
    assert presets.settings_of(ExperimentConfig("ood")).domain_max_grad_norm == 1.0
    config = ExperimentConfig("ood", domain_max_grad_norm=0)
    assert presets.settings_of(config).domain_max_grad_norm is None


@pytest.mark.parametrize(
    ("changes", "mu"),
    [
        ({}, 0.08),
        ({"target_batch": "mix"}, 0.02),
        ({"learning_rate": 5e-4}, 0.04),
        ({"domains": tuple("abc")}, 0.04),
        ({"mu": 0.5}, 0.5),
        ({"name": "ood"}, 0.02),
        ({"name": "wiki40b", "data": "x"}, 0.02),
        ({"preset": "paper"}, 0.01),
        ({"name": "ood", "preset": "paper"}, 0.01),
    ],
)
def test_mu_follows_target_domains_and_learning_rate(changes: dict[str, Any], mu: float) -> None:
    config = ExperimentConfig(**{"name": "universal", "preset": "small"} | changes)
    assert settled(config, tuple("abcdefg")).mu == pytest.approx(mu, rel=1e-12)


def test_of_many_arms_the_answer_names_the_best_and_the_worst() -> None:
    losses = {"uniform": 3.0} | {f"DoGE {i}": 3.0 + (i - 2) / 100 for i in range(9)}
    arms = [
        Measured(label, "", {0: {"a": loss, "b": loss}}, [], label == "uniform", None)
        for label, loss in losses.items()
    ]
    group = {"title": "Base models"}
    verdict = perplexity._verdict(arms, arms[0], ["a", "b"], group)
    assert verdict.sentences[0].startswith("DoGE 0: better on 2 of 2 than uniform")
    told = [sentence.replace("\N{NO-BREAK SPACE}", " ") for sentence in verdict.sentences]
    assert told[1:3] == [
        "2 of 9 arms below uniform on average.",
        "Lowest: DoGE 0: −2.0 %; DoGE 1: −1.0 %; DoGE 2: +0.0 %. "
        "Highest: DoGE 8: +6.2 %; DoGE 7: +5.1 %; DoGE 6: +4.1 %.",
    ]
    few = perplexity._verdict(arms[:6], arms[0], ["a", "b"], group)
    assert sum("better on" in sentence for sentence in few.sentences) == 5


def test_many_arms_have_a_line_each_and_the_extreme_curves() -> None:
    labels = [f"DoGE, domain clip None, mu x {2**i}" for i in range(12)]
    rows = {label: [Difference(i / 10, None, None, 1)] * 3 for i, label in enumerate(labels)}
    figure = arms_figure(rows, "uniform")
    told = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert told == labels[::-1]
    # A domain is not taken for the average of an arm that diverged on another.
    lost = Difference(math.inf, None, None, 1)
    figure = arms_figure({"DoGE": [lost, *rows[labels[0]]]}, "uniform")
    assert not figure.axes[0].containers
    curves = {label: ([1], [float(i)]) for i, label in enumerate(["uniform", *labels])}
    assert list(extremes(curves, "uniform")) == ["uniform", *labels[:3], *labels[-3:]]
    few = dict(list(curves.items())[:8])
    assert extremes(few, "uniform") == few


@pytest.mark.parametrize("mu", [0.0, -1.0, math.nan, math.inf])
def test_a_mu_that_is_none_is_refused_before_anything_is_trained(
    experiment: Make, mu: float
) -> None:
    config = experiment("universal", mu=mu)
    with pytest.raises(ValueError, match="mu must be positive and finite; got"):
        run_experiment(config)
    assert config.out is not None
    assert not config.out.exists()


def test_another_target_has_a_pace_of_its_own() -> None:
    """W towards one target spreads less than towards all; a mu that was asked for is kept."""
    names = tuple("abcdefg")
    for changes, mus in (
        ({}, {"as-set": 0.08, "target-mix": 0.02}),
        ({"target_batch": "mix"}, {"as-set": 0.02, "target-same-batch": 0.08}),
        ({"mu": 0.03}, {"as-set": 0.03, "target-mix": 0.03}),
    ):
        plan = planned(ExperimentConfig("settings", data="x", preset="small", **changes), names)
        found = {
            job.config.out.name: job.config.mu
            for job in plan.jobs
            if isinstance(job.config, ProxyConfig)
        }
        for name, mu in mus.items():
            assert found[f"proxy-{name}-seed0"] == pytest.approx(mu)


def test_only_the_plan(experiment: Make) -> None:
    config = experiment("scales", plan=True)
    assert config.out is not None
    lines = run_experiment(config)
    assert [line.split()[-1] for line in lines] == [
        f"proxy-{model}-seed0" for model in ("tiny", "mini", "small")
    ]
    assert not config.out.exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "ood", "targets": ("nowhere",)}, "targets must name domains of"),
        ({"name": "wiki40b"}, "targets must name domains of"),
        ({"name": "wiki40b", "data": None}, "wiki40b needs text in several languages"),
        ({"name": "scales", "proxy_models": ("tiny",)}, "proxy_models must name three sizes"),
        ({"seeds": (1, 1)}, "Seeds must differ"),
        ({"domains": ("nowhere", "code")}, "domains must name domains of"),
        ({"learning_rate": 1e-5}, "min_learning_rate must be at most learning_rate"),
        ({"name": "ood", "domains": ("code",), "targets": ("code",)}, "ood needs a domain"),
        ({"name": "curriculum", "base_steps": 1}, "curriculum needs runs of 2 steps"),
    ],
)
def test_refusals(experiment: Make, changes: dict[str, Any], sentence: str) -> None:
    config = experiment(changes.pop("name", "scales"), **changes)
    with pytest.raises(ValueError, match=sentence):
        run_experiment(config)
    assert config.out is not None
    assert not config.out.exists()


# The paper's own size, of which only the plan can be looked at here.


def planned(config: ExperimentConfig, names: Sequence[str] | None = None) -> Plan:
    names = names or runner._domains_of(config, presets.settings_of(config))
    return plan_of(config, settled(config, names), names, config.out or Path("x"))


def test_the_papers_universal_experiment() -> None:
    plan = planned(ExperimentConfig("universal", preset="paper"))
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


def test_a_target_is_never_trained_on_but_by_the_oracle_and_afterwards() -> None:
    config = ExperimentConfig("ood", preset="paper", targets=("RedPajamaGithub",))
    for job in planned(config).jobs:
        name, stage = job.config.out.name, job.config
        assert isinstance(stage, ProxyConfig | BaseConfig)
        trains = "RedPajamaGithub" in stage.corpus.domains
        assert trains == name.startswith(("base-uniform-with-", "finetuned-")), name


@pytest.mark.parametrize("preset", ["small", "paper"])
@pytest.mark.parametrize("name", get_args(Experiment))
def test_runs_come_after_what_they_read(name: Any, preset: Any) -> None:
    names = None
    config = ExperimentConfig(name, preset=preset)
    if preset == "small":
        config = replace(config, data="nowhere")
        names = (*SLIMPAJAMA, "en", "de", "fr", "es", "ru", "ca", "nl")
    seen: set[Path] = set()
    for job in planned(config, names).jobs:
        for needed in needs(job.config):
            assert needed in seen, (job.config.out, needed)
        seen.add(job.config.out)
    assert seen


def test_the_papers_languages() -> None:
    plan = planned(ExperimentConfig("wiki40b", preset="paper"))
    corpora = [job.config.corpus for job in plan.jobs if isinstance(job.config, ProxyConfig)]
    assert {corpus.domains for corpus in corpora} == {("en", "de", "fr", "es", "ru")}
    assert {(corpus.data, corpus.domain_column) for corpus in corpora} == {("google/wiki40b", None)}
    # Two targets, two seeds.
    assert len(corpora) == 4


def needs(config: Any) -> Iterator[Path]:
    if isinstance(config, BaseConfig):
        if config.weights not in ("uniform", "natural"):
            yield Path(config.weights)
        if config.model.pretrained:
            yield Path(config.model.model).parent
    if isinstance(config, DoReMiConfig):
        yield config.reference
    if isinstance(config, ProxyConfig) and config.selection is not None:
        yield config.selection.parent
    assert isinstance(config, BaseConfig | DoReMiConfig | ProxyConfig | SelectConfig)


# The verdict, of records written by hand.


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ((-0.02, -0.021, -0.019), "DoGE beats uniform"),
        ((0.02, 0.021, 0.019), "DoGE loses to uniform"),
        ((0.02, -0.03, 0.001), "DoGE comes out below uniform on average, which 3 seeds cannot"),
        ((-0.02,), "DoGE comes out below uniform in the one seed, which one seed cannot"),
        ((0.0, 0.0), "DoGE and uniform come out the same"),
        ((math.nan, 0.1), "DoGE or uniform diverged"),
    ],
)
def test_the_headline_is_whoever_wins_as_far_as_seeds_tell(
    tmp_path: Path, changes: Sequence[float], headline: str
) -> None:
    found = findings_of(open_experiment(write_experiment(tmp_path / "e", changes)))
    assert found.verdicts[0].headline.startswith(headline)


def test_the_sentence_gives_the_paired_interval(tmp_path: Path) -> None:
    out = write_experiment(tmp_path / "e", (-0.02, -0.03, -0.025))
    found = findings_of(open_experiment(out))
    (sentence, *_) = found.verdicts[0].sentences
    # The seeds' own spread, a hundred times as large, is not in it.
    assert "better on 7 of 7 than uniform; average −2.5\N{NO-BREAK SPACE}% [−3.7, −1.3]" in sentence
    assert "over 3 paired seeds" in sentence


def test_a_page_of_unfinished_runs_says_so(tmp_path: Path) -> None:
    out = write_experiment(tmp_path / "e", (-0.02, -0.03))
    record = json.loads((out / "experiment.json").read_text())
    record["runs"].append("doge-seed2")
    (out / "experiment.json").write_text(json.dumps(record))
    page = report.write_experiment_report(out)
    assert "1 run of 7 not complete yet, so left out: doge-seed2" in page.read_text()


# Averages and curricula.


def test_the_drift_of_an_average_leaves_out_what_it_leaves_out(
    proxy: Callable[..., ProxyConfig],
) -> None:
    """Of the steps 4, 5 and 6 the last fifth begins after 5.4."""
    from doge_fast.pipeline.proxy import learn_weights

    config = proxy("late-drift", steps=6, mu=0.001, average_from=0.5)
    learn_weights(config)
    lines = {line["step"]: line["alpha"] for line in records.read_metrics(config.out, kind="train")}
    expected = sum(
        abs((lines[4][name] + lines[5][name] + lines[6][name]) / 3 - (lines[4][name] + before) / 2)
        for name, before in lines[5].items()
    )
    assert expected > 0
    assert records.read_weights(config.out)["drift"] == pytest.approx(expected, rel=1e-5)
    (learned,) = study.read_study([config.out]).proxies
    assert learned.drift()[1][-1] == pytest.approx(expected, rel=1e-5)


def test_an_average_may_leave_out_the_early_steps(proxy: Callable[..., ProxyConfig]) -> None:
    from doge_fast.pipeline.proxy import learn_weights

    config = proxy("late", steps=6, mu=0.001, average_from=0.5)
    learn_weights(config)
    lines = {line["step"]: line["alpha"] for line in records.read_metrics(config.out, kind="train")}
    for name, weight in records.weights_by_name(records.read_weights(config.out)).items():
        assert weight == pytest.approx(sum(lines[step][name] for step in (4, 5, 6)) / 3, rel=1e-5)
    with pytest.raises(ValueError, match="average_from must be a share of the steps"):
        learn_weights(proxy("never", average_from=1.0))


def test_a_curriculum_takes_the_proxys_means_stage_by_stage(
    proxy: Callable[..., ProxyConfig], base: Callable[..., BaseConfig]
) -> None:
    from doge_fast.pipeline import base as stage_two
    from doge_fast.pipeline.domains import load_corpus
    from doge_fast.pipeline.proxy import learn_weights

    source = proxy("source", steps=6, mu=0.001)
    learn_weights(source)
    lines = {line["step"]: line["alpha"] for line in records.read_metrics(source.out, kind="train")}
    config = base("curriculum", weights=str(source.out), steps=9, stages=3)
    stages = stage_two.resolve_phases(config, load_corpus(config.corpus))
    assert [stage.first_step for stage in stages] == [0, 3, 6]
    for place, stage in enumerate(stages):
        first, second = lines[2 * place + 1], lines[2 * place + 2]
        for name, weight in stage.weights.items():
            assert weight == pytest.approx((first[name] + second[name]) / 2, rel=1e-6)
    stage_two.train_base(config)
    used = records.read_weights(config.out)
    assert [each["first_step"] for each in used["stages"]] == [0, 3, 6]
    average = records.weights_by_name(records.read_weights(source.out))
    for name, weight in records.weights_by_name(used).items():
        assert weight == pytest.approx(average[name], rel=1e-5)
    # A resumed run reads back what it used, to the bit.
    again = stage_two.resolve_phases(config, load_corpus(config.corpus))
    assert again == tuple(Phase(each.first_step, dict(each.weights)) for each in stages)


@pytest.mark.parametrize(
    ("weights", "stages", "sentence"),
    [("uniform", 2, "needs the run directory of a proxy"), ("uniform", 9, "stages")],
)
def test_a_curriculum_without_a_proxy_is_refused(
    base: Callable[..., BaseConfig], weights: str, stages: int, sentence: str
) -> None:
    from doge_fast.pipeline.base import train_base

    config = base("refused", weights=weights, stages=stages)
    with pytest.raises(ValueError, match=sentence):
        train_base(config)
    assert not config.out.exists()
