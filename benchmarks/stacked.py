"""One backward pass for all domains: its step, when it beats one after another, and its loss.

    python -m benchmarks.stacked
    python -m benchmarks.stacked --device cuda --model 124M --domains 7 22 50

Step: the stacked DoGE step over a plain step on the same batch, and over the DoGE step that takes
one domain after another; the same with the logits of one domain at a time. Memory: peaks in
processes of their own, rows kept from step to step and rows given back after each
(`optimizer.release()`), so that they come while activations go. Head: `losses.linear_domain_losses`
over `domain_losses` of the head's logits, forward and backward. Nothing is compiled: what a step
costs over the fastest plain one, `benchmarks.anchor` says.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import cases, memory, models, optimizer_step, protocol, steps
from benchmarks.models import Shape
from benchmarks.protocol import paired
from benchmarks.steps import DogeStep, PlainStep, Problem
from doge_fast import DoGEOptimizer, losses
from doge_fast.alternation import alternated, ratio_of
from doge_fast.losses import domain_losses, linear_domain_losses

# Two cores; bars of the ratio to a plain step. The others show where one after another wins.
SMALL = Shape(4, 4, 256, 8192, 128)
CPU_PROBLEMS = (
    Problem(replace(SMALL, sequence=64), 7, 7, mode=steps.STACKED),
    Problem(SMALL, 7, 7, mode=steps.STACKED, bar=1.20),
    Problem(SMALL, 7, 14, mode=steps.STACKED),
    Problem(SMALL, 7, 28, mode=steps.STACKED, bar=1.10),
    Problem(SMALL, 50, 50, mode=steps.STACKED, bar=1.30),
)
# Domains, tokens of each, width, vocabulary.
CPU_HEADS = (
    *((7, 512, 256, 8192), (7, 512, 256, 32768), (50, 128, 256, 8192)),
    (7, 128, 512, 50304),
)
GPU_HEADS = ((7, 9362, 768, 50304), (50, 1310, 768, 50304))
# What the peak may be over the plain one, beside what rows need beyond the freed activations.
MEMORY_SLACK = 1.05


class FusedStep(DogeStep):
    """The stacked step with the logits of one domain at a time."""

    def sum_of_losses(self) -> Tensor:
        """Of all domains, from one forward."""
        with models.mixed_precision(self.batch.device, self.problem.autocast_dtype):
            hidden, weight = self.model.hidden(self.batch), self.model.head.weight
            return linear_domain_losses(hidden, weight, self.batch, self.sizes).sum()


class ReleasedStep(DogeStep):
    """Rows live from the backward pass to the weighted sum alone."""

    def __call__(self) -> None:
        """One step."""
        super().__call__()
        self.optimizer.release()


def released(problem: dict[str, Any], device: str) -> ReleasedStep:
    """What `memory.peak_bytes` names."""
    return ReleasedStep(Problem.from_dict(problem), device)


def measure_step(
    problem: Problem, device: torch.device | str, *, pairs: int, with_memory: bool = True
) -> dict[str, Any]:
    """One row of the first table."""
    calls = {
        "plain": PlainStep(problem, device),
        "stacked": DogeStep(problem, device),
        "fused": FusedStep(problem, device),
        "sequential": DogeStep(replace(problem, mode=steps.SEQUENTIAL), device),
    }
    error = steps.check(problem, device)
    for call in calls.values():
        for _ in range(steps.WARM_UP):
            call()
    times = alternated(calls, rounds=pairs, device=device)
    row: dict[str, Any] = {
        "problem": str(problem),
        "domains": problem.num_domains,
        "tokens_per_domain": problem.num_tokens // problem.num_domains,
        "gradient_error": protocol.rounded(error, 3),
        "over_plain": protocol.as_dict(ratio_of(times["stacked"], times["plain"])),
        "over_sequential": protocol.as_dict(ratio_of(times["stacked"], times["sequential"])),
        "fused_over_sequential": protocol.as_dict(ratio_of(times["fused"], times["sequential"])),
        "bar": problem.bar,
    }
    if problem.bar is not None:
        row["verdict"] = "met" if row["over_plain"]["ratio"] <= problem.bar else "missed"
    return row | (measure_memory(problem, device) if with_memory else {})


def measure_memory(problem: Problem, device: torch.device | str) -> dict[str, Any]:
    """Peaks, and what the released one may be."""
    plain = memory.bytes_of("benchmarks.steps:side", steps.arguments_of("plain", problem), device)
    kept = memory.bytes_of("benchmarks.steps:side", steps.arguments_of("doge", problem), device)
    arguments = {"problem": steps.arguments_of("doge", problem)["problem"]}
    given_back = memory.bytes_of("benchmarks.stacked:released", arguments, device)
    dtype = getattr(torch, problem.buffer_dtype or problem.autocast or "float32")
    rows = problem.num_domains * models.num_parameters(problem.shape) * dtype.itemsize
    activations = plain.peak - plain.resting
    most = MEMORY_SLACK * plain.peak + max(0, rows - activations)
    return {
        "rows_bytes": rows,
        "plain_peak_bytes": plain.peak,
        "plain_resting_bytes": plain.resting,
        "kept_peak_bytes": kept.peak,
        "released_peak_bytes": given_back.peak,
        "released_most_bytes": int(most),
        "memory_verdict": "met" if given_back.peak <= most else "missed",
    }


class Head:
    """Hidden states to their gradient and each domain's gradient of the weight."""

    def __init__(
        self,
        is_fused: bool,
        num_domains: int,
        tokens: int,
        width: int,
        vocabulary: int,
        device: torch.device | str,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, device=device)
            return values.requires_grad_()

        self.is_fused = is_fused
        self.hidden_BLH = draw(num_domains, tokens + 1, width)
        self.head = nn.Linear(width, vocabulary, bias=False, device=device)
        # As GPT-2 begins. Of larger logits a tenth of the probabilities are denormal, and products
        # of those took thirty times as long on an Intel CPU.
        nn.init.normal_(self.head.weight, std=0.02, generator=generator)
        self.labels_BL = torch.randint(
            vocabulary, (num_domains, tokens + 1), generator=generator, device=device
        )
        self.sizes = {str(domain): 1 for domain in range(num_domains)}
        self.optimizer = DoGEOptimizer(
            torch.optim.SGD(self.head.parameters(), lr=0.1),
            domains=list(self.sizes),
            micro_batches=None,
        )
        on_gpu = torch.device(device).type == "cuda"
        self.autocast = torch.autocast("cuda", torch.bfloat16, enabled=on_gpu)

    def losses(self) -> Tensor:
        """[D]"""
        if self.is_fused:
            weight_VH = self.head.weight
            return linear_domain_losses(self.hidden_BLH, weight_VH, self.labels_BL, self.sizes)
        return domain_losses(self.head(self.hidden_BLH), self.labels_BL, self.sizes)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Gradients of the hidden states, and of the weight by domain."""
        self.hidden_BLH.grad = None
        self.optimizer.zero_grad()
        with self.optimizer.stacked(self.head, self.sizes):
            with self.autocast:
                total = self.losses().sum()
            total.backward()
        (block,) = self.optimizer.buffer.blocks
        assert self.hidden_BLH.grad is not None
        return self.hidden_BLH.grad, block.rows_BN


class HeadAgain(Head):
    """The fused head where the backward pass computes the logits again."""

    def __call__(self) -> tuple[Tensor, Tensor]:
        """As without memory in the rows for gradients that come early."""
        with mock.patch.object(losses._HeadRows, "reserve", return_value=None):
            return super().__call__()


def head(is_fused: bool, sizes: list[int], device: str) -> Head:
    """What `memory.peak_bytes` names."""
    return Head(is_fused, *sizes, device)  # type: ignore[call-arg,arg-type]


def measure_head(
    sizes: tuple[int, int, int, int],
    device: torch.device | str,
    *,
    pairs: int,
    with_memory: bool = True,
) -> dict[str, Any]:
    """One row of the second table."""
    fused, naive = (Head(is_fused, *sizes, device) for is_fused in (True, False))
    error = cases.largest(
        float((ours - theirs).norm() / theirs.norm())
        for ours, theirs in zip(fused(), naive(), strict=True)
    )
    if not error < (2**-7 if torch.device(device).type == "cuda" else 1e-5):
        raise RuntimeError(f"the gradients of the head are off by {error:.1e}; nothing is timed.")
    ratio = paired(fused, naive, pairs=pairs, device=device)
    over_again = paired(fused, HeadAgain(True, *sizes, device), pairs=pairs, device=device)
    row: dict[str, Any] = {
        **dict(zip(("domains", "tokens", "width", "vocabulary"), sizes, strict=True)),
        "gradient_error": protocol.rounded(error, 3),
        **protocol.as_dict(ratio),
        "over_again": protocol.as_dict(over_again),
    }
    if with_memory:
        for name, is_fused in (("fused", True), ("naive", False)):
            arguments = {"is_fused": is_fused, "sizes": list(sizes)}
            row[f"{name}_peak_bytes"] = memory.peak_bytes(
                "benchmarks.stacked:head", arguments, device
            )
    return row


def step_line(row: dict[str, Any]) -> str:
    """A row for people."""
    plain, sequential, fused = (
        row[name] for name in ("over_plain", "over_sequential", "fused_over_sequential")
    )
    bar = f" (bar {row['bar']}: {row['verdict']})" if row["bar"] else ""
    text = (
        f"{row['problem']}\n  over plain {plain['ratio']:.3f} "
        f"[{plain['low']:.3f}, {plain['high']:.3f}]{bar}, over one domain after another "
        f"{sequential['ratio']:.3f} [{sequential['low']:.3f}, {sequential['high']:.3f}], with the "
        f"fused head {fused['ratio']:.3f} [{fused['low']:.3f}, {fused['high']:.3f}]"
    )
    if "rows_bytes" in row:
        text += (
            f"\n  peak: plain {row['plain_peak_bytes'] / 1e6:.0f} MB, rows kept "
            f"{row['kept_peak_bytes'] / 1e6:.0f}, released {row['released_peak_bytes'] / 1e6:.0f} "
            f"(at most {row['released_most_bytes'] / 1e6:.0f}: {row['memory_verdict']}); "
            f"the rows {row['rows_bytes'] / 1e6:.0f} MB"
        )
    return text


def head_line(row: dict[str, Any]) -> str:
    """A row for people."""
    text = (
        f"head, {row['domains']} x {row['tokens']} tokens, {row['width']} wide, vocabulary "
        f"{row['vocabulary']}\n  fused / naive = {row['ratio']:.3f} "
        f"[{row['low']:.3f}, {row['high']:.3f}], fused / with the logits again = "
        f"{row['over_again']['ratio']:.3f} "
        f"[{row['over_again']['low']:.3f}, {row['over_again']['high']:.3f}]"
    )
    if "fused_peak_bytes" in row:
        text += (
            f", peak {row['fused_peak_bytes'] / 1e6:.0f} MB against "
            f"{row['naive_peak_bytes'] / 1e6:.0f} MB"
        )
    return text


def problems_of(args: argparse.Namespace) -> Sequence[Problem]:
    """The standing rows on a CPU; the paper's sizes and tokens on a GPU."""
    if torch.device(args.device).type != "cuda" and not args.model:
        return CPU_PROBLEMS
    return [
        optimizer_step.paper_problem(
            model,
            num_domains,
            mode=steps.STACKED,
            autocast="bfloat16" if torch.device(args.device).type == "cuda" else None,
        )
        for model in args.model or models.PAPER
        for num_domains in args.domains
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print, and write the record when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=11, help="timed rounds per row")
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--model", nargs="+", choices=models.PAPER, help="sizes of the paper")
    parser.add_argument("--domains", nargs="+", type=int, default=[7, 22, 50], help="K")
    parser.add_argument("--no-memory", action="store_true", help="leave the peaks out")
    args = parser.parse_args(arguments)
    options = {"pairs": args.pairs, "with_memory": not args.no_memory}
    on_gpu = torch.device(args.device).type == "cuda"
    rows: list[dict[str, Any]] = []
    for problem in problems_of(args):
        rows.append(measure_step(problem, args.device, **options))
        print(step_line(rows[-1]), flush=True)
    heads = []
    for sizes in GPU_HEADS if on_gpu else CPU_HEADS:
        heads.append(measure_head(sizes, args.device, **options))
        print(head_line(heads[-1]), flush=True)
    if args.json:
        record = {**protocol.machine(args.device), "rows": rows, "heads": heads}
        protocol.write(args.json, {"benchmark": "stacked", **record})


if __name__ == "__main__":
    main()
