"""Documents of the paper's tasks, as their data sets hold them."""

import json
import random
from pathlib import Path
from typing import Any

NOUNS = ["river", "cat", "stone", "lamp", "ship", "garden", "window", "letter"]
CHOICES = {"copa": 2, "sciq": 4, "logiqa": 4, "piqa": 2, "wic": 2, "winogrande": 2}


def document(task: str, draw: random.Random) -> dict[str, Any]:
    """A document with the columns that the task's data set has on the Hub."""
    one, two, three, four = draw.sample(NOUNS, 4)
    right = draw.randrange(CHOICES[task])
    return {
        "copa": {
            "premise": f"The {one} fell.",
            "choice1": f"The {two} moved.",
            "choice2": f"The {three} slept well.",
            "question": draw.choice(("cause", "effect")),
            "label": right,
        },
        "sciq": {
            "question": f"What holds a {one}?",
            "support": draw.choice(("", f" A {two} holds a {one}.")),
            "distractor1": f"the {three}",
            "distractor2": f"a {four}",
            "distractor3": one,
            "correct_answer": two,
        },
        "logiqa": {
            "context": f"Every {one} is a {two}.",
            "question": "What follows?",
            "options": [f"A {one}.", f"No {two} is.", f"Some {three} is.", f"All {four}."],
            "label": "abcd"[right],
        },
        "piqa": {
            "goal": f"Mend a {one}.",
            "sol1": f"Use a {two}.",
            "sol2": f"Ask the old {three} in the {four}.",
            "label": right,
        },
        "wic": {
            "word": one,
            "sentence1": f"A {one} came.",
            "sentence2": f"The {one} in the {two}.",
            "start1": 2,
            "end1": 2 + len(one),
            "label": right,
        },
        "winogrande": {
            "sentence": f"The {one} met the {two} because the _ was late.",
            "option1": one,
            "option2": two,
            "answer": str(1 + right % 2),
        },
    }[task]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_documents(folder: Path, *tasks: str, train: int = 9, scored: int = 6) -> Path:
    """So many documents of each task for shots, and so many that are scored."""
    for task in tasks:
        draw = random.Random(task)
        (folder / task).mkdir()
        for split, count in (("train", train), ("validation", scored)):
            lines = (json.dumps(document(task, draw)) for _ in range(count))
            text = "".join(f"{line}\n" for line in lines)
            (folder / task / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return folder
