"""Accuracies are lm-eval's and say what was cut."""

import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import processors
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from doge_fast import cli
from doge_fast.pipeline import records
from doge_fast.pipeline.config import BaseConfig, EvaluateConfig, TasksConfig
from doge_fast.pipeline.domains import Corpus
from tests.pipeline.corpora import write_jsonl
from tests.pipeline.task_documents import CHOICES, document, read, write_documents

pytest.importorskip("lm_eval", reason="lm-eval is not installed: the extra fewshot")
from lm_eval.models.huggingface import HFLM

from doge_fast.pipeline.fewshot import PAPER_TASKS, accuracy_table, few_shot

Ask = Callable[..., EvaluateConfig]


@pytest.fixture(scope="module")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("tasks"), *PAPER_TASKS)


@pytest.fixture(scope="module")
def make_run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A finished run whose random model has so many positions."""

    def make(positions: int) -> Path:
        out = tmp_path_factory.mktemp("runs") / "base"
        described = corpus.describe()
        records.open_run(BaseConfig(out=out), corpus=described)
        torch.manual_seed(7)
        shape = {"n_positions": positions, "n_layer": 1, "n_head": 2, "n_embd": 32}
        # Wide weights: choices of a fresh model are otherwise nearly as likely as each other.
        wide = GPT2Config(vocab_size=corpus.vocab_size, initializer_range=0.4, **shape)
        model = GPT2LMHeadModel(wide)
        model.save_pretrained(out / "model")
        corpus.tokenizer.save_pretrained(out / "model")
        records.write_manifest(out / "model")
        return out

    return make


@pytest.fixture(scope="module")
def run(make_run: Callable[[int], Path]) -> Path:
    return make_run(2048)


@pytest.fixture(scope="module")
def ask(run: Path, task_data: Path) -> Ask:
    """Asks for all tasks on the local documents; keywords replace what is asked of tasks."""

    def ask(**changes: Any) -> EvaluateConfig:
        (run / "fewshot.json").unlink(missing_ok=True)
        tasks = TasksConfig(PAPER_TASKS, shots=2, task_data=task_data)
        return EvaluateConfig(run=run, device="cpu", tasks=replace(tasks, **changes))

    return ask


@pytest.fixture(scope="module")
def result(ask: Ask) -> dict[str, Any]:
    return few_shot(ask())


def test_every_task_of_the_paper_is_scored(result, run):
    assert tuple(result["tasks"]) == PAPER_TASKS
    for name, scores in result["tasks"].items():
        assert scores["documents"] == 6
        assert scores["requests"] == 6 * CHOICES[name]
        assert scores["chance"] == pytest.approx(1 / CHOICES[name], rel=1e-15)
        assert scores["truncated_requests"] == 0
        assert scores["version"] == 1.0
        assert scores["shots"] == 2
        assert scores["split"] == "validation"
        assert ("acc_norm" in scores) == (name in ("sciq", "logiqa", "piqa"))
        for metric in {"acc", "acc_norm"} & set(scores):
            # Of n answers that are right or wrong.
            p, n = scores[metric], scores["documents"]
            assert p * n == pytest.approx(round(p * n), abs=1e-12)
            expected = math.sqrt(p * (1 - p) / (n - 1))
            assert scores[f"{metric}_stderr"] == pytest.approx(expected, abs=1e-15)
    assert records.read_json(run / "fewshot.json") == records.plain(result)
    assert (result["fewshot_seed"], result["positions"]) == (1234, 2048)
    scores = result["tasks"].values()
    assert result["average"]["acc"] == pytest.approx(sum(s["acc"] for s in scores) / 6)
    assert result["average"]["chance"] == pytest.approx((4 * 0.5 + 2 * 0.25) / 6)
    variance = sum(s["acc_stderr"] ** 2 for s in scores) / 36
    assert result["average"]["acc_stderr"] == pytest.approx(math.sqrt(variance))


def test_the_table_puts_chance_beside_every_accuracy(result, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    head, _, *rows = accuracy_table(result).splitlines()
    assert " ".join(head.split()) == "task acc acc_norm chance shots documents cut prompts"
    assert [row.split()[0] for row in rows] == [*PAPER_TASKS, "average"]
    piqa = result["tasks"]["piqa"]
    cells = (
        f"{piqa[metric]:.3f} +/- {piqa[f'{metric}_stderr']:.3f}" for metric in ("acc", "acc_norm")
    )
    assert rows[3].split() == ["piqa", *" ".join(cells).split(), "0.500", "2", "6", "0%"]


def test_prompts_have_the_shots_of_the_seed(ask, task_data, monkeypatch):
    """PIQA's, written out: of one more than the shots the document itself is left out."""
    seen = record_scores(monkeypatch)
    few_shot(ask(tasks=("piqa",)))
    train, validation = (
        read(task_data / "piqa" / f"{split}.jsonl") for split in ("train", "validation")
    )
    draw, expected = random.Random(1234), []
    for asked in validation:
        drawn = [shot for shot in draw.sample(train, 3) if shot != asked][:2]
        solved = (
            f"Question: {shot['goal']}\nAnswer: {shot[('sol1', 'sol2')[shot['label']]]}\n\n"
            for shot in drawn
        )
        prompt = "".join(solved) + f"Question: {asked['goal']}\nAnswer:"
        expected += [(prompt, f" {asked[choice]}") for choice in ("sol1", "sol2")]
    assert [(prompt, answer) for prompt, answer, _ in seen] == expected


def record_scores(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, float]]:
    """(prompt, answer, log-likelihood) of every request from now on, in order."""
    seen: list[tuple[str, str, float]] = []
    score = HFLM._loglikelihood_tokens

    def recorded(self: Any, requests: Any, **arguments: Any) -> Any:
        scores = score(self, requests, **arguments)
        for (texts, *_), (value, _) in zip(requests, scores, strict=True):
            seen.append((*texts, value))
        return scores

    monkeypatch.setattr(HFLM, "_loglikelihood_tokens", recorded)
    return seen


@pytest.mark.exhaustive
def test_asking_again_gives_the_same_and_the_batch_does_not_matter(ask, result):
    assert few_shot(replace(ask(), batch_size=3)) == result
    alone = few_shot(ask(tasks=("wic",)))
    # A task's shots do not depend on which tasks were run before it.
    assert alone["tasks"]["wic"] == result["tasks"]["wic"]


@pytest.mark.exhaustive
def test_prompts_have_no_token_that_packed_text_lacks(ask, run, result, tmp_path):
    """A tokenizer may add a first and a last token to what it is given."""
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{end} $A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    shutil.copytree(run, tmp_path / "run")
    tokenizer.save_pretrained(tmp_path / "run" / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model")("a").input_ids[-1] == (
        tokenizer.eos_token_id
    )
    records.write_manifest(tmp_path / "run" / "model")
    again = few_shot(replace(ask(), run=tmp_path / "run"))
    assert again["tasks"] == result["tasks"]


def test_the_first_documents_only(ask):
    result = few_shot(ask(tasks=("copa,wic",), task_limit=1, shots=0))
    scores = result["tasks"]["copa"]
    assert (scores["documents"], scores["requests"], scores["acc_stderr"]) == (1, 2, None)
    assert result["average"]["acc_stderr"] is None
    assert "+/-" not in accuracy_table(result)


@pytest.mark.exhaustive
def test_cut_prompts_are_counted_and_said(ask, make_run, caplog):
    asked = ask(tasks=("copa",), shots=5)
    whole, cut = few_shot(asked), few_shot(replace(asked, run=make_run(64)))
    tokens = cut["tasks"]["copa"]
    assert tokens["truncated_requests"] == tokens["requests"] == 12
    assert "lost its beginning" in accuracy_table(cut)
    assert "100%" in accuracy_table(cut)
    assert "positions" not in accuracy_table(whole)
    # lm-eval's own line for every single prompt.
    assert not caplog.records


def test_names_between_commas_or_spaces():
    assert TasksConfig(("copa,sciq",)).names == TasksConfig(("copa", "sciq")).names
    assert TasksConfig(("copa, sciq,", "copa", "wic")).names == ("copa", "sciq", "wic")


def test_a_task_without_choices_is_refused(ask, tmp_path):
    for split in ("train", "validation"):
        write_jsonl(tmp_path / "lambada_openai" / f"{split}.jsonl", ["one two"] * 3)
    with pytest.raises(ValueError, match="lambada_openai does not choose"):
        few_shot(ask(tasks=("lambada_openai",), task_data=tmp_path, shots=0))


def test_an_unknown_task_is_refused(ask):
    with pytest.raises(ValueError, match="no single task 'copper'"):
        few_shot(ask(tasks=("copper",), task_data=None))


def test_the_hub_is_asked_for_what_lm_eval_names(ask, monkeypatch):
    """The data set's own splits, sciq's test split among them."""
    asked, draw = [], random.Random(0)
    rows = datasets.Dataset.from_list([document("sciq", draw) for _ in range(7)])

    def load_dataset(path: str, name: str | None = None, **_: Any) -> datasets.DatasetDict:
        asked.append((path, name))
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    result = few_shot(ask(tasks=("sciq",), task_data=None))
    assert asked == [("allenai/sciq", None)]
    assert result["tasks"]["sciq"]["split"] == "test"


def test_the_verb_measures_both_or_one(run, task_data, tmp_path, capsys):
    out = shutil.copytree(run, tmp_path / "base", ignore=shutil.ignore_patterns("fewshot.json"))
    words = ["evaluate", str(out), "--device", "cpu", "--task-data", str(task_data)]
    assert cli.main([*words, "--tasks", "copa,wic", "--task-limit", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    first = [line.split()[0] for line in printed]
    assert [word for word in first if word != "The" and not word.startswith("--")] == [
        *("task", "copa", "wic", "average"),
    ]
    assert not (out / "evaluation.json").exists()
    assert list(records.read_json(out / "fewshot.json")["tasks"]) == ["copa", "wic"]
    # What was measured is not written over.
    assert cli.main([*words, "--tasks", "copa"]) == 2
    assert "wic" in capsys.readouterr().err
