"""Corpora whose best mixture is known: how they are made, and what is said of the weights."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from doge_fast.pipeline import generated_corpus, records, stage
from doge_fast.pipeline.config import ExperimentConfig
from doge_fast.pipeline.config.fields import filled
from doge_fast.pipeline.experiments import presets
from doge_fast.pipeline.experiments.plans import plan_of
from doge_fast.pipeline.experiments.runner import run_experiment
from doge_fast.pipeline.reporting import regret
from doge_fast.pipeline.reporting.study import open_study

Make = Callable[..., ExperimentConfig]


def documents(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


def test_every_case_is_made_and_judged(
    experiment: Make, small_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = experiment("known", proxy={"steps": 1}, base={"steps": 1, "eval_points": 1})
    assert config.out is not None
    table, _ = run_experiment(config)
    corpora = config.out / "corpora"
    given = {file.stem: documents(file) for file in small_corpus.glob("*.jsonl")}

    def made(case: str, name: str) -> list[str]:
        return documents(corpora / case / name / "train.jsonl")

    # Noise: the same words of every document, in another order; the others as they were.
    assert [sorted(text.split()) for text in made("noise", "code")] == [
        sorted(text.split()) for text in given["code"]
    ]
    assert not set(made("noise", "code")) & set(given["code"])
    # Twins: the same text under two names.
    assert made("twins", "code-again") == made("twins", "code") == given["code"]
    # Hidden: a tenth of the characters, within a document.
    hidden = made("hidden", "code")
    target = set(given["verse"])
    strange = sum(len(text) for text in hidden if text in target)
    assert strange / sum(map(len, hidden)) == pytest.approx(0.1, abs=0.02)
    assert {text in target for text in hidden[: len(hidden) // 3]} == {True, False}
    # Groups: not a letter is common, and nothing is lost.
    for name in ("table", "verse"):
        foreign = made("groups", name)
        assert not any("a" <= letter <= "z" for text in foreign for letter in text)
        assert len(set(foreign)) == len(set(given[name]))
        assert [text.count(" ") for text in foreign] == [text.count(" ") for text in given[name]]
    for case, others in {"noise": ("prose",), "twins": ("prose",), "groups": ("code",)}.items():
        assert all(made(case, name) == given[name] for name in others)

    study = open_study([config.out])
    found = {
        group["title"].split(":")[0]: regret.regrets_of(study, group) for group in study.groups[:4]
    }
    uniform = {"Noise": 1 / 4, "Twins": 2 / 5, "Hidden": 1 / 3, "Groups": 2 / 3}
    for case, share in uniform.items():
        methods = found[case].methods
        assert methods[0].label == "uniform"
        shares = [method.share for method in methods]
        assert shares[0] == pytest.approx(share)
        odds = [each / (1 - each) / (share / (1 - share)) for each in shares[1:4]]
        assert odds == pytest.approx([1 / 2, 2, 8] if case == "Hidden" else [1 / 8, 1 / 2, 2])
        labels = [method.label for method in methods[4:]]
        assert labels == {
            "Hidden": ["share 0.941", "DoGE"],
            "Twins": ["DoGE", "DoGE, all as targets"],
        }.get(case, ["DoGE"])
        measured = [method.measured.mean for method in methods]
        assert min(measured) == 0 < max(measured)
    assert "code should get less than uniform weights give, 0.250; DoGE gives 0.2" in table
    assert "code should get more than uniform weights give, 0.333; DoGE gives 0.3" in table
    twins, unaware = (
        records.read_config(config.out / "runs" / f"proxy-{name}-seed0")["config"]["target"]
        for name in ("twins", "twins-universal")
    )
    assert twins == ["code", "prose", "table", "verse"]
    assert unaware == ["universal"]
    # Nothing is made twice.
    monkeypatch.setattr(stage, "train", None)
    before = {file: file.stat().st_mtime_ns for file in corpora.rglob("*.jsonl")}
    assert run_experiment(config)[0] == table
    assert {file: file.stat().st_mtime_ns for file in before} == before


def test_without_a_corpus_text_is_generated(tmp_path: Path) -> None:
    config = replace(presets.preset_of("known", "smoke"), out=tmp_path / "known")
    assert presets.known_domains(config) == generated_corpus.DOMAINS
    lines = "\n".join(run_experiment(replace(config, plan=True)))
    assert "--only proxy-hidden-seed0" in lines
    first, again, other = (
        list(generated_corpus.documents(name, 20)) for name in ("alpha", "alpha", "beta")
    )
    assert first == again != other
    words, others = ({word for text in texts for word in text.split()} for texts in (first, other))
    # Half of the words are everybody's.
    assert 0.3 < len(words & others) / len(words) < 0.7


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"corpus": {"domains": ("code", "prose", "verse")}}, "known needs 4 domains and more"),
        ({"targets": ("nowhere",)}, "targets must name domains of"),
        ({"targets": ("code", "prose")}, "known has one target; got code, prose"),
    ],
)
def test_refusals(experiment: Make, changes: dict[str, object], sentence: str) -> None:
    config = experiment("known", **changes)
    with pytest.raises(ValueError, match=sentence):
        run_experiment(config)
    assert config.out is not None
    assert not config.out.exists()


def test_the_target_is_a_domain_in_use(tmp_path: Path) -> None:
    changes = {"corpus": {"domains": tuple("abcd")}, "targets": ("e",)}
    config = filled(presets.preset_of("known", data="x"), changes)
    with pytest.raises(ValueError, match="which are a, b, c, d; e is not among them"):
        plan_of(config, tuple("abcde"), tmp_path)
