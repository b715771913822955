"""What is kept of an experiment tells the same story as its runs; the pages tell no other."""

import json
import math
import re
from pathlib import Path

import pytest

from benchmarks import aligned, evidence, figure, known, temperature
from doge_fast import cli
from doge_fast.pipeline import records
from doge_fast.pipeline.report import terminal_table
from doge_fast.pipeline.reporting.statistics import change_of, paired_difference
from doge_fast.pipeline.tables import PIPE_WIDTH
from tests.pages import ROOT, blocks_of
from tests.pipeline.written_runs import write_experiment

PAGE = ROOT / "docs" / "evidence.md"
RESULTS = ROOT / "benchmarks" / "results"


def test_kept_records_make_the_tables_of_the_experiment(tmp_path, capsys):
    experiment = write_experiment(tmp_path / "experiment", (-0.02, -0.021, -0.019))
    kept, again = tmp_path / "kept.json", tmp_path / "again"
    assert evidence.main(["pack", str(experiment), str(kept)]) == 0
    assert evidence.main(["unpack", str(kept), str(again)]) == 0
    capsys.readouterr()
    assert cli.main(["report", str(again)]) == 0
    assert capsys.readouterr().out.startswith(terminal_table([experiment]))


def test_kept_records_have_every_evaluation_and_the_largest_gradient():
    lines = [{"step": step, "kind": "train"} for step in range(1, 1001)]
    lines[649]["grad_norm"] = {"a": 54.0, "b": None}
    lines[500:500] = [{"step": 500, "kind": "eval"}]
    thin = evidence.thinned(lines, 11)
    assert {1, 650, 1000} < {line["step"] for line in thin if line["kind"] == "train"}
    assert [line["step"] for line in thin if line["kind"] == "eval"] == [500]
    assert len(thin) == 13
    assert evidence.thinned(lines[:5], 11) == lines[:5]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All tables that the kept records make."""
    folder = tmp_path_factory.mktemp("kept")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(PIPE_WIDTH))
        for file in sorted(RESULTS.glob("evidence-*.json")):
            if file.stem.endswith("-unbiased"):
                # Commit a3f4879 is the last one that has this score.
                continue
            record = json.loads(file.read_text(encoding="utf-8"))
            if table := evidence.TABLES.get(record["benchmark"]):
                found.append(table(record))
                continue
            found.append(evidence.tables_of(record, folder / file.stem))
        for name in ("regret", "universal-long"):
            found.append(evidence.against_doge(folder / f"evidence-{name}"))
    return "\n".join(found)


@pytest.mark.exhaustive
def test_page_shows_what_the_kept_records_say(tables):
    shown = [block.text.strip() for block in blocks_of(PAGE) if block.language == "none"]
    assert shown
    assert [block for block in shown if block not in tables] == []


@pytest.mark.exhaustive
def test_percentages_in_running_text_stand_in_a_table(tables):
    numbers = set(re.findall(r"\d+\.\d+", tables))
    # What an earlier commit measured has figures and no table.
    before = r"^##+ (Tried and refused|Where the answer is known)$.*?(?=^##|\Z)"
    page = re.sub(before, "", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    running = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
    percent = set(re.findall(r"(\d+\.\d+)\s%", running))
    assert percent
    assert percent <= numbers


def test_readme_says_what_one_proxy_gains():
    changes = []
    for question in figure.TARGETS:
        file = figure.RESULTS / f"evidence-one-proxy-{question}.json"
        own, uniform = (
            {
                each["seed"]: each["methods"][way]["loss"]
                for each in records.read_json(file)["seeds"]
            }
            for way in (temperature.ALIGNED, "uniform")
        )
        changes.append(change_of(paired_difference(own, uniform)))
    assert len(changes) == 7
    decided = [100 * mean for mean, _, high in changes if high < 0]
    assert len(decided) == 6
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    told = f"lowered perplexity by {-max(decided):.0f} to {-min(decided):.0f} %"
    assert "six of seven texts" in page
    assert told in page


@pytest.mark.parametrize("file", ["benchmarks/steps.svg", "evidence/targets.svg"])
def test_kept_figures_show_the_kept_records(file, tmp_path):
    kept = (ROOT / "docs" / "_static" / file).read_text(encoding="utf-8")
    assert figure.main([Path(file).stem, str(tmp_path / "drawn.svg")]) == 0
    drawn = (tmp_path / "drawn.svg").read_text(encoding="utf-8")
    # Words, and where points and lines are.
    for part in (r">([^<>\n]+)</text>", r' d="(M [^"]+)"', r'<use [^>]*x="([-.\d]+)"'):
        assert re.findall(part, drawn) == re.findall(part, kept)


def test_table_of_temperature_pairs_the_seeds():
    def seed(uniform: float, measured: float) -> records.Json:
        methods = {
            name: {"weights": {"a": 0.5, "b": 0.5}, "trainings": cost, "loss": loss}
            for name, loss, cost in (("uniform", uniform, 0), (temperature.MEASURED, measured, 6))
        }
        return {"inverse_temperature": 2.0, "methods": methods}

    # The seeds differ by a whole nat, the methods by a tenth in each.
    record = {"seeds": [seed(5.0, 4.9), seed(6.0, 5.9)], "target": ["c"], "steps": 1000}
    assert f"{100 * (math.exp(-0.1) - 1):.1f} %" in temperature.table(record)


def test_table_of_one_proxy_compares_the_aligned_rule():
    def methods(**losses: float) -> records.Json:
        return {
            name.replace("_", " "): {"weights": {"a": 1.0}, "trainings": 1, "loss": loss}
            for name, loss in losses.items()
        }

    seeds = [{"methods": methods(uniform=5.0 + s, DoGE=4.9 + s, aligned=4.7 + s)} for s in (0, 1)]
    printed = temperature.table({"seeds": seeds, "target": ["c"], "steps": 1000})
    assert "aligned against it" in printed
    for change in (-0.3, -0.2, -0.1):
        assert f"{100 * math.expm1(change):.1f} %" in printed


def test_table_of_variants_pairs_the_seeds_that_both_have():
    def seed(number: int, **losses: float) -> records.Json:
        return {"seed": number, "methods": {name: {"loss": loss} for name, loss in losses.items()}}

    seeds = [seed(0, uniform=5.0, rule=4.9, other=4.5), seed(1, uniform=6.0, rule=5.9)]
    printed = aligned.table({"seeds": seeds}).splitlines()
    assert "-9.5, -9.5" in printed[3]
    assert f"{100 * math.expm1(-0.5):.1f} %" in printed[4]
    assert f"{100 * math.expm1(-0.4):.1f} %" in printed[4]


@pytest.mark.exhaustive
def test_variants_of_the_rule_are_trained_and_judged(tmp_path, capsys):
    known.main([str(tmp_path / "known")])
    words = [str(tmp_path / "run"), "--data", str(tmp_path / "known" / "hidden"), "--steps", "24"]
    words += ["--target", "eta", "--domains", "alpha", "beta", "gamma", "--seeds", "0"]
    variants = ["rule", "exact, 50 steps", "step before", "Euclidean metric"]
    for _ in range(2):
        assert aligned.main([*words, "--vocab-size", "300", "--variants", *variants]) == 0
    (seed,) = json.loads((tmp_path / "run" / aligned.RECORD).read_text("utf-8"))["seeds"]
    assert list(seed["methods"]) == ["uniform", *variants]
    for method in seed["methods"].values():
        assert sum(method["weights"].values()) == pytest.approx(1)
        assert math.isfinite(method["loss"])
    weights = [tuple(method["weights"].values()) for method in seed["methods"].values()]
    assert len(set(weights)) == len(weights)
    first, second = capsys.readouterr().out.split("weights ")[-2:]
    assert first.splitlines()[:6] == second.splitlines()[:6]


@pytest.mark.exhaustive
def test_weights_of_a_record_are_judged_again_and_by_longer_models(tmp_path):
    known.main([str(tmp_path / "known")])
    words = ["--data", str(tmp_path / "known" / "hidden"), "--target", "eta", "--seeds", "0"]
    words += ["--domains", "alpha", "beta", "gamma", "--model", "micro", "--vocab-size", "300"]

    def losses(*arguments: str) -> dict[str, float]:
        out = tmp_path / arguments[0]
        assert temperature.main([str(out), *words, *arguments[1:]]) == 0
        (seed,) = json.loads((out / temperature.RECORD).read_text(encoding="utf-8"))["seeds"]
        return {name: each["loss"] for name, each in seed["methods"].items()}

    own = losses("own", "--steps", "24", "--one-proxy", "--no-others")
    assert own.keys() == {"uniform", temperature.ALIGNED}
    record = str(tmp_path / "own" / temperature.RECORD)
    assert losses("again", "--steps", "24", "--weights", record) == own
    longer = losses("longer", "--steps", "48", "--weights", record)
    assert all(longer[name] < own[name] for name in own)
