"""A DoGE step, everything included, over a plain step on the same tokens and micro-batches.

    python -m benchmarks.optimizer_step --device cpu
    python -m benchmarks.optimizer_step --device cuda --model 124M --domains 7 22 50
    python -m benchmarks.optimizer_step --score aligned

Both sides run one forward and backward per domain (or, `--mode stacked`, one over the whole batch)
and one AdamW step on a GPT-2-shaped model with tied embeddings. Before anything is timed the
combined gradient is checked against autograd's. With `--score aligned` a DoGE step with this rule,
which takes two halves of each domain in one stacked pass, stands over one with the paper's score,
and beside its memory stands that of the paper's. Memory is measured in a process of its own per
side: the peak during a step of the DoGE side, less that of the plain side, over the size of the
buffer, which has 2 K rows with the aligned rule. With `--drop-rows` a stacked step with it does not
keep them.

Neither side is compiled. What a step costs over the fastest plain one, `benchmarks.anchor` says.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import memory, models, protocol, steps
from benchmarks.models import PAPER, Shape
from benchmarks.protocol import paired
from benchmarks.steps import Problem

# Two cores: what the tokens of a step take in seconds, and a bar at few tokens a domain.
CPU_PROBLEMS = (
    Problem(Shape(4, 4, 256, 8192, 128), 7, 28, bar=1.03),
    Problem(Shape(6, 8, 512, 16384, 128), 7, 7, bar=1.08),
)
# The aligned rule's step over that of the paper's score.
ALIGNED_BAR = 1.05
# Two sequences a domain at least: the rule compares halves.
ALIGNED_CPU_PROBLEMS = tuple(
    Problem(shape, 7, sequences, mode=mode, bar=ALIGNED_BAR, score="aligned")
    for shape, sequences in ((Shape(4, 4, 256, 8192, 128), 28), (Shape(6, 8, 512, 16384, 64), 14))
    for mode in steps.MODES
)
# 128 x 512 tokens a step, as the paper's runs.
GPU_SEQUENCES = 128
SIDES = {"paper": "DoGE step / plain step", "aligned": "aligned step / paper's step"}
# The ratio to a plain step, by mode and domains.
GPU_BARS = {
    (steps.SEQUENTIAL, 7): 1.05,
    (steps.STACKED, 7): 1.03,
    (steps.STACKED, 22): 1.08,
    (steps.STACKED, 50): 1.15,
}


def bar_of(mode: str, num_domains: int, score: str) -> float | None:
    """The ratio that a step on a GPU must not pass."""
    return ALIGNED_BAR if score == "aligned" else GPU_BARS.get((mode, num_domains))


def paper_problem(model: str, num_domains: int, **options: Any) -> Problem:
    """One of the paper's sizes at the paper's tokens per step, with the bar for so many domains."""
    mode, score = options.get("mode", steps.SEQUENTIAL), options.get("score", "paper")
    bar = options.pop("bar", bar_of(mode, num_domains, score))
    sequences = options.pop("num_sequences", GPU_SEQUENCES)
    return Problem(PAPER[model], num_domains, sequences, bar=bar, **options)


def measure(
    problem: Problem,
    device: torch.device | str,
    *,
    pairs: int,
    seconds: float = float("inf"),
    with_memory: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """One row: correctness, time ratio, utilisation, memory, and on a GPU what the host waits for.

    Args:
        seconds: after which no pair of steps is begun.
        with_memory: measured in processes of their own, which takes longer than the rest.
        clock: as for `alternated`.
    """
    on_gpu = torch.device(device).type == "cuda"
    num_params = models.num_parameters(problem.shape)
    row: dict[str, Any] = {
        "problem": str(problem),
        "parameters": num_params,
        "domains": problem.num_domains,
        "mode": problem.mode,
        "sides": SIDES[problem.score],
        "tokens": problem.num_tokens,
        "gradient_error": protocol.rounded(steps.check(problem, device), 3),
    }
    # The next sides need the room of these.
    protocol.release(device)
    paper = replace(problem, score="paper")
    ratio = paired(
        steps.DogeStep(problem, device),
        steps.PlainStep(problem, device) if paper == problem else steps.DogeStep(paper, device),
        pairs=pairs,
        device=device,
        seconds=seconds,
        clock=clock,
    )
    row |= {**protocol.as_dict(ratio), "bar": problem.bar}
    row["verdict"] = verdict(row)
    row["plain_mfu"] = None
    if paper == problem:
        row["plain_mfu"] = models.utilisation(
            problem.shape, problem.num_tokens, ratio.baseline_ms, device
        )
    protocol.release(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        row["host_synchronisations"] = steps.host_synchronisations(problem, device)
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    if with_memory:
        row |= measured_memory(problem, device, num_params)
    return row


def measured_memory(
    problem: Problem, device: torch.device | str, num_params: int
) -> dict[str, Any]:
    """Peak of the DoGE side over that of the plain side, and how far it is from the buffer.

    Of the aligned rule also that of the paper's score over the plain side.
    """
    dtype = getattr(torch, problem.buffer_dtype or "float32")
    buffer_bytes = problem.num_rows * num_params * dtype.itemsize

    def peak(name: str, problem: Problem) -> int:
        arguments = steps.arguments_of(name, problem)
        return memory.peak_bytes("benchmarks.steps:side", arguments, device)

    plain = peak("plain", problem)
    extra = peak("doge", problem) - plain
    found = {
        "buffer_bytes": buffer_bytes,
        "plain_peak_bytes": plain,
        "extra_bytes": extra,
        "extra_over_buffer": round(extra / buffer_bytes - 1, 4),
    }
    if problem.score == "aligned":
        found["paper_extra_bytes"] = peak("doge", replace(problem, score="paper")) - plain
    return found


def verdict(row: dict[str, Any]) -> str | None:
    """ "met" or "missed", by the median; None without a bar."""
    if row["bar"] is None:
        return None
    return "met" if row["ratio"] <= row["bar"] else "missed"


def line(row: dict[str, Any]) -> str:
    """A row for people, in two lines."""
    bar = f", bar {row['bar']}: {row['verdict']}" if row["bar"] else ""
    mfu = f", {100 * row['plain_mfu']:.0f} % MFU" if row["plain_mfu"] else ""
    text = (
        f"{row['problem']}\n  {row['sides']} = {row['ratio']:.3f} "
        f"[{row['low']:.3f}, {row['high']:.3f}] ({row['pairs']} pairs, the latter "
        f"{row['baseline_ms']:.0f} ms{mfu}{bar})"
    )
    if "extra_over_buffer" in row:
        text += (
            "\n  peak memory over plain, less the buffer: "
            f"{100 * row['extra_over_buffer']:+.1f} % of the buffer"
        )
    if "paper_extra_bytes" in row:
        text += (
            f"; over plain {row['extra_bytes'] / 1e6:.0f} MB, with the paper's score "
            f"{row['paper_extra_bytes'] / 1e6:.0f} MB"
        )
    if "host_synchronisations" in row:
        text += f"\n  host synchronisations in a step: {row['host_synchronisations']}"
    return text


def problems_of(args: argparse.Namespace) -> Sequence[Problem]:
    """The standing rows on a CPU; the paper's sizes on a GPU, or where they are named."""
    on_gpu = torch.device(args.device).type == "cuda"
    if not args.model and not on_gpu:
        standing = CPU_PROBLEMS if args.score == "paper" else ALIGNED_CPU_PROBLEMS
        if not args.drop_rows:
            return standing
        return [replace(each, keep_rows=False) for each in standing if each.mode == steps.STACKED]
    options = {
        "autocast": args.autocast or ("bfloat16" if on_gpu else None),
        "buffer_dtype": args.buffer_dtype,
        "mode": args.mode,
        "score": args.score,
        "keep_rows": not args.drop_rows,
    }
    if options["autocast"] == "float32":
        options["autocast"] = None
    sequences = {"num_sequences": args.sequences} if args.sequences else {}
    return [
        paper_problem(model, num_domains, **options, **sequences)
        for model in args.model or PAPER
        for num_domains in args.domains
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print, and write the record when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=21, help="timed pairs of steps per row")
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--model", nargs="+", choices=PAPER, help="sizes of the paper")
    parser.add_argument("--domains", nargs="+", type=int, default=[7, 22, 50], help="K")
    parser.add_argument("--sequences", type=int, help="per step, of all domains together")
    parser.add_argument("--autocast", help="bfloat16 on a GPU unless given; float32 for none")
    parser.add_argument("--buffer-dtype", help="of the stored domain gradients")
    parser.add_argument("--mode", choices=steps.MODES, default=steps.SEQUENTIAL)
    parser.add_argument("--score", choices=SIDES, default="paper")
    parser.add_argument("--drop-rows", action="store_true", help="of stacked steps (keep_rows)")
    parser.add_argument("--no-memory", action="store_true", help="leave the peaks out")
    parser.add_argument(
        "--cpu-time", action="store_true", help="without what other processes of a machine take"
    )
    args = parser.parse_args(arguments)
    options = {
        "pairs": args.pairs,
        "with_memory": not args.no_memory,
        "clock": time.process_time if args.cpu_time else time.perf_counter,
    }
    rows: list[dict[str, Any]] = []
    for problem in problems_of(args):
        rows.append(measure(problem, args.device, **options))
        print(line(rows[-1]), flush=True)
    record = {
        "benchmark": "optimizer_step",
        **protocol.machine(args.device),
        "time": "of the processor" if args.cpu_time else "of the wall",
        "rows": rows,
    }
    if args.json:
        protocol.write(args.json, record)


if __name__ == "__main__":
    main()
