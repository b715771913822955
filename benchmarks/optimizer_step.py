"""A DoGE step, everything included, over a plain step on the same tokens and micro-batches.

    python benchmarks/optimizer_step.py --device cpu

Both sides run one forward and backward per domain and one AdamW step on a GPT-2-shaped model
with tied embeddings, float32. The plain side adds the gradients up in `p.grad`; the DoGE side
keeps them apart, takes their Gram matrix, moves the domain weights and combines them. Before
anything is timed the combined gradient is checked against autograd's.

Memory is measured in a process of its own per side: the peak during a step of the DoGE side,
less that of the plain side, over the size of the K x N buffer.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import protocol
from doge_fast import DoGEOptimizer


@dataclass(frozen=True)
class Problem:
    """Sizes of one row of the table."""

    num_domains: int
    tokens: int
    """Per domain and step."""
    num_layers: int
    width: int
    vocab_size: int
    sequence: int = 128
    bar: float | None = None
    """The ratio that a step must stay under on a CPU."""

    def __str__(self) -> str:
        return (
            f"{self.num_domains} x {self.tokens} tokens, {self.num_layers} layers, "
            f"{self.width} wide, vocabulary {self.vocab_size}"
        )


PROBLEMS = (
    Problem(7, 512, 4, 256, 8192, bar=1.03),
    Problem(7, 128, 6, 512, 16384, bar=1.08),
)
DOMAINS = "abcdefghijklmnopqrstuvwxyz"


def build_model(problem: Problem, device: str) -> nn.Module:
    """A GPT-2 of transformers, dropout off, from a fixed seed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=problem.num_layers,
        n_embd=problem.width,
        n_head=problem.width // 64,
        vocab_size=problem.vocab_size,
        n_positions=problem.sequence,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).to(device)


def batches(problem: Problem, device: str) -> dict[str, Tensor]:
    """{domain: tokens [B, L]}, the same for both sides."""
    generator = torch.Generator().manual_seed(1)
    shape = (problem.tokens // problem.sequence, problem.sequence)
    return {
        name: torch.randint(problem.vocab_size, shape, generator=generator).to(device)
        for name in DOMAINS[: problem.num_domains]
    }


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean next-token loss."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def plain_step(problem: Problem, device: str) -> Callable[[], None]:
    """Gradient accumulation over the same micro-batches, then AdamW."""
    model = build_model(problem, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = batches(problem, device)

    def step() -> None:
        for tokens in data.values():
            (loss_of(model, tokens) / problem.num_domains).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def doge_step(problem: Problem, device: str) -> Callable[[], None]:
    """The same with domain gradients, Gram matrix, mirror step and weighted sum."""
    model = build_model(problem, device)
    data = batches(problem, device)
    optimizer = DoGEOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-4), domains=list(data), mu=1.0
    )

    def step() -> None:
        for name, tokens in data.items():
            with optimizer.domain(name):
                loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def check(problem: Problem, device: str) -> float:
    """Largest error of the combined gradient relative to its largest element; raises above 1e-5."""
    model = build_model(problem, device)
    data = batches(problem, device)
    params = list(model.parameters())
    optimizer = DoGEOptimizer(torch.optim.SGD(params, lr=0.0), domains=list(data), mu=1.0)
    for name, tokens in data.items():
        with optimizer.domain(name):
            loss_of(model, tokens).backward()
    optimizer.combine()
    expected = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    for alpha, tokens in zip(optimizer.alpha.tolist(), data.values(), strict=True):
        grads = torch.autograd.grad(loss_of(model, tokens), params)
        for total, grad in zip(expected, grads, strict=True):
            total += alpha * grad.double()
    largest = max(e.abs().max().item() for e in expected)
    pairs = zip(params, expected, strict=True)
    error = max((p.grad.double() - e).abs().max().item() for p, e in pairs) / largest
    # float32 sums of seven rows: a few units of 6e-8.
    if not error < 1e-5:
        raise RuntimeError(f"the combined gradient is off by {error:.1e}; nothing is timed.")
    return error


def peak_bytes(side: str, problem: Problem, device: str) -> int:
    """Peak memory of steps after the second, in a process of its own."""
    environment = {
        **os.environ,
        # glibc otherwise keeps freed memory, and the peak would be that of an earlier moment.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    command = [sys.executable, __file__, "--device", device, "--peak", side]
    command += ["--problem", json.dumps(problem.__dict__)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring memory failed: {done.stderr.strip()}")
    return int(done.stdout.split()[-1])


def print_peak(side: str, problem: Problem, device: str) -> None:
    """What `peak_bytes` starts."""
    step = {"plain": plain_step, "doge": doge_step}[side](problem, device)
    step()
    step()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        print(torch.cuda.max_memory_allocated())
        return
    # 5 resets the high-water mark of the resident set (man 5 proc).
    Path("/proc/self/clear_refs").write_text("5")
    step()
    step()
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    print(int(line.split()[1]) * 1024)


def measure(problem: Problem, device: str, pairs: int) -> dict[str, object]:
    """One row: correctness, time ratio, memory."""
    error = check(problem, device)
    ratio = protocol.paired(
        doge_step(problem, device), plain_step(problem, device), pairs=pairs, device=device
    )
    num_params = sum(p.numel() for p in build_model(problem, device).parameters())
    buffer_bytes = problem.num_domains * num_params * 4
    extra = peak_bytes("doge", problem, device) - peak_bytes("plain", problem, device)
    return {
        "problem": str(problem),
        "parameters": num_params,
        "gradient_error": error,
        **protocol.as_dict(ratio),
        "bar": problem.bar,
        "buffer_bytes": buffer_bytes,
        "extra_bytes": extra,
        "extra_over_buffer": round(extra / buffer_bytes - 1, 4),
    }


def main() -> None:
    """Parse, measure, print, and write the record when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=21, help="timed pairs of steps per row")
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--domains", type=int, help="measure this instead of the two rows")
    parser.add_argument("--tokens", type=int, default=512, help="per domain and step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--peak", choices=["plain", "doge"], help=argparse.SUPPRESS)
    parser.add_argument("--problem", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print_peak(args.peak, Problem(**json.loads(args.problem)), args.device)
        return
    problems = PROBLEMS
    if args.domains:
        problems = (Problem(args.domains, args.tokens, args.layers, args.width, args.vocabulary),)
    rows = []
    for problem in problems:
        row = measure(problem, args.device, args.pairs)
        rows.append(row)
        bar = f", bar {problem.bar}" if problem.bar else ""
        print(
            f"{problem}: DoGE step / plain step = {row['ratio']:.3f} "
            f"[{row['low']:.3f}, {row['high']:.3f}] ({row['pairs']} pairs, plain "
            f"{row['baseline_ms']:.0f} ms{bar}); peak memory over plain, less the K x N buffer: "
            f"{100 * row['extra_over_buffer']:+.1f} % of the buffer",
            flush=True,
        )
    record = {"benchmark": "optimizer_step", **protocol.machine(args.device), "rows": rows}
    if args.json:
        protocol.write(args.json, record)


if __name__ == "__main__":
    main()
