"""A DoGE step over the fastest plain step, which a user would run in its place.

    python -m benchmarks.anchor
    python -m benchmarks.anchor --device cuda --model 82M 124M --domains 7 22 50

The plain side is compiled by torch, head and loss with the body or fused apart from it, with AdamW
(fused on a GPU), all tokens at once or as many micro-batches as there are domains: the fastest of
these is chosen first, on the same machine. The DoGE sides have the same model with a compiled body:
stacked, with the fused head; and one domain after another, with the loss compiled too. On a CPU
times are of the processor, not of the clock on the wall, and of one thread.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import cases, models, optimizer_step, protocol, stacked, steps
from benchmarks.steps import DogeStep, PlainStep, Problem
from doge_fast.alternation import Call, alternated, ratio_of
from doge_fast.losses import linear_domain_losses

# Of the fastest plain step, on an A100 or an H100, by the number of domains.
GPU_BARS = {7: 1.02, 22: 1.05, 50: 1.10}
CPU_PROBLEMS = (
    Problem(stacked.SMALL, 7, 7, mode=steps.STACKED),
    Problem(stacked.SMALL, 7, 28, mode=steps.STACKED),
    Problem(stacked.SMALL, 50, 50, mode=steps.STACKED),
)
# Rounds in which the plain candidates are compared.
TRIALS = 5
COMPILED, FUSED = "compiled head", "fused head"


class CompiledPlain(PlainStep):
    """A plain step, compiled, in so many micro-batches."""

    def __init__(
        self, problem: Problem, device: torch.device | str, head: str, micro_batches: int
    ) -> None:
        super().__init__(problem, device)
        self.parts = self.batch.tensor_split(micro_batches)
        self.compiled_loss = torch.compile(models.loss_of)
        self.compiled_hidden = torch.compile(self.model.hidden)
        self.head = head

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean next-token loss."""
        if self.head == COMPILED:
            loss: Tensor = self.compiled_loss(self.model, tokens, self.problem.autocast_dtype)
            return loss
        with models.mixed_precision(tokens.device, self.problem.autocast_dtype):
            hidden, weight = self.compiled_hidden(tokens), self.model.head.weight
            return linear_domain_losses(hidden, weight, tokens, {"all": len(tokens)}).sum()

    def backward(self) -> None:
        """All micro-batches."""
        for tokens in self.parts:
            (self.loss(tokens) * (len(tokens) / len(self.batch))).backward()


class CompiledStacked(stacked.FusedStep):
    """The stacked step with a compiled body and the fused head."""

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        super().__init__(problem, device)
        self.compiled_hidden = torch.compile(self.model.hidden)

    def sum_of_losses(self) -> Tensor:
        """Of all domains, from one forward."""
        with models.mixed_precision(self.batch.device, self.problem.autocast_dtype):
            hidden, weight = self.compiled_hidden(self.batch), self.model.head.weight
            return linear_domain_losses(hidden, weight, self.batch, self.sizes).sum()


class CompiledSequential(DogeStep):
    """One domain after another, body and loss compiled."""

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        super().__init__(problem, device)
        self.compiled_loss = torch.compile(models.loss_of)

    def loss(self, tokens: Tensor) -> Tensor:
        """Of one domain."""
        loss: Tensor = self.compiled_loss(self.model, tokens, self.problem.autocast_dtype)
        return loss

    def backward(self) -> None:
        """All domains."""
        for name, tokens in self.data.items():
            with self.optimizer.domain(name):
                self.loss(tokens).backward()


def measure(
    problem: Problem,
    device: torch.device | str,
    *,
    pairs: int,
    seconds: float = float("inf"),
    plain: tuple[str, int] | None = None,
) -> dict[str, Any]:
    """One row: the plain candidates, and both DoGE sides over the best of them.

    Args:
        seconds: after which no round of steps is begun.
        plain: head and micro-batches of the only candidate, where the fastest is known.
    """
    on_gpu = torch.device(device).type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    torch.compiler.reset()
    every = itertools.product((COMPILED, FUSED), sorted({1, problem.num_domains}))
    kinds = {_name(*kind): kind for kind in ([plain] if plain else every)}
    candidates: dict[str, Call] = {
        name: CompiledPlain(problem, device, *kind) for name, kind in kinds.items()
    }
    tried = _times(candidates, device, rounds=TRIALS, seconds=seconds / 3, clock=clock)
    medians = {name: statistics.median(times) for name, times in tried.items()}
    best = min(medians, key=medians.__getitem__)
    sides: dict[str, Call] = {
        "plain": candidates.pop(best),
        "stacked": CompiledStacked(problem, device),
        "sequential": CompiledSequential(problem, device),
    }
    candidates.clear()
    protocol.release(device)
    row: dict[str, Any] = {
        "problem": str(problem),
        "domains": problem.num_domains,
        "tokens": problem.num_tokens,
        "plain": best,
        "plain_kind": kinds[best],
        "candidates_ms": {name: protocol.rounded(ms) for name, ms in medians.items()},
        "gradient_error": protocol.rounded(check(problem, device), 3),
    }
    times = _times(sides, device, rounds=pairs, seconds=seconds, clock=clock)
    for name in ("stacked", "sequential"):
        row[name] = protocol.as_dict(ratio_of(times[name], times["plain"]))
    row["plain_mfu"] = models.utilisation(
        problem.shape, problem.num_tokens, row["stacked"]["baseline_ms"], device
    )
    row["ratio"] = min(row[name]["ratio"] for name in ("stacked", "sequential"))
    row["bar"] = problem.bar
    if problem.bar is not None:
        row["verdict"] = "met" if row["ratio"] <= problem.bar else "missed"
    return row


def _name(head: str, micro_batches: int) -> str:
    return f"{head}, micro-batches: {micro_batches}"


def _times(
    calls: dict[str, Call],
    device: torch.device | str,
    *,
    rounds: int,
    seconds: float,
    clock: Any,
) -> dict[str, list[float]]:
    for call in calls.values():
        for _ in range(steps.WARM_UP):
            call()
    return alternated(calls, rounds=rounds, device=device, seconds=seconds, clock=clock)


def check(problem: Problem, device: torch.device | str) -> float:
    """Largest difference of the compiled stacked step's gradient, over the largest element.

    Against the step that is not compiled; RuntimeError where it is more than rounding.
    """
    found = []
    for side in (CompiledStacked, DogeStep):
        step = side(problem, device)
        step.backward()
        step.optimizer.combine()
        found.append([param.grad for param in step.model.parameters()])
    error = cases.relative_error(*found)  # type: ignore[arg-type]
    if not error < (1e-5 if problem.autocast is None else 2**-6):
        raise RuntimeError(f"the compiled gradient is off by {error:.1e}; nothing is timed.")
    return error


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    mfu = f", {100 * row['plain_mfu']:.0f} % MFU" if row["plain_mfu"] else ""
    bar = f" (bar {row['bar']}: {row['verdict']})" if row["bar"] else ""
    ratios = " and ".join(
        f"{name} {each['ratio']:.3f} [{each['low']:.3f}, {each['high']:.3f}]"
        for name, each in ((name, row[name]) for name in ("stacked", "sequential"))
    )
    return (
        f"{row['problem']}\n  over the fastest plain step: {ratios}{bar}\n  plain: {row['plain']}, "
        f"{row['stacked']['baseline_ms']:.0f} ms{mfu}"
    )


def problems_of(args: argparse.Namespace) -> Sequence[Problem]:
    """The standing rows on a CPU; the paper's sizes and tokens on a GPU, or where named."""
    on_gpu = torch.device(args.device).type == "cuda"
    if not on_gpu and not args.model:
        return CPU_PROBLEMS
    return [
        optimizer_step.paper_problem(
            model,
            num_domains,
            mode=steps.STACKED,
            autocast="bfloat16" if on_gpu else None,
            bar=GPU_BARS.get(num_domains),
        )
        for model in args.model or ("82M",)
        for num_domains in args.domains
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print, and write the record when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=15, help="timed rounds per row")
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--model", nargs="+", choices=models.PAPER, help="sizes of the paper")
    parser.add_argument("--domains", nargs="+", type=int, default=[7, 22, 50], help="K")
    args = parser.parse_args(arguments)
    if torch.device(args.device).type == "cpu":
        torch.set_num_threads(1)
    rows = []
    for problem in problems_of(args):
        rows.append(measure(problem, args.device, pairs=args.pairs))
        print(line(rows[-1]), flush=True)
        protocol.release(args.device)
        if args.json:
            # Rows take minutes: what is measured is kept.
            record = {"benchmark": "anchor", **protocol.machine(args.device), "rows": rows}
            protocol.write(args.json, record)


if __name__ == "__main__":
    main()
