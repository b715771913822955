"""What a step costs the host: Python calls, passes over the parameters, and time.

On a GPU a small model waits for the host. This counts, in one step of a GPT-2 of twelve layers that
is too narrow to take any time itself, the calls of functions of this library, and how often the
lists of parameters in the optimizer's groups are walked through.

    python -m benchmarks.host_calls
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import doge_fast
from doge_fast import DoGEOptimizer

DOMAINS = [f"d{row}" for row in range(7)]
FOLDERS = tuple(
    str(Path(doge_fast.__file__).resolve().parent.parent / name)
    for name in ("doge_fast", "kernels")
)


class CountedList(list[Any]):
    """A list that counts how often it is walked through."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        CountedList.walks += 1
        return super().__iter__()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="timed steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = narrow_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    optimizer = DoGEOptimizer(inner, domains=DOMAINS, mu=1.0, domain_max_grad_norm=1.0)
    for group in inner.param_groups:
        group["params"] = CountedList(group["params"])
    grads = [torch.randn_like(param) for param in model.parameters()]
    step = step_of(optimizer, list(model.parameters()), grads)
    for _ in range(3):
        step()
    CountedList.walks = 0
    calls = calls_of_ours(step)
    print(f"{len(grads)} parameters, {len(DOMAINS)} domains, one step:")
    print(f"  {calls:6d} calls of this library's functions")
    print(f"  {CountedList.walks:6d} passes over the parameters")
    times = []
    for _ in range(arguments.steps):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    print(f"  {statistics.median(times):6.2f} ms (median of {len(times)})")


def narrow_model() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=12, n_head=1, n_embd=8, vocab_size=64, n_positions=16)
    return GPT2LMHeadModel(config)


def step_of(
    optimizer: DoGEOptimizer, params: list[torch.Tensor], grads: list[torch.Tensor]
) -> Callable[[], None]:
    """A step whose backward passes do nothing but hand each parameter a gradient."""
    sources = [grad.clone() for grad in grads]

    def step() -> None:
        for name in DOMAINS:
            with optimizer.domain(name):
                # The least that autograd can do for every parameter.
                torch.autograd.backward(params, sources)
        optimizer.step()
        optimizer.zero_grad()

    return step


def calls_of_ours(function: Callable[[], None]) -> int:
    """Calls of Python functions that stand in this library's folders."""
    count = 0

    def count_call(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            count += 1

    # Also on the thread that autograd runs hooks on, which is this one for a CPU.
    sys.setprofile(count_call)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


if __name__ == "__main__":
    main()
