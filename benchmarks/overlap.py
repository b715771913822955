"""What travels while ranks compute: a DoGE step on a slow link, and DistributedDataParallel's.

    python -m benchmarks.overlap
    python -m benchmarks.overlap --ranks 2 --domains 8 --share 1.0

Ranks are processes here, with gloo. The link is slowed: what a rank sends takes bytes / bandwidth,
one collective after another, from the moment when gloo itself has delivered it. Layers are real and
small, and sleep as long as a device would compute, a unit forward and two backward, so that ranks
do not fight for cores. `share`: plain training's traffic over its computation, which sets the
bandwidth.

Sides of one round: `ahead`, rows that travel while the next ones are computed; `after`, the same
step with everything at its end (`micro_batches=None`); `plain`, DistributedDataParallel with small
buckets, which reduces in the backward pass of its last micro-batch; `alone`, no traffic at all.
"""

import argparse
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import protocol
from doge_fast import DoGEOptimizer
from doge_fast.alternation import alternated, ratio_of
from doge_fast.distributed import data_parallel
from doge_fast.sampling import pieces

PROBLEMS = ((2, 2), (2, 4), (2, 8), (3, 7), (4, 4), (4, 8))
SHARES = (0.5,)
WIDTH, NUM_LAYERS = 512, 8
# Of a rank in a step.
NUM_EXAMPLES = 8
# Of a layer and an example, forward; twice that backward.
SLEEP_SECONDS = 1e-3
# So that its reduction can begin while layers are left.
DDP_BUCKET_MB = 2
WARM_UP = 3


class Link:
    """Carries one thing after another, at a bandwidth."""

    def __init__(self) -> None:
        self.bytes_per_second = float("inf")
        self._queue: queue.SimpleQueue[tuple[Any, float, Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._carry, daemon=True).start()

    def send(self, work: Any, num_bytes: float, done: Callable[[], None]) -> None:
        """Call `done` when gloo has delivered, and the link carried, what has been sent."""
        self._queue.put((work, num_bytes, done))

    def _carry(self) -> None:
        while True:
            work, num_bytes, done = self._queue.get()
            work.wait()
            time.sleep(num_bytes / self.bytes_per_second)
            done()


class Delayed:
    """A collective on a slow link, as torch's `Work`."""

    def __init__(self, link: Link, work: Any, num_bytes: float) -> None:
        self._has_come = threading.Event()
        link.send(work, num_bytes, self._has_come.set)

    def is_completed(self) -> bool:
        """Whether it has come."""
        return self._has_come.is_set()

    def wait(self) -> bool:
        """Until it has come."""
        return self._has_come.wait()


@contextmanager
def slowed(link: Link) -> Iterator[None]:
    """Have what ranks exchange of rows and sums go over the link."""
    all_to_all, all_gather = dist.all_to_all_single, data_parallel.all_gather

    def slow_all_to_all(there: Tensor, here: Tensor, *splits: Any, **options: Any) -> Any:
        work = all_to_all(there, here, *splits, **options)
        mine = splits[1][dist.get_rank()]
        # Ranks that only connect have nothing to wait for.
        return work and Delayed(link, work, here.itemsize * (here.numel() - mine))

    def slow_all_gather(there: Tensor, here: Tensor, **options: Any) -> None:
        work = all_gather(there, here, async_op=True, **options)
        Delayed(link, work, here.nbytes * (dist.get_world_size() - 1)).wait()

    dist.all_to_all_single, data_parallel.all_gather = slow_all_to_all, slow_all_gather
    try:
        yield
    finally:
        dist.all_to_all_single, data_parallel.all_gather = all_to_all, all_gather


def reduced(link: Link, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DistributedDataParallel's all-reduce of a bucket, over the link."""
    num_ranks, total = dist.get_world_size(), bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(total, async_op=True)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    num_bytes = 2 * (num_ranks - 1) / num_ranks * total.nbytes
    link.send(work, num_bytes, lambda: future.set_result(total))
    return future


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.seconds = SLEEP_SECONDS * len(x)
        time.sleep(ctx.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return grad


class Layer(nn.Linear):
    """Takes as long as a device would."""

    def forward(self, x: Tensor) -> Tensor:
        """The layer of `x` [B, H]."""
        slept: Tensor = _Sleep.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return slept.tanh()


class Side:
    """A model, and its batch on this rank."""

    def __init__(self, sizes: dict[str, int]) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        generator = torch.Generator().manual_seed(0)
        batch = {
            name: torch.randn(size, WIDTH, generator=generator) for name, size in sizes.items()
        }
        mine = pieces(sizes, dist.get_rank(), dist.get_world_size())
        self.batch = {name: batch[name][slice(*mine[name])] for name in mine}
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def loss(self, x: Tensor) -> Tensor:
        """Of examples [B, H]."""
        loss: Tensor = (self.model(x) - 1).square().mean()
        return loss


class Doge(Side):
    """A DoGE step, with `micro_batches` 1 or None."""

    def __init__(self, sizes: dict[str, int], micro_batches: int | None) -> None:
        super().__init__(sizes)
        self.optimizer = DoGEOptimizer(
            self.inner, domains=list(sizes), mu=1.0, micro_batches=micro_batches
        )

    def __call__(self) -> None:
        """One step."""
        for name, x in self.batch.items():
            with self.optimizer.domain(name, count=len(x)):
                self.loss(x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Plain(Side):
    """A step of DistributedDataParallel, or of a model alone."""

    def __init__(self, sizes: dict[str, int], link: Link | None) -> None:
        super().__init__(sizes)
        self.ddp: DistributedDataParallel | None = None
        if link is not None:
            self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=DDP_BUCKET_MB)
            self.ddp.register_comm_hook(link, reduced)
            self.model = self.ddp

    def __call__(self) -> None:
        """One step."""
        for index, x in enumerate(self.batch.values(), 1):
            is_last = self.ddp is None or index == len(self.batch)
            with nullcontext() if is_last else self.ddp.no_sync():  # type: ignore[union-attr]
                self.loss(x).backward()
        self.inner.step()
        self.inner.zero_grad()


def times_of_rank(num_domains: int, shares: Sequence[float], rounds: int) -> list[dict[str, Any]]:
    """Of each share: bandwidth, and milliseconds of all sides."""
    num_ranks = dist.get_world_size()
    names = [f"d{row}" for row in range(num_domains)]
    shortest, rest = divmod(NUM_EXAMPLES * num_ranks, num_domains)
    sizes = {name: shortest + (row < rest) for row, name in enumerate(names)}
    link = Link()
    sides: dict[str, Side] = {
        "ahead": Doge(sizes, 1),
        "after": Doge(sizes, None),
        "plain": Plain(sizes, link),
        "alone": Plain(sizes, None),
    }
    found = []
    with slowed(link):
        for side in sides.values():
            for _ in range(WARM_UP):
                side()
        check(sides["ahead"], sides["after"])
        computation = alternated({"alone": sides["alone"]}, rounds=5)["alone"]
        num_bytes = sum(param.nbytes for param in sides["alone"].model.parameters())
        plain_bytes = 2 * (num_ranks - 1) / num_ranks * num_bytes
        for share in shares:
            seconds = share * sorted(computation)[2] / 1e3
            bandwidth = torch.tensor([plain_bytes / seconds])
            dist.broadcast(bandwidth, 0)
            link.bytes_per_second = float(bandwidth)
            times = alternated(sides, rounds=rounds, before=dist.barrier)
            link.bytes_per_second = float("inf")
            found.append({"share": share, "megabytes_per_second": float(bandwidth) / 1e6, **times})
    return found


def check(one: Side, other: Side) -> None:
    """Refuse to time sides that do not train alike."""
    for param, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        if not torch.equal(param, theirs):
            raise RuntimeError("rows that travel ahead change the step; nothing is timed.")


def serve(rank: int, num_ranks: int, store: str, answers: Any, *arguments: Any) -> None:
    """A process of the group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    answers.put(times_of_rank(*arguments))
    dist.barrier()
    dist.destroy_process_group()


def measure(
    num_ranks: int, num_domains: int, shares: Sequence[float], *, pairs: int
) -> list[dict[str, Any]]:
    """A row for each share; a step takes as long as on the slowest rank."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, f"{folder}/store", answers, num_domains, shares, pairs)
        processes = multiprocessing.spawn(serve, arguments, num_ranks, join=False)
        found = [answers.get() for _ in range(num_ranks)]
        processes.join()
    return rows_of(found, num_ranks, num_domains)


def rows_of(
    found: Sequence[list[dict[str, Any]]], num_ranks: int, num_domains: int
) -> list[dict[str, Any]]:
    """Of what each rank has found: a row for each share."""
    rows = []
    for ranks in zip(*found, strict=True):
        times = {
            side: [max(each) for each in zip(*(rank[side] for rank in ranks), strict=True)]
            for side in ("ahead", "after", "plain", "alone")
        }
        row = {key: ranks[0][key] for key in ("share", "megabytes_per_second")}
        row |= {"ranks": num_ranks, "domains": num_domains}
        for side, over in (("ahead", "after"), ("ahead", "plain"), ("after", "plain")):
            row[f"{side}_over_{over}"] = protocol.as_dict(ratio_of(times[side], times[over]))
        row["plain_over_alone"] = protocol.as_dict(ratio_of(times["plain"], times["alone"]))
        rows.append(row)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    parts = [
        f"{name.replace('_', ' ')} {row[name]['ratio']:.3f} "
        f"[{row[name]['low']:.3f}, {row[name]['high']:.3f}]"
        for name in ("ahead_over_after", "ahead_over_plain", "after_over_plain", "plain_over_alone")
    ]
    return (
        f"{row['ranks']} ranks, K={row['domains']}, traffic {row['share']} of the computation "
        f"({row['ahead_over_after']['variant_ms']:.0f} ms a step)\n  " + ", ".join(parts)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print, and write the record when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="with --domains: one problem in place of all")
    parser.add_argument("--domains", type=int, help="K")
    parser.add_argument("--share", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--pairs", type=int, default=11, help="timed rounds per row")
    parser.add_argument("--json", type=Path, help="where to write the record")
    args = parser.parse_args(arguments)
    if (args.ranks is None) != (args.domains is None):
        parser.error("--ranks and --domains go together")
    problems = PROBLEMS if args.ranks is None else ((args.ranks, args.domains),)
    rows: list[dict[str, Any]] = []
    for num_ranks, num_domains in problems:
        for row in measure(num_ranks, num_domains, args.share, pairs=args.pairs):
            rows.append(row)
            print(line(row), flush=True)
    if args.json:
        protocol.write(args.json, {"benchmark": "overlap", **protocol.machine("cpu"), "rows": rows})


if __name__ == "__main__":
    main()
