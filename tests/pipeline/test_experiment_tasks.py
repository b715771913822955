"""Base models of an experiment, scored on lm-eval's tasks."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: the extra fewshot")

from doge_fast.pipeline import fewshot, records
from doge_fast.pipeline.config import ExperimentConfig
from doge_fast.pipeline.experiments.runner import run_experiment
from doge_fast.pipeline.reporting.sections import sections_of
from doge_fast.pipeline.reporting.study import open_study
from doge_fast.pipeline.tables import Table
from doge_fast.pipeline.trainer import RecordedTrainer
from tests.pipeline.task_documents import write_documents
from tests.pipeline.written_runs import write_experiment

TASKS = ("copa", "wic")


@pytest.fixture(scope="module")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("tasks"), *TASKS)


def tables_of(folder: Path) -> list[Table]:
    return [table for part in sections_of(open_study([folder])) for table in part.tables]


def refused(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("what was done is done again")


@pytest.mark.exhaustive
def test_tasks_may_be_added_to_what_was_trained_and_are_scored_once(
    experiment: Callable[..., ExperimentConfig],
    task_data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = experiment("curriculum", seeds=(0, 1))
    before, _ = run_experiment(config)
    assert "copa" not in before
    monkeypatch.setattr(RecordedTrainer, "go_on", refused)
    asked = {"tasks": ("copa,wic",), "shots": 1, "task_data": task_data}
    config = experiment("curriculum", seeds=(0, 1), tasks=asked)
    table, page = run_experiment(config)
    assert config.out is not None
    runs = [path.parent for path in sorted((config.out / "runs").glob("base-*/model"))]
    scored = {run.name: records.read_few_shot(run) for run in runs}
    assert scored
    assert all(tuple(record["tasks"]) == TASKS for record in scored.values())
    assert all(word in table for word in ("copa", "wic", "chance", "50.0"))
    assert "Tasks:" in Path(page.removeprefix("report: ")).read_text(encoding="utf-8")
    whole = tables_of(config.out)
    monkeypatch.setattr(fewshot, "few_shot", refused)
    assert run_experiment(config)[0] == table
    # Other documents are another question.
    file = task_data / "copa" / "validation.jsonl"
    text = file.read_text(encoding="utf-8")
    file.write_text("".join(text.splitlines(keepends=True)[1:]), encoding="utf-8")
    with pytest.raises(RuntimeError, match="done again"):
        run_experiment(config)
    file.write_text(text, encoding="utf-8")
    assert run_experiment(config)[0] == table
    (runs[0] / "fewshot.json").unlink()
    # The perplexities of that run are still known, and so is the other seed of its arm.
    tables = tables_of(config.out)
    assert [table.title for table in tables] == [table.title for table in whole]
    told = [table == other for table, other in zip(tables, whole, strict=True)]
    assert [table.title for table, same in zip(tables, told, strict=True) if not same] == [
        "Tasks: Base models of size tiny"
    ]


def test_accuracies_have_the_error_of_seeds_and_of_documents(tmp_path: Path) -> None:
    write_experiment(tmp_path, [0.0] * 3)
    record = records.read_experiment(tmp_path)
    group = {"kind": "tasks", "title": "Tasks", "arms": record["groups"][0]["arms"], "focus": None}
    group |= {"tasks": ["copa"], "shots": 2, "task_limit": None, "task_data_sha256": None}
    groups = [*record["groups"], group]
    records.write_json(tmp_path / records.EXPERIMENT, record | {"groups": groups})
    for seed in range(3):
        score = {
            "acc": 0.5 + 0.1 * seed,
            "acc_stderr": 0.02,
            "chance": 0.5,
            "truncated_requests": 3,
        }
        setting = {"shots": 2, "fewshot_seed": 0, "positions": 32}
        told = records.few_shot(step=1, tasks={"copa": score}, setting=setting)
        records.write_json(tmp_path / "runs" / f"uniform-seed{seed}" / records.FEWSHOT, told)
    (table,) = [each for each in tables_of(tmp_path) if each.title == "Tasks"]
    assert "Prompts were cut" in table.note
    error = math.hypot(10 / math.sqrt(3), 2)
    assert [cell.text for cell in table.rows[0].cells] == [f"60.0 ± {error:.1f}", "50.0"]


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("scales", {}, "scales does not. doge-fast evaluate RUN --tasks scores any base run"),
        ("universal", {"tasks": ("copaa",)}, "no task 'copaa'"),
        ("universal", {"shots": 50}, "50 shots need at least 51 documents"),
        ("universal", {"task_data": Path("nowhere")}, "nowhere/copa/train.jsonl does not exist"),
    ],
)
def test_what_cannot_be_scored_is_said_before_anything_is_trained(
    experiment: Callable[..., ExperimentConfig],
    task_data: Path,
    name: str,
    changes: dict[str, Any],
    text: str,
) -> None:
    config = experiment(name, tasks={"tasks": ("copa",), "task_data": task_data} | changes)
    with pytest.raises(ValueError, match=text):
        run_experiment(config)
    assert config.out is not None
    assert not config.out.exists()
