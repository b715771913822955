"""Which functions of ours run when the last domain of a step is left: `python -m tests.walk`.

Two linear layers under AdamW on a CPU, after four steps. The step, its K x K algebra and the
operators' own code count; torch's and Python's do not.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import torch

import doge_fast
from doge_fast import DoGEOptimizer

ROOT = Path(doge_fast.__file__).resolve().parents[1]


def walk() -> list[tuple[str, str]]:
    """(file, function) of every call, in order."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = DoGEOptimizer(torch.optim.AdamW(model.parameters()), domains=["a", "b"])
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            calls.append((str(path.relative_to(ROOT)), frame.f_code.co_name))

    for _ in range(5):
        for name in ("a", "b"):
            domain = optimizer.domain(name)
            domain.__enter__()
            model(torch.randn(4, 8)).sum().backward()
            calls.clear()
            sys.setprofile(note)
            domain.__exit__(None, None, None)
            sys.setprofile(None)
        optimizer.step()
        optimizer.zero_grad()
    return calls


def main() -> None:
    calls = walk()
    numbers = Counter(file for file, _ in calls)
    print(f"{len(calls)} calls in {len(numbers)} files")
    for file, number in numbers.items():
        names = dict.fromkeys(name for where, name in calls if where == file)
        print(f"{number:4} {file}: {', '.join(names)}")


if __name__ == "__main__":
    main()
