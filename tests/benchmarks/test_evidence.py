"""What is kept of an experiment tells the same story as the runs did."""

import json
import re
from itertools import pairwise

import pytest

from benchmarks import evidence, figure, temperature
from doge_fast import cli
from doge_fast.pipeline import records
from doge_fast.pipeline.report import terminal_table
from doge_fast.pipeline.reporting.runs import open_runs
from doge_fast.pipeline.tables import PIPE_WIDTH
from tests.pages import ROOT, blocks_of
from tests.pipeline.written_runs import write_experiment

PAGE = ROOT / "docs" / "evidence.md"
RESULTS = ROOT / "benchmarks" / "results"


def test_the_kept_records_make_the_same_tables_and_the_page(tmp_path, capsys):
    experiment = write_experiment(tmp_path / "experiment", (-0.02, -0.021, -0.019))
    kept, again = tmp_path / "kept.json", tmp_path / "again"
    assert evidence.main(["pack", str(experiment), str(kept)]) == 0
    assert evidence.main(["unpack", str(kept), str(again)]) == 0
    capsys.readouterr()
    assert cli.main(["report", "--runs", str(again)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(terminal_table([experiment]))
    assert printed.endswith(f"report: {again / 'report.html'}\n")
    assert "DoGE: perplexity 2.0" in (again / "report.html").read_text(encoding="utf-8")


def test_the_size_of_a_model_is_kept(tmp_path):
    experiment = write_experiment(tmp_path / "experiment", (-0.02,))
    (run, *_) = sorted((experiment / "runs").iterdir())
    file = run / records.CONFIG
    records.write_json(file, records.read_json(file) | {"parameters": 22})
    again = evidence.unpack(evidence.packed(experiment), tmp_path / "again")
    (kept,) = open_runs([again / "runs" / run.name])
    assert kept.record.parameters == 22


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """{experiment: its tables}, from the records that are kept."""
    folder = tmp_path_factory.mktemp("kept")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(PIPE_WIDTH))
        for file in sorted(RESULTS.glob("evidence-*.json")):
            if file.stem.endswith("-unbiased"):
                # Commit a3f4879 is the last one that has this score.
                continue
            record = json.loads(file.read_text(encoding="utf-8"))
            if record["benchmark"] == "temperature":
                found[file.stem] = temperature.table(record)
                continue
            found[file.stem] = terminal_table([evidence.unpack(record, folder / file.stem)])
        for name in ("regret", "universal-long"):
            found[f"{name} against DoGE"] = evidence.against_doge(folder / f"evidence-{name}")
    return found


@pytest.mark.exhaustive
def test_the_page_shows_what_the_kept_records_say(told):
    shown = [block.text.strip() for block in blocks_of(PAGE) if block.language == "none"]
    assert shown
    for block in shown:
        assert any(block in each for each in told.values()), block


@pytest.mark.exhaustive
def test_percentages_in_running_text_stand_in_a_table(told):
    numbers = set(re.findall(r"\d+\.\d+", "\n".join(told.values())))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    # What an earlier commit measured has figures and no table.
    before = r"^##+ (Tried and refused|Where the answer is known)$.*?(?=^##|\Z)"
    running = re.sub(
        r"^```.*?^```$", "", re.sub(before, "", page, flags=re.M | re.S), flags=re.M | re.S
    )
    for text in (readme, running):
        percent = re.findall(r"(\d+\.\d+)\s%", text)
        assert percent
        assert set(percent) <= numbers


def test_few_lines_of_a_training_are_kept_and_all_its_evaluations(tmp_path):
    lines = [{"step": step, "kind": "train"} for step in range(1, 1001)]
    lines[500:500] = [{"step": 500, "kind": "eval"}]
    lines.append({"step": 1000, "kind": "eval"})
    thin = evidence.thinned(lines, 11)
    assert [line["step"] for line in thin if line["kind"] == "eval"] == [500, 1000]
    steps = [line["step"] for line in thin if line["kind"] == "train"]
    assert (steps[0], steps[-1], len(steps)) == (1, 1000, 11)
    assert max(b - a for a, b in pairwise(steps)) <= 101
    assert evidence.thinned(lines[:5], 11) == lines[:5]
    lines[700]["grad_norm"] = {"a": 54.0, "b": None}
    assert set(steps) | {lines[700]["step"]} == {
        line["step"] for line in evidence.thinned(lines, 11) if line["kind"] == "train"
    }


def test_a_record_of_no_experiment_is_told_from_one_and_nothing_is_overwritten(tmp_path, capsys):
    file = RESULTS / "evidence-temperature-ca.json"
    assert evidence.main(["compare", str(file)]) == 0
    assert f"{temperature.MEASURED}        438.3" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"benchmarks\.temperature"):
        evidence.main(["unpack", str(file), str(tmp_path / "again")])
    assert not (tmp_path / "again").exists()
    experiment = write_experiment(tmp_path / "experiment", (-0.02,))
    with pytest.raises(ValueError, match="exists; name a directory that does not"):
        evidence.unpack(evidence.packed(experiment), experiment)


def test_the_kept_figure_shows_the_kept_records(tmp_path):
    kept = (ROOT / "docs" / "_static" / "benchmarks" / "steps.svg").read_text(encoding="utf-8")
    assert figure.main([str(tmp_path / "steps.svg")]) == 0
    drawn = (tmp_path / "steps.svg").read_text(encoding="utf-8")
    words = re.compile(r">([^<>\n]+)</text>")
    assert words.findall(drawn) == words.findall(kept)
    records = [json.loads(file.read_text("utf-8")) for file in figure.RESULTS.glob("peers-*.json")]
    for record in records:
        for row in record["rows"]:
            if row["peer"] in figure.LABELS:
                assert f"{row['ratio']:.2f}" in words.findall(kept)
