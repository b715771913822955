"""Tasks as a target: texts are what lm-eval scores, and nothing of the scored split is in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from doge_fast import cli
from doge_fast.pipeline.config import TargetConfig
from tests.pipeline.task_documents import read, write_documents

pytest.importorskip("lm_eval", reason="lm-eval is not installed: the extra fewshot")

from doge_fast.pipeline.task_target import write_target


def copa(document: dict[str, Any]) -> str:
    choice = document[("choice1", "choice2")[document["label"]]]
    word = {"cause": "because", "effect": "therefore"}[document["question"]]
    return f"{document['premise'].strip()[:-1]} {word}  {choice[0].lower()}{choice[1:]}"


def piqa(document: dict[str, Any]) -> str:
    return f"Question: {document['goal']}\nAnswer: {document[('sol1', 'sol2')[document['label']]]}"


def winogrande(document: dict[str, Any]) -> str:
    return document["sentence"].replace("_", document[f"option{document['answer']}"])


WRITTEN: dict[str, Callable[[dict[str, Any]], str]] = {
    "copa": copa,
    "piqa": piqa,
    "winogrande": winogrande,
}


@pytest.fixture
def task_data(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    return write_documents(tmp_path / "tasks", *WRITTEN)


def test_a_text_is_the_question_with_its_right_answer(task_data, tmp_path):
    out = tmp_path / "corpus" / "tasks.jsonl"
    # The same text may lie there already.
    for _ in range(2):
        write_target(TargetConfig(tuple(WRITTEN), out=out, task_data=task_data))
    expected = [
        {"text": written(document), "task": task}
        for task, written in WRITTEN.items()
        for document in read(task_data / task / "train.jsonl")
    ]
    assert read(out) == expected


def test_what_is_scored_is_left_out(task_data, tmp_path, capsys):
    train, scored = (task_data / "piqa" / f"{split}.jsonl" for split in ("train", "validation"))
    leaked, *others = train.read_text(encoding="utf-8").splitlines(keepends=True)
    scored.write_text(scored.read_text(encoding="utf-8") + leaked, encoding="utf-8")
    out = tmp_path / "piqa.jsonl"
    words = ["target", "piqa", "--task-data", str(task_data), "--out", str(out)]
    assert cli.main([*words, "--task-limit", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["piqa", "3", "1"]
    assert [line["text"] for line in read(out)] == [piqa(json.loads(each)) for each in others[:3]]


def test_a_task_without_a_training_split_is_refused(tmp_path, monkeypatch):
    # As lm-eval finds it on the Hub: scored on its only split.
    asked = {"question": "Is it?", "mc1_targets": {"choices": ["no", "yes"], "labels": [1, 0]}}
    there = datasets.DatasetDict({"validation": datasets.Dataset.from_list([asked])})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: there)
    with pytest.raises(ValueError, match="names no training split of truthfulqa_mc1"):
        write_target(TargetConfig(("truthfulqa_mc1",), out=tmp_path / "truth.jsonl"))
    assert not (tmp_path / "truth.jsonl").exists()
