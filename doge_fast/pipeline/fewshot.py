"""k-shot accuracy of a run's model through lm-evaluation-harness.

Prompts, choices, metrics and the draw of the shots are lm-eval's own. Ours are where the
documents come from, what a guess would score, and how many prompts the model could not see
whole: a small model has few positions, and lm-eval drops what does not fit from the left, so the
first shots go first.
"""

import functools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import torch
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from doge_fast.pipeline import hub, named, records, tables, training
from doge_fast.pipeline.config import EvaluateConfig, TasksConfig
from doge_fast.pipeline.config.ranges import check
from doge_fast.pipeline.failures import one_line, reading
from doge_fast.pipeline.model import open_model

# Source: DoGE, Table fewshot.
PAPER_TASKS = ("copa", "sciq", "logiqa", "piqa", "wic", "winogrande")

# Draws the shots; lm-eval's own default.
FEWSHOT_SEED = 1234

_METRICS = ("acc", "acc_norm")


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval warns once for every prompt that it cuts; they are counted instead."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@_quiet()
def few_shot(config: EvaluateConfig) -> dict[str, Any]:
    """Score a finished run's model on k-shot multiple-choice tasks; write fewshot.json.

    acc       =  share of documents whose right choice has the largest  log p(choice | prompt)
    acc_norm  =  the same with each log-likelihood divided by the choice's characters
    chance    =  mean over documents of 1 / number of choices

    The prompt is k documents of the task's training split with their answers, drawn for every
    document from a generator with lm-eval's seed, and the document's question. So all
    models meet the same prompts, and a rerun gives the same numbers.

    Args:
        config: which run; and `tasks`.

    Returns:
        What fewshot.json holds; see `records.few_shot`.

    Raises:
        ValueError: the run is not complete; a task is unknown or does not choose among answers; a
            number is out of its range; a local file is absent or not what the task reads; or
            fewshot.json holds accuracies of other tasks.
        RuntimeError: a task's data cannot be had from the Hub.

    Source: DoGE, section universal-exp, Table fewshot (5 shots).
    """
    (_, trained), asked = records.load_config(config.run), config.tasks
    records.check_finished(config.run)
    check(config)
    file = config.run / records.FEWSHOT
    known = records.read_json(file).get("tasks", {}) if file.exists() else {}
    if lost := known.keys() - set(task_names(asked.tasks)):
        raise ValueError(
            f"{file} holds {', '.join(sorted(lost))} too. Ask for these as well (--tasks), or move "
            "the file away."
        )
    tasks = _load_tasks(asked)
    folder = config.run / records.MODEL
    model, tokenizer = open_model(folder), AutoTokenizer.from_pretrained(folder)
    torch.nn.Module.to(model, training.device_of(config.device))
    scorer: Any = _Scorer(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=config.batch_size,
        # As packed text has no special tokens either.
        add_bos_token=False,
    )
    scores = {name: _score(name, task, scorer, asked) for name, task in tasks.items()}
    result = records.few_shot(
        step=trained.training.steps,
        tasks=scores,
        setting={
            "shots": asked.shots,
            "fewshot_seed": FEWSHOT_SEED,
            "task_limit": asked.task_limit,
            "positions": scorer.max_length,
            "lm_eval": metadata.version("lm_eval"),
            "task_data": asked.task_data,
        },
    )
    records.write_json(file, result)
    return result


@_quiet()
def _load_tasks(asked: TasksConfig) -> dict[str, Any]:
    """lm-eval's tasks with their documents; says what is wrong before any model is opened.

    Raises:
        ValueError, RuntimeError: as `few_shot`.
    """
    names = task_names(asked.tasks)
    if not names:
        raise ValueError(
            f"tasks names no task. Name some of lm-eval's; the paper's are {','.join(PAPER_TASKS)}."
        )
    for name in names:
        _check_name(name)
    tasks = {}
    for name in names:
        tasks[name] = _open_task(name, asked.task_data)
        _check_task(name, tasks[name], asked.shots)
        if asked.task_data is not None:
            _check_documents(name, tasks[name], asked.task_data)
    return tasks


def task_names(words: Sequence[str]) -> tuple[str, ...]:
    """The tasks that were asked for, once each: "a,b" "c" and "a" "b" "c" are the same."""
    names = (name.strip() for word in words for name in word.split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def table(result: Mapping[str, Any]) -> str:
    """The accuracies as aligned plain text, with what a guess would score and what was cut."""
    header = ("task", *_METRICS, "chance", "shots", "documents", "cut prompts")
    shots = str(result["shots"])
    rows = []
    for name, scores in result["tasks"].items():
        cut = f"{scores['truncated_requests'] / scores['requests']:.0%}"
        rows.append((name, *_accuracies(scores), shots, str(scores["documents"]), cut))
    if len(rows) > 1:
        rows.append(("average", *_accuracies(result["average"]), "", "", ""))
    return "\n".join([tables.text(tables.table_of(header, rows)), *_remarks(result)])


def _accuracies(scores: Mapping[str, Any]) -> tuple[str, ...]:
    """acc and acc_norm, each with its standard error, and chance; "-" for what a task lacks."""
    cells = []
    for metric in _METRICS:
        stderr = scores.get(f"{metric}_stderr")
        error = "" if stderr is None else f" ± {stderr:.3f}"
        cells.append(f"{scores[metric]:.3f}{error}" if scores.get(metric) is not None else "-")
    return (*cells, f"{scores['chance']:.3f}")


def _remarks(result: Mapping[str, Any]) -> list[str]:
    if not any(task["truncated_requests"] for task in result["tasks"].values()):
        return []
    return [
        f"The model has {result['positions']} positions. Longer prompts lost their beginning, the "
        f"first shots: accuracies with cut prompts are not {result['shots']}-shot accuracies. Of "
        "an answer that is longer than that the end was scored."
    ]


def _check_name(name: str) -> None:
    manager = _task_manager()
    if name in manager.all_subtasks:
        return
    if name in manager.all_tasks:
        raise ValueError(f"{name} is a group of lm-eval's tasks; name the tasks in it.")
    guess = named.nearest(name, manager.all_tasks, "`lm-eval ls tasks` lists all.")
    raise ValueError(
        f"lm-eval has no task {name!r}. {guess} The paper's are {','.join(PAPER_TASKS)}."
    )


def _check_task(name: str, task: Any, shots: int) -> None:
    if task.OUTPUT_TYPE != "multiple_choice" or "acc" not in task.aggregation():
        raise ValueError(
            f"Few-shot accuracies are of tasks that choose among given answers; {name} is "
            f"{task.OUTPUT_TYPE}, measured by {', '.join(task.aggregation())}. Run lm-eval itself "
            "on the run's model/ for it."
        )
    if shots and task.get_config("num_fewshot") == 0:
        raise ValueError(f"lm-eval fixes {name} at 0 shots; got shots={shots}. Pass shots=0.")
    # One more is drawn, in case one of them is the document that is asked about.
    if shots and (pool := len(task.fewshot_docs())) <= shots:
        raise ValueError(
            f"{shots} shots need at least {shots + 1} documents to draw from; {name} has {pool} "
            f"in its {task.get_config('training_split') or 'only'} split. Pass a smaller shots."
        )


@functools.cache
def _task_manager() -> Any:
    """lm-eval's index of all tasks, which takes seconds."""
    return TaskManager()


def _open_task(name: str, folder: Path | None) -> Any:
    """The task with the documents that lm-eval names on the Hub, or with those of `folder`/NAME."""
    asked: Any = [name]
    if folder is not None:
        read = datasets.Dataset.from_list
        splits = {
            split: _read_documents(folder / name / f"{split}.jsonl")
            for split in ("train", "validation")
        }
        changes = {
            "custom_dataset": lambda **_: datasets.DatasetDict(
                {split: read(rows) for split, rows in splits.items()}
            ),
            "training_split": "train",
            "validation_split": "validation",
            **dict.fromkeys(("test_split", "fewshot_split")),
        }
        # As a member of a group, which is how lm-eval lets a registered task be changed.
        asked = {"group": "task-data", "task": [{"task": name, **changes}]}
    try:
        with hub.asked_once() if folder is None else nullcontext():
            return _task_manager().load(asked)["tasks"][name]
    # Whatever the Hub, its cache and the network raise, or code of the task itself over documents
    # that it does not understand.
    except Exception as error:
        if folder is None:
            raise RuntimeError(
                f"The documents of {name} cannot be had from the Hub ({one_line(error)}). "
                "The network may be down, or the data set may be a loading script, which datasets "
                f"no longer runs. Pass --task-data DIR, a directory with {name}/train.jsonl and "
                f"{name}/validation.jsonl."
            ) from error
        raise ValueError(
            f"lm-eval's {name} cannot read the documents in {folder / name}: {one_line(error)}. "
            "They need the columns that the task's data set has on the Hub."
        ) from error


def _read_documents(path: Path) -> list[dict[str, Any]]:
    """TASK/SPLIT.jsonl."""
    if not path.is_file():
        name = path.parent.name
        raise ValueError(
            f"task_data must be a directory with {name}/train.jsonl and {name}/validation.jsonl; "
            f"{path} does not exist."
        )
    with reading(path):
        found = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
    if not found or not all(isinstance(document, dict) for document in found):
        raise ValueError(f"{path} must hold JSON objects, one a line, and at least one.")
    return found


def _check_documents(name: str, task: Any, folder: Path) -> None:
    """Every local document has a right answer: lm-eval scores some that have none in silence."""
    for split, documents in (("train", task.training_docs()), ("validation", task.eval_docs)):
        for number, document in enumerate(documents, start=1):
            try:
                right, choices = _right_choice(task, document)
                why = f"its right answer is {right!r} of the choices {choices!r}"
                is_told = right in range(len(choices))
                # Some tasks take a label of null for one, or write None into the prompt.
                if lacking := [field for field, value in document.items() if value is None]:
                    why, is_told = f"{', '.join(lacking)}: null or missing", False
            except Exception as error:
                why, is_told = one_line(error), False
            if not is_told:
                raise ValueError(
                    f"{folder / name / split}.jsonl, document {number}: lm-eval's {name} cannot "
                    f"read it ({why}). It needs the columns of the task's data set on the Hub."
                )


def _right_choice(task: Any, document: Any) -> tuple[Any, list[Any]]:
    """(The right choice's number, all choices) of a document.

    Tasks name the choice or give its number, and some that fill a blank do so elsewhere.
    """
    told, target = task.doc_to_text(document), task.doc_to_target(document)
    told = told if task.multiple_input else target
    right, choices = told[0] if isinstance(told, list) else told, task.doc_to_choice(document)
    return choices.index(right) if right in choices else right, choices


class _Scorer(HFLM):  # type: ignore[misc]
    """lm-eval's scorer, which counts what it cuts, and cuts answers too instead of giving up."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.counts: dict[str, int] = {}

    def _loglikelihood_tokens(self, requests: Any, **arguments: Any) -> Any:
        positions = self.max_length
        # The last token of an answer is predicted, not read.
        cut = sum(len(prompt) + len(answer) - 1 > positions for _, prompt, answer in requests)
        self.counts = {"requests": len(requests), "truncated_requests": cut}
        # What is before the last tokens of an overlong answer is context like the prompt.
        fitting = [
            (texts, prompt + answer[:-positions], answer[-positions:])
            for texts, prompt, answer in requests
        ]
        return super()._loglikelihood_tokens(fitting, **arguments)


def _score(name: str, task: Any, scorer: Any, asked: TasksConfig) -> dict[str, Any]:
    """One task's part of fewshot.json."""
    task.set_config("num_fewshot", asked.shots)
    task.set_fewshot_seed(FEWSHOT_SEED)
    # Not simple_evaluate: it seeds the process, and asks git and the Hub about the model.
    found = evaluator.evaluate(
        scorer,
        {"tasks": {name: task}},
        limit=asked.task_limit,
        # acc and acc_norm are means, whose standard error has a closed form.
        bootstrap_iters=1000,
        log_samples=False,
    )
    scores = found["results"][name]
    assert found["n-shot"][name] == asked.shots
    count = found["n-samples"][name]["effective"]
    measured: dict[str, float | None] = {}
    for metric in _METRICS:
        if f"{metric},none" in scores:
            measured[metric] = float(scores[f"{metric},none"])
            # Of a single document there is none.
            stderr = scores[f"{metric}_stderr,none"]
            measured[f"{metric}_stderr"] = None if stderr == "N/A" else float(stderr)
    choices = (len(task.doc_to_choice(document)) for _, document in task.doc_iterator(limit=count))
    return {
        "version": found["versions"][name],
        "split": task.get_config("test_split") or task.get_config("validation_split"),
        "documents": count,
        **measured,
        "chance": math.fsum(1 / number for number in choices) / count,
        **scorer.counts,
    }
