"""The local documents of lm-eval's tasks: DIR/TASK/train.jsonl, DIR/TASK/validation.jsonl."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SPLITS = ("train", "validation")

# What lm-eval's task reads of a local document: a type, or the values that it may have. Its own
# code would take some wrong values for an answer and score them in silence.
_FIELDS: dict[str, dict[str, type | tuple[Any, ...]]] = {
    "copa": {
        "premise": str,
        "choice1": str,
        "choice2": str,
        "question": ("cause", "effect"),
        "label": (0, 1),
    },
    "sciq": {
        "question": str,
        "support": str,
        "distractor1": str,
        "distractor2": str,
        "distractor3": str,
        "correct_answer": str,
    },
    "logiqa": {"context": str, "question": str, "options": list, "label": ("a", "b", "c", "d")},
    "piqa": {"goal": str, "sol1": str, "sol2": str, "label": (0, 1)},
    "wic": {"sentence1": str, "sentence2": str, "start1": int, "end1": int, "label": (0, 1)},
    "winogrande": {"sentence": str, "option1": str, "option2": str, "answer": ("1", "2")},
}


def read_documents(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """{split: documents} of a task, checked; the task is the folder's name.

    Raises:
        ValueError: a file is absent or empty, or a document is not what the task reads.
    """
    return {split: _read(folder / f"{split}.jsonl", folder.name) for split in SPLITS}


def hashes(folder: Path) -> dict[str, str]:
    """{split: SHA-256} of the files that a task's documents came from."""
    return {
        split: hashlib.sha256((folder / f"{split}.jsonl").read_bytes()).hexdigest()
        for split in SPLITS
    }


def _read(path: Path, name: str) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(
            f"task_data must be a directory with {name}/train.jsonl and {name}/validation.jsonl; "
            f"{path} does not exist."
        )
    lines = path.read_text(encoding="utf-8").split("\n")
    found = [(n, _parse(line, path, n)) for n, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise ValueError(f"{path} must hold one JSON object a line; it is empty.")
    for n, document in found:
        _check_document(document, name, f"{path}, line {n}")
    return [document for _, document in found]


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}, must hold JSON and does not: {error}.") from None
    if not isinstance(document, dict):
        raise ValueError(
            f"{path}, line {number}, must hold a JSON object; it holds a {type(document).__name__}."
        )
    return document


def _check_document(document: Mapping[str, Any], name: str, where: str) -> None:
    """It has what the task reads; tasks outside the paper's are checked by lm-eval alone."""
    for field, allowed in _FIELDS.get(name, {}).items():
        if field not in document:
            raise ValueError(f"{where}: {name} reads {', '.join(_FIELDS[name])}; it lacks {field}.")
        value = document[field]
        if not _is_allowed(value, allowed):
            rule = (
                f"one of {', '.join(map(repr, allowed))}"
                if isinstance(allowed, tuple)
                else f"of type {allowed.__name__}"
            )
            raise ValueError(f"{where}: {field} must be {rule}; it is {value!r}.")
    if name == "winogrande" and "_" not in document["sentence"]:
        raise ValueError(f"{where}: the sentence must have a blank, _, for the two options.")
    if name == "logiqa" and len(document["options"]) != 4:
        raise ValueError(f"{where}: there must be 4 options; there are {len(document['options'])}.")


def _is_allowed(value: Any, allowed: type | tuple[Any, ...]) -> bool:
    """JSON's true is Python's 1, and no label."""
    if isinstance(value, bool):
        return False
    return value in allowed if isinstance(allowed, tuple) else isinstance(value, allowed)
