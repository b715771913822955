"""k-shot accuracy of a run's model, by lm-evaluation-harness.

Prompts, shots, scores and metrics are lm-eval's. This module adds the accuracy of a random guess
and the number of prompts that were cut: a small model has few positions, and lm-eval cuts long
prompts from the left, so the first shots are lost first.
"""

import logging
import math
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from doge_fast.pipeline import records, tables
from doge_fast.pipeline.config import EvaluateConfig
from doge_fast.pipeline.config.ranges import check_paths
from doge_fast.pipeline.failures import UserError, reading
from doge_fast.pipeline.trainer import device_of

# Source: DoGE, Table fewshot.
PAPER_TASKS = ("copa", "sciq", "logiqa", "piqa", "wic", "winogrande")

# Draws the shots; lm-eval's own default.
FEWSHOT_SEED = 1234

_METRICS = ("acc", "acc_norm")


def few_shot(config: EvaluateConfig) -> dict[str, Any]:
    """Score a finished run's model on k-shot multiple-choice tasks; write fewshot.json.

    acc is the share of documents whose right choice has the largest log p(choice | prompt);
    acc_norm the same with each divided by the choice's characters; chance the mean of 1 / number of
    choices. All models get the same shots, and a rerun gives the same numbers.

    Returns:
        The content of fewshot.json; see `records.few_shot_record`.

    Raises:
        UserError: the run is not complete; a task is unknown or has no accuracy; or fewshot.json
            holds accuracies of other tasks. Errors of lm-eval and datasets pass through.

    Source: DoGE, section universal-exp, Table fewshot (5 shots).
    """
    (_, trained), asked = records.load_config(config.run), config.tasks
    records.check_finished(config.run)
    check_paths(config)
    names = asked.names
    file = config.run / records.FEWSHOT
    known = records.read_json(file).get("tasks", {}) if file.exists() else {}
    if lost := known.keys() - set(names):
        raise UserError(
            f"{file} holds {', '.join(sorted(lost))} too. Ask for these as well (--tasks), or move "
            "the file away."
        )
    if not names:
        raise UserError(f"tasks names no task; the paper's are {','.join(PAPER_TASKS)}.")
    manager = _task_manager()
    if unknown := [name for name in names if name not in manager.all_subtasks]:
        raise UserError(f"lm-eval has no single task {unknown[0]!r}; `lm-eval ls tasks` lists all.")
    model = HFLM(
        pretrained=str(config.run / records.MODEL),
        backend="causal",
        device=str(device_of(config.device)),
        batch_size=config.batch_size,
        # The packed training text has none either.
        add_bos_token=False,
    )
    # lm-eval warns once for every prompt that it cuts; they are counted instead.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    found = simple_evaluate(
        model,
        tasks=[_task(name, asked.task_data) for name in names],
        num_fewshot=asked.shots,
        limit=asked.task_limit,
        task_manager=manager,
        fewshot_random_seed=FEWSHOT_SEED,
        # acc and acc_norm are means, whose standard error has a closed form.
        bootstrap_iters=1000,
        # Nothing else is random, so this process's generators are left alone.
        **dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed")),
    )
    result = records.few_shot_record(
        step=trained.training.steps,
        tasks={name: _scores(name, found, model) for name in names},
        setting={
            "fewshot_seed": FEWSHOT_SEED,
            "task_limit": asked.task_limit,
            "positions": model.max_length,
            "lm_eval": metadata.version("lm_eval"),
            "task_data": asked.task_data,
        },
    )
    records.write_json(file, result)
    return result


@cache
def _task_manager() -> TaskManager:
    """Reads the 14,000 files of lm-eval's tasks, which takes ten seconds."""
    return TaskManager()


def _task(name: str, folder: Path | None) -> Any:
    """A task with lm-eval's documents from the Hub, or with those of `folder`/NAME."""
    if folder is None:
        return name
    files = {split: str(folder / name / f"{split}.jsonl") for split in ("train", "validation")}

    def documents(**_: Any) -> datasets.DatasetDict:
        with reading(folder / name):
            return datasets.load_dataset("json", data_files=files)

    splits = {"training_split": "train", "validation_split": "validation"}
    local = {"custom_dataset": documents, **splits, "test_split": None, "fewshot_split": None}
    # As a member of a group, which is how lm-eval lets a registered task be changed.
    return {"group": f"local-{name}", "task": [{"task": name, **local}]}


def _scores(name: str, found: Mapping[str, Any], model: HFLM) -> dict[str, Any]:
    """One task's part of fewshot.json."""
    scores, samples, task = (found[part][name] for part in ("results", "samples", "configs"))
    if task["output_type"] != "multiple_choice" or "acc,none" not in scores:
        raise UserError(
            f"{name} does not choose among given answers. Run lm-eval itself on the run's model/."
        )
    known = [metric for metric in _METRICS if f"{metric},none" in scores]
    measured = {metric: scores[f"{metric},none"] for metric in known}
    for metric in known:
        # A single document has no standard error.
        stderr = scores[f"{metric}_stderr,none"]
        measured[f"{metric}_stderr"] = None if stderr == "N/A" else stderr
    requests = ["".join(texts) for sample in samples for texts in sample["arguments"]]
    # The last token of an answer is predicted, not read.
    cut = sum(len(model.tok_encode(text)) - 1 > model.max_length for text in requests)
    return {
        "version": found["versions"][name],
        "split": task.get("test_split") or task.get("validation_split"),
        "shots": found["n-shot"][name],
        "documents": len(samples),
        **measured,
        "chance": math.fsum(1 / len(sample["arguments"]) for sample in samples) / len(samples),
        "requests": len(requests),
        "truncated_requests": cut,
    }


def accuracy_table(result: Mapping[str, Any]) -> str:
    """The accuracies as aligned plain text, with chance accuracy and the share of cut prompts."""
    rows = []
    for name, scores in result["tasks"].items():
        cut = f"{scores['truncated_requests'] / scores['requests']:.0%}"
        rows.append(
            [name, *_accuracies(scores), str(scores["shots"]), str(scores["documents"]), cut]
        )
    if len(rows) > 1:
        rows.append(["average", *_accuracies(result["average"]), "", "", ""])
    header = ("task", *_METRICS, "chance", "shots", "documents", "cut prompts")
    printed = tables.text(tables.table_of(header, rows))
    if any(task["truncated_requests"] for task in result["tasks"].values()):
        printed += (
            f"\nThe model has {result['positions']} positions; a cut prompt lost its beginning."
        )
    return printed


def _accuracies(scores: Mapping[str, Any]) -> list[str]:
    """acc and acc_norm, each with its standard error, and chance; "-" for what a task lacks."""
    cells = []
    for metric in _METRICS:
        value, stderr = scores.get(metric), scores.get(f"{metric}_stderr")
        error = "" if stderr is None else f" ± {stderr:.3f}"
        cells.append("-" if value is None else f"{value:.3f}{error}")
    return [*cells, f"{scores['chance']:.3f}"]
