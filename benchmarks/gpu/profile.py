"""Where the time of a compiled stacked step goes, kernel by kernel, by torch's profiler."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks import anchor, optimizer_step, protocol, steps
from benchmarks.gpu.session import Row, Session
from benchmarks.models import Shape
from benchmarks.steps import Problem
from doge_fast.alternation import synchronize

NUM_STEPS = 3
# Of the kernels that take the longest.
LINES = 40


def profiles(session: Session) -> Iterator[Row]:
    """82M with 7 and with 50 domains."""
    for num_domains in (7,) if session.quick else (7, 50):
        problem = (
            Problem(Shape(1, 2, 64, 256, 32), num_domains, 8, mode=steps.STACKED)
            if session.quick
            else optimizer_step.paper_problem(
                "82M", num_domains, mode=steps.STACKED, autocast="bfloat16", bar=None
            )
        )
        row: Row = {"mode": steps.STACKED, "domains": num_domains, "problem": str(problem)}
        yield row | measured(problem, session.device)
        protocol.release(session.device)


def measured(problem: Problem, device: torch.device) -> Row:
    """Milliseconds and launches of a step, by kernel, and how long the device had nothing to do."""
    torch.compiler.reset()
    step = anchor.CompiledStacked(problem, device)
    for _ in range(steps.WARM_UP):
        step()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(NUM_STEPS):
        step()
    synchronize(device)
    step_ms = 1e3 * (time.perf_counter() - start) / NUM_STEPS
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(NUM_STEPS):
            step()
        synchronize(device)
    found: list[Any] = list(profiler.key_averages())
    kernels = sorted(
        (
            {
                "kernel": each.key[:200],
                "ms": protocol.rounded(_ms(each, on_gpu=on_gpu) / NUM_STEPS),
                "launches": round(each.count / NUM_STEPS, 1),
            }
            for each in found
        ),
        key=lambda row: -row["ms"],
    )
    return {
        "profiled_ms": protocol.rounded(step_ms),
        "busy_ms": protocol.rounded(sum(row["ms"] for row in kernels)),
        "launches": round(sum(row["launches"] for row in kernels)),
        "kernels": kernels[:LINES],
        "correct": True,
    }


def _ms(event: Any, *, on_gpu: bool) -> float:
    return 1e-3 * float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)
