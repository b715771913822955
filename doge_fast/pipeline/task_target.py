"""A target made of tasks: their questions with the right answers, as documents of a corpus.

Weights learned for it serve those tasks' format and subjects. Only training splits are written, so
what `evaluate --tasks` scores is not among what the weights were learned for.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from doge_fast import atomic_file
from doge_fast.pipeline import tables
from doge_fast.pipeline.config import TargetConfig, TasksConfig
from doge_fast.pipeline.config.ranges import check
from doge_fast.pipeline.fewshot import load_tasks, right_choice


def write_target(config: TargetConfig) -> list[str]:
    """Write one JSON object a line: `text`, a question with its right answer, and its `task`.

    The text is what lm-eval gives a model to score without shots: the prompt, and the right choice
    after it. A document whose text is also in the split that is scored is left out.

    Returns:
        Lines to print: a table of the documents of each task, and where they are.

    Raises:
        ValueError: a task is unknown, chooses among no answers, or has no training split that is
            not scored; `out` is no .jsonl file, or holds something else.
        RuntimeError: a task's data cannot be had from the Hub.
    """
    check(config)
    if config.out.suffix != ".jsonl":
        raise ValueError(f"out must be a file that ends in .jsonl; got {config.out}.")
    asked = TasksConfig(config.tasks, shots=0, task_data=config.task_data)
    lines, rows = [], []
    for name, task in load_tasks(asked).items():
        _check_training_split(name, task)
        scored = set(_texts(name, task, task.eval_docs))
        drawn = list(itertools.islice(_texts(name, task, task.training_docs()), config.task_limit))
        kept = [text for text in drawn if text not in scored]
        lines += [json.dumps({"text": text, "task": name}) for text in kept]
        rows.append((name, str(len(kept)), str(len(drawn) - len(kept))))
    content = "".join(f"{line}\n" for line in lines).encode()
    # A domain of the corpus may have that name.
    if config.out.exists() and config.out.read_bytes() != content:
        raise ValueError(f"{config.out} holds something else. Remove it, or name another file.")
    config.out.parent.mkdir(parents=True, exist_ok=True)
    atomic_file.write(config.out, content)
    header = ("task", "documents", "left out: scored too")
    return [tables.text(tables.table_of(header, rows)), f"target: {config.out}"]


def _check_training_split(name: str, task: Any) -> None:
    training = task.get_config("training_split")
    scored = task.get_config("test_split") or task.get_config("validation_split")
    if not task.has_training_docs() or training == scored:
        raise ValueError(
            f"lm-eval names no training split of {name} beside the one that is scored, and weights "
            "that were learned for a scored split cannot be judged by it. Name another task, or "
            "give documents of yours with --task-data DIR."
        )


def _texts(name: str, task: Any, documents: Any) -> Iterator[str]:
    """Each document's prompt with its right choice, as lm-eval scores them without shots."""
    for document in documents:
        right, _ = right_choice(task, document)
        requests = task.construct_requests(document, task.fewshot_context(document, 0))
        if right not in range(len(requests)):
            raise ValueError(f"A document of {name} has no right answer: {document}.")
        yield "".join(requests[right].arguments)
