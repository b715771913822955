"""The same weights over the GPUs of a machine, through NCCL: right, and beside plain DDP.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.gpu.ranks --out F

Two ranks on a CPU, through gloo. Every rank trains the model of `examples/distributed_loop.py` in
float64, first alone, then with the others: the weights must be the same bits on all ranks, and
those of one process to rounding.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import cases, protocol
from benchmarks.gpu.session import ROOT, Row, Session, run_command
from benchmarks.models import PAPER, Shape
from benchmarks.optimizer_step import GPU_SEQUENCES
from benchmarks.steps import DogeStep, PlainStep, Problem
from doge_fast.alternation import alternated, ratio_of
from doge_fast.sampling import pieces

FORMS = ("ddp", "fsdp2")
STEPS = 20
# float64, after steps of AdamW; a GPU adds up the rows of an embedding in changing order.
TOLERANCE = 1e-10
# Of everything; a collective that hangs ends earlier.
SECONDS, COLLECTIVE_SECONDS = 300, 60
PAIRS = 15


def ranks(session: Session) -> Iterator[Row]:
    """A row for each form of the model, and the time of a step over that of plain DDP."""
    num_ranks = torch.cuda.device_count() if session.on_gpu else 2
    if num_ranks < 2:
        yield {"skipped": "needs two GPUs"}
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        yield from launched(command(session, num_ranks, out), out)


def command(session: Session, num_ranks: int, out: Path) -> list[str]:
    """What starts the ranks, whose first writes rows."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    words = [sys.executable, "-m", *torchrun, "-m", "benchmarks.gpu.ranks", "--out", str(out)]
    return [*words, "--device", session.device.type, *(["--quick"] if session.quick else [])]


def launched(words: Sequence[str], out: Path, seconds: float = SECONDS) -> list[Row]:
    """The rows of the ranks; one that is not right where they failed."""
    row: Row = {"operator": "ranks", "correct": False}
    code, printed = run_command(words, seconds)
    if code is None:
        return [row | {"problem": printed}]
    if code != 0:
        return [row | {"problem": f"code {code}", "lines": printed.strip().splitlines()[-12:]}]
    rows: list[Row] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    return rows


def weights_of(form: str, device: torch.device) -> Tensor:
    """[2, K] last and average weights, after steps of the example in float64."""
    sys.path.insert(0, str(ROOT / "examples"))
    example = importlib.import_module({"ddp": "distributed_loop", "fsdp2": "fsdp2_loop"}[form])
    sys.path.pop(0)
    torch.set_default_dtype(torch.float64)
    try:
        if form == "ddp":
            optimizer = example.train(STEPS, device)
        else:
            model, optimizer = example.built(device)
            for step in range(STEPS):
                example.train_step(model, optimizer, step)
    finally:
        torch.set_default_dtype(torch.float32)
    return torch.stack([optimizer.alpha, optimizer.alpha_mean])


def of_all_ranks(values: Tensor) -> list[Tensor]:
    """The same tensor of every rank."""
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values)
    return found


def check(form: str, alone: Tensor, together: Tensor) -> Row:
    """Whether ranks agree to the bit, and with one process to rounding."""
    found = of_all_ranks(together)
    largest = cases.largest(float((each - alone).abs().max()) for each in found)
    is_same = all(torch.equal(each, found[0]) for each in found)
    row: Row = {"operator": f"weights of {form}", "implementation": f"{len(found)} ranks"}
    row |= {"dtype": "float64", "rows": alone.shape[1]}
    row |= {"largest_difference": largest, "correct": is_same and largest <= TOLERANCE}
    if not row["correct"]:
        row["problem"] = f"off by {largest:.1e}" if is_same else "other weights on other ranks"
    return row


def cut(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's piece of a batch."""
    sizes = {name: len(tokens) for name, tokens in data.items()}
    mine = pieces(sizes, dist.get_rank(), dist.get_world_size())
    return {name: data[name][first:last] for name, (first, last) in mine.items()}


class PlainRank(PlainStep):
    """DistributedDataParallel, which reduces in the last micro-batch."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        super().__init__(problem, device)
        self.data = cut(self.data)
        self.model = self.ddp = DistributedDataParallel(self.model)

    def backward(self) -> None:
        """A micro-batch for each domain of this rank."""
        num_examples = sum(map(len, self.data.values()))
        for index, tokens in enumerate(self.data.values(), 1):
            with nullcontext() if index == len(self.data) else self.ddp.no_sync():
                (self.loss(tokens) * (len(tokens) / num_examples)).backward()


class DogeRank(DogeStep):
    """The same with domain gradients that ranks exchange."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        super().__init__(problem, device)
        self.data = cut(self.data)
        self.model = DistributedDataParallel(self.model)

    def backward(self) -> None:
        """The domains of this rank."""
        for name, tokens in self.data.items():
            with self.optimizer.domain(name, count=len(tokens)):
                self.loss(tokens).backward()


def timed(problem: Problem, model: str, device: torch.device, pairs: int) -> Row:
    """A step over that of plain DDP, each as long as on the slowest rank."""
    doge, plain = DogeRank(problem, device), PlainRank(problem, device)
    for _ in range(3):
        doge()
        plain()
    # No limit of time: ranks must run equally many rounds.
    times = alternated(
        {"doge": doge, "plain": plain}, rounds=pairs, device=device, before=dist.barrier
    )
    slowest = {
        name: torch.stack(of_all_ranks(torch.tensor(each, device=device))).amax(0).tolist()
        for name, each in times.items()
    }
    alphas = of_all_ranks(doge.optimizer.alpha)
    # Of this rank, whose piece is as large as any other's.
    peak = {"peak_bytes": torch.cuda.max_memory_allocated()} if device.type == "cuda" else {}
    return peak | {
        "model": model,
        "mode": f"ddp, {len(alphas)} ranks",
        "domains": problem.num_domains,
        "problem": str(problem),
        **protocol.as_dict(ratio_of(slowest["doge"], slowest["plain"])),
        "correct": all(torch.equal(alpha, alphas[0]) for alpha in alphas),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Be a rank; the first writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny problems")
    parser.add_argument("--out", type=Path, required=True, help="where the rows go")
    args = parser.parse_args(arguments)
    device, backend = torch.device(args.device), "gloo"
    if device.type == "cuda":
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    # Before there is a group: one process.
    alone = weights_of("ddp", device)
    dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    rows = [check(form, alone, weights_of(form, device)) for form in FORMS]
    shape = Shape(1, 2, 64, 256, 32) if args.quick else PAPER["124M"]
    precision = "bfloat16" if device.type == "cuda" else None
    sequences = 14 if args.quick else GPU_SEQUENCES
    problem = Problem(shape, 7, sequences, autocast=precision)
    name = "tiny" if args.quick else "124M"
    rows.append(timed(problem, name, device, 3 if args.quick else PAIRS))
    if dist.get_rank() == 0:
        protocol.write(args.out, {"rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
